"""The search: shapes, then stage cuts, then pipelines, in the order of the step time to be expected; what a bound rules out is never tried.

A node of the search stands for one plan under one pipeline, or for many. Its bound holds for all of them. The answer carries the least bound
of whatever was neither simulated whole nor ruled out: no plan of the space can be faster than that.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, wait
from itertools import count
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs import define, field, frozen

from ratrain.ratrainc.planner.answer import Answer, Candidate, Rejected, Request
from ratrain.ratrainc.planner.bounds import shape_bounds
from ratrain.ratrainc.planner.columns import Columns, Numbers, state_bytes
from ratrain.ratrainc.planner.cuts import (
    BestCuts,
    best_cuts,
    can_be_listed,
    cuts_of,
    listed,
    neighbours,
    partition_count,
    partitions,
)
from ratrain.ratrainc.planner.evaluation import Evaluation, Task, folded_micro_batches
from ratrain.ratrainc.planner.losers import losers
from ratrain.ratrainc.planner.profile import Profiles
from ratrain.ratrainc.planner.space import Shape
from ratrain.ratrainc.planner.variants import pipeline_for, variants
from ratrain.ratrainc.planner.workers import Runner, workers

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ratrain.ratrain_ir.frontend.plan import Plan

_WORTH_TRYING = 1.03
"""What is expected to take longer than this many times the best is left to an exhaustive search."""
_WHOLE = 2
"""Plans that are simulated whole at the end, at least: the winner and the runner-up."""
_PATIENCE = 3
"""How many times the time for the search is used while nothing fits."""


@frozen(order=True)
class _Node:
    """An entry of the queue."""

    expected: float
    number: int
    bound: float = field(order=False)
    shape: Shape = field(order=False)
    layers: tuple[int, ...] | None = field(order=False, default=None)
    """the cuts; None: not chosen yet"""
    pipeline: str | None = field(order=False, default=None)
    """None: the strategy's own, and its variants after it"""


Tick = Callable[[str], None]


@define(eq=False)
class Search:
    """One search; `run` gives its answer."""

    request: Request
    tick: Tick = lambda _text: None
    """called after each evaluation with a line for a progress bar"""
    profiles: Profiles = field(init=False)
    fitting: list[Candidate] = field(factory=list)
    refused: list[Candidate] = field(factory=list)
    rejected: list[Rejected] = field(factory=list)
    open_bound: float = float("inf")
    """the least bound of what was put aside without being tried"""
    best: float = float("inf")
    queue: list[_Node] = field(factory=list)
    numbers: Iterator[int] = field(factory=count)
    evaluations: int = 0
    tried_one_peer: bool = False
    """whether a plan of one tensor peer was evaluated"""

    def __attrs_post_init__(self) -> None:
        self.profiles = Profiles(self.request.setting)

    def run(self) -> Answer:
        """Search until it is proven that nothing is left to gain, nothing is worth trying, or time is up."""
        begin = time.monotonic()
        space = self.fill_queue()
        with workers(self.request.jobs) as run:
            self.explore(run, begin)
            self.simulate_whole(run)
        if not self.fitting and not self.rejected:
            self.reject_smallest_state()
        ranked = sorted(self.fitting, key=Candidate.rank)
        bound, relaxed = self.lower_bound(ranked), self.relaxed_bound()
        proven = bool(ranked) and bound >= ranked[0].seconds
        best = ranked[0].seconds if ranked else float("inf")
        return Answer(
            self.request,
            ranked,
            self.refused,
            self.rejected,
            min(bound, best),
            min(relaxed, best),
            len(space),
            sum(partition_count(self.request.model.layers, shape.pp, shape.chunks) for shape in space),
            self.evaluations,
            time.monotonic() - begin,
            proven,
            losers(self, ranked[0]) if ranked else [],
        )

    def fill_queue(self) -> list[Shape]:
        """Put every shape into the queue under its bound for any cuts."""
        request = self.request
        space = request.shapes()
        self.columns = Columns.of(self.profiles, space, schedule=request.schedule)
        self.row = {shape: row for row, shape in enumerate(space)}
        self.shape_bounds = shape_bounds(self.columns)
        for shape, bound in zip(space, self.shape_bounds.tolist(), strict=True):
            if np.isfinite(bound):
                self.push(bound, bound, shape)
        return space

    columns: Columns = field(init=False)
    shape_bounds: Numbers = field(init=False)
    row: dict[Shape, int] = field(init=False)

    def columns_of(self, shape: Shape) -> Columns:
        """The one row of a shape."""
        at = self.row[shape]
        return self.columns.rows(slice(at, at + 1))

    def push(
        self,
        expected: float,
        bound: float,
        shape: Shape,
        layers: tuple[int, ...] | None = None,
        pipeline: str | None = None,
    ) -> None:
        """Queue a node: for a whole shape, for cuts of it, or for cuts under another pipeline."""
        heapq.heappush(self.queue, _Node(expected, next(self.numbers), bound, shape, layers, pipeline))

    def next_leaf(self, *, of_one_peer: bool = False) -> _Node | None:
        """The next plan worth evaluating, or the next of one tensor peer; shapes on the way to it get their cuts."""
        others: list[_Node] = []
        leaf = self.pop_leaf(others if of_one_peer else None)
        for node in others:
            heapq.heappush(self.queue, node)
        return leaf

    def pop_leaf(self, others: list[_Node] | None) -> _Node | None:
        """The next plan worth evaluating; nodes with tensor peers are put into `others` where there is such a list."""
        while self.queue:
            node = heapq.heappop(self.queue)
            if others is not None and node.shape.tp > 1:
                others.append(node)
                continue
            hopeless = not self.request.exhaustive and node.expected > self.best * _WORTH_TRYING
            if (
                node.bound >= self.best or hopeless
            ):  # the best may be an estimate, so what it rules out is remembered too
                self.set_aside(node)
                continue
            if node.layers is not None:
                return node
            cuts = best_cuts(self.columns_of(node.shape))
            if np.isfinite(cuts.seconds):
                self.push(cuts.seconds, cuts.seconds, node.shape, cuts.layers)
            else:
                self.reject(node.shape, cuts)
        return None

    def reject(self, shape: Shape, cuts: BestCuts) -> None:
        """Note that no cuts of a shape fit."""
        self.rejected.append(Rejected(shape, cuts.stage, cuts.short_bytes))

    def reject_smallest_state(self) -> None:
        """Where the state alone is too large for every shape: what the one with least of it lacks."""
        shape = list(self.row)[int(np.argmin(state_bytes(self.columns)))]
        self.reject(shape, best_cuts(self.columns_of(shape)))

    def set_aside(self, node: _Node) -> None:
        """Leave a node untried; the answer's bound remembers it."""
        self.open_bound = min(self.open_bound, node.bound)

    def explore(self, run: Runner, begin: float) -> None:
        """Evaluate leaves, as many at a time as there are workers."""
        running: dict[Future[Evaluation], _Node] = {}
        while True:
            while len(running) < run.width:
                late = not self.may_go_on(time.monotonic() - begin)
                # a plan of one tensor peer is tried whatever the time: with more the answer is none the worse
                node = None if late and self.tried_one_peer else self.next_leaf(of_one_peer=late)
                if node is None:
                    break
                self.tried_one_peer |= node.shape.tp == 1
                running[run.submit(self.task(node))] = node
            if not running:
                break
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                self.record(running.pop(future), future.result())
        for node in self.queue:
            self.set_aside(node)

    def may_go_on(self, seconds: float) -> bool:
        """Whether a new evaluation may start: in time, or late while nothing fits yet."""
        limit = self.request.seconds
        return seconds < limit or (not self.fitting and (seconds < _PATIENCE * limit or not self.evaluations))

    def task(self, node: _Node) -> Task:
        """What a leaf asks of a worker."""
        request = self.request
        assert node.layers is not None
        plan = node.shape.plan(self.profiles.setting, cuts_of(node.layers, node.shape))
        pipeline = node.pipeline or pipeline_for(request.strategy.passes, plan)
        folded = not request.exhaustive and folded_micro_batches(plan) < plan.micro_batches
        return Task(request.model, plan, pipeline, request.machine, folded)

    def record(self, node: _Node, evaluation: Evaluation) -> None:
        """Keep what an evaluation found and queue what it makes worth trying."""
        self.evaluations += 1
        task = self.task(node)
        candidate = Candidate(node.shape, task.plan, task.pipeline, node.bound, evaluation)
        (self.refused if evaluation.step_seconds is None else self.fitting).append(candidate)
        self.best = min(self.best, candidate.seconds)
        self.tick(f"best {self.best:.2f} s a step" if np.isfinite(self.best) else "nothing fits yet")
        self.branch(node, candidate)

    def branch(self, node: _Node, candidate: Candidate) -> None:
        """Other pipelines of the plan, and other cuts of its shape."""
        fits = bool(np.isfinite(candidate.seconds))
        ratio = candidate.seconds / node.bound if fits else 1.0
        assert node.layers is not None
        own = node.pipeline is None
        if own and (fits or self.request.exhaustive):
            for pipeline in variants(self.request.strategy.passes, candidate.plan):
                self.push(ratio * node.bound, node.bound, node.shape, node.layers, pipeline)
        if own:
            self.branch_cuts(node.shape, node.layers, ratio)
        if own and not fits:
            roomiest = best_cuts(self.columns_of(node.shape), roomiest=True)
            self.branch_to(node.shape, [(roomiest.seconds, roomiest.layers)], ratio)

    def branch_cuts(self, shape: Shape, layers: tuple[int, ...], ratio: float) -> None:
        """Other cuts of a shape."""
        first = shape not in self.cuts_seen
        self.cuts_seen.setdefault(shape, set()).add(layers)
        self.branch_to(shape, self.other_cuts(shape, layers, first=first), ratio)

    def branch_to(self, shape: Shape, cuts: list[tuple[float, tuple[int, ...]]], ratio: float) -> None:
        """Queue those of some cuts that were not queued before."""
        seen = self.cuts_seen.setdefault(shape, set())
        for bound, layers in cuts:
            if layers not in seen:
                seen.add(layers)
                self.push(ratio * bound, bound, shape, layers)

    cuts_seen: dict[Shape, set[tuple[int, ...]]] = field(factory=dict)

    def other_cuts(self, shape: Shape, layers: tuple[int, ...], *, first: bool) -> list[tuple[float, tuple[int, ...]]]:
        """More cuts of a shape: all of them where they can be listed, else the neighbours of those that were tried."""
        total = self.request.model.layers
        columns = self.columns_of(shape)
        if can_be_listed(total, shape.pp, shape.chunks):
            return listed(columns, list(partitions(total, shape.pp, shape.chunks))) if first else []
        if first:
            self.open_bound = min(self.open_bound, best_cuts(columns).seconds)  # the cuts that are never listed
        return listed(columns, neighbours(layers, shape.chunks))[:_NEIGHBOURS]

    def simulate_whole(self, run: Runner) -> None:
        """Simulate whole steps, and verify them, until the best plan and the runner-up are known exactly."""
        verified: set[tuple[Plan, str]] = set()
        while pending := [c for c in self.leaders() if (c.plan, c.pipeline) not in verified]:
            self.simulate_again(run, pending)
            verified |= {(c.plan, c.pipeline) for c in pending}

    def leaders(self) -> list[Candidate]:
        """The best plan and the runner-up, each under its fastest pipeline."""
        fastest: dict[Plan, Candidate] = {}
        for candidate in sorted(self.fitting, key=Candidate.rank):
            fastest.setdefault(candidate.plan, candidate)
        return list(fastest.values())[:_WHOLE]

    def simulate_again(self, run: Runner, candidates: list[Candidate]) -> None:
        """Replace the evaluations of candidates by those of their whole steps."""
        request = self.request
        tasks = [
            Task(request.model, c.plan, c.pipeline, request.machine, checked=True, disturbed=request.robust)
            for c in candidates
        ]
        for candidate, future in zip(candidates, [run.submit(task) for task in tasks], strict=True):
            whole = attrs.evolve(candidate, evaluation=future.result())
            self.fitting.remove(candidate)
            (self.fitting if np.isfinite(whole.seconds) else self.refused).append(whole)

    def lower_bound(self, ranked: list[Candidate]) -> float:
        """The least step time that any plan of the space can have."""
        open_bounds = [c.bound_seconds for c in ranked if not c.is_exact]
        open_bounds += [c.bound_seconds for c in self.refused if not c.is_exact]
        exact = [c.seconds for c in ranked if c.is_exact]
        return min([self.open_bound, *open_bounds, *exact])

    def relaxed_bound(self) -> float:
        """The least closed-form bound of all plans: it holds for schedules that no pass makes, too."""
        return min([self.open_bound, *(c.bound_seconds for c in self.fitting + self.refused)])


_NEIGHBOURS = 8
"""Neighbouring cuts that are queued after each evaluation of a shape with too many cuts to list."""
