"""`insert-prefetch`: gathers parameter views for the next step in the order its forward visits the blocks.

Each gather follows the update of its block, and updates come in forward order too, so that the view the next step needs
first is whole first. Where nothing is sharded an update writes its view itself and only the order of updates changes.
Where views are sharded within the step too (ZeRO 3), each is gathered `depth-blocks` block ops ahead of its use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeGuard

from attrs import field, frozen

from passes.pass_base import Pass, PassContext
from ratrain_ir.blocks import Block, block_chain, gathers_within_step
from ratrain_ir.ops import AllGather, Engine, Op, Tensor, Update
from ratrain_ir.types import StateKind

if TYPE_CHECKING:
    from ratrain_ir.module import Module, Stage


@frozen
class InsertPrefetchPass(Pass):
    """Order updates and view gathers by the next step's forward."""

    name: ClassVar[str] = "insert-prefetch"
    depth_blocks: int = field(default=1, metadata={"unit": "blocks"})
    """How many block ops ahead of its use a view sharded within the step is gathered (ZeRO 3)."""

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage."""
        order = {unit: index for index, unit in enumerate(block_chain(module.model))}
        gathers = sum(_reorder(stage, order) for stage in module.stages)
        if gathers_within_step(module.plan):
            gathers = sum(_prefetch_within_step(stage, self.depth_blocks) for stage in module.stages)
        context.statistics["gathers"] = gathers


def _reorder(stage: Stage, order: dict[Block, int]) -> int:
    """Put updates in forward order, each gather right after the last update it needs; the number of gathers."""
    updates = sorted((op for op in stage.ops if type(op) is Update), key=lambda op: order[op.block])
    gathers = {max(op.blocks, key=order.__getitem__): op for op in stage.ops if _is_for_next_step(op)}
    last_update = max((i for i, op in enumerate(stage.ops) if type(op) is Update), default=-1)
    ops: list[Op] = []
    for position, op in enumerate(stage.ops):
        if type(op) is not Update and not _is_for_next_step(op):
            ops.append(op)
        if position == last_update:
            for update in updates:
                ops.append(update)
                if update.block in gathers:
                    ops.append(gathers[update.block])
    stage.ops = ops
    return len(gathers)


def _is_for_next_step(op: Op) -> TypeGuard[AllGather]:
    return type(op) is AllGather and op.phase is None


def _prefetch_within_step(stage: Stage, depth: int) -> int:
    """Move each gather of a sharded view `depth` compute ops ahead of its use; the number of gathers.

    Not beyond the write of what it reads: within a step masters are only read before the updates, which end it.
    """
    ahead: dict[int, list[Op]] = {}
    """Gathers by the position of the compute op they come before."""
    compute: list[int] = []
    uses: dict[Tensor, int] = {}
    for position, op in enumerate(stage.ops):
        if op.engine is Engine.COMPUTE:
            compute.append(position)
            for tensor in op.reads:
                if tensor.kind is StateKind.VIEW:
                    uses.setdefault(tensor, len(compute) - 1)
    gathers = [op for op in stage.ops if type(op) is AllGather and op.phase is not None]
    for gather in gathers:
        at = compute[max(0, uses[gather.writes[0]] - depth)]
        ahead.setdefault(at, []).append(gather)
    ops: list[Op] = []
    for position, op in enumerate(stage.ops):
        ops.extend(ahead.get(position, ()))
        if not (type(op) is AllGather and op.phase is not None):
            ops.append(op)
    stage.ops = ops
    return len(gathers)
