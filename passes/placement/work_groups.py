"""Ops of a stage grouped by the work that they serve.

A group is one pass of a piece through a chunk: forward, backward, or weight halves; the rest is the step's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.analysis.progress import hop_of
from ratrain.ratrain_ir.ops.base import Direction, Op, WorkGroup
from ratrain.ratrain_ir.ops.compute import BackwardWeight
from ratrain.ratrain_ir.ops.messages import MessageOp
from ratrain.ratrain_ir.schedules.action import Action, ActionKind, Work

if TYPE_CHECKING:
    from ratrain.ratrain_ir.model.blocks import Block
    from ratrain.ratrain_ir.module import Stage
    from ratrain.ratrain_ir.topology import Topology


@define
class WorkGroups:
    """Ops in list order within each group; all groups but the last are indexed by chunk, micro-batch and slice.

    Where a backward is split, its weight halves are a group of their own, with the reductions that wait for them.
    """

    forward: dict[Work, list[Op]] = field(factory=dict)
    backward: dict[Work, list[Op]] = field(factory=dict)
    weight: dict[Work, list[Op]] = field(factory=dict)
    step_end: list[Op] = field(factory=list)

    def whole_backward(self, work: Work) -> list[Op]:
        """Return the ops of a backward, followed by its weight halves."""
        return self.backward[work] + self.weight.get(work, [])

    def of(self, action: Action) -> list[Op]:
        """Return the ops that serve an action; none if there are no weight halves."""
        work = action.work
        if action.kind is ActionKind.FORWARD:
            return self.forward[work]
        if action.kind is ActionKind.BACKWARD:
            return self.whole_backward(work)
        return self.backward[work] if action.kind is ActionKind.BACKWARD_INPUT else self.weight.get(work, [])


def split_into_groups(stage: Stage, topology: Topology) -> WorkGroups:
    """Group the ops of a stage that has no releases or addresses yet (reordering would make them wrong)."""
    groups = WorkGroups()
    sides = {
        WorkGroup.FORWARD: groups.forward,
        WorkGroup.BACKWARD: groups.backward,
        WorkGroup.WEIGHT: groups.weight,
    }
    halves = {(op.block, op.micro_batch, op.slice or 0) for op in stage.ops if type(op) is BackwardWeight}
    for op in stage.ops:
        group = op.work_group
        if group is WorkGroup.STEP_END:
            groups.step_end.append(op)
            continue
        micro_batch = getattr(op, "micro_batch", None)
        assert isinstance(micro_batch, int)
        number = op.served_slice(topology.model, topology.plan)
        blocks = op.served_blocks(topology.model)
        # Without weight halves of its blocks, the op belongs to the whole backward.
        if group is WorkGroup.WEIGHT and halves.isdisjoint((block, micro_batch, number) for block in blocks):
            group = WorkGroup.BACKWARD
        work = _chunk(op, blocks, stage, topology), micro_batch, number
        sides[group].setdefault(work, []).append(op)
    return groups


def _chunk(op: Op, blocks: tuple[Block, ...], stage: Stage, topology: Topology) -> int:
    """Return the chunk whose pass an op serves."""
    if isinstance(op, MessageOp):
        hop = hop_of(op, stage, topology)
        assert hop is not None  # the verifier has refused messages between stages that are no neighbours
        return hop.channel.source if op.direction is Direction.OUT else hop.channel.target
    return topology.chunk_of[blocks[0]] if blocks else topology.chunks_of(stage.index)[0]
