"""Searches small enough for brute force, what brute force finds, and the words of small searches on the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from attrs import evolve

from ratrain.passes.placed_by import placed_by
from ratrain.ratrainc.choices.machine_changes import with_constants
from ratrain.ratrainc.choices.strategies import hiding_exchanges, strategy
from ratrain.ratrainc.planner.bounds.cuts import cuts_of, partitions
from ratrain.ratrainc.planner.bounds.profiles import Profiles
from ratrain.ratrainc.planner.search.family_spaces import family_spaces
from ratrain.ratrainc.planner.search.plan_evaluation import Task, evaluate
from ratrain.ratrainc.planner.search.plan_request import PlanRequest
from ratrain.ratrainc.planner.space.space import divisions
from ratrain.ratrainc.planner.space.variants import least_bytes_passes, variants
from ratrain.targets.machine.machine import load_machine
from tests.end_to_end.toys import UNEVEN

MODEL = evolve(UNEVEN, name="small", vocab_size=1000, hidden_size=64, head_dim=16, ffn_size=160)
# As on the real machine a layer takes longer than its launches, and the link matters.
SLOW = {"fp16_peak": 1e10, "ddr_bandwidth": 1e9, "link_bandwidth": 1e8, "collective_chunk": 4096.0}


def small_request(*, capacity: float = 8e6, clusters: int = 3, batch: int = 4, name: str = "ratrain") -> PlanRequest:
    machine = with_constants(load_machine(None), {**SLOW, "ddr_capacity": capacity})
    several = any(chunks > 1 for chunks, _, _ in divisions(strategy(name).schedule or "1f1b"))
    return PlanRequest(
        evolve(MODEL, layers=5) if several else MODEL,
        machine,
        clusters,
        batch,
        32,
        strategy(name),
        seconds=math.inf,
        exhaustive=True,
    )


def every_candidate(request: PlanRequest):
    """All plans of a space under all pipelines."""
    of_bytes = request.objective.of_bytes
    for space in family_spaces(request, Profiles(request.setting)):
        own = space.family.strategy.passes
        for shape in space.shapes:
            for layers in partitions(request.model.layers, shape.pp, shape.chunks):
                plan = shape.plan(request.setting, cuts_of(layers, shape))
                others = () if of_bytes else variants(own, plan)
                usual = hiding_exchanges(least_bytes_passes(own) if of_bytes else own, plan)
                for pipeline in (usual, *others):
                    yield Task(request.model, plan, pipeline, request.machine)


def costs_of_every_plan(request: PlanRequest) -> dict[Any, Any]:
    """What each plan of a space that fits costs under its best pipeline, by brute force."""
    costs: dict[Any, Any] = {}
    for task in every_candidate(request):
        found = evaluate(task)
        if found.step_seconds is not None:
            cost = request.objective.cost(found.step_seconds, max(found.peak_bytes), task.plan.clusters)
            key = task.plan, placed_by(task.pipeline)
            costs[key] = min(cost, costs.get(key, cost))
    return costs


ROOT = Path(__file__).resolve().parents[3]
TINY = ("--model", str(ROOT / "examples/tiny.json"))
TINY_PLAN = str(ROOT / "examples/tiny.toml")
QUICK = (*TINY, "--clusters", "4", "--global-batch", "16", "--seq-len", "64")
SMALL = (*QUICK, "--jobs", "1", "--seconds", "1")
