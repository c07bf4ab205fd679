"""ZeRO levels of single blocks of the best plan: some keep their views, others gather them for each use.

The shapes of a search have one level for all layers. When the search is over, the best plan is taken with ZeRO 3, and
`level_choice.py` chooses the levels of its blocks by simulated steps. The result is one more candidate, under a bound
that holds for any levels of its blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.time_limit import OutOfTime, time_limit
from ratrain.ratrainc.choices.level_choice import choose_levels
from ratrain.ratrainc.planner.bounds.bounds import StageBounds, plan_bounds
from ratrain.ratrainc.planner.bounds.shape_columns import of_any_levels
from ratrain.ratrainc.planner.search.plan_evaluation import folded_micro_batches

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.planner.search.answer import Candidate
    from ratrain.ratrainc.planner.search.family_spaces import FamilySpace
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest
    from ratrain.ratrainc.planner.space.space import Shape

PLANS = 10
"""Plans that are compiled for a choice of levels, about."""
WORTH = 1.002
"""Factor over the bound of any levels; a faster step needs no choice of levels."""


def all_gathered(space: FamilySpace, shape: Shape) -> Shape | None:
    """Return a shape with all views gathered for each use; None if the search does not choose levels of blocks."""
    # the bound on any mix of levels needs the profiles of both extremes, so both must be shapes of the space
    found = evolve(shape, zero=3, ends=None)
    if shape.zero and space.request.wide and {found, _all_kept(found)} <= space.row.keys():
        return found
    return None


def bounds_of_any_levels(space: FamilySpace, gathered: Shape, plan: Plan) -> StageBounds:
    """Bound a plan under any levels of its blocks, ZeRO 3 or a level of whole views."""
    request = space.request
    columns = of_any_levels(space.columns_of(gathered), space.columns_of(_all_kept(gathered)))
    chunks = [len(plan.chunk_layers(chunk, request.model)) for chunk in range(len(plan.cuts) + 1)]
    layers = np.zeros((1, plan.pp))
    np.add.at(layers[0], list(gathered.pipeline.chunk_stages), chunks)
    return plan_bounds(columns, layers)


def with_levels(request: PlanRequest, candidate: Candidate, plan: Plan, seconds: float | None) -> Plan | None:
    """Return a plan of ZeRO 3 with the levels of the shortest step; None if there are none, or time is up."""
    whole = request.exhaustive
    folded = plan if whole else evolve(plan, micro_batches=folded_micro_batches(plan, candidate.pipeline))
    try:
        with time_limit(seconds):
            levels = choose_levels(request.model, folded, candidate.pipeline, request.machine).levels
    except (OutOfTime, DiagnosticError):  # it does not fit, though another of its shape does
        return None
    return None if levels is None else evolve(plan, zero_blocks=levels)


def _all_kept(gathered: Shape) -> Shape:
    """Return the shape with all views whole; with `last` level 2 is the same as 1."""
    return evolve(gathered, zero=2 if gathered.reduce == "each-micro-batch" else 1, view_group=None)
