"""The fewest clusters that a model fits, with the plan: shown and saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import Note, fail
from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.console.console import size_text
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.facts.model_facts import model_facts, summary
from ratrain.ratrainc.planner.answer.report import candidate_json, plan_text, shape_text
from ratrain.ratrainc.planner.search.answer import Candidate, Request
from ratrain.ratrainc.planner.search.smallest import SEQUENCES, Smallest, smallest_clusters

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan


@frozen(repr=False)
class Fewest(Shown):
    """The fewest clusters for which a plan was found that fits."""

    request: Request
    clusters: int
    best: Candidate
    unproven: tuple[int, ...]
    """numbers of clusters below, of which it is not proved that nothing fits"""
    model: str
    """as commands name it"""
    machine: MachineChoice
    """as commands name it"""

    @property
    def plan(self) -> Plan:
        """The plan that fits."""
        return self.best.plan

    @property
    def _of_fewer(self) -> str:
        return _of_fewer(self.unproven, self.clusters)

    def parts(self) -> Iterator[Part]:
        """What the model is, the plan, and what is known of fewer clusters."""
        model, best = self.request.model, self.best
        yield from summary(model_facts(model, self.request.seq_len))
        shape = f"{shape_text(best)}, cuts {list(best.plan.cuts)}, highest peak {size_text(best.peak_bytes)}"
        yield f"{model.name} fits {self.clusters} clusters: {shape}"
        if self._of_fewer:
            yield self._of_fewer

    def to_json(self) -> dict[str, Any]:
        """The answer as `--json` prints it."""
        return {
            "model": self.request.model.name,
            "clusters": self.clusters,
            "unproven_clusters": list(self.unproven),
            "plan": candidate_json(self.best, self.clusters, None),
        }

    def save(self, path: str) -> None:
        """Write the plan. Raises `DiagnosticError` RT002 where the file cannot be written."""
        model, machine = self.request.model.name, self.request.machine.name
        head = [f"The fewest clusters on which {model} was found to fit {machine}: {self.clusters}."]
        head += [f"{self._of_fewer}."] if self._of_fewer else []
        write_text(path, plan_text(self.best, self.request.model, self.model, head, self.machine))


def fewest_clusters(request: Request, model: str, machine: MachineChoice, tick: Callable[[str], None]) -> Fewest:
    """The fewest clusters, up to the request's, for which a plan is found that fits.

    Raises `DiagnosticError` RT053 where none was found.
    """
    found = smallest_clusters(request, tick)
    if found.clusters is None or found.candidate is None:
        _none_fits(request, found)
    return Fewest(request, found.clusters, found.candidate, found.unproven, model, machine)


def _none_fits(request: Request, found: Smallest) -> NoReturn:
    known = "fits" if not found.unproven else "was found that fits"
    fail(
        "RT053",
        f"no plan of {request.model.name} {known} {request.clusters} clusters or fewer, at {SEQUENCES} sequences each",
        notes=[Note(_of_fewer(found.unproven, None))],
        help="allow more clusters",
    )


def _of_fewer(unproven: tuple[int, ...], clusters: int | None) -> str:
    """What is known of the numbers of clusters that were passed over; empty where there are none."""
    if unproven:
        numbers = ", ".join(map(str, unproven))
        return f"On {numbers} the roomiest shapes could not be placed and others were not tried: that none fits is not proved"
    return "" if clusters == 1 else "On all fewer, bounds on bytes rule out every plan"
