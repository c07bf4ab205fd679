"""Level one alone: the plan with the least pessimistic estimate, and how far that is from the bound on every plan."""

from __future__ import annotations

import time
from math import isfinite

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrainc.planner.bounds.columns import least_bytes
from ratrain.ratrainc.planner.bounds.cuts import best_cuts, cuts_of
from ratrain.ratrainc.planner.bounds.estimates import plan_estimates
from ratrain.ratrainc.planner.bounds.profile import Profiles
from ratrain.ratrainc.planner.search.answer import Answer, Candidate, Rejected, Request
from ratrain.ratrainc.planner.search.family_spaces import FamilySpace, family_spaces
from ratrain.ratrainc.planner.search.losers import losers
from ratrain.ratrainc.planner.space.objective import WORST, Cost, scaled
from ratrain.ratrainc.planner.space.variants import pipeline_for

SECONDS = 3.0
"""of computing for the cuts of shapes, once one fits; what is left then is covered by its bound. Others' work changes no answer"""
_WORTH_A_LOOK = 1.5
"""Shapes that are guessed to cost this many times the best estimate are left to their bound."""


def quick_answer(request: Request) -> Answer:
    """An answer without compiling anything: its times are estimates, its peaks lower bounds."""
    begin = time.monotonic()
    return quick_answer_of(request, family_spaces(request, Profiles(request.setting)), begin)


def quick_answer_of(request: Request, spaces: list[FamilySpace], begin: float) -> Answer:
    """The same of spaces whose bounds are known."""
    objective = request.objective
    computed = time.process_time()
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    kept: list[Cost] = []
    for guess, space, row in _in_order(spaces):
        least = sorted(kept)[request.keep - 1] if len(kept) >= request.keep else WORST
        late = bool(kept) and time.process_time() - computed > SECONDS
        if late or guess > scaled(least, _WORTH_A_LOOK):
            break
        if space.cost(row) >= least:
            continue
        space.taken.add(row)
        shape, name = space.shapes[row], space.family.name
        columns = space.columns_of(shape)
        cuts = best_cuts(columns, roomiest=objective.of_bytes)
        if not isfinite(cuts.seconds):
            rejected.append(Rejected(shape, cuts.stage, cuts.short_bytes, name))
            continue
        estimate = float(plan_estimates(columns, np.array([cuts.layers], float))[0])
        plan = shape.plan(space.request.setting, cuts_of(cuts.layers, shape))
        pipeline = pipeline_for(space.request.strategy.passes, plan, least_bytes=objective.of_bytes)
        found = Candidate(shape, plan, pipeline, cuts.seconds, None, estimate, cuts.peak_bytes, name)
        candidates.append(found)
        if isfinite(estimate):
            kept.append(found.cost(objective))
    if not candidates and not rejected:  # the state alone is too large for every shape
        for space in spaces:
            smallest = space.shapes[int(np.argmin(least_bytes(space.columns)))]
            cuts = best_cuts(space.columns_of(smallest))
            rejected.append(Rejected(smallest, cuts.stage, cuts.short_bytes, space.family.name))
    candidates.sort(key=lambda c: c.cost(objective))
    fitting = [c for c in candidates if isfinite(c.seconds)]
    bound = min([*(space.least_left() for space in spaces), *(c.bound(objective) for c in candidates)])
    return Answer(
        evolve(request, seconds=SECONDS),
        fitting,
        [],
        rejected,
        bound,
        bound,
        sum(len(space.shapes) for space in spaces),
        sum(space.plans for space in spaces),
        0,
        time.monotonic() - begin,
        proven=False,
        losers=losers(_Bounded(request, spaces), fitting[0]) if request.explain and fitting else [],
    )


@frozen
class _Bounded:
    """What losers are read off where nothing was evaluated."""

    request: Request
    spaces: list[FamilySpace]
    fitting: tuple[Candidate, ...] = ()
    refused: tuple[Candidate, ...] = ()


def _in_order(spaces: list[FamilySpace]) -> list[tuple[Cost, FamilySpace, int]]:
    """All shapes of some families that their state leaves room for, the most promising first."""
    rows = ((space.guess(row), number, row) for number, space in enumerate(spaces) for row in space.order)
    return [(guess, spaces[number], row) for guess, number, row in sorted(rows)]
