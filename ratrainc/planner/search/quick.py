"""The quick answer: closed forms put plans in order, and the first few are compiled and simulated.

Estimates are neither bounds nor simulated: they only choose what is tried. Example: estimates of 5.9, 6.0 and 6.1 ms
that simulate at 7.4, 5.4 and 6.2 ms give the second plan. Where nothing more is worth its time, the others stay
estimates and come after it.
"""

from __future__ import annotations

import time
from math import inf, isfinite
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrainc.console.progress import Steps
from ratrain.ratrainc.planner.bounds.estimates import cuts_estimate
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.answer import Answer, Candidate, OversizedShape
from ratrain.ratrainc.planner.search.family_spaces import FamilySpace, family_spaces, rule_out_fewer
from ratrain.ratrainc.planner.search.plan_evaluation import compiled_units, evaluate
from ratrain.ratrainc.planner.search.rejected_plans import rejected_plans
from ratrain.ratrainc.planner.space.objective import WORST, Cost, scaled

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest

SECONDS = 3.0
"""Computing time for the cuts of shapes, once one fits; shapes left then are covered by their bound.

It is time of this process, so that other work on the machine changes no answer."""
TRIAL_SECONDS = 3.0
"""Computing time for simulating plans, once one fits."""
_LIMIT_SECONDS = 20.0
"""Computing time of one plan; of a plan that takes longer the estimate stays."""
_MOST_UNITS = 2500.0
"""Work (`compiled_units`) of a plan that is expected to take longer, and is not begun."""
_TRIED = 5
"""Most plans that fit to simulate, or the number that is wanted if that is more."""
_REFUSED = 8
"""Most plans that may be refused before one fits."""
_WORTH_A_LOOK = 1.5
"""Factor over the best estimate beyond which the guess of a shape leaves it to its bound."""


def quick_answer(request: PlanRequest, tick: Steps | None = None) -> Answer:
    """Answer with the best of the plans that estimates put first; `tick` hears of each that is tried."""
    tick = Steps() if tick is None else tick
    begin = time.monotonic()
    spaces = family_spaces(request, Profiles(request.setting), tick)
    tick.begin("estimates")
    answer = estimated_answer(request, spaces, begin)
    tried(answer, tick)
    if request.explain and answer.candidates:
        rows = rejected_plans(request, spaces, answer.candidates[0], answer.evaluated, answer.refused)
        answer.rejected_plans = rows
    answer.seconds = time.monotonic() - begin
    return answer


def estimated(request: PlanRequest) -> Answer:
    """Answer by estimates alone, without compiling anything."""
    begin = time.monotonic()
    return estimated_answer(request, family_spaces(request, Profiles(request.setting)), begin)


def tried(answer: Answer, tick: Steps) -> None:
    """Compile and simulate the first plans of an answer of estimates, long steps folded; put what fits first.

    Plans are tried until enough of them fit, their time is up, or the bounds rule out that another is better. Where one
    takes too long, it and all after it stay estimates.
    """
    request, objective = answer.request, answer.request.objective
    wanted = max(_TRIED, request.keep)
    fitting: list[Candidate] = []
    left: list[Candidate] = []
    taken, stopped = 0.0, False
    for candidate in answer.best_plans:
        best = min((each.cost(objective) for each in fitting), default=WORST)
        units = compiled_units(candidate.plan, request.model.layers, folded=True, in_halves=False)
        stopped = stopped or units > _MOST_UNITS
        enough = stopped or len(fitting) >= wanted or (len(fitting) >= request.keep and taken >= TRIAL_SECONDS)
        if enough or (not fitting and len(answer.refused) >= _REFUSED) or candidate.bound(objective) >= best:
            left.append(candidate)
            continue
        tick.begin(f"{candidate.plan.summary}, {candidate.family}")
        task = request.task(candidate.plan, candidate.pipeline)
        evaluation = evaluate(evolve(task, seconds=max(TRIAL_SECONDS - taken, _LIMIT_SECONDS)))
        tick(f"{candidate.plan.summary}, {candidate.family}")
        taken, stopped = taken + evaluation.taken, evaluation.stopped
        answer.evaluations += not stopped
        if stopped:
            left.append(candidate)
            continue
        found = evolve(candidate, evaluation=evaluation)
        (fitting if evaluation.step_seconds is not None else answer.refused).append(found)
    fitting.sort(key=lambda each: each.rank(objective))
    answer.candidates = fitting + left


def estimated_answer(
    request: PlanRequest, spaces: list[FamilySpace], begin: float, below: float = inf, seconds: float | None = None
) -> Answer:
    """Answer by estimates alone: times are estimates, peaks lower bounds. `begin` is when the answer was asked for.

    Plans that cost `below` or more, by the measure of the objective, are not wanted. `seconds` is the computing time
    for cuts, if not `SECONDS`.
    """
    objective = request.objective
    limit = SECONDS if seconds is None else seconds
    computed = time.process_time()
    candidates: list[Candidate] = []
    oversized: list[OversizedShape] = []
    kept: list[Cost] = []
    most = (below, -inf) if isfinite(below) else WORST
    for guess, space, row in _in_order(spaces):
        # the cost of the worst plan that is wanted so far
        least = sorted(kept)[request.keep - 1] if len(kept) >= request.keep else most
        late = bool(kept) and time.process_time() - computed > limit
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
    if objective.of_clusters and fitting:
        oversized += rule_out_fewer(spaces, fitting[0].cost(objective))
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
    )


def _in_order(spaces: list[FamilySpace]) -> list[tuple[Cost, FamilySpace, int]]:
    """Return the shapes of families whose state fits as (guess, space, row), the most promising first."""
    rows = ((space.guess(row), number, row) for number, space in enumerate(spaces) for row in space.order)
    return [(guess, spaces[number], row) for guess, number, row in sorted(rows)]
