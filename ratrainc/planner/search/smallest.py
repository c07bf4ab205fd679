"""The fewest clusters on which a model fits at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrainc.planner.bounds.cuts import best_cuts, cuts_of
from ratrain.ratrainc.planner.bounds.profile import Profiles
from ratrain.ratrainc.planner.search.answer import Candidate
from ratrain.ratrainc.planner.search.evaluation import Task, evaluate, folded_micro_batches
from ratrain.ratrainc.planner.search.family_spaces import family_spaces
from ratrain.ratrainc.planner.space.variants import pipeline_for, storing

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.answer import Request

SEQUENCES = 8
"""of a cluster in a step; a step needs enough micro-batches that its pipeline is full, beyond that they change no peak"""

_TRIED = 3
"""Shapes of one number of clusters that are compiled; of those that bounds allow, the ones with most room."""


@frozen
class Smallest:
    """The fewest clusters for which a plan is compiled and placed."""

    clusters: int | None
    """None: of no number that was tried"""
    candidate: Candidate | None
    """the plan; None where there is none"""
    unproven: tuple[int, ...]
    """numbers of clusters that were passed over because what was tried could not be placed; all others are ruled out by bounds"""


def smallest_clusters(request: Request, tick: Callable[[str], None]) -> Smallest:
    """The fewest clusters, up to the request's, for which a plan is compiled and placed, and that plan.

    Each cluster has `SEQUENCES` sequences, one a micro-batch. Numbers of clusters are tried upwards. One is passed over when the
    bound on bytes rules out every shape, or when none of the shapes with most room can be placed.
    """
    unproven: list[int] = []
    for clusters in range(1, request.clusters + 1):
        tick(f"{clusters} clusters")
        fitting, tried = _fitting(evolve(request, clusters=clusters, global_batch=clusters * SEQUENCES))
        if fitting is not None:
            return Smallest(clusters, fitting, tuple(unproven))
        if tried:
            unproven.append(clusters)
    return Smallest(None, None, tuple(unproven))


def _fitting(request: Request) -> tuple[Candidate | None, bool]:
    """A plan that fits, and whether bounds left any to be tried."""
    roomy = []
    profiles = Profiles(request.setting)
    for number, space in enumerate(family_spaces(request, profiles)):
        using_all = [s for s in space.shapes if s.clusters == request.clusters and s.micro_batch_size == 1]
        shapes = {evolve(shape, tiles=()): shape for shape in using_all}  # bytes do not depend on the mapping
        for shape in shapes.values():
            if not np.isfinite(space.seconds[space.row[shape]]):
                continue
            cuts = best_cuts(space.columns_of(shape), roomiest=True)
            if np.isfinite(cuts.seconds):
                roomy.append((cuts.peak_bytes, number, shape, cuts, space.family))
    for _, _, shape, cuts, family in sorted(roomy, key=lambda item: item[:3])[:_TRIED]:
        plan = shape.plan(profiles.setting, cuts_of(cuts.layers, shape))
        first = pipeline_for(family.strategy.passes, plan)
        folded = folded_micro_batches(plan) < plan.micro_batches
        for pipeline in (first, *storing(first)):
            evaluation = evaluate(Task(request.model, plan, pipeline, request.machine, folded))
            if evaluation.step_seconds is not None:
                found = Candidate(
                    shape, plan, pipeline, cuts.seconds, evaluation, bound_bytes=cuts.peak_bytes, family=family.name
                )
                return found, True
    return None, bool(roomy)
