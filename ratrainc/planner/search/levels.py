"""Levels of blocks of the best plan: which blocks keep their views where ZeRO 3 gathers those of others for each use.

The shapes of a search have one ZeRO level for all layers. Of the best plan that it found, with whatever level, the same plan with ZeRO 3 is given
the levels that `level_choice.py` chooses by simulated steps, and is one more candidate. What bounds it holds for any levels of its blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.time_limit import OutOfTime, time_limit
from ratrain.ratrainc.choices.level_choice import choose_levels
from ratrain.ratrainc.planner.bounds.bounds import StageBounds, plan_bounds
from ratrain.ratrainc.planner.bounds.columns import of_any_levels
from ratrain.ratrainc.planner.search.evaluation import folded_micro_batches

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.planner.search.answer import Candidate, Request
    from ratrain.ratrainc.planner.search.family_spaces import FamilySpace
    from ratrain.ratrainc.planner.space.space import Shape

PLANS = 10
"""About as many plans are compiled for a choice of levels."""
WORTH = 1.002
"""Where a step takes less than so many times the bound of any levels, none are looked for."""


def all_gathered(space: FamilySpace, shape: Shape) -> Shape | None:
    """The shape of a space that gathers all views for each use, and is else as another; None where levels are none of the search's."""
    found = evolve(shape, zero=3, ends=None)
    if shape.zero and space.request.wide and {found, _all_kept(found)} <= space.row.keys():
        return found
    return None


def bounds_of_any_levels(space: FamilySpace, gathered: Shape, plan: Plan) -> StageBounds:
    """Bounds of a plan whatever levels its blocks have, ZeRO 3 or those of whole views."""
    request = space.request
    columns = of_any_levels(space.columns_of(gathered), space.columns_of(_all_kept(gathered)))
    chunks = [len(plan.chunk_layers(chunk, request.model)) for chunk in range(len(plan.cuts) + 1)]
    layers = np.zeros((1, plan.pp))
    np.add.at(layers[0], list(gathered.pipeline.chunk_stages), chunks)
    return plan_bounds(columns, layers)


def with_levels(request: Request, candidate: Candidate, plan: Plan, seconds: float | None) -> Plan | None:
    """A plan of ZeRO 3 with the levels that make its step shortest; None where it has none such, or they are not found in the time."""
    whole = request.exhaustive
    folded = plan if whole else evolve(plan, micro_batches=folded_micro_batches(plan))
    try:
        with time_limit(seconds):
            levels = choose_levels(request.model, folded, candidate.pipeline, request.machine).levels
    except (OutOfTime, DiagnosticError):  # it does not fit, though another of its shape does
        return None
    return None if levels is None else evolve(plan, zero_blocks=levels)


def _all_kept(gathered: Shape) -> Shape:
    """The same shape with all views whole; with `last` level 2 is as 1."""
    return evolve(gathered, zero=2 if gathered.reduce == "each-micro-batch" else 1, view_group=None)
