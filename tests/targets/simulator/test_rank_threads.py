"""Ranks of one thread each: no step is shorter than what a thread has to do, nor than engines that run side by side would have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.machine.resource_work import ResourceWork
from ratrain.targets.runtime.ranks.waiting import LONGEST_PAUSE, VISITED
from ratrain.targets.simulator.rank_threads import threads_step_seconds
from ratrain.targets.simulator.timed_run import UNLIMITED
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, make_program
from tests.targets.simulator.given_works import simulate_work

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "ratrain": ("ratrain", {"micro_batches": 5}),
    "zero3": ("zero3", {"zero": 3, "reduce": "each-micro-batch"}),
    "zb-h1, clipped": ("zb-h1", {"micro_batches": 4, "optimizer": evolve(OPTIMIZER, clip="global", max_norm=0.3)}),
    "interleaved": ("interleaved", {"chunks": 2, "micro_batches": 4, "cuts": (1, 2, 3)}),
    "peers": ("ratrain", {"tp": 2, "zero": 0, "dp": 1}),
    "slices": ("seq1f1b", {"slices": (5, 5)}),
}
COSTS = {Engine.COMPUTE: 3.0, Engine.SEND: 0.5, Engine.RECV: 0.25, Engine.COLLECTIVE: 2.0, Engine.TENSOR: 1.0}


def program_of(kind: str) -> Program:
    name, keys = KINDS[kind]
    return make_program(evolve(MODEL, layers=4, tied_embeddings=kind == "ratrain"), name, **keys)


def cost(_stage: int, engine: Engine, instruction: Instruction) -> float:
    """Seconds; backwards take twice what forwards take."""
    return COSTS.get(engine, 1.0) * (2 if "backward" in instruction.keyword else 1)


def by_op(program: Program, seconds_of: Callable[[int, Engine, Instruction], float]) -> list[float]:
    """Seconds of all instructions, stream by stream."""
    return [
        seconds_of(index, engine, item)
        for index, stage in enumerate(program.stages)
        for engine in ENGINES
        for item in stage.streams[engine]
    ]


def test_all_engines_are_visited() -> None:
    assert {*VISITED} == {*ENGINES}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_between_its_bounds(kind: str) -> None:
    program = program_of(kind)
    each = [
        sum(cost(index, engine, item) for engine in ENGINES for item in stage.streams[engine])
        for index, stage in enumerate(program.stages)
    ]
    ops = sum(len(stream) for stage in program.stages for stream in stage.streams.values())
    found = threads_step_seconds(program, by_op(program, cost), program.plan.clusters)
    beside = simulate_work(program, lambda *which: ResourceWork(cost(*which)), UNLIMITED).step_seconds
    assert max(each) * (1 - 1e-12) <= found <= sum(each) + LONGEST_PAUSE * ops
    assert beside <= found * (1 + 1e-12)


def test_one_rank_takes_all_its_work() -> None:
    program = make_program(pp=1, dp=1, zero=0)
    (stage,) = program.stages
    work = sum(cost(0, engine, item) for engine in ENGINES for item in stage.streams[engine])
    assert threads_step_seconds(program, by_op(program, cost), 1) == pytest.approx(work)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_that_share_cores_take_their_work_at_least(kind: str) -> None:
    """No core is idle for long on one; fewer cores are never faster, and cores that no rank is left for change nothing."""
    program = program_of(kind)
    clusters = program.plan.clusters
    costs = by_op(program, cost)
    work = sum(costs) * program.topology.lanes
    found = [threads_step_seconds(program, costs, cores) for cores in range(1, clusters + 1)]
    assert all(seconds >= work / cores * (1 - 1e-12) for cores, seconds in enumerate(found, 1))
    assert found[0] <= work + LONGEST_PAUSE * len(costs) * clusters
    assert found == sorted(found, reverse=True)
    assert threads_step_seconds(program, costs, clusters + 3) == found[-1]


def test_replicas_that_share_a_core_wait_for_one_another() -> None:
    """Two replicas on one core take twice the time of one, and their collectives end once both have come to them."""
    program = make_program(pp=1, dp=2, zero=0)
    costs = by_op(program, cost)
    alone, shared = (threads_step_seconds(program, costs, cores) for cores in (2, 1))
    assert shared == pytest.approx(2 * alone, rel=1e-3)


def test_a_message_is_found_only_behind_what_was_computed_meanwhile() -> None:
    """Longer ops, of as much work: the other stage waits longer for what this one has, or has not looked for."""
    program = program_of("ratrain")

    def computes(stage: int, engine: Engine, _instruction: Instruction) -> float:
        return 1.0 / len(program.stages[stage].streams[engine]) if engine is Engine.COMPUTE else 0.0

    beside = simulate_work(program, lambda *which: ResourceWork(computes(*which)), UNLIMITED).step_seconds
    assert 1.0 < beside <= threads_step_seconds(program, by_op(program, computes), program.plan.clusters)
