"""Pareto fronts: plans that are faster than any found on as few clusters, or with as few bytes of a rank.

Level one gives candidates and a bound for each limit, a number of clusters or of bytes. The limits that estimates leave
on the front are compiled and simulated as far as there is time, and plans that another then dominates are dropped.
Example: estimates of 9, 5, 6 s on 1, 2, 3 clusters leave 1 and 2; if these take 9 and 10 s simulated, only 1 stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from math import inf, isfinite
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.console.pictures import new_figure, write_figure
from ratrain.ratrainc.planner.answer.plan_files import numbered, plan_text
from ratrain.ratrainc.planner.bounds.estimates import cuts_estimate
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.answer import Candidate
from ratrain.ratrainc.planner.search.family_spaces import FamilySpace, family_spaces
from ratrain.ratrainc.planner.search.plan_evaluation import evaluate
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.search.quick import quick_answer_of

_POINTS = 12
"""Most points of a front."""
_CUT = 8
"""Shapes of a number of clusters whose cuts are chosen."""
_TRIED = 3
"""Plans of a point to compile, if the first are refused."""
_STEP = 2**-0.25
"""Factor from one number of bytes to the next."""


@frozen
class FrontPoint:
    """A plan that is faster than any found within its limit."""

    limit: float
    """clusters, or bytes"""
    candidate: Candidate
    bound_seconds: float
    """lower bound of all plans within the limit"""


@frozen
class _Limit:
    """The plans of level one within a limit, by estimate."""

    limit: float
    candidates: list[Candidate]
    bound_seconds: float


@frozen(repr=False)
class ParetoFront(Shown):
    """Step time against clusters, or against the bytes of a rank."""

    request: PlanRequest = field(eq=False)
    against: str
    """`clusters` or `memory`"""
    points: tuple[FrontPoint, ...] = field(eq=False)
    """fewest first, each faster than those before"""
    tokens: float | None
    """tokens of a training whose cost to show"""
    model: str
    """name of the model in commands"""
    machine: MachineChoice
    """machine as commands name it"""

    @property
    def title(self) -> str:
        """Model, machine and size of a step."""
        asked = self.request
        return f"{asked.model.name} on {asked.machine.name}, {asked.global_batch} sequences of {asked.seq_len} tokens"

    def parts(self) -> Iterator[Part]:
        """Yield a table of its plans."""
        limit = "clusters" if self.against == "clusters" else "bytes of a rank"
        rates = ["tokens/s", "tokens/cluster-h"]
        columns = [limit, "plan", "schedule", "step", *rates, "peak", "no plan within takes less than", "how"]
        rows = [self._row(point) for point in self.points]
        yield TextTable(f"{self.title} (all times simulated or estimates)", columns, rows)

    def _row(self, point: FrontPoint) -> list[str]:
        candidate = point.candidate
        rate = candidate.tokens_per_second
        return [
            _limit_text(self.against, point.limit),
            candidate.plan.summary,
            candidate.family,
            seconds_text(candidate.seconds),
            f"{rate:,.0f}",
            f"{rate * 3600 / candidate.plan.clusters:,.0f}",
            size_text(candidate.peak_bytes) + ("" if candidate.evaluation else "+"),
            seconds_text(point.bound_seconds),
            candidate.how,
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the front as `--json` prints it."""
        return {
            "model": self.request.model.name,
            "machine": self.request.machine.name,
            "families": [family.name for family in self.request.searched],
            "pareto": self.against,
            "points": [
                {"limit": point.limit, "bound_step_seconds": point.bound_seconds}
                | point.candidate.to_json(point.candidate.shape.clusters, self.tokens)
                for point in self.points
            ],
        }

    def save(self, path: str) -> list[str]:
        """Write each plan to a numbered file; return the names. Raises `DiagnosticError` RT002 as writers do."""
        names = numbered(path, len(self.points))
        for name, point in zip(names, self.points, strict=True):
            limit, found = _limit_text(self.against, point.limit), point.candidate
            within = f"{limit} clusters" if self.against == "clusters" else f"{limit} of a rank"
            head = [f"Planned for {self.title}: the fastest found within {within}."]
            write_text(name, plan_text(found.plan, found.pipeline, self.request.model, self.model, head, self.machine))
        return names

    def draw(self, path: str) -> None:
        """Write a plot with its bounds, as PNG or SVG by the file's ending.

        Raises `DiagnosticError` RT002 as `write_figure` does.
        """
        figure, axes = new_figure(6, 4, self.title)
        of_clusters = self.against == "clusters"
        limits = [point.limit / (1.0 if of_clusters else 2.0**30) for point in self.points]
        axes.step(limits, [point.candidate.seconds for point in self.points], "o-", where="post", label="best found")
        bounds = [point.bound_seconds for point in self.points]
        axes.step(limits, bounds, "--", where="post", color="grey", label="bound")
        axes.set(xlabel="clusters" if of_clusters else "GiB of a rank", ylabel="seconds of a step")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend()
        write_figure(figure, path)


def pareto_front(
    request: PlanRequest,
    against: str,
    tick: Callable[[str], None],
    *,
    quick: bool,
    tokens: float | None,
    model: str,
    machine: MachineChoice,
) -> ParetoFront:
    """Find the front of a request; `quick` stays with estimates.

    Raises `DiagnosticError` RT053 if nothing fits, RT064 if the space is empty.
    """
    begin = time.monotonic()
    spaces = family_spaces(request, Profiles(request.setting))
    of_clusters = against == "clusters"
    points: list[FrontPoint] = []
    for each in _thinned(list(_of_clusters(spaces) if of_clusters else _of_bytes(request, spaces))):
        late = quick or (points and time.monotonic() - begin > request.seconds)
        candidate = each.candidates[0] if late else _first_placed(request, each, of_bytes=not of_clusters)
        if candidate is not None:
            points.append(FrontPoint(each.limit, candidate, each.bound_seconds))
        tick(_limit_text(against, each.limit))
    best, left = inf, []
    for point in points:
        if point.candidate.seconds < best:
            best = point.candidate.seconds
            left.append(point)
    if not left:
        fail(
            "RT053",
            f"no plan of {request.model.name} was found that fits {request.clusters} clusters or fewer",
            help="search longer with --seconds, or plan without --pareto: it says what lacks how many bytes",
        )
    return ParetoFront(request, against, tuple(left), tokens, model, machine)


def _limit_text(against: str, limit: float) -> str:
    return f"{limit:.0f}" if against == "clusters" else size_text(int(limit))


def _candidate(space: FamilySpace, row: int) -> tuple[Candidate | None, float]:
    """Return a shape's best cuts as a candidate, None if nothing fits, and the lower bound under any cuts."""
    shape = space.shapes[row]
    cuts = space.best_cuts(shape)
    if not isfinite(cuts.seconds):
        return None, inf
    estimate = cuts_estimate(space.columns_of(shape), cuts.layers)
    found = space.candidate(shape, cuts, estimate=estimate) if isfinite(estimate) else None
    return found, cuts.seconds


def _of_clusters(spaces: Sequence[FamilySpace]) -> Iterator[_Limit]:
    """Yield the numbers of clusters on the front of estimates, ascending."""
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
            yield _Limit(clusters, found, min(bound, least))


def _of_bytes(request: PlanRequest, spaces: Sequence[FamilySpace]) -> Iterator[_Limit]:
    """Yield the numbers of bytes on the front of estimates, ascending."""
    capacity = max(float(space.columns.capacity.max()) for space in spaces)
    choices = []
    while True:
        answer = quick_answer_of(request, [space.within(capacity) for space in spaces], time.monotonic())
        if answer.best is None:
            break
        choices.append(_Limit(capacity, answer.candidates, answer.bound_seconds))
        capacity = float(int(capacity * _STEP))
    least = inf
    for choice in reversed(choices):
        if choice.candidates[0].seconds < least:
            least = choice.candidates[0].seconds
            yield choice


def _thinned(choices: list[_Limit]) -> list[_Limit]:
    """Return at most `_POINTS` limits, evenly spaced by logarithm, with the first and the last."""
    if len(choices) <= _POINTS:
        return choices
    limits = np.log([choice.limit for choice in choices])
    wanted = np.linspace(limits[0], limits[-1], _POINTS)
    return [choices[at] for at in sorted({int(np.abs(limits - each).argmin()) for each in wanted})]


def _first_placed(request: PlanRequest, choice: _Limit, *, of_bytes: bool) -> Candidate | None:
    """Return the first plan that compiles and stays within the limit; None if none of those tried does."""
    for candidate in choice.candidates[:_TRIED]:
        budgets = (int(choice.limit), int(choice.limit * 0.95)) if of_bytes else (None,)
        for budget in budgets:
            pipeline = candidate.pipeline if budget is None else _within(candidate.pipeline, budget)
            evaluation = evaluate(request.task(candidate.plan, pipeline))
            if evaluation.step_seconds is None:
                break
            if not of_bytes or max(evaluation.peak_bytes) <= choice.limit:
                return evolve(candidate, pipeline=pipeline, evaluation=evaluation)
    return None


def _within(pipeline: str, budget: int) -> str:
    """Return a pipeline with a budget of bytes for its choice of what to recover, if it has that choice."""
    items = [
        evolve(item, budget=budget)
        if isinstance(item, RecomputePass | JointOrderPass) and item.policy == "auto"
        else item
        for item in parse_pipeline(pipeline)
    ]
    return pipeline_text(items)
