"""The search: shapes, then stage cuts, then pipelines, in the order of expected cost.

Plans and shapes that a bound rules out are never tried.

A leaf of the queue is one plan under one pipeline; a shape whose cuts are not chosen yet stands for many plans. Bounds
hold for all of them.

1. Take the most promising shape of all families. If it comes before the first leaf, choose its cuts and queue them as a
   leaf; repeat.
2. Else evaluate the first leaf, unless its bound is no better than the best plan (the limit), or its time is too long.
3. A plan that fits lowers the limit, which rules out leaves and shapes everywhere. Its other pipelines and its
   neighbouring cuts are queued.
4. When nothing is left, or time is up, simulate the best plans whole and verify them.

Example, with bounds of 5, 6 and 9 s for three plans: the first is simulated and takes 8 s, which rules out the third;
the second takes 7 s and wins. The bound on all plans is min(8, 7, 9) = 7 s, so it is proved best.

Cost: each evaluation compiles and simulates a plan; the time of the request limits their number (`TimeBudget`).

Guarantee: every shape or plan that is dropped leaves its bound in `open_bound`, so the answer's bound holds for every
plan of the space.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import count
from math import inf, isfinite
from typing import TYPE_CHECKING

import attrs
from attrs import define, field, frozen

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.support.time_limit import is_ended
from ratrain.ratrainc.choices.strategies import hiding_exchanges
from ratrain.ratrainc.console.progress import Steps
from ratrain.ratrainc.planner.bounds.cuts import (
    BestCuts,
    best_cuts,
    can_be_listed,
    cuts_of,
    listed,
    neighbours,
    partitions,
)
from ratrain.ratrainc.planner.bounds.estimates import cuts_estimate
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.answer import Answer, Candidate, OversizedShape
from ratrain.ratrainc.planner.search.family_spaces import FamilySpace, family_spaces, nearest_to_fit, rule_out_fewer
from ratrain.ratrainc.planner.search.levels import PLANS, WORTH, all_gathered, bounds_of_any_levels, with_levels
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task, compiled_units
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.search.rejected_plans import rejected_plans
from ratrain.ratrainc.planner.search.time_budget import TimeBudget
from ratrain.ratrainc.planner.search.workers import WorkerPool, workers
from ratrain.ratrainc.planner.space.objective import TIME, WORST, Cost, scaled
from ratrain.ratrainc.planner.space.space import Shape
from ratrain.ratrainc.planner.space.variants import storing, trials_of, variants

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ratrain.ratrainc.planner.search.answer import RejectedPlan

_WORTH_TRYING = 1.03
"""Factor over the best cost beyond which a plan is left to an exhaustive search."""
_WHOLE = 2
"""Plans simulated whole at the end: the winner, and the runner-up if folded steps do not tell them apart."""
_FOLDED_APART = 1.01
"""Factor over the best cost from which on folded steps tell plans apart."""
_TRIED_AT_LEAST = 4
"""Plans evaluated whatever the time, while nothing fits."""
_REFUSED_LIKE = 1.1
"""Factor on the order of a plan for each refused plan of its kind."""
_SHAPES_AT_ONCE = 256
"""Most shapes whose cuts are chosen before the next plan is compiled."""
_BOUNDING = 0.05
"""Share of the time that may go between two plans to cuts of shapes whose bound is low."""
_PESSIMISM = 1.5
"""Factor on the order of a plan that hardly fits."""


Kind = tuple[str, int, str, int, int, int, int | None]


@frozen(order=True)
class _Leaf:
    """An entry of the queue: one plan under one pipeline."""

    order: Cost
    """sort key of the queue"""
    number: int
    expected: Cost = field(order=False)
    """its bound, scaled by the ratio of simulated cost to bound of similar plans"""
    bound: Cost = field(order=False)
    space: FamilySpace = field(order=False)
    shape: Shape = field(order=False)
    cuts: BestCuts = field(order=False)
    units: float = field(order=False)
    """work of its evaluation (`compiled_units`)"""
    pipeline: str | None = field(order=False, default=None)
    """None: the strategy's own, followed by its variants"""
    refused: int = field(order=False, default=0)
    """refused plans of its kind when it was queued"""

    @property
    def kind(self) -> Kind:
        """Key of plans that need bytes for the same reasons."""
        shape = self.shape
        return self.space.family.name, shape.zero, shape.reduce, shape.tp, shape.cp, shape.ep, shape.ends


@define(eq=False)
class Search:
    """One search; `run` returns its answer."""

    request: PlanRequest
    tick: Steps = field(factory=Steps)
    """hears of each evaluation that begins or ends"""
    best_text: str = ""
    """the best cost so far, in words behind what is tried"""
    profiles: Profiles = field()
    """shared with searches that ask for the same profiles"""
    spaces: list[FamilySpace] = field(factory=list)
    fitting: list[Candidate] = field(factory=list)
    refused: list[Candidate] = field(factory=list)
    oversized: list[OversizedShape] = field(factory=list)
    open_bound: Cost = WORST
    """the least bound of all that was dropped untried"""
    limit: Cost = WORST
    """cost that a plan must stay below to be wanted"""
    queue: list[_Leaf] = field(factory=list)
    numbers: Iterator[int] = field(factory=count)
    evaluations: int = 0
    effort: TimeBudget = field(init=False)
    refused_of: Counter[Kind] = field(factory=Counter)
    """refused plans by kind"""
    lacks_time: bool = False
    """True if something was left untried for want of time, and not since it is ruled out or not worth trying"""
    tried_whole: bool = False
    """True if a plan without tensor-parallel, context and expert ranks was evaluated"""
    cuts_seen: dict[tuple[str, Shape], set[tuple[int, ...]]] = field(factory=dict)
    given_up: list[Candidate] = field(factory=list)
    """plans whose whole step took longer than was left"""
    least: dict[tuple[str, Plan], Cost] = field(factory=dict)
    """cost of each evaluated plan that fits, under its best pipeline"""

    @profiles.default
    def _profiles(self) -> Profiles:
        return Profiles(self.request.setting)

    def __attrs_post_init__(self) -> None:
        self.effort = TimeBudget(self.request.seconds)

    def run(self) -> Answer:
        """Search until it is proven that nothing is left to gain, nothing is worth trying, or time is up."""
        self.effort.begin()
        with workers(self.request.jobs) as run:  # open before the bounds, beside which workers import
            self.spaces = family_spaces(self.request, self.profiles, self.tick)
            self.explore(run)
            self.choose_levels(run)
            self.simulate_whole(run)
        if not self.fitting and not is_ended():
            self.oversized += nearest_to_fit(self.spaces, self.oversized)
        objective = self.request.objective
        ranked = sorted(self.fitting, key=lambda candidate: candidate.rank(objective))
        best = ranked[0].cost(objective) if ranked else WORST
        bound = self.lower_bound(ranked)
        return Answer(
            self.request,
            ranked,
            self.refused,
            self.oversized,
            min(bound, best),
            min(self.relaxed_bound(), best),
            sum(len(space.shapes) for space in self.spaces),
            sum(space.plans for space in self.spaces),
            self.evaluations,
            self.effort.elapsed,
            bool(ranked) and bound >= best,
            self.rejected if ranked and not is_ended() else list,
            is_ended(),
            settled=not self.lacks_time,
            profiles=self.profiles,
        )

    def rejected(self) -> list[RejectedPlan]:
        """Return the kinds of plans that lost to the best one, and why."""
        best = min(self.fitting, key=lambda candidate: candidate.rank(self.request.objective))
        return rejected_plans(self.request, self.spaces, best, self.fitting, self.refused)

    def next_leaf(self, *, of_whole: bool = False) -> _Leaf | None:
        """Return the next plan worth evaluating, of ranks that compute alone (`is_whole`) if asked; None if none is.

        Shapes that come before it get their cuts.
        """
        self.cut_low_shapes()
        others: list[_Leaf] = []
        left = _SHAPES_AT_ONCE
        while True:
            # A shape that is expected to be better than the first leaf becomes a leaf first. At most
            # `_SHAPES_AT_ONCE` do so between two evaluations: choosing cuts takes time in which no limit falls.
            space = self.next_space(of_whole=of_whole)
            cost = space[0] if space is not None else WORST
            if space is not None and (left > 0 or not self.queue) and (not self.queue or cost < self.queue[0].order):
                self.choose_cuts(space[1], space[2])
                left -= 1
                continue
            if not self.queue:
                break
            leaf = heapq.heappop(self.queue)
            refused = self.refused_of[leaf.kind]
            # Plans of its kind were refused since it was queued: put it back with a worse order. Doing so only now
            # saves a search through the queue at each refusal.
            if refused > leaf.refused:
                order = scaled(leaf.order, _REFUSED_LIKE ** (refused - leaf.refused))
                heapq.heappush(self.queue, attrs.evolve(leaf, order=order, refused=refused))
            # it is not wanted now, but stays in the queue
            elif of_whole and not leaf.shape.is_whole:
                others.append(leaf)
            elif self.is_out(leaf.bound, leaf.expected):
                self.set_aside(leaf.bound)
            elif self.is_too_long(leaf):
                self.lacks_time = True
                self.set_aside(leaf.bound)
            else:
                for other in others:
                    heapq.heappush(self.queue, other)
                return leaf
        for other in others:
            heapq.heappush(self.queue, other)
        return None

    def cut_low_shapes(self) -> None:
        """Choose the cuts of shapes that keep the bound on all plans low, lowest first.

        Most of them only look good: the bound on cuts knows what no bound on shapes does, and rules them out before a
        plan of them is compiled. It takes at most a share of the time.
        """
        if self.request.objective is not TIME:
            return
        low = self.limit[0] / _WORTH_TRYING
        rows = [
            (space.seconds[row], number, row) for number, space in enumerate(self.spaces) for row in space.below(low)
        ]
        until = self.effort.elapsed + _BOUNDING * self.effort.seconds
        for _, number, row in sorted(rows)[:_SHAPES_AT_ONCE]:
            if self.effort.elapsed >= until or is_ended():
                return
            self.choose_cuts(self.spaces[number], row)

    def is_too_long(self, leaf: _Leaf) -> bool:
        """Return True if another plan fits already and compiling this one is expected to exceed the time."""
        return bool(self.fitting) and not self.request.exhaustive and not self.effort.is_affordable(leaf.units)

    def next_space(self, *, of_whole: bool) -> tuple[Cost, FamilySpace, int] | None:
        """Return the most promising shape that is not ruled out (guessed cost, space, row); None if all are."""
        found: tuple[Cost, FamilySpace, int] | None = None
        for space in self.spaces:
            row = space.next_row(lambda cost: self.is_out(cost, cost), of_whole=of_whole)
            if row is not None and (found is None or space.guess(row) < found[0]):
                found = space.guess(row), space, row
        return found

    def is_out(self, bound: Cost, expected: Cost) -> bool:
        """Return True if plans of this bound cannot be wanted, or are not expected to be."""
        if bound >= self.limit:  # the limit may be an estimate, so its victims stay in `open_bound`
            return True
        if self.request.exhaustive:
            return False
        measure, seconds = self.limit
        return expected > (measure * _WORTH_TRYING, inf) or (
            expected[0] == measure and expected[1] > seconds * _WORTH_TRYING
        )

    def choose_cuts(self, space: FamilySpace, row: int) -> None:
        """Queue the best cuts of a shape, or note that none fit."""
        space.taken.add(row)
        shape = space.shapes[row]
        cuts = space.best_cuts(shape)
        if not isfinite(cuts.seconds):
            self.oversized.append(space.oversized(shape, cuts))
            return
        # a guess below the bound is certainly wrong
        cost = max(self.cost_of(shape, cuts), space.guess(row))
        doubtful = not isfinite(cuts_estimate(space.columns_of(shape), cuts.layers))  # it may be refused
        self.push(space, shape, cuts, order=scaled(cost, _PESSIMISM) if doubtful else cost)

    def cost_of(self, shape: Shape, cuts: BestCuts, ratio: float = 1.0) -> Cost:
        """Return the bound on the cost of cuts, with its seconds multiplied by `ratio`."""
        return self.request.objective.cost(ratio * cuts.seconds, cuts.peak_bytes, shape.clusters)

    def push(
        self,
        space: FamilySpace,
        shape: Shape,
        cuts: BestCuts,
        *,
        order: Cost | None = None,
        ratio: float = 1.0,
        pipeline: str | None = None,
    ) -> None:
        """Queue cuts of a shape; `ratio` is the cost over the bound of a similar plan."""
        expected = self.cost_of(shape, cuts, ratio)
        usual = pipeline or hiding_exchanges(space.family.strategy.passes, shape)
        units = self.units(space, shape, cuts) * trials_of(usual)
        order = scaled(order or expected, self.effort.dearness(units))
        bound, number = self.cost_of(shape, cuts), next(self.numbers)
        heapq.heappush(self.queue, _Leaf(order, number, expected, bound, space, shape, cuts, units, pipeline))

    def units(self, space: FamilySpace, shape: Shape, cuts: BestCuts) -> float:
        """Estimate the work of evaluating a plan."""
        plan = shape.plan(self.profiles.setting, cuts_of(cuts.layers, shape))
        in_halves, layers = space.columns.has_halves, self.request.model.layers
        return compiled_units(plan, layers, folded=not self.request.exhaustive, in_halves=in_halves)

    def set_aside(self, bound: Cost) -> None:
        """Drop something untried; the answer's bound keeps its bound."""
        self.open_bound = min(self.open_bound, bound)

    def explore(self, run: WorkerPool) -> None:
        """Evaluate leaves, as many at a time as there are workers."""
        running: dict[Future[PlanEvaluation], _Leaf] = {}
        while True:
            while len(running) < run.width:
                late = not self.may_go_on()
                self.lacks_time |= late
                # One plan without these ranks is tried whatever the time, so that others make no answer worse.
                leaf = None if is_ended() or (late and self.tried_whole) else self.next_leaf(of_whole=late)
                if leaf is None:
                    break
                self.tried_whole |= leaf.shape.is_whole
                self.tick.begin(f"{leaf.shape.summary}, {leaf.space.family.name}{self.best_text}")
                fits = bool(self.fitting)
                seconds = None if self.request.exhaustive else self.effort.allowed(fits=fits, last=late)
                running[run.submit(attrs.evolve(self.task(leaf), seconds=seconds))] = leaf
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                self.record(running.pop(future), future.result())
        if self.request.objective.of_clusters and self.fitting and not is_ended():
            best = min(candidate.cost(self.request.objective) for candidate in self.fitting)
            self.oversized += rule_out_fewer(self.spaces, best)
        self.cut_low_shapes()
        # time is up or nothing is worth trying: the certificate must cover all that is left
        for leaf in self.queue:
            self.set_aside(leaf.bound)
        for space in self.spaces:
            self.set_aside(space.least_left())

    def may_go_on(self) -> bool:
        """Return True if a new evaluation may start: in time, or late while nothing fits yet."""
        if is_ended():
            return False
        if self.fitting:
            return not self.effort.is_over(self.left_to_simulate)
        return not self.effort.is_over_without_a_plan or self.evaluations < _TRIED_AT_LEAST

    @property
    def left_to_simulate(self) -> float:
        """Work of simulating the best plan whole, if only its folded step is known."""
        best = min(self.fitting, key=lambda candidate: candidate.cost(self.request.objective))
        return 0.0 if best.is_exact else self.whole_units(best)

    def task(self, leaf: _Leaf) -> Task:
        """Return the evaluation of a leaf."""
        request = leaf.space.request
        plan = leaf.shape.plan(self.profiles.setting, cuts_of(leaf.cuts.layers, leaf.shape))
        task = request.task(plan, leaf.pipeline or leaf.space.passes_for(plan))
        folded = task.folded and not request.exhaustive
        wanted = self.limit[1] if request.objective is TIME else inf  # no other measure is seconds alone
        return attrs.evolve(task, folded=folded, checked_below=wanted, disturbed=self.request.robust and not folded)

    def space_of(self, candidate: Candidate) -> FamilySpace:
        """Return the space of a candidate's family."""
        return next(space for space in self.spaces if space.family.name == candidate.family)

    def record(self, leaf: _Leaf, evaluation: PlanEvaluation) -> None:
        """Keep the plan of an evaluation, and queue others that it makes worth trying."""
        self.evaluations += 1
        self.effort.learn(leaf.units, evaluation)
        if evaluation.stopped:
            self.lacks_time = True
            if self.fitting:
                self.set_aside(leaf.bound)
            else:  # try again later, and longer
                heapq.heappush(self.queue, attrs.evolve(leaf, order=scaled(leaf.order, _REFUSED_LIKE)))
            self.tick("one takes too long" if self.fitting else "nothing fits yet, one took too long")
            return
        # the same plan and pipeline as when it was submitted; only its limits may differ by now
        task = self.task(leaf)
        found = leaf.space.candidate(leaf.shape, leaf.cuts)
        candidate = attrs.evolve(found, plan=task.plan, pipeline=task.pipeline, evaluation=evaluation)
        (self.refused if evaluation.step_seconds is None else self.fitting).append(candidate)
        self.refused_of[leaf.kind] += evaluation.step_seconds is None
        self.tighten(candidate)
        self.branch(leaf, candidate)

    def tighten(self, candidate: Candidate) -> None:
        """Lower the limit to a candidate's cost, if it is among the best."""
        objective, keep = self.request.objective, self.request.keep
        cost = candidate.cost(objective)
        if isfinite(cost[0]):
            known = self.least.get(candidate.identity, WORST)
            self.least[candidate.identity] = min(cost, known)
            # the limit is the worst of the `keep` best plans: a plan must beat it to be among them
            best = heapq.nsmallest(keep, self.least.values())
            self.limit = best[-1] if len(best) == keep else WORST
            for space in self.spaces:
                space.tighten(self.limit)
            self.best_text = f"; best {objective.text(best[0][0], candidate.plan.tokens_per_step)}"
            self.tick(self.best_text.removeprefix("; "))
        elif not self.least:
            self.tick("nothing fits yet")

    def branch(self, leaf: _Leaf, candidate: Candidate) -> None:
        """Queue other pipelines of the plan, and other cuts of its shape."""
        fits = isfinite(candidate.seconds)
        # similar plans are expected to exceed their bounds by the same factor
        ratio = candidate.seconds / leaf.cuts.seconds if fits else 1.0
        # a leaf with a pipeline is itself a variant: its plan has branched before
        if leaf.pipeline is not None:
            return
        space, shape = leaf.space, leaf.shape
        request = space.request
        if not request.objective.of_bytes:
            tried = fits or request.exhaustive
            for pipeline in variants(request.strategy.passes, candidate.plan) if tried else storing(candidate.pipeline):
                self.push(space, shape, leaf.cuts, ratio=ratio, pipeline=pipeline)
        self.branch_cuts(space, shape, leaf.cuts.layers, ratio)
        if not fits:
            self.branch_to(space, shape, [best_cuts(space.columns_of(shape), roomiest=True)], ratio)

    def branch_cuts(self, space: FamilySpace, shape: Shape, layers: tuple[int, ...], ratio: float) -> None:
        """Queue other cuts of a shape."""
        key = space.family.name, shape
        first = key not in self.cuts_seen
        self.cuts_seen.setdefault(key, set()).add(layers)
        self.branch_to(space, shape, self.other_cuts(space, shape, layers, first=first), ratio)

    def branch_to(self, space: FamilySpace, shape: Shape, cuts: list[BestCuts], ratio: float) -> None:
        """Queue the cuts that were not queued before."""
        seen = self.cuts_seen.setdefault((space.family.name, shape), set())
        for each in cuts:
            if each.layers not in seen:
                seen.add(each.layers)
                self.push(space, shape, each, ratio=ratio)

    def other_cuts(self, space: FamilySpace, shape: Shape, layers: tuple[int, ...], *, first: bool) -> list[BestCuts]:
        """Return more cuts of a shape: all if they can be listed, else the neighbours of the cuts just tried."""
        total = self.request.model.layers
        columns = space.columns_of(shape)
        if can_be_listed(total, shape.pp, shape.chunks):
            return listed(columns, list(partitions(total, shape.pp, shape.chunks))) if first else []
        if first:  # most cuts of the shape are never listed: keep the bound on all of them
            self.set_aside(self.cost_of(shape, space.best_cuts(shape)))
        return listed(columns, neighbours(layers, shape.chunks))[:_NEIGHBOURS]

    def choose_levels(self, run: WorkerPool) -> None:
        """Try the best plan with levels of single blocks, if there is time for it and something to gain."""
        idle = not self.fitting or self.request.objective.of_bytes or is_ended()
        if idle or self.effort.is_over(self.left_to_simulate):
            return
        best = min(self.fitting, key=lambda candidate: candidate.rank(self.request.objective))
        space = self.space_of(best)
        shape = all_gathered(space, best.shape)
        if shape is None:
            return
        plan = attrs.evolve(best.plan, zero=3, zero_blocks=None)
        bounds = bounds_of_any_levels(space, shape, plan)
        units = compiled_units(plan, self.request.model.layers, folded=True, in_halves=space.columns.has_halves)
        dear = not self.effort.is_affordable(PLANS * units * trials_of(best.pipeline))
        if best.seconds <= WORTH * bounds.seconds[0] or (dear and not self.request.exhaustive):
            return
        seconds = None if self.request.exhaustive else self.effort.allowed(fits=True)
        chosen = with_levels(self.request, best, plan, seconds)
        if chosen is None:
            return
        task = Task(self.request.model, chosen, best.pipeline, self.request.machine, checked_below=inf)
        evaluation = run.submit(attrs.evolve(task, disturbed=self.request.robust)).result()
        self.evaluations += 1
        peak = float(bounds.peak_bytes.max())
        bounded = attrs.evolve(best, bound_seconds=float(bounds.seconds[0]), bound_bytes=peak)
        found = attrs.evolve(bounded, shape=shape, plan=chosen, evaluation=evaluation)
        (self.refused if evaluation.step_seconds is None else self.fitting).append(found)
        if found.cost(self.request.objective) < best.cost(self.request.objective):
            self.set_aside(found.bound(self.request.objective))  # other levels of its blocks may be even better
        self.tighten(found)

    def simulate_whole(self, run: WorkerPool) -> None:
        """Simulate whole steps, and verify them, until the best plans and a runner-up are known exactly.

        A plan whose whole step is expected to take longer than is left of the search stays folded, and so does one that
        takes longer.
        """
        # a whole step may be slower than its folded estimate, which makes another plan a leader
        while not is_ended() and (pending := [c for c in self.leaders() if not self.is_known(c)]):
            self.simulate_again(run, pending)

    def is_known(self, candidate: Candidate) -> bool:
        """Return True if a candidate was verified, or is folded and its whole step too long for this search."""
        assert candidate.evaluation is not None
        if candidate in self.given_up:
            return True
        if candidate.evaluation.verified or self.request.exhaustive or candidate.is_exact:
            return candidate.evaluation.verified
        return not self.effort.is_affordable(self.whole_units(candidate))

    def whole_units(self, candidate: Candidate) -> float:
        """Estimate the work of simulating a candidate's whole step."""
        in_halves = self.space_of(candidate).columns.has_halves
        units = compiled_units(candidate.plan, self.request.model.layers, folded=False, in_halves=in_halves)
        return units * trials_of(candidate.pipeline)

    def leaders(self) -> list[Candidate]:
        """Return the wanted best plans and a runner-up, each under its fastest pipeline."""
        objective = self.request.objective
        fastest: dict[tuple[str, Plan], Candidate] = {}
        for candidate in sorted(self.fitting, key=lambda candidate: candidate.rank(objective)):
            fastest.setdefault(candidate.identity, candidate)
        ranked = list(fastest.values())
        keep = self.request.keep
        near = [c for c in ranked[keep:_WHOLE] if c.cost(objective) <= scaled(ranked[0].cost(objective), _FOLDED_APART)]
        return ranked[:keep] + near

    def simulate_again(self, run: WorkerPool, candidates: list[Candidate]) -> None:
        """Replace the evaluations of candidates by evaluations of their whole steps."""
        request = self.request
        self.tick.begin(f"the whole step of the best plan{self.best_text}")
        tasks = [
            Task(
                request.model,
                c.plan,
                c.pipeline,
                request.machine,
                checked_below=inf,
                disturbed=request.robust,
                seconds=None if request.exhaustive else self.effort.allowed(fits=True, last=True),
            )
            for c in candidates
        ]
        for candidate, future in zip(candidates, [run.submit(task) for task in tasks], strict=True):
            evaluation = future.result()
            if evaluation.stopped:
                self.given_up.append(candidate)
                continue
            whole = attrs.evolve(candidate, evaluation=evaluation)
            self.fitting.remove(candidate)
            (self.fitting if isfinite(whole.seconds) else self.refused).append(whole)

    def lower_bound(self, ranked: list[Candidate]) -> Cost:
        """Return a lower bound on the cost of every plan of the space."""
        objective = self.request.objective
        # a folded or refused plan has no exact cost, so its bound stands for it
        open_bounds = [c.bound(objective) for c in (*ranked, *self.refused) if not c.is_exact]
        exact = [c.cost(objective) for c in ranked if c.is_exact]
        return min([self.open_bound, *open_bounds, *exact])

    def relaxed_bound(self) -> Cost:
        """Return the least closed-form bound of all plans, which also holds for orders that no pass makes."""
        objective = self.request.objective
        return min([self.open_bound, *(c.bound(objective) for c in self.fitting + self.refused)])


_NEIGHBOURS = 8
"""Neighbouring cuts queued after each evaluation of a shape with too many cuts to list."""
