"""Level one alone: the plan of the least pessimistic estimate, and its distance from the bound on every plan."""

from __future__ import annotations

import time
from math import isfinite
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrainc.planner.bounds.estimates import cuts_estimate
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.answer import Answer, Candidate, OversizedShape
from ratrain.ratrainc.planner.search.family_spaces import FamilySpace, family_spaces
from ratrain.ratrainc.planner.search.rejected_plans import rejected_plans
from ratrain.ratrainc.planner.space.objective import WORST, Cost, scaled

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest

SECONDS = 3.0
"""Computing time for the cuts of shapes, once one fits; shapes left then are covered by their bound.

It is time of this process, so that other work on the machine changes no answer."""
_WORTH_A_LOOK = 1.5
"""Factor over the best estimate beyond which the guess of a shape leaves it to its bound."""


def quick_answer(request: PlanRequest) -> Answer:
    """Answer without compiling anything: times are estimates, peaks lower bounds."""
    begin = time.monotonic()
    return quick_answer_of(request, family_spaces(request, Profiles(request.setting)), begin)


def quick_answer_of(request: PlanRequest, spaces: list[FamilySpace], begin: float) -> Answer:
    """Answer for spaces whose bounds are known; `begin` is when the answer was asked for."""
    objective = request.objective
    computed = time.process_time()
    candidates: list[Candidate] = []
    oversized: list[OversizedShape] = []
    kept: list[Cost] = []
    for guess, space, row in _in_order(spaces):
        # the cost of the worst plan that is wanted so far
        least = sorted(kept)[request.keep - 1] if len(kept) >= request.keep else WORST
        late = bool(kept) and time.process_time() - computed > SECONDS
        # shapes are in the order of guesses, so all later ones are left to `least_left` as well
        if late or guess > scaled(least, _WORTH_A_LOOK):
            break
        if space.cost(row) >= least:
            continue
        space.taken.add(row)
        shape = space.shapes[row]
        cuts = space.best_cuts(shape)
        if not isfinite(cuts.seconds):
            oversized.append(space.oversized(shape, cuts))
            continue
        estimate = cuts_estimate(space.columns_of(shape), cuts.layers)
        found = space.candidate(shape, cuts, estimate=estimate)
        candidates.append(found)
        if isfinite(estimate):
            kept.append(found.cost(objective))
    if not candidates and not oversized:
        oversized = [space.least_state for space in spaces]
    candidates.sort(key=lambda c: c.cost(objective))
    fitting = [c for c in candidates if isfinite(c.seconds)]
    # no bound on a shape's cuts is dropped: candidates that may not fit count too
    bound = min([*(space.least_left() for space in spaces), *(c.bound(objective) for c in candidates)])
    return Answer(
        evolve(request, seconds=SECONDS),
        fitting,
        [],
        oversized,
        bound,
        bound,
        sum(len(space.shapes) for space in spaces),
        sum(space.plans for space in spaces),
        0,
        time.monotonic() - begin,
        proven=False,
        rejected_plans=rejected_plans(request, spaces, fitting[0]) if request.explain and fitting else [],
    )


def _in_order(spaces: list[FamilySpace]) -> list[tuple[Cost, FamilySpace, int]]:
    """Return the shapes of families whose state fits as (guess, space, row), the most promising first."""
    rows = ((space.guess(row), number, row) for number, space in enumerate(spaces) for row in space.order)
    return [(guess, spaces[number], row) for guess, number, row in sorted(rows)]
