"""The search: shapes, then stage cuts, then pipelines, in the order of what they can be expected to cost; what a bound rules out is never tried.

A leaf stands for one plan under one pipeline; a shape whose cuts are not chosen yet stands for many. Bounds hold for all of them. Families
are searched together: the next shape is the cheapest of all, and what the best plan rules out it rules out everywhere. The answer carries
the least bound of whatever was neither simulated whole nor ruled out: no plan of the space can be better than that.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import count
from math import inf, isfinite
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs import define, field, frozen

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrainc.choices.strategies import hiding_exchanges
from ratrain.ratrainc.planner.bounds.columns import least_bytes
from ratrain.ratrainc.planner.bounds.cuts import (
    BestCuts,
    best_cuts,
    can_be_listed,
    cuts_of,
    listed,
    neighbours,
    partitions,
)
from ratrain.ratrainc.planner.bounds.estimates import plan_estimates
from ratrain.ratrainc.planner.bounds.profile import Profiles
from ratrain.ratrainc.planner.search.answer import Answer, Candidate, Rejected, Request
from ratrain.ratrainc.planner.search.effort import EffortModel
from ratrain.ratrainc.planner.search.evaluation import Evaluation, Task, compiled_units, folded_micro_batches
from ratrain.ratrainc.planner.search.family_spaces import FamilySpace, family_spaces
from ratrain.ratrainc.planner.search.levels import PLANS, WORTH, all_gathered, bounds_of_any_levels, with_levels
from ratrain.ratrainc.planner.search.losers import losers
from ratrain.ratrainc.planner.search.workers import Runner, workers
from ratrain.ratrainc.planner.space.objective import TIME, WORST, Cost, scaled
from ratrain.ratrainc.planner.space.space import Shape
from ratrain.ratrainc.planner.space.variants import pipeline_for, storing, trials_of, variants

if TYPE_CHECKING:
    from concurrent.futures import Future

_WORTH_TRYING = 1.03
"""What is expected to cost more than this many times the best is left to an exhaustive search."""
_WHOLE = 2
"""Plans that are simulated whole at the end: the winner, and the runner-up where a folded step does not tell them apart."""
_FOLDED_APART = 1.01
"""From so many times the best on, folded steps tell plans apart."""
_TRIED_AT_LEAST = 4
"""Plans that are evaluated whatever the time, while nothing fits."""
_REFUSED_LIKE = 1.1
"""By how much a plan counts as dearer for each one of its kind that was refused."""
_SHAPES_AT_ONCE = 256
"""Shapes whose cuts are chosen before the next plan is compiled, at most."""
_PESSIMISM = 1.5
"""By how much what has hardly room counts as dearer, where plans are put in order."""


Kind = tuple[str, int, str, int, int | None]


@frozen(order=True)
class _Leaf:
    """An entry of the queue: one plan under one pipeline."""

    order: Cost
    """what it is taken in the order of"""
    number: int
    expected: Cost = field(order=False)
    """what it may cost by what was simulated of its like, or its bound"""
    bound: Cost = field(order=False)
    bound_seconds: float = field(order=False)
    bound_bytes: float = field(order=False)
    space: FamilySpace = field(order=False)
    shape: Shape = field(order=False)
    layers: tuple[int, ...] = field(order=False)
    units: float = field(order=False)
    """of work that its evaluation takes (`compiled_units`)"""
    pipeline: str | None = field(order=False, default=None)
    """None: the strategy's own, and its variants after it"""
    refused: int = field(order=False, default=0)
    """plans of its kind that had been refused when it was put in order"""

    @property
    def kind(self) -> Kind:
        """What plans that need bytes for the same reasons have in common."""
        shape = self.shape
        return self.space.family.name, shape.zero, shape.reduce, shape.tp, shape.ends


Tick = Callable[[str], None]


@define(eq=False)
class Search:
    """One search; `run` gives its answer."""

    request: Request
    tick: Tick = lambda _text: None
    """called after each evaluation with a line for a progress bar"""
    profiles: Profiles = field(init=False)
    spaces: list[FamilySpace] = field(factory=list)
    fitting: list[Candidate] = field(factory=list)
    refused: list[Candidate] = field(factory=list)
    rejected: list[Rejected] = field(factory=list)
    open_bound: Cost = WORST
    """the least bound of what was put aside without being tried"""
    limit: Cost = WORST
    """what a plan must cost less than to be one of those that are wanted"""
    queue: list[_Leaf] = field(factory=list)
    numbers: Iterator[int] = field(factory=count)
    evaluations: int = 0
    effort: EffortModel = field(init=False)
    refused_of: Counter[Kind] = field(factory=Counter)
    """plans that were refused, by kind"""
    tried_one_peer: bool = False
    """whether a plan of one tensor peer was evaluated"""
    cuts_seen: dict[tuple[str, Shape], set[tuple[int, ...]]] = field(factory=dict)
    least: dict[tuple[str, Plan], Cost] = field(factory=dict)
    """what each plan that was evaluated and fits costs, under its best pipeline"""

    def __attrs_post_init__(self) -> None:
        self.profiles = Profiles(self.request.setting)
        self.effort = EffortModel(self.request.seconds)

    def run(self) -> Answer:
        """Search until it is proven that nothing is left to gain, nothing is worth trying, or time is up."""
        self.effort.begin()
        self.spaces = family_spaces(self.request, self.profiles)
        with workers(self.request.jobs) as run:
            self.explore(run)
            self.choose_levels(run)
            self.simulate_whole(run)
        if not self.fitting and not self.rejected:
            self.reject_smallest_state()
        objective = self.request.objective
        ranked = sorted(self.fitting, key=lambda candidate: candidate.rank(objective))
        best = ranked[0].cost(objective) if ranked else WORST
        bound = self.lower_bound(ranked)
        return Answer(
            self.request,
            ranked,
            self.refused,
            self.rejected,
            min(bound, best),
            min(self.relaxed_bound(), best),
            sum(len(space.shapes) for space in self.spaces),
            sum(space.plans for space in self.spaces),
            self.evaluations,
            self.effort.elapsed,
            bool(ranked) and bound >= best,
            losers(self, ranked[0]) if ranked else [],
        )

    def next_leaf(self, *, of_one_peer: bool = False) -> _Leaf | None:
        """The next plan worth evaluating, or the next of one tensor peer; shapes that may come before it get their cuts."""
        others: list[_Leaf] = []
        left = _SHAPES_AT_ONCE
        while True:
            space = self.next_space(of_one_peer=of_one_peer)
            cost = space[0] if space is not None else WORST
            if space is not None and (left > 0 or not self.queue) and (not self.queue or cost < self.queue[0].order):
                self.choose_cuts(space[1], space[2])
                left -= 1
                continue
            if not self.queue:
                break
            leaf = heapq.heappop(self.queue)
            refused = self.refused_of[leaf.kind]
            if refused > leaf.refused:
                order = scaled(leaf.order, _REFUSED_LIKE ** (refused - leaf.refused))
                heapq.heappush(self.queue, attrs.evolve(leaf, order=order, refused=refused))
            elif of_one_peer and leaf.shape.tp > 1:
                others.append(leaf)
            elif self.is_out(leaf.bound, leaf.expected) or self.is_too_long(leaf):
                self.set_aside(leaf.bound)
            else:
                for other in others:
                    heapq.heappush(self.queue, other)
                return leaf
        for other in others:
            heapq.heappush(self.queue, other)
        return None

    def is_too_long(self, leaf: _Leaf) -> bool:
        """Whether compiling a plan is expected to take longer than there is time for it, while another one fits already."""
        return bool(self.fitting) and not self.request.exhaustive and not self.effort.is_affordable(leaf.units)

    def next_space(self, *, of_one_peer: bool) -> tuple[Cost, FamilySpace, int] | None:
        """The most promising shape of all families that is not ruled out: what it may cost, its space and its row there."""
        found: tuple[Cost, FamilySpace, int] | None = None
        for space in self.spaces:
            row = space.next_row(lambda cost: self.is_out(cost, cost), of_one_peer=of_one_peer)
            if row is not None and (found is None or space.guess(row) < found[0]):
                found = space.guess(row), space, row
        return found

    def is_out(self, bound: Cost, expected: Cost) -> bool:
        """Whether nothing that is wanted can be had of what costs so much at least, or can be expected to."""
        if bound >= self.limit:  # the limit may be an estimate, so what it rules out is remembered too
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
        shape, columns = space.shapes[row], space.columns_of(space.shapes[row])
        cuts = best_cuts(columns, roomiest=self.request.objective.of_bytes)
        if not isfinite(cuts.seconds):
            self.reject(space, shape, cuts)
            return
        estimate = float(plan_estimates(columns, np.array([cuts.layers], float))[0])
        objective = self.request.objective
        cost = max(objective.cost(cuts.seconds, cuts.peak_bytes, shape.clusters), space.guess(row))
        doubtful = not isfinite(estimate)  # what has hardly room may be refused
        self.push(space, shape, cuts, order=scaled(cost, _PESSIMISM) if doubtful else cost)

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
        """Queue cuts of a shape; `ratio` is what the like of it costs over its bound."""
        bound = self.request.objective.cost(cuts.seconds, cuts.peak_bytes, shape.clusters)
        expected = self.request.objective.cost(ratio * cuts.seconds, cuts.peak_bytes, shape.clusters)
        units = self.units(space, shape, cuts) * trials_of(
            pipeline or hiding_exchanges(space.family.strategy.passes, shape.tp)
        )
        leaf = _Leaf(
            scaled(order or expected, self.effort.dearness(units)),
            next(self.numbers),
            expected,
            bound,
            cuts.seconds,
            cuts.peak_bytes,
            space,
            shape,
            cuts.layers,
            units,
            pipeline,
        )
        heapq.heappush(self.queue, leaf)

    def units(self, space: FamilySpace, shape: Shape, cuts: BestCuts) -> float:
        """About how much work the evaluation of a plan is."""
        plan = shape.plan(self.profiles.setting, cuts_of(cuts.layers, shape))
        in_halves, layers = space.columns.has_halves, self.request.model.layers
        return compiled_units(plan, layers, folded=not self.request.exhaustive, in_halves=in_halves)

    def reject(self, space: FamilySpace, shape: Shape, cuts: BestCuts) -> None:
        """Note that no cuts of a shape fit."""
        self.rejected.append(Rejected(shape, cuts.stage, cuts.short_bytes, space.family.name))

    def reject_smallest_state(self) -> None:
        """Where the state alone is too large for every shape: what the one with least of it lacks."""
        for space in self.spaces:
            shape = space.shapes[int(np.argmin(least_bytes(space.columns)))]
            self.reject(space, shape, best_cuts(space.columns_of(shape)))

    def set_aside(self, bound: Cost) -> None:
        """Leave something untried; the answer's bound remembers it."""
        self.open_bound = min(self.open_bound, bound)

    def explore(self, run: Runner) -> None:
        """Evaluate leaves, as many at a time as there are workers."""
        running: dict[Future[Evaluation], _Leaf] = {}
        while True:
            while len(running) < run.width:
                late = not self.may_go_on()
                # a plan of one tensor peer is tried whatever the time: with more the answer is none the worse
                leaf = None if late and self.tried_one_peer else self.next_leaf(of_one_peer=late)
                if leaf is None:
                    break
                self.tried_one_peer |= leaf.shape.tp == 1
                seconds = None if self.request.exhaustive else self.effort.allowed(fits=bool(self.fitting))
                running[run.submit(attrs.evolve(self.task(leaf), seconds=seconds))] = leaf
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                self.record(running.pop(future), future.result())
        for leaf in self.queue:
            self.set_aside(leaf.bound)
        for space in self.spaces:
            self.set_aside(space.least_left())

    def may_go_on(self) -> bool:
        """Whether a new evaluation may start: in time, or late while nothing fits yet."""
        if self.fitting:
            return not self.effort.is_over(self.left_to_simulate)
        return not self.effort.is_over_without_a_plan or self.evaluations < _TRIED_AT_LEAST

    @property
    def left_to_simulate(self) -> float:
        """Units of the whole simulation of the best plan, where only a folded one is known."""
        best = min(self.fitting, key=lambda candidate: candidate.cost(self.request.objective))
        if best.is_exact:
            return 0.0
        space = next(space for space in self.spaces if space.family.name == best.family)
        units = compiled_units(best.plan, self.request.model.layers, folded=False, in_halves=space.columns.has_halves)
        return units * trials_of(best.pipeline)

    def task(self, leaf: _Leaf) -> Task:
        """What a leaf asks of a worker."""
        request = leaf.space.request
        plan = leaf.shape.plan(self.profiles.setting, cuts_of(leaf.layers, leaf.shape))
        pipeline = leaf.pipeline or pipeline_for(request.strategy.passes, plan, least_bytes=request.objective.of_bytes)
        folded = not request.exhaustive and folded_micro_batches(plan) < plan.micro_batches
        wanted = self.limit[1] if request.objective is TIME else inf  # no other measure is seconds alone
        return Task(
            request.model,
            plan,
            pipeline,
            request.machine,
            folded,
            checked_below=wanted,
            disturbed=self.request.robust and not folded,
        )

    def record(self, leaf: _Leaf, evaluation: Evaluation) -> None:
        """Keep what an evaluation found and queue what it makes worth trying."""
        self.evaluations += 1
        self.effort.learn(leaf.units, evaluation)
        if evaluation.stopped:
            if self.fitting:
                self.set_aside(leaf.bound)
            else:  # later, and longer
                heapq.heappush(self.queue, attrs.evolve(leaf, order=scaled(leaf.order, _REFUSED_LIKE)))
            self.tick("one takes too long" if self.fitting else "nothing fits yet, one took too long")
            return
        task = self.task(leaf)
        candidate = Candidate(
            leaf.shape,
            task.plan,
            task.pipeline,
            leaf.bound_seconds,
            evaluation,
            bound_bytes=leaf.bound_bytes,
            family=leaf.space.family.name,
        )
        (self.refused if evaluation.step_seconds is None else self.fitting).append(candidate)
        self.refused_of[leaf.kind] += evaluation.step_seconds is None
        self.tighten(candidate)
        self.branch(leaf, candidate)

    def tighten(self, candidate: Candidate) -> None:
        """Take a candidate into account for what is still wanted."""
        objective, keep = self.request.objective, self.request.keep
        cost = candidate.cost(objective)
        if isfinite(cost[0]):
            known = self.least.get(candidate.identity, WORST)
            self.least[candidate.identity] = min(cost, known)
            best = heapq.nsmallest(keep, self.least.values())
            self.limit = best[-1] if len(best) == keep else WORST
            for space in self.spaces:
                space.tighten(self.limit)
            self.tick(f"best {objective.text(best[0][0], candidate.plan.tokens_per_step)}")
        elif not self.least:
            self.tick("nothing fits yet")

    def branch(self, leaf: _Leaf, candidate: Candidate) -> None:
        """Other pipelines of the plan, and other cuts of its shape."""
        fits = isfinite(candidate.seconds)
        ratio = candidate.seconds / leaf.bound_seconds if fits else 1.0
        if leaf.pipeline is not None:
            return
        space, shape = leaf.space, leaf.shape
        request = space.request
        if not request.objective.of_bytes:
            own = BestCuts(leaf.bound_seconds, leaf.layers, peak_bytes=leaf.bound_bytes)
            tried = fits or request.exhaustive
            for pipeline in variants(request.strategy.passes, candidate.plan) if tried else storing(candidate.pipeline):
                self.push(space, shape, own, ratio=ratio, pipeline=pipeline)
        self.branch_cuts(space, shape, leaf.layers, ratio)
        if not fits:
            self.branch_to(space, shape, [best_cuts(space.columns_of(shape), roomiest=True)], ratio)

    def branch_cuts(self, space: FamilySpace, shape: Shape, layers: tuple[int, ...], ratio: float) -> None:
        """Other cuts of a shape."""
        key = space.family.name, shape
        first = key not in self.cuts_seen
        self.cuts_seen.setdefault(key, set()).add(layers)
        self.branch_to(space, shape, self.other_cuts(space, shape, layers, first=first), ratio)

    def branch_to(self, space: FamilySpace, shape: Shape, cuts: list[BestCuts], ratio: float) -> None:
        """Queue those of some cuts that were not queued before."""
        seen = self.cuts_seen.setdefault((space.family.name, shape), set())
        for each in cuts:
            if each.layers not in seen:
                seen.add(each.layers)
                self.push(space, shape, each, ratio=ratio)

    def other_cuts(self, space: FamilySpace, shape: Shape, layers: tuple[int, ...], *, first: bool) -> list[BestCuts]:
        """More cuts of a shape: all of them where they can be listed, else the neighbours of those that were tried."""
        total = self.request.model.layers
        columns = space.columns_of(shape)
        if can_be_listed(total, shape.pp, shape.chunks):
            return listed(columns, list(partitions(total, shape.pp, shape.chunks))) if first else []
        if first:  # the cuts that are never listed
            best = best_cuts(columns, roomiest=self.request.objective.of_bytes)
            self.set_aside(self.request.objective.cost(best.seconds, best.peak_bytes, shape.clusters))
        return listed(columns, neighbours(layers, shape.chunks))[:_NEIGHBOURS]

    def choose_levels(self, run: Runner) -> None:
        """Try the best plan with levels of single blocks, where time allows it and there is something to gain."""
        if not self.fitting or self.request.objective.of_bytes or self.effort.is_over(self.left_to_simulate):
            return
        best = min(self.fitting, key=lambda candidate: candidate.rank(self.request.objective))
        space = next(space for space in self.spaces if space.family.name == best.family)
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
        bound_bytes = float(bounds.peak_bytes.max())
        found = attrs.evolve(
            best,
            shape=shape,
            plan=chosen,
            bound_seconds=float(bounds.seconds[0]),
            evaluation=evaluation,
            bound_bytes=bound_bytes,
        )
        (self.refused if evaluation.step_seconds is None else self.fitting).append(found)
        if found.cost(self.request.objective) < best.cost(self.request.objective):
            self.set_aside(found.bound(self.request.objective))  # other levels of its blocks may be better still
        self.tighten(found)

    def simulate_whole(self, run: Runner) -> None:
        """Simulate whole steps, and verify them, until the best plans and a runner-up are known exactly."""
        while pending := [c for c in self.leaders() if c.evaluation is None or not c.evaluation.verified]:
            self.simulate_again(run, pending)

    def leaders(self) -> list[Candidate]:
        """The best plans that are wanted and a runner-up, each under its fastest pipeline."""
        objective = self.request.objective
        fastest: dict[tuple[str, Plan], Candidate] = {}
        for candidate in sorted(self.fitting, key=lambda candidate: candidate.rank(objective)):
            fastest.setdefault(candidate.identity, candidate)
        ranked = list(fastest.values())
        keep = self.request.keep
        near = [c for c in ranked[keep:_WHOLE] if c.cost(objective) <= scaled(ranked[0].cost(objective), _FOLDED_APART)]
        return ranked[:keep] + near

    def simulate_again(self, run: Runner, candidates: list[Candidate]) -> None:
        """Replace the evaluations of candidates by those of their whole steps."""
        request = self.request
        self.tick("the whole step of the best plan")
        tasks = [
            Task(request.model, c.plan, c.pipeline, request.machine, checked_below=inf, disturbed=request.robust)
            for c in candidates
        ]
        for candidate, future in zip(candidates, [run.submit(task) for task in tasks], strict=True):
            whole = attrs.evolve(candidate, evaluation=future.result())
            self.fitting.remove(candidate)
            (self.fitting if isfinite(whole.seconds) else self.refused).append(whole)

    def lower_bound(self, ranked: list[Candidate]) -> Cost:
        """The least that any plan of the space can cost."""
        objective = self.request.objective
        open_bounds = [c.bound(objective) for c in (*ranked, *self.refused) if not c.is_exact]
        exact = [c.cost(objective) for c in ranked if c.is_exact]
        return min([self.open_bound, *open_bounds, *exact])

    def relaxed_bound(self) -> Cost:
        """The least closed-form bound of all plans: it holds for schedules that no pass makes, too."""
        objective = self.request.objective
        return min([self.open_bound, *(c.bound(objective) for c in self.fitting + self.refused)])


_NEIGHBOURS = 8
"""Neighbouring cuts that are queued after each evaluation of a shape with too many cuts to list."""
