"""Deep copies of modules and ops, for passes that assign addresses and for tests that break things.

Code that only changes the lists of a stage takes a draft instead (`Stage.draft`), which costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.module import Module, Stage

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor


def copy_module(module: Module) -> Module:
    """Copy a module with its stages, tensors and ops; the copy shares only immutable values with the original.

    The copy keeps no `source`, the text that the module was read from.
    """
    return Module(
        module.name,
        module.level,
        module.model,
        module.plan,
        [_copy_stage(stage) for stage in module.stages],
        module.target,
        module.pipeline,
    )


def _copy_stage(stage: Stage) -> Stage:
    same = {tensor: evolve(tensor) for tensor in stage.tensors.values()}
    ops = [copy_op(op, same.__getitem__) for op in stage.ops]
    return Stage(stage.index, {tensor.name: tensor for tensor in same.values()}, ops, stage.line)


def copy_op(op: Op, tensor: Callable[[Tensor], Tensor] = lambda same: same) -> Op:
    """Copy an op; `tensor` maps each operand to that of the copy, by default to itself."""
    groups: dict[str, Any] = {
        group: tuple(map(tensor, getattr(op, group))) for group in ("reads", "writes", "updates", "scratch")
    }
    return evolve(op, **groups)
