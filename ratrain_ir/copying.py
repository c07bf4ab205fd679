"""Copies of modules and ops that share nothing, for who gives them other addresses and for tests that break things.

Who only changes the lists of a stage makes a draft of it (`Stage.draft`), which costs next to nothing.
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
    """A module that shares nothing that may be changed with another."""
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
    """An equal op, on other tensors if asked for."""
    groups: dict[str, Any] = {
        group: tuple(map(tensor, getattr(op, group))) for group in ("reads", "writes", "updates", "scratch")
    }
    return evolve(op, **groups)
