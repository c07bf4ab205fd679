"""The kernels a routine may call, with the shapes and types of their operands: what a step must fit before it may run.

An operand is written `name:type[dims]`, then `=` where it is written, `+` where it is written and, with `accumulate`, read first,
`~` where it is updated, and `?` where it may be left out. Types: `i32`, `f32`, `f64`; `s` is the one storage type (f16 or f32)
that such operands of a call share, `*` any storage type. A dimension is a symbol, equal wherever it stands, a number, or a product
of options. Meanings are those of `ratrain.targets.runtime.kernels.interface.KernelSet`, whose method names and arguments these are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite, prod
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.types import Dtype

if TYPE_CHECKING:
    from ratrain.targets.program.routine import Shape, Step

Types = Mapping[str, tuple[Dtype, "Shape"]]
"""Dtype and shape of what each operand of a step refers to."""

_STORAGE = (Dtype.F16, Dtype.F32)
_TEXT = re.compile(r"(\w+):(i32|f32|f64|s|\*)\[([^\]]*)\]([=+~]?)(\??)")


@frozen
class CallOperand:
    """One operand of a kernel."""

    name: str
    type: str
    dims: tuple[str, ...]
    mode: str
    """empty: read; `=` written; `+` written and, with `accumulate`, read; `~` updated"""
    optional: bool

    @property
    def is_written(self) -> bool:
        """Whether the kernel changes it."""
        return bool(self.mode)

    def is_read(self, options: Mapping[str, Any]) -> bool:
        """Whether the kernel depends on what it held before."""
        return self.mode in ("", "~") or (self.mode == "+" and options.get("accumulate") is True)


@frozen
class KernelCall:
    """Operands and options of a kernel."""

    operands: tuple[CallOperand, ...]
    options: dict[str, Callable[[Any], bool]]
    """What each option must be."""
    optional: frozenset[str]
    """Options that may be left out."""


def _call(text: str, *optional: str, **options: Callable[[Any], bool]) -> KernelCall:
    found = [
        CallOperand(name, type_, tuple(filter(None, dims.split(","))), mode, bool(mark))
        for name, type_, dims, mode, mark in _TEXT.findall(text)
    ]
    return KernelCall(tuple(found), options, frozenset(optional))


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 50


def _count_or_none(value: Any) -> bool:
    return value is None or _count(value)


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e30 and isfinite(value)


_ATTENTION: dict[str, Callable[[Any], bool]] = {
    "batch": _count,
    "seq_len": _count,
    "heads": _count,
    "kv_heads": _count,
    "head_dim": _count,
    "window": _count_or_none,
    "alibi": _flag,
}
_Q, _KV, _LSE = "[batch*seq_len,heads*head_dim]", "[batch*seq_len,kv_heads*head_dim]", "[heads,batch*seq_len]"

CALLS: dict[str, KernelCall] = {
    "gemm": _call(
        "a:*[A,B] b:*[C,D] out:*[M,N]+ bias:*[N]? residual:*[M,N]?",
        "trans_a",
        "trans_b",
        "accumulate",
        trans_a=_flag,
        trans_b=_flag,
        accumulate=_flag,
    ),
    "column_sum": _call("a:*[M,N] out:*[N]+", accumulate=_flag),
    "rmsnorm_forward": _call("x:s[T,h] gamma:s[h] xn:s[T,h]= rstd:f32[T]=", eps=_positive),
    "rmsnorm_backward": _call(
        "dxn:s[T,h] x:s[T,h] gamma:s[h] rstd:f32[T] dx:s[T,h]= dgamma:*[h]+ residual:s[T,h]?", accumulate=_flag
    ),
    "rope": _call(
        "x:s[T,heads*head_dim]~", heads=_count, head_dim=_count, seq_len=_count, theta=_positive, inverse=_flag
    ),
    "attention_forward": _call(f"q:s{_Q} k:s{_KV} v:s{_KV} o:s{_Q}= lse:f32{_LSE}=", **_ATTENTION),
    "attention_backward": _call(
        f"q:s{_Q} k:s{_KV} v:s{_KV} o:s{_Q} lse:f32{_LSE} do:s{_Q} dq:s{_Q}= dk:s{_KV}= dv:s{_KV}= delta:f32{_LSE}=",
        **_ATTENTION,
    ),
    "swiglu_forward": _call("gate:s[T,f] up:s[T,f] prod:s[T,f]="),
    "swiglu_backward": _call("gate:s[T,f] up:s[T,f] dprod:s[T,f] dgate:s[T,f]= dup:s[T,f]="),
    "embedding_forward": _call("tokens:i32[T] table:s[V,h] y:s[T,h]="),
    "embedding_backward": _call("tokens:i32[T] dy:s[T,h] dtable:*[V,h]+", accumulate=_flag),
    "head_forward": _call(
        "xn:s[T,h] table:s[V,h] labels:i32[T] lse:f32[T]= loss:f64[1]+ logits:f32[c,V]=",
        normalise=_flag,
        accumulate=_flag,
    ),
    "head_backward": _call(
        "xn:s[T,h] table:s[V,h] labels:i32[T] lse:f32[T] scale:f32[2] logits:f32[c,V]= dxn:s[T,h]= dtable:*[V,h]+",
        denominator=_positive,
        normalise=_flag,
        accumulate=_flag,
    ),
    "zero": _call("a:*[n]="),
    "cast": _call("src:*[n] dst:*[n]="),
    "add": _call("a:*[n] b:*[n] out:*[n]="),
}
"""Kernels of block ops. Those of updates and collectives are called by the runtime itself, never by a routine."""

IN_PLACE = frozenset(
    {
        ("gemm", "out", "residual"),
        ("add", "out", "a"),
        ("add", "out", "b"),
        ("rmsnorm_backward", "dx", "dxn"),
        ("rmsnorm_backward", "dx", "residual"),
        *(("swiglu_backward", out, source) for out in ("dgate", "dup") for source in ("gate", "up", "dprod")),
    }
)
"""A written operand of a kernel, and one that may be the very same bytes."""


def step_problem(step: Step, types: Types) -> str | None:
    """Why a step is no call of its kernel, or None."""
    call = CALLS.get(step.kernel)
    if call is None:
        return f"'{step.kernel}' is not a kernel of routines; they are {', '.join(CALLS)}"
    needed = {operand.name for operand in call.operands if not operand.optional}
    known = {operand.name for operand in call.operands}
    if not needed <= step.operands.keys() <= known:
        return f"'{step.kernel}' takes the operands {', '.join(sorted(known))}; it got {', '.join(step.operands)}"
    if not call.options.keys() - call.optional <= step.options.keys() <= call.options.keys():
        return f"'{step.kernel}' takes the options {', '.join(call.options)}; it got {', '.join(step.options)}"
    for name, value in step.options.items():
        if not call.options[name](value):
            return f"'{name}' of '{step.kernel}' cannot be {value!r}"
    return _types_problem(step, call, types) or _shape_rules(step, types)


def _types_problem(step: Step, call: KernelCall, types: Types) -> str | None:
    """Whether dtypes and shapes of the operands go together."""
    symbols: dict[str, int] = {name: value for name, value in step.options.items() if type(value) is int}
    shared: Dtype | None = None
    for operand in call.operands:
        if operand.name not in types:
            continue
        dtype, shape = types[operand.name]
        words = f"'{operand.name}' of '{step.kernel}' is {dtype.value}{list(shape)}"
        if operand.type == "s":
            shared = shared or dtype
        if dtype not in (
            _STORAGE if operand.type == "*" else (shared,) if operand.type == "s" else (Dtype(operand.type),)
        ):
            return f"{words}: it does not go with the other operands"
        if shared not in (None, *_STORAGE):
            return f"{words}: tensors are stored in f16 or f32"
        if len(shape) != len(operand.dims):
            return f"{words}: {len(operand.dims)} dimensions are expected"
        for dim, extent in zip(operand.dims, shape, strict=True):
            if extent != _extent(dim, symbols, extent):
                return f"{words}: it does not fit the other operands and options"
    return None


def _extent(dim: str, symbols: dict[str, int], extent: int) -> int:
    """The extent a dimension must have; a symbol that is new takes the one it has."""
    if dim.isdigit():
        return int(dim)
    if "*" in dim:
        return prod(symbols[factor] for factor in dim.split("*"))
    return symbols.setdefault(dim, extent)


def _shape_rules(step: Step, types: Types) -> str | None:
    """What symbols alone do not say."""
    options = step.options
    if step.kernel == "gemm":
        a, b, out = (types[name][1] for name in ("a", "b", "out"))
        rows, inner = reversed(a) if options.get("trans_a") else a
        depth, columns = reversed(b) if options.get("trans_b") else b
        if inner != depth or out != (rows, columns):
            return f"'gemm' of {list(a)} and {list(b)} does not give {list(out)}"
    if step.kernel == "rope" and (options["head_dim"] % 2 or types["x"][1][0] % options["seq_len"]):
        return "'rope' needs whole sequences, and heads of an even width"
    if step.kernel.startswith("attention") and options["heads"] % options["kv_heads"]:
        return f"{options['heads']} query heads cannot share {options['kv_heads']} key-value heads"
    return None
