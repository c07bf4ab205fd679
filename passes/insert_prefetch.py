"""`insert-prefetch`: gathers parameter views for the next step in the order its forward visits the blocks.

Each gather follows the update of its block, and updates come in forward order too, so that the view the next step needs
first is whole first. Where nothing is sharded an update writes its view itself and only the order of updates changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from passes.pass_base import Pass, PassContext
from ratrain_ir.blocks import Block, block_chain
from ratrain_ir.ops import AllGather, Op, Update

if TYPE_CHECKING:
    from ratrain_ir.module import Module, Stage


@frozen
class InsertPrefetchPass(Pass):
    """Order updates and view gathers by the next step's forward."""

    name: ClassVar[str] = "insert-prefetch"

    def run(self, module: Module, context: PassContext) -> None:
        """Rewrite every stage."""
        order = {unit: index for index, unit in enumerate(block_chain(module.model))}
        context.statistics["gathers"] = sum(_reorder(stage, order) for stage in module.stages)


def _reorder(stage: Stage, order: dict[Block, int]) -> int:
    """Put updates in forward order, each gather right after the last update it needs; the number of gathers."""
    updates = sorted((op for op in stage.ops if type(op) is Update), key=lambda op: order[op.block])
    gathers = {max(op.blocks, key=order.__getitem__): op for op in stage.ops if type(op) is AllGather}
    last_update = max((i for i, op in enumerate(stage.ops) if type(op) is Update), default=-1)
    ops: list[Op] = []
    for position, op in enumerate(stage.ops):
        if type(op) not in (Update, AllGather):
            ops.append(op)
        if position == last_update:
            for update in updates:
                ops.append(update)
                if update.block in gathers:
                    ops.append(gathers[update.block])
    stage.ops = ops
    return len(gathers)
