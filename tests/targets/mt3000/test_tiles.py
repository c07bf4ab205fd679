"""Tile schedules: they fit, they move the bytes they must, their time reads them, and mutations are refused."""

from __future__ import annotations

import json
from collections import Counter
from math import prod
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.mt3000.tiles.core_program import Run, Transfer, core_events
from ratrain.targets.mt3000.tiles.tile_schedule import OnChipMemory, TileSchedule, elements, tiles_from_json
from ratrain.targets.mt3000.tiles.verifier import schedule_problem
from ratrain.targets.mt3000.tiling.attention import (
    PARTS,
    AttentionShape,
    attention_bound_seconds,
    attention_candidates,
    attention_schedule,
)
from ratrain.targets.mt3000.tiling.gemm import GemmShape, gemm_bound_seconds, gemm_candidates, gemm_schedule
from ratrain.targets.mt3000.tiling.tile_search import attention_tiles, gemm_tiles
from ratrain.targets.mt3000.tiling.tile_timing import tile_time
from tests.targets.mt3000.tile_shapes import MT3000, SMALL, attention_shapes, gemm_shapes

if TYPE_CHECKING:
    from ratrain.targets.mt3000.tiling.core import Cluster

HALF = Dtype.F16
CLUSTERS = st.sampled_from([MT3000, SMALL])
SQUARE = GemmShape(8192, 4096, 4096, HALF, HALF, HALF)
LLAMA_7B = AttentionShape(1, 2048, 32, 32, 128, None, HALF)


def moved(schedule: TileSchedule) -> Counter[tuple[str, str]]:
    """Bytes by (source, destination) memory, counted transfer by transfer over all cores."""
    memory_of = {buffer.name: buffer.memory.value for buffer in schedule.buffers}
    found: Counter[tuple[str, str]] = Counter()
    for core in range(schedule.memories.cores):
        for event in core_events(schedule, core):
            if isinstance(event, Transfer):
                near, far = event.buffer.memory.value, memory_of.get(event.other, "ddr")
                found[(far, near) if event.is_load else (near, far)] += event.nbytes
    return found


def stored(schedule: TileSchedule) -> Counter[str]:
    """Elements stored to each operand."""
    found: Counter[str] = Counter()
    for core in range(schedule.memories.cores):
        for event in core_events(schedule, core):
            if isinstance(event, Transfer) and not event.is_load:
                found[event.other] += elements(event.buffer.axes, event.ranges)
    return found


def check_schedule(schedule: TileSchedule, cluster: Cluster, results: tuple[str, ...]) -> None:
    assert schedule_problem(schedule) is None
    assert tiles_from_json(json.loads(json.dumps(schedule.to_json()))) == schedule
    for memory in OnChipMemory:
        used = max((buffer.end for buffer in schedule.buffers if buffer.memory is memory), default=0)
        assert used <= cluster.memories.capacity(memory)
    time = tile_time(schedule, cluster)
    assert time.transfers == moved(schedule)
    assert time.seconds >= max(time.core_seconds, time.am_seconds, time.gsm_seconds, time.ddr_seconds) > 0
    assert time.ddr_seconds == pytest.approx(time.ddr_bytes / cluster.ddr_bandwidth)
    shapes = {operand.name: prod(schedule.operand_shape(operand)) for operand in schedule.operands}
    assert stored(schedule) == {name: shapes[name] for name in results}


@settings(max_examples=25, deadline=None)
@given(gemm_shapes(), CLUSTERS)
def test_tiles_of_a_product_fit_and_move_every_byte(shape: GemmShape, cluster: Cluster) -> None:
    schedule = gemm_tiles(shape, cluster)
    check_schedule(schedule, cluster, ("out",))
    products = 0
    for core in range(cluster.cores):
        for event in core_events(schedule, core):
            if isinstance(event, Run) and event.compute.kernel == "add_product":
                products += prod(event.ranges[dim][1] - event.ranges[dim][0] for dim in "mnk")
    assert products == shape.m * shape.n * shape.k


@settings(max_examples=15, deadline=None)
@given(attention_shapes(), CLUSTERS, st.sampled_from(sorted(PARTS)))
def test_tiles_of_attention_fit_and_move_every_byte(shape: AttentionShape, cluster: Cluster, kernel: str) -> None:
    schedule = attention_tiles(kernel, shape, cluster)
    results = {
        "attention_forward": ("o", "lse"),
        "attention_query_gradient": ("dq", "delta"),
        "attention_key_gradient": ("dk", "dv"),
    }[kernel]
    check_schedule(schedule, cluster, results)
    seen = Counter(
        (event.ranges["b"][0], event.ranges["g"][0], event.ranges["h"][0], i, j)
        for core in range(cluster.cores)
        for event in core_events(schedule, core)
        if isinstance(event, Run) and event.compute.writes[0] == "score"
        for i in range(*event.ranges["q"])
        for j in range(*event.ranges["k"])
        if j <= i and (shape.window is None or j > i - shape.window)
    )
    assert set(seen.values()) == {1}
    assert len(seen) == shape.batch * shape.heads * shape.visible


@settings(max_examples=10, deadline=None)
@given(gemm_shapes(), st.integers(0, 10**6))
def test_every_candidate_that_fits_is_sound(shape: GemmShape, choice: int) -> None:
    candidates = list(gemm_candidates(shape, SMALL.memories))
    schedule = gemm_schedule(shape, candidates[choice % len(candidates)], SMALL.memories)
    assert schedule is None or schedule_problem(schedule) is None


@settings(max_examples=10, deadline=None)
@given(attention_shapes(), st.sampled_from(sorted(PARTS)), st.integers(0, 10**6))
def test_every_candidate_of_attention_that_fits_is_sound(shape: AttentionShape, kernel: str, choice: int) -> None:
    candidates = list(attention_candidates(shape, SMALL.memories))
    schedule = attention_schedule(PARTS[kernel], shape, candidates[choice % len(candidates)], SMALL.memories)
    assert schedule is None or schedule_problem(schedule) is None


def test_scores_never_reach_ddr() -> None:
    """The backward reads and writes tensors of tokens only: a few times q, k, v, o, do, dq, dk and dv."""
    tensor = 2048 * 4096 * 2
    row = 32 * 2048 * 4
    times = [tile_time(attention_tiles(kernel, LLAMA_7B, MT3000), MT3000) for kernel in sorted(PARTS)[1:]]
    found = sum(time.ddr_bytes for time in times)
    assert found < 12.5 * tensor + 20 * row
    assert found < 32 * 2048 * 2048 * 2  # less than the scores once, in halves


def test_the_bound_is_near_the_time() -> None:
    for shape in (SQUARE, evolve(SQUARE, trans_b=True), evolve(SQUARE, n=96), evolve(SQUARE, m=16)):
        bound = min(gemm_bound_seconds(shape, tiles, MT3000) for tiles in gemm_candidates(shape, MT3000.memories))
        assert tile_time(gemm_tiles(shape, MT3000), MT3000).seconds == pytest.approx(bound, rel=0.1)
    for kernel, part in PARTS.items():
        bound = min(
            attention_bound_seconds(part, LLAMA_7B, tiles, MT3000)
            for tiles in attention_candidates(LLAMA_7B, MT3000.memories)
            if attention_schedule(part, LLAMA_7B, tiles, MT3000.memories) is not None
        )
        assert tile_time(attention_tiles(kernel, LLAMA_7B, MT3000), MT3000).seconds == pytest.approx(bound, rel=0.25)


def test_efficiency_depends_on_the_shape_as_published() -> None:
    """NT is below NN, thin products are far below square ones: the order of the published measurements."""

    def efficiency(shape: GemmShape) -> float:
        seconds = tile_time(gemm_tiles(shape, MT3000), MT3000).seconds
        return 2 * shape.m * shape.n * shape.k / seconds / 8.1e12

    square = efficiency(SQUARE)
    assert 0.5 < square < 1
    assert efficiency(evolve(SQUARE, trans_b=True)) < square
    assert efficiency(evolve(SQUARE, n=96)) < 0.6 * square
    assert efficiency(evolve(SQUARE, n=32)) < efficiency(evolve(SQUARE, n=96))
    assert efficiency(evolve(SQUARE, m=32, n=32)) < 0.1 * square


def test_a_machine_without_room_is_refused() -> None:
    tiny = evolve(SMALL, memories=evolve(SMALL.memories, am_bytes=256))
    with pytest.raises(ValueError, match="no tile of it fits"):
        gemm_tiles(SQUARE, tiny)


def test_equal_searches_give_equal_schedules() -> None:
    again = evolve(MT3000, clock=MT3000.clock + 0.0)
    gemm_tiles.cache_clear()
    first = gemm_tiles(SQUARE, MT3000)
    gemm_tiles.cache_clear()
    assert gemm_tiles(SQUARE, again) == first
