"""The ops of a stage grouped by what they serve: one pass of a micro-batch through a chunk, forward, backward, weight half, or the step's end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.analysis.exchanges import exchanging_block
from ratrain.ratrain_ir.analysis.progress import hop_of
from ratrain.ratrain_ir.ops.base import Op, Part, Payload, Phase
from ratrain.ratrain_ir.ops.collectives import AllGather, PeerOp, ReduceScatter
from ratrain.ratrain_ir.ops.compute import (
    AddBranch,
    AddBranchBackward,
    Backward,
    BackwardHeads,
    BackwardInput,
    BackwardWeight,
    Forward,
    LoadInput,
    Project,
    Recompute,
)
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.schedules.action import Action, ActionKind, Work

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage
    from ratrain.ratrain_ir.topology import Topology


@define
class WorkGroups:
    """Ops in list order within each group; all but the last are indexed by chunk, micro-batch and slice.

    Where a backward is split, its weight halves are a group of their own, each with the reduction it is the last to contribute to.
    """

    forward: dict[Work, list[Op]] = field(factory=dict)
    backward: dict[Work, list[Op]] = field(factory=dict)
    weight: dict[Work, list[Op]] = field(factory=dict)
    step_end: list[Op] = field(factory=list)

    def whole_backward(self, work: Work) -> list[Op]:
        """A backward and the weight halves of it."""
        return self.backward[work] + self.weight.get(work, [])

    def of(self, action: Action) -> list[Op]:
        """The ops that serve an action."""
        work = action.work
        if action.kind is ActionKind.FORWARD:
            return self.forward[work]
        if action.kind is ActionKind.BACKWARD:
            return self.whole_backward(work)
        return self.backward[work] if action.kind is ActionKind.BACKWARD_INPUT else self.weight.get(work, [])


def split_into_groups(stage: Stage, topology: Topology) -> WorkGroups:
    """Group a stage's ops, without releases or addresses (whose order would then be wrong)."""
    groups = WorkGroups()
    halves = {(op.block, op.micro_batch) for op in stage.ops if type(op) is BackwardWeight and not op.slice}
    chunk_of = topology.chunk_of
    last = len(topology.chunk_stages) - 1
    for op in stage.ops:
        if isinstance(op, Forward | AddBranch | Project):
            side, chunk = groups.forward, chunk_of[op.block]
        elif isinstance(op, LoadInput):
            chunks = {Part.TOKENS: 0, Part.LABELS: last, Part.DOCUMENTS: topology.chunks_of(stage.index)[0]}
            side, chunk = groups.forward, chunks[op.part]
        elif isinstance(op, BackwardWeight):
            side, chunk = groups.weight, chunk_of[op.block]
        elif isinstance(op, Backward | BackwardInput | BackwardHeads | AddBranchBackward | Recompute):
            side, chunk = groups.backward, chunk_of[op.block]
        elif isinstance(op, Send | Recv):
            side = groups.forward if op.payload is Payload.ACTIVATION else groups.backward
            hop = hop_of(op, stage, topology)
            assert hop is not None  # the verifier has refused messages between stages that are no neighbours
            chunk = hop.channel.source if type(op) is Send else hop.channel.target
        elif isinstance(op, ReduceScatter) and op.micro_batch is not None:
            waits = any((block, op.micro_batch) in halves for block in op.blocks)
            side, chunk = groups.weight if waits else groups.backward, chunk_of[op.blocks[0]]
        elif isinstance(op, AllGather) and op.micro_batch is not None:
            side, chunk = groups.forward if op.phase is Phase.FORWARD else groups.backward, chunk_of[op.blocks[0]]
        elif isinstance(op, PeerOp):
            block, is_forward = exchanging_block(op, topology.model)
            side, chunk = groups.forward if is_forward else groups.backward, chunk_of[block]
        else:
            groups.step_end.append(op)
            continue
        assert op.micro_batch is not None
        number = (
            0 if isinstance(op, ReduceScatter) else op.slice or 0
        )  # slices descend: slice 0 is the last to contribute
        side.setdefault((chunk, op.micro_batch, number), []).append(op)
    return groups
