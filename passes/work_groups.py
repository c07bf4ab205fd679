"""The ops of a stage grouped by what they serve: one micro-batch's forward, its backward, or the step's end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field

from ratrain_ir.ops import (
    AllGather,
    Backward,
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
    from ratrain_ir.module import Stage


@define
class WorkGroups:
    """Ops in list order within each group; forward and backward are indexed by micro-batch."""

    forward: dict[int, list[Op]] = field(factory=dict)
    backward: dict[int, list[Op]] = field(factory=dict)
    step_end: list[Op] = field(factory=list)

    def joined(self) -> list[Op]:
        """All ops: forwards ascending, backwards ascending, the step's end."""
        passes = [self.forward[m] for m in sorted(self.forward)] + [self.backward[m] for m in sorted(self.backward)]
        return [op for group in passes for op in group] + self.step_end


def split_into_groups(stage: Stage) -> WorkGroups:
    """Group a stage's ops, without releases or addresses (whose order would then be wrong)."""
    groups = WorkGroups()
    for op in stage.ops:
        if isinstance(op, Forward | LoadInput):
            groups.forward.setdefault(op.micro_batch, []).append(op)
        elif isinstance(op, Backward | Recompute):
            groups.backward.setdefault(op.micro_batch, []).append(op)
        elif isinstance(op, Send | Recv):
            side = groups.forward if op.payload is Payload.ACTIVATION else groups.backward
            side.setdefault(op.micro_batch, []).append(op)
        elif isinstance(op, ReduceScatter) and op.micro_batch is not None:
            groups.backward.setdefault(op.micro_batch, []).append(op)
        elif isinstance(op, AllGather) and op.micro_batch is not None:
            side = groups.forward if op.phase is Phase.FORWARD else groups.backward
            side.setdefault(op.micro_batch, []).append(op)
        else:
            groups.step_end.append(op)
    return groups
