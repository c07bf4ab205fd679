"""What more clusters, or more bytes, are worth: the plans that are faster than any with as few.

Level one gives a candidate and a bound for each number of clusters, or of bytes; those that its estimates leave on the front are compiled
and simulated, as far as there is time, and what another then dominates is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs import evolve, frozen

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrainc.console.console import size_text
from ratrain.ratrainc.planner.bounds.cuts import best_cuts, cuts_of
from ratrain.ratrainc.planner.bounds.estimates import plan_estimates
from ratrain.ratrainc.planner.bounds.profile import Profiles
from ratrain.ratrainc.planner.search.answer import Candidate
from ratrain.ratrainc.planner.search.evaluation import Task, evaluate, folded_micro_batches
from ratrain.ratrainc.planner.search.family_spaces import FamilySpace, family_spaces
from ratrain.ratrainc.planner.search.quick import quick_answer_of
from ratrain.ratrainc.planner.space.variants import pipeline_for

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.answer import Request

AGAINST = ("clusters", "memory")
_POINTS = 12
"""of a front, at most"""
_CUT = 8
"""Shapes of a number of clusters whose cuts are chosen."""
_TRIED = 3
"""Plans of a point that are compiled, where the first are refused."""
_STEP = 2**-0.25
"""From one number of bytes to the next."""


@frozen
class FrontPoint:
    """A plan that none with as few clusters, or bytes, was found to be faster than."""

    limit: float
    """clusters, or bytes"""
    candidate: Candidate
    bound_seconds: float
    """no plan within the limit takes less"""


@frozen
class _Choice:
    """What level one knows of a limit: plans to try, the least estimate first."""

    limit: float
    candidates: list[Candidate]
    bound_seconds: float


def front(request: Request, against: str, tick: Callable[[str], None], *, quick: bool) -> list[FrontPoint]:
    """The plans on the front of step time against clusters, or against the bytes of the fullest rank; fewest first.

    `quick` stays with estimates. Raises `DiagnosticError` RT064 where the space is empty.
    """
    begin = time.monotonic()
    spaces = family_spaces(request, Profiles(request.setting))
    of_clusters = against == "clusters"
    choices = _thinned(list(_of_clusters(spaces) if of_clusters else _of_bytes(request, spaces)))
    points: list[FrontPoint] = []
    for choice in choices:
        late = quick or (points and time.monotonic() - begin > request.seconds)
        candidate = choice.candidates[0] if late else _first_placed(request, choice, of_bytes=not of_clusters)
        if candidate is not None:
            points.append(FrontPoint(choice.limit, candidate, choice.bound_seconds))
        tick(limit_text(against, choice.limit))
    best, left = inf, []
    for point in points:
        if point.candidate.seconds < best:
            best = point.candidate.seconds
            left.append(point)
    return left


def limit_text(against: str, limit: float) -> str:
    """Clusters, or bytes, for people."""
    return f"{limit:.0f}" if against == "clusters" else size_text(int(limit))


def _candidate(space: FamilySpace, row: int) -> tuple[Candidate | None, float]:
    """A shape's best cuts as a candidate, None where nothing fits; and the seconds that no cuts go below."""
    shape = space.shapes[row]
    columns = space.columns_of(shape)
    cuts = best_cuts(columns)
    if not isfinite(cuts.seconds):
        return None, inf
    estimate = float(plan_estimates(columns, np.array([cuts.layers], float))[0])
    plan = shape.plan(space.request.setting, cuts_of(cuts.layers, shape))
    pipeline = pipeline_for(space.request.strategy.passes, plan)
    found = Candidate(shape, plan, pipeline, cuts.seconds, None, estimate, cuts.peak_bytes, space.family.name)
    return (found if isfinite(estimate) else None), cuts.seconds


def _of_clusters(spaces: Sequence[FamilySpace]) -> Iterator[_Choice]:
    """The numbers of clusters on the front of estimates, ascending."""
    rows: dict[int, list[tuple[float, int, int]]] = {}
    for number, space in enumerate(spaces):
        for row in space.order:
            rows.setdefault(space.shapes[row].clusters, []).append((float(space.seconds[row]), number, row))
    least, bound = inf, inf
    for clusters in sorted(rows):
        ordered = sorted(rows[clusters])
        found: list[Candidate] = []
        taken = 0
        for seconds, number, row in ordered:
            if seconds >= least or taken >= _CUT:
                bound = min(bound, seconds)
                break
            candidate, at_least = _candidate(spaces[number], row)
            bound = min(bound, at_least)
            taken += isfinite(at_least)
            if candidate is not None:
                found.append(candidate)
        found.sort(key=lambda each: each.seconds)
        if found and found[0].seconds < least:
            least = found[0].seconds
            yield _Choice(clusters, found, min(bound, least))


def _of_bytes(request: Request, spaces: Sequence[FamilySpace]) -> Iterator[_Choice]:
    """The numbers of bytes on the front of estimates, ascending."""
    capacity = max(float(space.columns.capacity.max()) for space in spaces)
    choices = []
    while True:
        answer = quick_answer_of(request, [space.within(capacity) for space in spaces], time.monotonic())
        if answer.best is None:
            break
        choices.append(_Choice(capacity, answer.candidates, answer.bound_seconds))
        capacity = float(int(capacity * _STEP))
    least = inf
    for choice in reversed(choices):
        if choice.candidates[0].seconds < least:
            least = choice.candidates[0].seconds
            yield choice


def _thinned(choices: list[_Choice]) -> list[_Choice]:
    """At most `_POINTS` of them, evenly over the logarithm of their limits, the first and the last among them."""
    if len(choices) <= _POINTS:
        return choices
    limits = np.log([choice.limit for choice in choices])
    wanted = np.linspace(limits[0], limits[-1], _POINTS)
    return [choices[at] for at in sorted({int(np.abs(limits - each).argmin()) for each in wanted})]


def _first_placed(request: Request, choice: _Choice, *, of_bytes: bool) -> Candidate | None:
    """The first plan of a choice that is compiled and stays within the limit; None where none of those that are tried does."""
    for candidate in choice.candidates[:_TRIED]:
        budgets = (int(choice.limit), int(choice.limit * 0.95)) if of_bytes else (None,)
        for budget in budgets:
            pipeline = candidate.pipeline if budget is None else _within(candidate.pipeline, budget)
            folded = folded_micro_batches(candidate.plan) < candidate.plan.micro_batches
            evaluation = evaluate(Task(request.model, candidate.plan, pipeline, request.machine, folded))
            if evaluation.step_seconds is None:
                break
            if not of_bytes or max(evaluation.peak_bytes) <= choice.limit:
                return evolve(candidate, pipeline=pipeline, evaluation=evaluation)
    return None


def _within(pipeline: str, budget: int) -> str:
    """A pipeline whose choice of what to recover has a budget of bytes, where it has that choice."""
    items = [
        attrs.evolve(item, budget=budget)
        if isinstance(item, RecomputePass | JointOrderPass) and item.policy == "auto"
        else item
        for item in parse_pipeline(pipeline)
    ]
    return pipeline_text(items)
