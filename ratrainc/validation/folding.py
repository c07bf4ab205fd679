"""Rows that are simulated with fewer micro-batches than they have: which may be, and their step on other machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.state.bucket_grad_sync import BucketGradSyncPass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrainc.choices.timed_plan import RefusedPlan, time_plan
from ratrain.ratrainc.planner.search.plan_evaluation import Task, folded_micro_batches, pace, shorter_plan, turns_apart
from ratrain.targets.program.program import Program
from ratrain.targets.simulator.figures import simulated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.passes.pass_base import Pass
    from ratrain.ratrainc.validation.validation_rows import ValidationRow
    from ratrain.targets.machine.machine import Machine

_BYTES = ("peak_bytes", "fits")


def task_of(row: ValidationRow, *, whole: bool) -> Task | None:
    """Return the task that simulates a row, folded if that changes no result; None if the row needs an unbuilt feature.

    With `whole`, no task is folded.
    """
    if row.task is None or whole or row.measure == "bubble_fraction":
        return row.task
    passes = parse_pipeline(row.task.pipeline)
    differs = _last_backward_waits(row.task.plan, passes) or (row.measure in _BYTES and _chooses_order(passes))
    return evolve(row.task, folded=_repeats(row.task.plan) and not differs)


def _repeats(plan: Plan) -> bool:
    """Return True if a few micro-batches between warm-up and cool-down show the pace of all.

    Reductions and gathers of every micro-batch may fall behind compute, further with each. A short step would end
    before that is seen.
    """
    return plan.reduce == "last" and plan.zero < 3


def _last_backward_waits(plan: Plan, passes: Sequence[Pass]) -> bool:
    """Return True if reductions delay the last backward of a single stage, so that it is not like the others."""
    return plan.pp == 1 and any(
        isinstance(each, BucketGradSyncPass) and each.blocking and each.unit != "stage" for each in passes
    )


def _chooses_order(passes: Sequence[Pass]) -> bool:
    """Return True if a pass chooses an order by step time: for a short step it may choose another, with other bytes."""
    return any(isinstance(each, JointOrderPass) for each in passes)


@frozen(eq=False)
class FoldedStep:
    """The compiled programs of a task, to be timed on machines that differ from its own in constants alone."""

    task: Task
    plan: Plan
    """the task's, with the micro-batches that are simulated"""
    program: Program
    shorter: Program | None
    """of several chunks: the program of the shorter step"""

    @classmethod
    def of(cls, task: Task) -> FoldedStep | None:
        """Compile a task; None if its plan does not fit. Raises `DiagnosticError` if the plan is not allowed."""
        plan = (
            evolve(task.plan, micro_batches=folded_micro_batches(task.plan, task.pipeline))
            if task.folded
            else task.plan
        )
        plans = [plan]
        if plan.chunks > 1 and plan.micro_batches < task.plan.micro_batches:
            plans.append(shorter_plan(plan))
        programs = []
        for each in plans:
            timed = time_plan(task.model, each, task.pipeline, task.machine)
            if isinstance(timed, RefusedPlan):
                if not timed.is_for_bytes:
                    raise timed.error
                return None
            programs.append(timed.program)
        return cls(task, plan, programs[0], programs[1] if len(programs) > 1 else None)

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of the whole step on a machine."""
        figures, timeline = simulated(self.program, machine)
        left_out = self.task.plan.micro_batches - self.plan.micro_batches
        if self.shorter is not None:
            shorter = simulated(self.shorter, machine)[0].step_seconds
            return figures.step_seconds + left_out * (figures.step_seconds - shorter) / turns_apart(self.plan)
        return figures.step_seconds + (left_out * pace(timeline, self.plan, self.task.pipeline) if left_out else 0.0)
