"""A front of plans as what is shown, saved and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attrs import field, frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.console.console import seconds_text, size_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.console.pictures import new_figure, write_figure
from ratrain.ratrainc.planner.answer.planned import numbered
from ratrain.ratrainc.planner.answer.report import candidate_json, how, plan_text, tokens_per_second
from ratrain.ratrainc.planner.search.answer import Request
from ratrain.ratrainc.planner.search.pareto import FrontPoint, front, limit_text


@frozen(repr=False)
class Front(Shown):
    """What more clusters, or more bytes of a rank, are worth."""

    request: Request = field(eq=False)
    against: str
    """`clusters` or `memory`"""
    points: tuple[FrontPoint, ...] = field(eq=False)
    """fewest first, each faster than those before"""
    tokens: float | None
    """of a training, of which it says what it takes"""
    model: str
    """as commands name it"""
    machine: MachineChoice
    """as commands name it"""

    @property
    def title(self) -> str:
        """What it is a front of."""
        asked = self.request
        return f"{asked.model.name} on {asked.machine.name}, {asked.global_batch} sequences of {asked.seq_len} tokens"

    def parts(self) -> Iterator[Part]:
        """A table of its plans."""
        limit = "clusters" if self.against == "clusters" else "bytes of a rank"
        rates = ["tokens/s", "tokens/cluster-h"]
        columns = [limit, "plan", "schedule", "step", *rates, "peak", "no plan within takes less than", "how"]
        rows = [self._row(point) for point in self.points]
        yield TextTable(f"{self.title} (all times simulated or estimates)", columns, rows)

    def _row(self, point: FrontPoint) -> list[str]:
        candidate = point.candidate
        rate = tokens_per_second(candidate)
        return [
            limit_text(self.against, point.limit),
            candidate.plan.summary,
            candidate.family,
            seconds_text(candidate.seconds),
            f"{rate:,.0f}",
            f"{rate * 3600 / candidate.plan.clusters:,.0f}",
            size_text(candidate.peak_bytes) + ("" if candidate.evaluation else "+"),
            seconds_text(point.bound_seconds),
            how(candidate),
        ]

    def to_json(self) -> dict[str, Any]:
        """The front as `--json` prints it."""
        return {
            "model": self.request.model.name,
            "machine": self.request.machine.name,
            "families": [family.name for family in self.request.searched],
            "pareto": self.against,
            "points": [
                {"limit": point.limit, "bound_step_seconds": point.bound_seconds}
                | candidate_json(point.candidate, point.candidate.shape.clusters, self.tokens)
                for point in self.points
            ],
        }

    def save(self, path: str) -> list[str]:
        """Write each plan to a file of its own, numbered from 1; the names of these. Raises `DiagnosticError` RT002 as writers do."""
        names = numbered(path, len(self.points))
        for name, point in zip(names, self.points, strict=True):
            limit = limit_text(self.against, point.limit)
            within = f"{limit} clusters" if self.against == "clusters" else f"{limit} of a rank"
            head = [f"Planned for {self.title}: the fastest found within {within}."]
            write_text(name, plan_text(point.candidate, self.request.model, self.model, head, self.machine))
        return names

    def draw(self, path: str) -> None:
        """Write a plot with its bounds, as PNG or SVG by the file's ending. Raises `DiagnosticError` RT002 as `write_figure` does."""
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


def front_of(
    request: Request,
    against: str,
    tick: Callable[[str], None],
    *,
    quick: bool,
    tokens: float | None,
    model: str,
    machine: MachineChoice,
) -> Front:
    """The front of a request. Raises `DiagnosticError` RT053 where nothing fits."""
    points = front(request, against, tick, quick=quick)
    if not points:
        text = f"no plan of {request.model.name} was found that fits {request.clusters} clusters or fewer"
        fail(
            "RT053",
            text,
            help="search longer with --seconds, or plan without --pareto: it says what lacks how many bytes",
        )
    return Front(request, against, tuple(points), tokens, model, machine)
