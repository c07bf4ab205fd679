"""The choice of rows that are simulated with fewer micro-batches than they have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.state.bucket_grad_sync import BucketGradSyncPass
from ratrain.passes.state.joint_order import JointOrderPass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.passes.pass_base import Pass
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.planner.search.plan_evaluation import Task
    from ratrain.ratrainc.validation.validation_rows import ValidationRow

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
