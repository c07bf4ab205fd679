"""Weak scaling: the best plan, or a given one with more replicas, at several numbers of clusters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_summary import legend
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.console.pictures import new_figure, write_figure
from ratrain.ratrainc.planner.search.plan_evaluation import Task, evaluate
from ratrain.ratrainc.planner.search.plan_search import Search
from ratrain.ratrainc.planner.search.workers import workers

if TYPE_CHECKING:
    from ratrain.ratrainc.console.progress import Steps
    from ratrain.ratrainc.planner.search.plan_request import PlanRequest


@frozen
class Point:
    """The plan at one number of clusters. Without `step_seconds` none was found that fits."""

    clusters: int
    global_batch: int
    step_seconds: float | None
    tokens_per_second: float | None
    efficiency: float | None
    """throughput of a cluster, relative to the first point"""
    bound_seconds: float | None
    plan: Plan | None


def planned_points(request: PlanRequest, counts: Sequence[int], sequences: int, tick: Steps) -> list[Point]:
    """Find the best plan at each number of clusters, with `sequences` sequences a cluster."""
    timed = []
    with workers(request.jobs):  # one pool for all searches
        for clusters in counts:
            tick.prefix = f"{number_of(clusters, 'cluster')}: "
            answer = Search(evolve(request, clusters=clusters, global_batch=clusters * sequences), tick).run()
            best = answer.best
            seconds = best.seconds if best else None
            timed.append((clusters, clusters * sequences, seconds, answer.bound_seconds, best.plan if best else None))
    return _points(timed, request.seq_len)


def fixed_points(
    request: PlanRequest, plan: Plan, counts: Sequence[int], sequences: int | None, tick: Steps
) -> list[Point]:
    """Time a plan's stages and micro-batches with as many replicas as each number of clusters has room for.

    `sequences` is the number a cluster gets; None keeps the plan's own micro-batches. Raises `DiagnosticError`
    RT064 if the plan does not suit the strategy, a number of clusters is not a multiple of a replica's, or sequences do
    not divide evenly.
    """
    plan, pipeline = request.strategy.applied(plan, request.model, request.machine)
    timed = []
    replica, size = plan.pp * plan.cp * plan.tp, plan.micro_batch_size
    for clusters in counts:
        groups, rest = divmod(clusters, replica * plan.ep)  # a group of replicas shares out the experts
        dp = groups * plan.ep
        micro_batches, left = (plan.micro_batches, 0) if sequences is None else divmod(replica * sequences, size)
        if rest or left or not micro_batches:
            of = number_of(plan.pp, "stage") + (f" of {plan.tp} tensor-parallel ranks" if plan.tp > 1 else "")
            of += f" for {plan.cp} context ranks" if plan.cp > 1 else ""
            of += f" of {plan.ep} expert ranks" if plan.ep > 1 else ""
            each = "" if sequences is None else f" with {number_of(sequences, 'sequence')} each"
            whole = "" if sequences is None else ", and sequences that make whole micro-batches"
            fail(
                "RT064",
                f"{number_of(clusters, 'cluster')}{each} do not divide evenly over {of} with micro-batches of {size}",
                help=f"use a multiple of {number_of(replica * plan.ep, 'cluster')}{whole}",
            )
        # one replica has nothing to shard, and none to reduce with
        alone = {} if dp * plan.cp > 1 else {"zero": 0, "reduce": "last"}
        shaped = plan.reshaped(dp=dp, micro_batches=micro_batches, **alone)
        tick.begin(number_of(clusters, "cluster"))
        evaluation = evaluate(Task(request.model, shaped, pipeline, request.machine))
        tick(number_of(clusters, "cluster"))
        timed.append((clusters, shaped.global_batch, evaluation.step_seconds, None, shaped))
    return _points(timed, plan.seq_len)


def _points(timed: Sequence[tuple[int, int, float | None, float | None, Plan | None]], seq_len: int) -> list[Point]:
    points: list[Point] = []
    first: float | None = None
    for clusters, batch, seconds, bound, plan in timed:
        if seconds is None:
            points.append(Point(clusters, batch, None, None, None, bound, None))
            continue
        rate = batch * seq_len / seconds
        first = first or rate / clusters
        points.append(Point(clusters, batch, seconds, rate, rate / clusters / first, bound, plan))
    return points


@frozen(repr=False)
class Scaling(Shown):
    """Throughput by number of clusters, with equal work for each cluster."""

    points: tuple[Point, ...]
    model: str
    machine: str
    strategy: str
    sequences: float
    """sequences of a cluster in a step"""

    def plot(self, path: str) -> None:
        """Draw throughput over clusters with perfect scaling, as PNG or SVG by the file's ending.

        Raises `DiagnosticError` RT002 as `write_figure` does, and if matplotlib is not installed.
        """
        figure, axes = new_figure(6, 4, f"{self.model} on {self.machine}, {self.strategy} (simulated)")
        good = [(p.clusters, p.tokens_per_second) for p in self.points if p.tokens_per_second is not None]
        clusters = [count for count, _ in good]
        axes.plot(clusters, [rate for _, rate in good], "o-", label="simulated")
        if good:
            base = good[0][1] / good[0][0]
            axes.plot(clusters, [base * n for n in clusters], "--", color="grey", label="perfect scaling")
        axes.set(xlabel="clusters", ylabel="tokens/s", ylim=(0, None))
        axes.legend()
        write_figure(figure, path)

    def parts(self) -> Iterator[Part]:
        """Yield a table with a row for each number of clusters."""
        each = f"{number_of(self.sequences, 'sequence', 'g')} a cluster"
        title = f"{self.model} on {self.machine}: weak scaling, {each} (simulated; efficiency over the first row)"
        columns = ("clusters", "plan", "step", "tokens/s", "efficiency")
        yield TextTable(title, columns, [_row(point) for point in self.points])
        yield legend(point.plan.summary for point in self.points if point.plan is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the points as `--json` prints them."""
        head: dict[str, Any] = {"model": self.model, "machine": self.machine, "strategy": self.strategy}
        head["sequences_per_cluster"] = self.sequences
        return {**head, "points": [_point_json(each) for each in self.points]}


def _row(point: Point) -> list[str]:
    plan = point.plan
    if plan is None or point.step_seconds is None:
        return [str(point.clusters), "none was found" if plan is None else "does not fit", "-", "-", "-"]
    rate, share = f"{point.tokens_per_second:,.0f}", f"{100 * (point.efficiency or 0.0):.1f} %"
    return [str(point.clusters), plan.summary, seconds_text(point.step_seconds), rate, share]


def _point_json(point: Point) -> dict[str, Any]:
    plan = point.plan
    bound = point.bound_seconds if point.bound_seconds is not None and math.isfinite(point.bound_seconds) else None
    data: dict[str, Any] = {
        "clusters": point.clusters,
        "global_batch": point.global_batch,
        "tokens_per_second": point.tokens_per_second,
        "step_seconds": point.step_seconds,
        "efficiency": point.efficiency,
        "bound_step_seconds": bound,
    }
    if plan is not None:
        ranks, batch = ("pp", "dp", "cp", "tp", "ep"), ("micro_batch_size", "micro_batches")
        names = (*ranks, *batch, "zero", "reduce", "chunks", "layout")
        lists = {"cuts": list(plan.cuts), "slices": list(plan.slices)}
        data["plan"] = {name: getattr(plan, name) for name in names} | lists
    return data
