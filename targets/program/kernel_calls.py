"""Check of a routine's step against its kernel's declaration: operands, options, dtypes and shapes."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import STORAGE_DTYPES, Dtype
from ratrain.targets.program.kernel import ANY_SHAPE, Kernel, Types
from ratrain.targets.program.kernels import KERNELS

if TYPE_CHECKING:
    from ratrain.targets.program.routine import Shape, Step

_OF_ROUTINES = {kernel.name: kernel for kernel in KERNELS.values() if kernel.in_routines}


def step_problem(step: Step, types: Types) -> str | None:
    """Return why a step is no call of its kernel, or None."""
    kernel = _OF_ROUTINES.get(step.kernel)
    if kernel is None:
        return f"'{step.kernel}' is not a kernel of routines; they are {', '.join(_OF_ROUTINES)}"
    needed = {operand.name for operand in kernel.operands if not operand.optional}
    known = {operand.name for operand in kernel.operands}
    if not needed <= step.operands.keys() <= known:
        return f"'{step.kernel}' takes the operands {', '.join(sorted(known))}; it got {', '.join(step.operands)}"
    required = {name for name, option in kernel.options.items() if not option.is_optional}
    if not required <= step.options.keys() <= kernel.options.keys():
        return f"'{step.kernel}' takes the options {', '.join(kernel.options)}; it got {', '.join(step.options)}"
    for name, value in step.options.items():
        allows = kernel.options[name].allows
        if allows is None or not allows(value):
            return f"'{name}' of '{step.kernel}' cannot be {value!r}"
    return _types_problem(step, kernel, types) or kernel.rule(step.options, types)


def _types_problem(step: Step, kernel: Kernel, types: Types) -> str | None:
    """Return why dtypes and shapes of the operands do not fit together, or None."""
    # Symbols of dimensions: integer options have their value, others take the extent at which they are met first.
    symbols: dict[str, int] = {name: value for name, value in step.options.items() if type(value) is int}
    shared: Dtype | None = None
    whole: Shape | None = None
    for operand in kernel.operands:
        if operand.name not in types:
            continue
        dtype, shape = types[operand.name]
        words = f"'{operand.name}' of '{step.kernel}' is {dtype.value}{list(shape)}"
        if operand.type == "s":
            shared = shared or dtype
        if dtype not in (
            STORAGE_DTYPES if operand.type == "*" else (shared,) if operand.type == "s" else (Dtype(operand.type),)
        ):
            return f"{words}: it does not go with the other operands"
        if shared not in (None, *STORAGE_DTYPES):
            return f"{words}: tensors are stored in f16, bf16 or f32"
        if operand.dims == ANY_SHAPE:
            whole = whole or shape
            if shape != whole:
                return f"{words}: it does not have the shape of the other operands"
            continue
        if len(shape) != len(operand.dims):
            return f"{words}: {len(operand.dims)} dimensions are expected"
        for dim, extent in zip(operand.dims, shape, strict=True):
            if extent != _extent(dim, symbols, extent):
                return f"{words}: it does not fit the other operands and options"
    return None


def _extent(dim: str, symbols: dict[str, int], extent: int) -> int:
    """Return the extent a dimension must have; a symbol that is new takes `extent`."""
    if dim.endswith("+1"):
        return symbols.setdefault(dim.removesuffix("+1"), extent - 1) + 1
    if dim.isdigit():
        return int(dim)
    if "*" in dim:
        return prod(symbols[factor] for factor in dim.split("*"))
    return symbols.setdefault(dim, extent)
