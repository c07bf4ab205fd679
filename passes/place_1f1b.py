"""`place-1f1b`: one-forward-one-backward order of each stage's work.

Stage s of P runs min(P - s - 1, M) warm-up forwards, then alternates one forward and one backward, then drains. So at most
min(P - s, M) micro-batches are in flight. Any P, any M, any cuts. Micro-batches ascend in both directions, as the order of
gradient accumulation demands.

    F0 F1 F2 B0        becomes, on stage 0 of 2,        F0 F1 B0 F2 B1 B2
    (dataflow: forwards, then backwards)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from passes.pass_base import Fact, Pass, PassContext
from passes.work_groups import WorkGroups, split_into_groups
from ratrain_ir.module import Level, Module
from ratrain_ir.schedules import Action, ActionKind, schedule_1f1b

if TYPE_CHECKING:
    from ratrain_ir.ops import Op


@frozen
class Place1F1BPass(Pass):
    """Put every stage's forwards and backwards into 1F1B order."""

    name: ClassVar[str] = "place-1f1b"
    requires: ClassVar[frozenset[Fact]] = frozenset()

    def run(self, module: Module, context: PassContext) -> None:
        """Reorder whole forward and backward groups of micro-batches; what belongs to the step's end stays there."""
        plan = module.plan
        for stage in module.stages:
            groups = split_into_groups(stage)
            actions = schedule_1f1b(plan.pp, plan.micro_batches, stage.index)
            stage.ops = _ordered(groups, actions)
        module.level = Level.PLACED
        context.statistics["stages"] = plan.pp


def _ordered(groups: WorkGroups, actions: list[Action]) -> list[Op]:
    ops: list[Op] = []
    for action in actions:
        source = groups.forward if action.kind is ActionKind.FORWARD else groups.backward
        ops.extend(source[action.micro_batch])
    ops.extend(groups.step_end)
    return ops
