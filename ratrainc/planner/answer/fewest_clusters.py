"""The fewest clusters on which a model fits, with a plan that was compiled and placed there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.config.plan_summary import legend
from ratrain.ratrain_ir.support.diagnostics import Note, fail
from ratrain.ratrain_ir.support.files import write_text
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.time_limit import is_ended
from ratrain.ratrainc.choices.machine_choice import MachineChoice
from ratrain.ratrainc.console.console import size_text
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.facts.model_facts import model_facts, summary
from ratrain.ratrainc.planner.answer.plan_files import plan_text
from ratrain.ratrainc.planner.bounds.cuts import best_cuts
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.answer import Candidate
from ratrain.ratrainc.planner.search.family_spaces import family_spaces
from ratrain.ratrainc.planner.search.plan_evaluation import evaluate
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.space.variants import leanest, storing

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.console.progress import Steps

SEQUENCES = 8
"""Sequences of a cluster in a step: enough micro-batches that the pipeline is full; more of them change no peak."""

_TRIED = 6
"""Shapes of a number of clusters to compile: those with most room, of the ones that bounds allow."""


@frozen(repr=False)
class FewestClusters(Shown):
    """The fewest clusters for which a plan was found that fits."""

    request: PlanRequest
    clusters: int
    best: Candidate
    unproven: tuple[int, ...]
    """smaller numbers of clusters for which it is not proved that nothing fits"""
    model: str
    """name of the model in commands"""
    machine: MachineChoice
    """machine as commands name it"""

    @property
    def plan(self) -> Plan:
        """The plan that fits."""
        return self.best.plan

    @property
    def _of_fewer(self) -> str:
        return _of_fewer(self.unproven) if self.unproven or self.clusters > 1 else ""

    def parts(self) -> Iterator[Part]:
        """Yield facts of the model, the plan, and what is known of fewer clusters."""
        model, best = self.request.model, self.best
        yield from summary(model_facts(model, self.request.seq_len))
        cuts = f", cuts {','.join(map(str, best.plan.cuts))}" if best.plan.cuts else ""
        shape = f"{best.plan.summary}{cuts}, highest peak {size_text(best.peak_bytes)}"
        yield f"{model.name} fits {number_of(self.clusters, 'cluster')}: {shape}"
        strategy = self.request.strategy.passes
        if best.pipeline == leanest(best.pipeline) and strategy != leanest(strategy):  # it could have chosen
            yield f"It fits with everything recomputed and nothing moved ahead: --passes '{best.pipeline}'"
        yield legend([best.plan.summary])
        if self._of_fewer:
            yield self._of_fewer

    def to_json(self) -> dict[str, Any]:
        """Return the answer as `--json` prints it."""
        return {
            "model": self.request.model.name,
            "clusters": self.clusters,
            "unproven_clusters": list(self.unproven),
            "plan": self.best.to_json(self.clusters),
        }

    def save(self, path: str) -> None:
        """Write the plan. Raises `DiagnosticError` RT002 if the file cannot be written."""
        model, machine, best = self.request.model, self.request.machine.name, self.best
        head = [f"The fewest clusters on which {model.name} was found to fit {machine}: {self.clusters}."]
        head += [f"{self._of_fewer}."] if self._of_fewer else []
        write_text(path, plan_text(best.plan, best.pipeline, model, self.model, head, self.machine, path))


def fewest_clusters(request: PlanRequest, model: str, machine: MachineChoice, tick: Steps) -> FewestClusters:
    """Find the fewest clusters, up to the request's, for which a plan is compiled and placed, and that plan.

    Each cluster has `SEQUENCES` sequences, one a micro-batch. Numbers of clusters are tried upwards. One is passed over
    if bounds on bytes rule out every shape, or if none of the shapes with most room can be placed; the first one has
    room for the fewest ranks that are asked for. Raises `DiagnosticError` RT053 if no plan was found, RT064 if no
    number has room for these ranks.
    """
    unproven: list[int] = []
    profiles = Profiles(request.setting)
    if request.fewest > request.clusters:
        request.shapes()  # says which ranks are too many
    for clusters in range(request.fewest, request.clusters + 1):
        tick.begin(number_of(clusters, "cluster"))
        fitting, tried = _fitting(request.of_clusters(clusters, clusters * SEQUENCES), profiles)
        tick(number_of(clusters, "cluster"))
        if fitting is not None:
            break
        if is_ended():
            raise KeyboardInterrupt(
                f"interrupted: no plan was found that fits fewer than {number_of(clusters, 'cluster')}"
            )
        if tried:
            unproven.append(clusters)
    else:
        known = "was found that fits" if unproven else "fits"
        limit = f"{number_of(request.clusters, 'cluster')} or fewer, at {SEQUENCES} sequences each"
        text, notes = f"no plan of {request.model.name} {known} {limit}", [Note(_of_fewer(tuple(unproven)))]
        fail("RT053", text, notes=notes, help="allow more clusters")
    return FewestClusters(request, clusters, fitting, tuple(unproven), model, machine)


def _fitting(request: PlanRequest, profiles: Profiles) -> tuple[Candidate | None, bool]:
    """Return a plan that fits, and True if bounds left any to be tried.

    A shape is compiled with the fewest bytes first, which takes a tenth of the time; then faster pipelines are tried.
    """
    roomy = []
    for number, space in enumerate(family_spaces(request, profiles)):
        using_all = [s for s in space.shapes if s.clusters == request.clusters and s.micro_batch_size == 1]
        shapes = {evolve(shape, tiles=()): shape for shape in using_all}  # bytes do not depend on the mapping
        for shape in shapes.values():
            if not np.isfinite(space.seconds[space.row[shape]]):
                continue
            cuts = best_cuts(space.columns_of(shape), roomiest=True)
            if np.isfinite(cuts.seconds):
                roomy.append((cuts.peak_bytes, number, shape, cuts, space))
    for _, _, shape, cuts, space in sorted(roomy, key=lambda item: item[:3])[:_TRIED]:
        found = space.candidate(shape, cuts)
        lean = leanest(found.pipeline)
        placed = _placed(request, found, lean)
        if placed is None:
            continue
        others = [pipeline for pipeline in (found.pipeline, *storing(found.pipeline)) if pipeline != lean]
        return next(filter(None, (_placed(request, found, each) for each in others)), placed), True
    return None, bool(roomy)


def _placed(request: PlanRequest, found: Candidate, pipeline: str) -> Candidate | None:
    """Return a candidate compiled and placed by a pipeline; None if it does not fit."""
    evaluation = evaluate(request.task(found.plan, pipeline))
    return None if evaluation.step_seconds is None else evolve(found, pipeline=pipeline, evaluation=evaluation)


def _of_fewer(unproven: tuple[int, ...]) -> str:
    """Say what is known of the numbers of clusters that were passed over."""
    if unproven:
        numbers = ", ".join(map(str, unproven))
        tried = "the roomiest shapes did not fit; others are untried, so a fit is possible"
        return f"On {numbers} {tried}"
    return "On all fewer, bounds on bytes rule out every plan"
