"""Compilation of loops before they are needed: of a step in another process, of expert blocks by calling them.

The two attention loops take longest, so they are compiled in another process while the caller does other work; then
the other loops that a step needs late, from the last one back, until the caller meets them. They are cached on disk as
always: whoever needs a loop that another process is compiling waits for it, and reads it. One process for both
attention loops compiles their common parts once; more processes would be no faster on two cores.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from ratrain.ratrain_ir.process_pool import meanwhile
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.targets.program.attention_spec import AttentionSpec
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.scratch import Scratch
from ratrain.targets.runtime.kernels.fast.attention_loops import backward_head, forward_head
from ratrain.targets.runtime.kernels.fast.fast import Fast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ratrain.ratrain_ir.config.types import Dtype

_WIDTH = 8
_SPEC = AttentionSpec(batch=1, seq_len=1, heads=1, kv_heads=1, head_dim=_WIDTH)
_UPDATE: dict[str, Any] = {
    "step": 1,
    "grad_multiplier": 1.0,
    "lr": 0.0,
    "beta1": 0.9,
    "beta2": 0.9,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "decay": [(0, _WIDTH)],
}


@contextmanager
def step_compiling(dtype: Dtype) -> Iterator[None]:
    """While the block runs, compile loops of a LLaMA's step; do nothing if attention's are cached already.

    Attention comes without caps and documents.
    """
    if any(_is_kept(loop) for loop in (forward_head, backward_head)):
        yield
        return
    # all that numba loads before its first function (0.2 s) is loaded for both processes
    first: Any = njit(_nothing)
    with paused_gc():
        first()
    with meanwhile(lambda: _compile_step(dtype)):
        yield


def _nothing() -> None:
    pass


def _compile_step(dtype: Dtype) -> None:
    attend(dtype)
    end_step(dtype)


def _is_kept(loop: Any) -> bool:
    """Return whether a loop is cached for any types, or cannot be cached, so that another process could not help."""
    folder = (
        loop.stats.cache_path if hasattr(loop, "stats") else None
    )  # without its compiler, numba leaves functions unchanged
    return folder is None or any(Path(folder).glob(f"*.{loop.py_func.__name__}-*.nbi"))


def attend(dtype: Dtype) -> None:
    """Run attention of one query and its gradients, which compiles the loops."""
    kernels = Fast(1)
    q, k, v, o, do, dq, dk, dv = np.zeros((8, 1, _SPEC.head_dim), NUMPY_DTYPES[dtype])
    lse, delta = np.zeros((2, 1, 1), np.float32)
    scratch = Scratch(kernels.scratch_bytes("attention_forward", spec=_SPEC))
    kernels.attention_forward(q, k, v, o, lse, scratch=scratch, spec=_SPEC)
    scratch = Scratch(kernels.scratch_bytes("attention_backward", spec=_SPEC))
    kernels.attention_backward(q, k, v, o, lse, do, dq, dk, dv, delta, scratch=scratch, spec=_SPEC)


def end_step(dtype: Dtype) -> None:
    """Run the kernels that a step of a LLaMA begins last, from the last one back, which compiles their loops."""
    kernels, stored = Fast(1), NUMPY_DTYPES[dtype]
    master, m, v, rstd = np.zeros((4, _WIDTH), np.float32)
    gradient, other, gamma, dgamma = np.zeros((4, _WIDTH), stored)
    rows, tokens = np.zeros((1, _WIDTH), stored), np.zeros(1, np.int32)
    _call(kernels, "adamw", master=master, m=m, v=v, grad=gradient, **_UPDATE)
    _call(kernels, "cast", src=gradient, dst=np.zeros(_WIDTH))  # of which the norm sums squares
    mean = {"out": other, "accumulate": False, "divisor": 1.0}
    _call(kernels, "mean_of_replicas", parts=[gradient, gradient], **mean)
    _call(kernels, "embedding_backward", tokens=tokens, dy=rows, dtable=rows, accumulate=True)
    _call(kernels, "swiglu_backward", gate=rows, up=rows, dprod=rows, dgate=rows, dup=rows)
    norm = {"dxn": rows, "x": rows, "gamma": gamma, "rstd": rstd[:1], "dx": rows, "dgamma": dgamma}
    _call(kernels, "rmsnorm_backward", **norm, accumulate=True)
    labels, lse, logits = tokens, np.zeros(1, np.float32), np.zeros((1, 1), np.float32)
    head: dict[str, Any] = {"xn": rows, "table": rows, "labels": labels, "lse": lse, "logits": logits}
    head |= {"normalise": False, "accumulate": True}
    _call(kernels, "head_backward", **head, scale=lse, dxn=rows, dtable=rows, denominator=1.0)
    _call(kernels, "head_forward", **head, loss=np.zeros(1))
    _call(kernels, "swiglu_forward", gate=rows, up=rows, prod=rows)
    _call(kernels, "mean_of_replicas", parts=[gradient], **mean)  # has a loop of its own, which other plans need


def _call(kernels: Fast, kernel: str, **arguments: Any) -> None:
    getattr(kernels, kernel)(**arguments, scratch=Scratch(kernels.scratch_bytes(kernel, **arguments)))


def run_experts(dtype: Dtype) -> None:
    """Run each kernel of expert blocks on two tokens and three experts, which compiles its loops.

    Views and gradients are of one type. Rows are weighted by order and as they lie.
    """
    stored, call = NUMPY_DTYPES[dtype], partial(_call, Fast(1))
    logits, dlogits = np.zeros((2, 2, 3), np.float32)
    weights, dweights = np.zeros((2, 2, 2), np.float32)
    chosen, order, bounds = np.zeros((2, 2), np.int32), np.zeros(4, np.int32), np.zeros(4, np.int32)
    router = {"logits": logits, "chosen": chosen, "weights": weights, "normalise": True}
    call("route_forward", **router)
    call("route_forward", **router, bias=np.zeros(3, np.float32))
    call("group_rows", chosen=chosen, order=order, bounds=bounds)
    call("route_backward", **router, dweights=dweights, bounds=bounds, dlogits=dlogits)

    tokens, (gate, up, rows, dgate, dup) = np.zeros((2, 8), stored), np.zeros((5, 4, 8), stored)
    matrices, sums = np.zeros((3, 8, 8), stored), np.zeros((2, 8), np.float32)
    product = {"b": matrices, "order": order, "bounds": bounds}
    call("expert_rows", a=tokens, **product, out=gate)
    call("expert_rows", a=rows, b=matrices, bounds=bounds, out=gate)
    call("expert_sums", a=rows, **product, sums=sums, out=tokens)
    call("choice_sums", a=rows, out=tokens)
    for gathers_a in (False, True):
        factors = {"a": tokens, "b": rows} if gathers_a else {"a": rows, "b": tokens}
        for accumulate in (False, True):  # in float32, tiles that replace a gradient are stored at once
            gradient = {"out": matrices, "gathers_a": gathers_a, "accumulate": accumulate}
            call("expert_gradients", **factors, order=order, bounds=bounds, **gradient)
    for accumulate in (False, True):
        gradient = {"out": matrices, "gathers_a": False, "accumulate": accumulate}
        call("expert_gradients", a=rows, b=gate, bounds=bounds, **gradient)
    for of_rows in ({"weights": weights, "order": order}, {"weights": weights.reshape(4, 1)}):
        call("weighted_swiglu_forward", gate=gate, up=up, **of_rows, prod=rows)
        outputs = {"dgate": dgate, "dup": dup, "dweights": np.zeros_like(of_rows["weights"])}
        call("weighted_swiglu_backward", gate=gate, up=up, dprod=rows, **of_rows, **outputs)
    call("sigmoid_forward", x=logits, y=dlogits)
    call("sigmoid_backward", y=logits, dy=logits, dx=dlogits)
