"""Which rows are simulated with fewer micro-batches than they have."""

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
    """What simulates a row: folded where that tells the same, unless `whole`; None where the row needs something."""
    if row.task is None or whole or row.measure == "bubble_fraction":
        return row.task
    passes = parse_pipeline(row.task.pipeline)
    differs = _last_backward_waits(row.task.plan, passes) or (row.measure in _BYTES and _chooses_order(passes))
    return evolve(row.task, folded=_repeats(row.task.plan) and not differs)


def _repeats(plan: Plan) -> bool:
    """Whether micro-batches between warm-up and cool-down take a time that a few of them show.

    Reductions and gathers of every micro-batch may lag behind compute, more with each: a short step ends before that is seen.
    """
    return plan.reduce == "last" and plan.zero < 3


def _last_backward_waits(plan: Plan, passes: Sequence[Pass]) -> bool:
    """Whether reductions hold up the last backward of the only stage, which then stands for no other."""
    return plan.pp == 1 and any(
        isinstance(each, BucketGradSyncPass) and each.blocking and each.unit != "stage" for each in passes
    )


def _chooses_order(passes: Sequence[Pass]) -> bool:
    """Whether an order is chosen by the time of the step, so that a short one may take another, with other bytes."""
    return any(isinstance(each, JointOrderPass) for each in passes)
