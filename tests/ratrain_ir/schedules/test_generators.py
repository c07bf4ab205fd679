"""Every schedule that has a name: sound for any shape it takes, in the order gradients are summed in, and as long and large as is said."""

from __future__ import annotations

from itertools import product

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.analysis.actions import actions_of_orders, read_torch_csv
from ratrain.ratrain_ir.schedules.named import SCHEDULES, most_held
from ratrain.ratrain_ir.schedules.shape import LAYOUTS, PipelineShape
from tests.ratrain_ir.schedules import unit_time
from tests.ratrain_ir.schedules.unit_time import B, F, I, W, orders_of, run, shape_of
from tests.ratrain_ir.verifier.schedule_tables import ROOT

SHAPES = st.builds(
    PipelineShape, st.integers(1, 7), st.integers(1, 20), st.integers(1, 4), st.sampled_from(LAYOUTS), st.integers(1, 4)
)


@settings(max_examples=300)
@given(st.sampled_from(sorted(SCHEDULES)), SHAPES)
def test_every_shape_is_refused_or_has_a_sound_order(kind: str, shape: PipelineShape) -> None:
    """Everything is done once, nobody waits forever; and micro-batches ascend on each chunk, their slices ascend and then descend."""
    if SCHEDULES[kind].problem(shape) is not None:
        shape = shape_of(kind, shape.stages, shape.micro_batches, slices=2 if kind == "seq1f1b" else 1)
    orders = orders_of(kind, shape)
    run(orders, shape)
    for order in orders:
        for chunk, made in product(range(shape.stages * shape.chunks), (F, I, W)):
            kinds = (made,) if made is F else (made, B)
            seen = [action for action in order if action.chunk == chunk and action.kind in kinds]
            turn = 1 if made is F else -1
            assert seen == sorted(seen, key=lambda action: (action.micro_batch, turn * action.slice))


@pytest.mark.parametrize("kind", sorted(SCHEDULES))
def test_its_usual_shape_is_one_it_takes(kind: str) -> None:
    slices = 2 if kind == "seq1f1b" else 1
    assert SCHEDULES[kind].problem(shape_of(kind, 4, 8, slices=slices)) is None


REFUSED = [
    ("interleaved", PipelineShape(4, 8), "with one use 1f1b"),
    ("interleaved", PipelineShape(4, 8, 2, "vee"), "not in a vee"),
    ("interleaved", PipelineShape(4, 8, 2, slices=3), "with slices use seq1f1b"),
    ("breadth-first", PipelineShape(4, 8), "with one use gpipe"),
    ("zb-v", PipelineShape(4, 8, 3, "vee"), "two chunks a stage, not 3"),
    ("v-half", PipelineShape(4, 8, 2, "loop"), "not in a loop"),
    ("v-min", PipelineShape(4, 8, 1, "loop"), "two chunks a stage, not 1"),
    ("dualpipe-v", PipelineShape(4, 8, 2, "vee", 2), "not 2 slices of each"),
    ("seq1f1b", PipelineShape(4, 8), "use 1f1b"),
    ("seq1f1b", PipelineShape(4, 8, 2), "use interleaved"),
    ("seq1f1b", PipelineShape(4, 8, 2, "vee", 2), "not in a vee"),
    ("1f1b", PipelineShape(4, 8, slices=2), "not 2 slices of each"),
]


@pytest.mark.parametrize(("kind", "shape", "why"), REFUSED)
def test_what_contradicts_a_schedule_is_refused_with_the_reason(kind: str, shape: PipelineShape, why: str) -> None:
    assert why in (SCHEDULES[kind].problem(shape) or "")


# orders that PyTorch 2.13 makes

MADE_BY_TORCH = [
    ("interleaved", "interleaved", PipelineShape(2, 2, 2)),
    ("interleaved_4_ranks", "interleaved", PipelineShape(4, 8, 3)),
    ("zb_v", "zb-v", PipelineShape(4, 9, 2, "vee")),
    ("dualpipe_v", "dualpipe-v", PipelineShape(4, 9, 2, "vee")),
    ("looped_bfs", "breadth-first", PipelineShape(3, 4, 2)),
]


@pytest.mark.parametrize(("file", "kind", "shape"), MADE_BY_TORCH)
def test_the_order_is_that_of_pytorch(file: str, kind: str, shape: PipelineShape) -> None:
    """Pairs that overlap are one after the other; backwards of LoopedBFS ascend."""
    theirs = read_torch_csv(str(ROOT / f"tests/data/schedules/{file}.csv"))
    rows = [[evolve(action, slot=slot) for slot, action in enumerate(row)] for row in theirs.rows]
    if kind == "breadth-first":
        last = shape.micro_batches - 1
        rows = [[evolve(a, micro_batch=last - a.micro_batch) if a.kind is B else a for a in row] for row in rows]
    assert list(map(list, actions_of_orders(orders_of(kind, shape)).rows)) == rows


# closed forms

GRID = list(product(range(1, 8), range(1, 18)))


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
def test_1f1b_and_gpipe(kind: str) -> None:
    for stages, micro_batches in GRID:
        shape = shape_of(kind, stages, micro_batches)
        orders = orders_of(kind, shape)
        assert run(orders, shape).makespan == 3 * (micro_batches + stages - 1)
        for stage, order in enumerate(orders):
            held = micro_batches if kind == "gpipe" else min(stages - stage, micro_batches)
            assert unit_time.most_held(order, I) == most_held(kind, shape, stage) == held


def test_zb_h1() -> None:
    for stages, micro_batches in GRID:
        shape = shape_of("zb-h1", stages, micro_batches)
        bubble = stages - 1 if micro_batches >= stages else 2 * stages - 1 - micro_batches
        assert run(orders_of("zb-h1", shape), shape).makespan == 3 * micro_batches + bubble


def test_no_stage_of_zb_h2_waits_and_each_holds_one_less_than_twice_the_stages() -> None:
    for stages, micro_batches in GRID:
        shape = shape_of("zb-h2", stages, micro_batches)
        orders = orders_of("zb-h2", shape)
        pauses = run(orders, shape).pauses
        enough = micro_batches >= 2 * stages - 1
        assert not (enough and any(pauses))
        held = [unit_time.most_held(order, W) for order in orders]
        assert held == [min(2 * stages - 1, micro_batches)] * stages


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_the_bubble_of_interleaved_is_one_of_v_m_parts(chunks: int) -> None:
    """(P - 1) / (V M) of the work where M is a multiple of P; fewer than P micro-batches, or a remainder, add less than what is missing."""
    for stages, micro_batches in GRID:
        shape = shape_of("interleaved", stages, micro_batches, chunks)
        orders = orders_of("interleaved", shape)
        work = 3 * micro_batches * chunks
        bubble = run(orders, shape).makespan - work
        missing = -micro_batches % stages * (chunks - 1)
        if not missing:
            assert bubble * chunks * micro_batches == (stages - 1) * work
        elif micro_batches < stages:
            assert bubble == 3 * (stages - 1 + missing)
        else:
            assert 3 * (stages - 1) < bubble < 3 * (stages - 1 + missing)
        for stage, order in enumerate(orders):
            most = min((chunks - 1) * stages + 2 * (stages - 1 - stage) + 1, chunks * micro_batches)
            held = unit_time.most_held(order, I)
            assert held == most if not missing else held <= most


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bubble_of_breadth_first(layout: str, chunks: int) -> None:
    for stages, micro_batches in GRID:
        shape = PipelineShape(stages, micro_batches, chunks, layout)
        orders = orders_of("breadth-first", shape)
        assert all(unit_time.most_held(order, I) == chunks * micro_batches for order in orders)
        if layout == "loop":
            missing = max(0, stages - micro_batches) * (chunks - 1)
            assert run(orders, shape).makespan == 3 * (chunks * micro_batches + stages - 1 + missing)


def test_zb_v_has_no_bubble_and_holds_what_1f1b_does() -> None:
    """From M = 2P - 1 on, no stage pauses from its first forward, s units after the start, to its last action."""
    for stages, micro_batches in GRID:
        shape = shape_of("zb-v", stages, micro_batches)
        orders = orders_of("zb-v", shape)
        step = run(orders, shape)
        assert step.starts == list(range(stages))
        if micro_batches >= 2 * stages - 1:
            assert step.pauses == [0] * stages
            assert step.makespan == 6 * micro_batches + stages - 1
            assert [unit_time.most_held(order, W) for order in orders] == [2 * stages] * stages
        else:
            assert step.pauses[0] > 0
            assert all(unit_time.most_held(order, W) <= 2 * stages for order in orders)


def test_v_half_holds_half_of_1f1b_and_has_half_its_bubble() -> None:
    for stages, micro_batches in GRID:
        shape = shape_of("v-half", stages, micro_batches)
        orders = orders_of("v-half", shape)
        bubble = run(orders, shape).makespan - 6 * micro_batches
        held = max(unit_time.most_held(order, W) for order in orders)
        assert held <= 2 * (stages // 2) + 2
        if micro_batches >= stages > 1:
            assert bubble == 3 * (stages - 1) - stages % 2
            assert held == 2 * (stages // 2) + 2


def test_v_min_holds_a_third_of_1f1b_and_has_two_thirds_of_its_bubble() -> None:
    for stages, micro_batches in GRID:
        shape = shape_of("v-min", stages, micro_batches)
        orders = orders_of("v-min", shape)
        bubble = run(orders, shape).makespan - 6 * micro_batches
        held = max(unit_time.most_held(order, W) for order in orders)
        assert held <= 2 * ((stages + 1) // 3) + 2
        if micro_batches > 1 and stages > 1:
            assert bubble == 4 * stages - 5 + (2 if stages % 3 == 0 else 0)
        if micro_batches >= stages > 1:
            assert held == 2 * ((stages + 1) // 3) + 2


def test_dualpipe_v() -> None:
    for stages, micro_batches in GRID:
        shape = shape_of("dualpipe-v", stages, micro_batches)
        orders = orders_of("dualpipe-v", shape)
        step = run(orders, shape)
        assert all(unit_time.most_held(order, W) <= 2 * stages + 1 for order in orders)
        if micro_batches >= 2 * stages:
            assert step.makespan == 6 * micro_batches + stages - 1
            assert [unit_time.most_held(order, W) for order in orders] == [2 * stages + 1] * stages


@pytest.mark.parametrize("slices", [2, 3, 4, 8])
def test_seq1f1b(slices: int) -> None:
    """In units of a slice: (M k + P - 1) (F + B), and P - s - 1 + k slices held, or all there are."""
    for stages, micro_batches in product(range(1, 8), range(1, 7)):
        shape = shape_of("seq1f1b", stages, micro_batches, slices=slices)
        orders = orders_of("seq1f1b", shape)
        assert run(orders, shape).makespan == 3 * (micro_batches * slices + stages - 1)
        for stage, order in enumerate(orders):
            held = min(stages - stage - 1 + slices, micro_batches * slices)
            assert unit_time.most_held(order, I) == most_held("seq1f1b", shape, stage) == held


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("slices", [2, 3, 4])
def test_seq1f1b_in_several_chunks(slices: int, chunks: int) -> None:
    """(P - 1) / (V M k) of the work is idle where M is a multiple of ceil(P / k), and (V - 1) k ceil(P / k) + 2 (P - s - 1) + k slices
    of a chunk are held, or all."""
    for stages, micro_batches in product(range(1, 8), range(1, 10)):
        shape = shape_of("seq1f1b", stages, micro_batches, chunks, slices)
        orders = orders_of("seq1f1b", shape)
        passes = chunks * micro_batches * slices
        bubble = run(orders, shape).makespan - 3 * passes
        group = -(-stages // slices)
        missing = -micro_batches % group * slices * (chunks - 1)
        if not missing:
            assert bubble == 3 * (stages - 1)
        else:
            assert 3 * (stages - 1) < bubble <= 3 * (stages - 1 + missing)
        for stage, order in enumerate(orders):
            most = min((chunks - 1) * slices * group + 2 * (stages - 1 - stage) + slices, passes)
            held = unit_time.most_held(order, I)
            assert held == most if not missing else held <= most
