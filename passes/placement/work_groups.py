"""The ops of a stage grouped by what they serve: one micro-batch's forward, its backward, the weight half of that, or the step's end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain.ratrain_ir.ops import (
    AllGather,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    LoadInput,
    Op,
    Payload,
    Phase,
    Recompute,
    Recv,
    ReduceScatter,
    Send,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage


@define
class WorkGroups:
    """Ops in list order within each group; all but the last are indexed by micro-batch.

    Where a backward is split, its weight halves are a group of their own, each with the reduction it is the last to contribute to.
    """

    forward: dict[int, list[Op]] = field(factory=dict)
    backward: dict[int, list[Op]] = field(factory=dict)
    weight: dict[int, list[Op]] = field(factory=dict)
    step_end: list[Op] = field(factory=list)

    def joined(self) -> list[Op]:
        """All ops: forwards ascending, backwards ascending (weight halves right after the rest), the step's end."""
        passes = [self.forward[m] for m in sorted(self.forward)]
        passes += [self.whole_backward(m) for m in sorted(self.backward)]
        return [op for group in passes for op in group] + self.step_end

    def whole_backward(self, micro_batch: int) -> list[Op]:
        """A micro-batch's backward and the weight halves of it."""
        return self.backward[micro_batch] + self.weight.get(micro_batch, [])


def split_into_groups(stage: Stage) -> WorkGroups:
    """Group a stage's ops, without releases or addresses (whose order would then be wrong)."""
    groups = WorkGroups()
    halves = {(op.block, op.micro_batch) for op in stage.ops if type(op) is BackwardWeight}
    for op in stage.ops:
        if isinstance(op, Forward | LoadInput):
            groups.forward.setdefault(op.micro_batch, []).append(op)
        elif isinstance(op, BackwardWeight):
            groups.weight.setdefault(op.micro_batch, []).append(op)
        elif isinstance(op, Backward | BackwardInput | Recompute):
            groups.backward.setdefault(op.micro_batch, []).append(op)
        elif isinstance(op, Send | Recv):
            side = groups.forward if op.payload is Payload.ACTIVATION else groups.backward
            side.setdefault(op.micro_batch, []).append(op)
        elif isinstance(op, ReduceScatter) and op.micro_batch is not None:
            waits = any((block, op.micro_batch) in halves for block in op.blocks)
            (groups.weight if waits else groups.backward).setdefault(op.micro_batch, []).append(op)
        elif isinstance(op, AllGather) and op.micro_batch is not None:
            side = groups.forward if op.phase is Phase.FORWARD else groups.backward
            side.setdefault(op.micro_batch, []).append(op)
        else:
            groups.step_end.append(op)
    return groups
