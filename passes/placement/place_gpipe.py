"""`place-gpipe`: all forwards of a stage, then all its backwards, both in ascending micro-batch order.

    ops of forwards and backwards in dataflow order        becomes, with 3 micro-batches,        F0 F1 F2 B0 B1 B2

Every micro-batch of the step is in flight at once, so this takes the most memory of all schedules; 1F1B is measured
against it. Gradients accumulate in the same order, so training gives the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from ratrain.passes.pass_base import Decision, Fact, Pass, PassContext
from ratrain.passes.placement.placed_schedule import begin_placing
from ratrain.passes.placement.work_groups import split_into_groups
from ratrain.ratrain_ir.module import Level
from ratrain.ratrain_ir.schedules.named import SCHEDULES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module


@frozen
class PlaceGpipePass(Pass):
    """Put every stage's forwards before all its backwards (GPipe)."""

    name: ClassVar[str] = "place-gpipe"
    requires: ClassVar[frozenset[Fact]] = frozenset()
    decides: ClassVar[frozenset[Decision]] = frozenset({Decision.ORDER})

    @property
    def schedule(self) -> str | None:
        """Name of the schedule that this pass places."""
        return "gpipe"

    def run(self, module: Module, context: PassContext) -> None:
        """Join the groups of all micro-batches; the plan's schedule becomes `gpipe`."""
        begin_placing(module, "gpipe")
        for stage in module.stages:
            groups = split_into_groups(stage, module.topology)
            actions = SCHEDULES["gpipe"].order(module.topology.shape, stage.index)
            stage.ops = [op for action in actions for op in groups.of(action)] + groups.step_end
        module.level = Level.PLACED
        context.statistics["stages"] = module.plan.pp
