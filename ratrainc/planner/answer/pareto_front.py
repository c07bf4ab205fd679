"""Pareto fronts: plans that are faster than any found on as few clusters, or with as few bytes of a rank.

Level one gives candidates and a bound for each limit, a number of clusters or of bytes. The limits that estimates leave
on the front are compiled and simulated as far as there is time, and plans that another then dominates are dropped.
Example: estimates of 9, 5, 6 s on 1, 2, 3 clusters leave 1 and 2; if these take 9 and 10 s simulated, only 1 stays.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, field, frozen

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.config.plan_summary import legend
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.time_limit import OutOfTime, is_ended
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.console.pictures import new_figure, write_figure
from ratrain.ratrainc.planner.answer.plan_files import numbered, plan_text
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.answer import AT_LEAST, Answer, Candidate
from ratrain.ratrainc.planner.search.family_spaces import FamilySpace, family_spaces
from ratrain.ratrainc.planner.search.plan_evaluation import evaluate
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.search.quick import LIMIT_SECONDS, by_promise, estimated_answer, tried
from ratrain.ratrainc.planner.space.objective import TIME

if TYPE_CHECKING:
    from ratrain.ratrainc.console.progress import Steps

_POINTS = 12
"""Most points of a front."""
_TRIED = 5
"""Most plans of a point to compile."""
_ESTIMATING = 0.5
"""Share of the time for estimates."""
_SECONDS = 0.5
"""Computing time for the cuts of a limit: there are many limits."""
_GAIN = 0.01
"""Least share of its time that a plan gains to be listed again with more bytes."""
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
    answer: Answer
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
    quick: bool = False
    """True if no plan was compiled"""
    interrupted: bool = False
    """True if it was asked to end early"""

    @property
    def title(self) -> str:
        """Model, machine and size of a step."""
        asked = self.request
        return (
            f"{asked.model.name} on {asked.machine.name}, "
            f"{number_of(asked.global_batch, 'sequence')} of {number_of(asked.seq_len, 'token')}"
        )

    def parts(self) -> Iterator[Part]:
        """Yield a table of its plans."""
        limit = "within clusters" if self.against == "clusters" else "within, of a rank"
        rates = ["tokens/s", "tokens/cluster-h"]
        columns = [limit, "plan", "schedule", "step", *rates, "peak", "no plan within takes less than", "how"]
        rows = [self._row(point) for point in self.points]
        for row, (before, point) in zip(rows[1:], pairwise(self.points), strict=True):
            row[1] += ", more kept" if _named(before) == _named(point) else ""
        times = "all times estimates" if self.quick else "all times simulated or estimates"
        yield TextTable(f"{self.title} ({times})", columns, rows)
        yield legend(point.candidate.plan.summary for point in self.points)
        if self.against == "memory":
            yield "within, of a rank: the most bytes that tensors of any rank may take at a time"
            yield "Plans of fewer bytes: --objective memory finds the one of fewest"
        if not all(point.candidate.evaluation for point in self.points):
            yield AT_LEAST
        if self.quick:
            yield self._simulated_by
        if self.interrupted:
            yield "interrupted: plans so far, and estimates; the search to its end may find better ones"

    @property
    def _simulated_by(self) -> str:
        """Say what simulates a plan of a quick front."""
        if self.against == "memory":
            return "Without --quick the plans are compiled and simulated."
        return "Estimates only compare plans: --quick without --pareto simulates the best for one number of --clusters."

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
            "interrupted": self.interrupted,
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
            within = number_of(int(point.limit), "cluster") if self.against == "clusters" else f"{limit} of a rank"
            how = "the fastest found" if found.evaluation else "the fastest by its estimate, not compiled yet,"
            head = [f"Planned for {self.title}: {how} within {within}."]
            model = self.request.model
            text = plan_text(found.plan, found.pipeline, model, self.model, head, self.machine, name)
            write_text(name, text)
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
    tick: Steps,
    *,
    quick: bool,
    tokens: float | None,
    model: str,
    machine: MachineChoice,
) -> ParetoFront:
    """Find the front of a request.

    With `quick`, all plans stay estimates. A plan may be on the front again with more bytes, in which it keeps more of
    what its forwards save: if that gains less than `_GAIN`, it is listed once.

    Raises `DiagnosticError` RT053 if nothing fits, RT064 if the space is empty.
    """
    begin = time.monotonic()
    spaces = family_spaces(request, Profiles(request.setting), tick)
    of_clusters = against == "clusters"
    points: list[FrontPoint] = []
    until = inf if quick else begin + _ESTIMATING * request.seconds
    found = _of_clusters(request, spaces, tick) if of_clusters else _of_bytes(request, spaces, tick, until)
    limits = _thinned(list(found))
    for number, each in enumerate(limits):
        left_of_time = request.seconds - (time.monotonic() - begin)
        candidate = each.answer.best
        if quick or is_ended() or (points and left_of_time < 0):
            if candidate is not None and not of_clusters:
                candidate = evolve(candidate, pipeline=_within(candidate.pipeline, int(each.limit)))
        elif of_clusters:
            tried(each.answer, tick, max(left_of_time, 1.0 if points else LIMIT_SECONDS))
            candidate = each.answer.best
        else:
            share = left_of_time / (len(limits) - number)
            candidate = _fastest_placed(request, each, tick, share, max(left_of_time, 1.0 if points else LIMIT_SECONDS))
        if candidate is not None:
            points.append(FrontPoint(each.limit, candidate, each.bound_seconds))
        tick(_limit_text(against, each.limit))
    best = inf
    left: list[FrontPoint] = []
    for point in points:
        again = bool(left) and _named(left[-1]) == _named(point)
        if point.candidate.seconds < best * (1 - _GAIN if again else 1):
            best = point.candidate.seconds
            left.append(point)
    if not left and is_ended():
        raise OutOfTime
    if not left:
        fail(
            "RT053",
            f"no plan of {request.model.name} was found that fits {number_of(request.clusters, 'cluster')} or fewer",
            help="search longer with --seconds, or plan without --pareto: it says what lacks how many bytes",
        )
    return ParetoFront(request, against, tuple(left), tokens, model, machine, quick, is_ended())


def _named(point: FrontPoint) -> tuple[str, str]:
    """Return what a row shows of a plan."""
    return point.candidate.plan.summary, point.candidate.family


def _limit_text(against: str, limit: float) -> str:
    return f"{limit:.0f}" if against == "clusters" else size_text(int(limit))


def _of_clusters(request: PlanRequest, spaces: Sequence[FamilySpace], tick: Steps) -> Iterator[_Limit]:
    """Yield the numbers of clusters on the front of estimates, ascending."""
    least = bound = inf
    counts = sorted({count for space in spaces for count in np.unique(space.clusters)})
    each = min(_SECONDS, request.seconds / len(counts))
    for clusters in counts:
        if is_ended():
            break
        tick.begin(f"estimates on {_limit_text('clusters', clusters)} clusters")
        own = [space.of_clusters(int(clusters)) for space in spaces]
        answer = estimated_answer(request, own, time.monotonic(), least, each)
        bound = min(bound, answer.bound_seconds)
        if answer.best is not None and answer.best.seconds < least:
            least = answer.best.seconds
            yield _Limit(float(clusters), answer, min(bound, least))


def _of_bytes(request: PlanRequest, spaces: Sequence[FamilySpace], tick: Steps, until: float) -> Iterator[_Limit]:
    """Yield the numbers of bytes on the front of estimates, ascending; as few as there is time for."""
    capacity = max(float(space.columns.capacity.max()) for space in spaces)
    choices: list[_Limit] = []
    while not is_ended() and (not choices or time.monotonic() < until):
        tick.begin(f"estimates within {_limit_text('memory', capacity)}")
        answer = estimated_answer(
            request, [space.within(capacity) for space in spaces], time.monotonic(), seconds=_SECONDS
        )
        if answer.best is None:
            break
        choices.append(_Limit(capacity, answer, answer.bound_seconds))
        capacity = float(int(capacity * _STEP))
    least = inf
    for choice in reversed(choices):
        assert choice.answer.best is not None, "kept if there is one"
        # estimates of the most bytes may equal those of fewer, but its plan is the fastest when simulated
        if choice.answer.best.seconds < least or choice is choices[0]:
            least = choice.answer.best.seconds
            yield choice


def _thinned(choices: list[_Limit]) -> list[_Limit]:
    """Return at most `_POINTS` limits, evenly spaced by logarithm, with the first and the last."""
    if len(choices) <= _POINTS:
        return choices
    limits = np.log([choice.limit for choice in choices])
    wanted = np.linspace(limits[0], limits[-1], _POINTS)
    return [choices[at] for at in sorted({int(np.abs(limits - each).argmin()) for each in wanted})]


def _fastest_placed(request: PlanRequest, choice: _Limit, tick: Steps, share: float, left: float) -> Candidate | None:
    """Return the fastest plan that compiles and stays within the bytes; None if none of those tried does.

    Plans are tried by their promise, none after `share` seconds once one fits; each may take what is `left`.
    """
    begin = time.monotonic()
    best: Candidate | None = None
    for candidate in by_promise(choice.answer)[:_TRIED]:
        spent = time.monotonic() - begin
        if is_ended() or spent > (left if best is None else share):
            break
        if best is not None and candidate.bound(TIME) >= best.cost(TIME):
            continue
        tick.begin(f"{candidate.plan.summary}, {candidate.family}, within {_limit_text('memory', choice.limit)}")
        for budget in (int(choice.limit), int(choice.limit * 0.95)):
            pipeline = _within(candidate.pipeline, budget)
            limit = None if left == inf else max(left - spent, 1.0)
            evaluation = evaluate(evolve(request.task(candidate.plan, pipeline), seconds=limit))
            if is_ended() or evaluation.step_seconds is None:
                break
            if max(evaluation.peak_bytes) <= choice.limit:
                found = evolve(candidate, pipeline=pipeline, evaluation=evaluation)
                best = found if best is None or found.cost(TIME) < best.cost(TIME) else best
                break
    return best


def _within(pipeline: str, budget: int) -> str:
    """Return a pipeline with a budget of bytes for its choice of what to recover, if it has that choice."""
    items = [
        evolve(item, budget=budget)
        if isinstance(item, RecomputePass | JointOrderPass) and item.policy == "auto"
        else item
        for item in parse_pipeline(pipeline)
    ]
    return pipeline_text(items)
