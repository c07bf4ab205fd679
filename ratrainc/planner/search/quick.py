"""The quick answer: closed forms put plans in order, and the first few are compiled and simulated.

Estimates are neither bounds nor simulated: they only choose what is tried. A plan takes between its bound and about its
estimate, so the order is that of the middle of both. Example: estimates of 6.1, 6.2 and 6.3 ms over bounds of 6.0, 5.2
and 5.9 ms put the second plan first; if they simulate at 6.1, 5.3 and 6.0 ms, it is the answer. Where nothing more is
worth its time, the others stay estimates and come after it.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from collections.abc import Sequence
from math import inf, isfinite, log2
from typing import TYPE_CHECKING

from attrs import define, evolve

from ratrain.ratrain_ir.process_pool import each as each_of
from ratrain.ratrain_ir.process_pool import processes
from ratrain.ratrain_ir.support.time_limit import is_ended
from ratrain.ratrainc.console.progress import Steps
from ratrain.ratrainc.planner.bounds.estimates import cuts_estimate
from ratrain.ratrainc.planner.bounds.order_bounds import prepare
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.answer import Answer, Candidate, OversizedShape
from ratrain.ratrainc.planner.search.family_spaces import FamilySpace, family_spaces, nearest_to_fit, rule_out_fewer
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, compiled_units, evaluate
from ratrain.ratrainc.planner.search.rejected_plans import rejected_plans
from ratrain.ratrainc.planner.space.objective import WORST, Cost, scaled

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest

SECONDS = 1.0
"""Computing time for the cuts of shapes, once one fits; shapes left then are covered by their bound.

It is time of this process, so that other work on the machine changes no answer."""
TRIAL_UNITS = 1500.0
"""Work (`compiled_units`) of simulating plans, once one fits.

Work, not time: another load on the machine makes the same work take more computing time."""
_TRIAL_SECONDS = 6.0
"""Computing time for the same, for plans that take far longer than their work says."""
LIMIT_SECONDS = 20.0
"""Computing time of one plan; a plan that is expected to take longer is not begun."""
_GIVEN_UP_SECONDS = 30.0
"""Computing time of all plans that are given up; when it is used up, none is begun."""
_SECONDS_A_UNIT = 0.01
"""Guess before anything was simulated: 0.002 to 0.02 s of computing on a slow core."""
_FIRST_UNITS = 200.0
"""Units of work that the guess counts for."""
_WORTH_A_PROCESS = 200
"""Work of plans for which processes are forked: about a second."""
_TRIED = 5
"""Most plans that fit to simulate, or the number that is wanted if that is more."""
_DEARER = 0.02
"""Extra cost, for the order in which plans are tried, of each doubling of the work of trying one."""
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
    answer.interrupted = is_ended()
    if request.explain and answer.candidates and not answer.interrupted:
        best, evaluated, refused = answer.candidates[0], answer.evaluated, answer.refused
        answer.reject = lambda: rejected_plans(request, spaces, best, evaluated, refused)
    answer.seconds = time.monotonic() - begin
    return answer


def estimated(request: PlanRequest) -> Answer:
    """Answer by estimates alone, without compiling anything."""
    begin = time.monotonic()
    return estimated_answer(request, family_spaces(request, Profiles(request.setting)), begin)


def tried(answer: Answer, tick: Steps, seconds: float = inf) -> None:
    """Compile and simulate the first plans of an answer of estimates, long steps folded; put what fits first.

    Plans are tried until enough of them fit, their time is up, or the bounds rule out that another is better; as many
    at once as the request has jobs, if they are long enough for a process each. One that is expected to take too long
    is passed over, and one that does is given up: cheaper ones after it are tried. Those that stay estimates say why.
    None is begun after `seconds`.
    """
    until = time.monotonic() + seconds
    request, objective = answer.request, answer.request.objective
    fitting: list[Candidate] = []
    left: list[Candidate] = []
    effort = _Effort(max(_TRIED, request.keep), request.keep)
    waiting = deque(by_promise(answer))
    while waiting:
        best = min((each.cost(objective) for each in fitting), default=WORST)
        begun: list[tuple[Candidate, float]] = []
        while waiting and len(begun) < request.jobs:
            candidate = waiting[0]
            units = _units(answer, candidate)
            why = effort.reason_against(candidate, units, len(fitting), [each for _, each in begun])
            if not fitting and len(answer.refused) + len(begun) >= _REFUSED:
                why = NOT_REACHED
            if is_ended() or time.monotonic() > until:
                why = INTERRUPTED if is_ended() else NOT_REACHED
            if candidate.bound(objective) >= best:
                why = NO_BETTER
            if why is None:
                begun.append((candidate, units))
            elif begun:  # those before it may change the reason
                break
            else:
                left.append(evolve(candidate, why_estimated=why))
            waiting.popleft()
        allowed = min(effort.allowed, max(until - time.monotonic(), 1.0))
        names = [f"{candidate.plan.summary}, {candidate.family}" for candidate, _ in begun]
        if begun:
            tick.begin(" beside ".join(names))
        tasks = [evolve(request.task(each.plan, each.pipeline), seconds=allowed) for each, _ in begun]
        # forks, which have all imported; workers would import for longer than these few plans take
        with processes(request.jobs, least_work=_WORTH_A_PROCESS):
            found = each_of(evaluate, tasks, work=int(sum(units for _, units in begun)))
        for (candidate, units), name, evaluation in zip(begun, names, found, strict=True):
            tick(name)
            effort.learn(candidate, units, evaluation)
            answer.evaluations += not evaluation.stopped
            if evaluation.stopped:
                left.append(evolve(candidate, why_estimated=INTERRUPTED if is_ended() else GIVEN_UP))
                continue
            known = evolve(candidate, evaluation=evaluation)
            (fitting if evaluation.step_seconds is not None else answer.refused).append(known)
    fitting.sort(key=lambda each: each.rank(objective))
    answer.candidates = fitting + sorted(left, key=lambda each: each.cost(objective))


def by_promise(answer: Answer) -> list[Candidate]:
    """Return the plans of an answer of estimates, each once, by the middle of bound and estimate; dear ones later."""
    objective = answer.request.objective
    plans = [(candidate, _units(answer, candidate)) for candidate in answer.best_plans]
    least = min((units for _, units in plans), default=1.0)

    def expected(candidate: Candidate, units: float) -> Cost:
        (measure, seconds), (low, low_seconds) = candidate.cost(objective), candidate.bound(objective)
        return scaled(((measure + low) / 2, (seconds + low_seconds) / 2), 1 + _DEARER * log2(units / least))

    return [candidate for candidate, _ in sorted(plans, key=lambda plan: expected(*plan))]


def _units(answer: Answer, candidate: Candidate) -> float:
    """Return the work of trying a plan."""
    return compiled_units(candidate.plan, answer.request.model.layers, folded=True, in_halves=False)


GIVEN_UP = f"tried and given up after up to {LIMIT_SECONDS:.0f} s of computing"
TOO_LONG = f"expected to take longer than {LIMIT_SECONDS:.0f} s of computing"
NOT_REACHED = "behind the few that a quick answer simulates"
INTERRUPTED = "interrupted"
NO_BETTER = "no better than the best, by their bounds"


@define
class _Effort:
    """Work and computing time of the plans that were tried."""

    most: int
    """plans that fit to simulate at most"""
    least: int
    """plans that fit to simulate whatever the time"""
    _units: float = 0.0
    _taken: float = 0.0
    _given_up: float = 0.0
    _cheaper_than: tuple[float, int] = (inf, 0)
    """work and chunks of the cheapest plan that was given up"""

    def reason_against(
        self, candidate: Candidate, units: float, fitting: int, beside: Sequence[float] = ()
    ) -> str | None:
        """Return why a plan is not tried, after `fitting` that fit; None if it is.

        `beside`: the work of each plan that is tried beside it, and may fit too.
        """
        fitting += len(beside)
        used_up = self._units + sum(beside) >= TRIAL_UNITS or self._taken - self._given_up >= _TRIAL_SECONDS
        if fitting >= self.most or (fitting >= self.least and used_up) or self._given_up >= _GIVEN_UP_SECONDS:
            return NOT_REACHED
        if (units, candidate.plan.chunks) >= self._cheaper_than or self.expected(units) > LIMIT_SECONDS:
            return TOO_LONG
        return None

    def expected(self, units: float) -> float:
        """Return the computing time that some work is expected to take, by the plans that were tried."""
        pace = (self._taken + _SECONDS_A_UNIT * _FIRST_UNITS) / (self._units + _FIRST_UNITS)
        return units * pace

    @property
    def allowed(self) -> float:
        """Most computing time of the next plan."""
        return min(LIMIT_SECONDS, _GIVEN_UP_SECONDS - self._given_up)

    def learn(self, candidate: Candidate, units: float, evaluation: PlanEvaluation) -> None:
        """Take a plan that was tried into account."""
        self._units += units
        self._taken += evaluation.taken
        if evaluation.stopped:
            self._given_up += evaluation.taken
            self._cheaper_than = min(self._cheaper_than, (units, candidate.plan.chunks))


def estimated_answer(
    request: PlanRequest, spaces: list[FamilySpace], begin: float, below: float = inf, seconds: float | None = None
) -> Answer:
    """Answer by estimates alone: times are estimates, peaks lower bounds. `begin` is when the answer was asked for.

    Plans that cost `below` or more, by the measure of the objective, are not wanted. `seconds` is the computing time
    for cuts, if not `SECONDS`.
    """
    objective = request.objective
    limit = SECONDS if seconds is None else seconds
    prepare()
    computed = time.process_time()
    candidates: list[Candidate] = []
    oversized: list[OversizedShape] = []
    kept: list[Cost] = []  # ascending
    most = (below, -inf) if isfinite(below) else WORST
    for guess, space, row in _in_order(spaces):
        # the cost of the worst plan that is wanted so far
        least = kept[request.keep - 1] if len(kept) >= request.keep else most
        late = bool(kept) and (time.process_time() - computed > limit or is_ended())
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
            insort(kept, found.cost(objective))
    if not candidates:
        oversized += nearest_to_fit(spaces, oversized)
    candidates.sort(key=lambda c: c.cost(objective))
    fitting = [c for c in candidates if isfinite(c.seconds)]
    if objective.of_clusters and fitting and not is_ended():
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
