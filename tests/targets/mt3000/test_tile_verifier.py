"""Mutations of sound tile schedules: each is refused, and the reason names what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.mt3000.kernels.tiled_compute import TilePosition
from ratrain.targets.mt3000.kernels.tiled_memory import TiledMemory, memory_plan
from ratrain.targets.mt3000.tiles.calls import tiles_problem
from ratrain.targets.mt3000.tiles.tile_schedule import (
    Barrier,
    Claim,
    Compute,
    Loop,
    OnChipMemory,
    Ranges,
    Statement,
    TileLoad,
    TileSchedule,
    TileStore,
    Wait,
    statements,
)
from ratrain.targets.mt3000.tiles.verifier import schedule_problem
from ratrain.targets.mt3000.tiling.attention import PARTS, AttentionShape
from ratrain.targets.mt3000.tiling.gemm import GemmShape
from ratrain.targets.mt3000.tiling.tile_search import attention_tiles, gemm_tiles
from ratrain.targets.program.routine import Step
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from tests.targets.mt3000.tile_shapes import MT3000, SMALL

HALF = Dtype.F16
PRODUCT = GemmShape(200, 300, 150, HALF, HALF, HALF, trans_b=True, added=(("residual", HALF), ("out", HALF)))
ATTENTION = AttentionShape(2, 150, 6, 3, 8, None, HALF)


def schedules(product: GemmShape, attention: AttentionShape) -> dict[str, TileSchedule]:
    packed = evolve(attention, documents=True)
    parts = {kernel: attention_tiles(kernel, attention, SMALL) for kernel in sorted(PARTS)}
    of_documents = {f"{kernel} of documents": attention_tiles(kernel, packed, SMALL) for kernel in sorted(PARTS)}
    return {"gemm": gemm_tiles(product, SMALL)} | parts | of_documents


SOUND = schedules(PRODUCT, ATTENTION)
EXECUTED = schedules(evolve(PRODUCT, m=100, n=150, k=70), evolve(ATTENTION, batch=1, seq_len=100))
"""Smaller, so that what is accepted can be executed."""


def rewritten(
    body: tuple[Statement, ...], change: Callable[[Statement], tuple[Statement, ...]]
) -> tuple[Statement, ...]:
    """The nest with every statement replaced by what `change` makes of it, from the inside out."""
    found: list[Statement] = []
    for statement in body:
        inner = evolve(statement, body=rewritten(statement.body, change)) if isinstance(statement, Loop) else statement
        found += change(inner)
    return tuple(found)


def without(schedule: TileSchedule, index: int) -> TileSchedule:
    """The schedule without its statement of that number that is no loop."""
    count = -1

    def change(statement: Statement) -> tuple[Statement, ...]:
        nonlocal count
        if isinstance(statement, Loop):
            return (statement,)
        count += 1
        return () if count == index else (statement,)

    return evolve(schedule, body=rewritten(schedule.body, change))


def plain(schedule: TileSchedule) -> list[Statement]:
    return [s for s in statements(schedule.body) if not isinstance(s, Loop)]


def test_the_schedules_are_sound() -> None:
    assert {name: schedule_problem(schedule) for name, schedule in SOUND.items()} == dict.fromkeys(SOUND)
    assert any(b.copies == 2 for b in SOUND["gemm"].buffers)


@pytest.mark.parametrize("name", SOUND)
def test_no_statement_can_be_left_out(name: str) -> None:
    """Loads, stores, waits, barriers and micro-kernels: each is needed. Without a claim one copy does the work of all."""
    schedule = SOUND[name]
    accepted = [
        statement
        for index, statement in enumerate(plain(schedule))
        if not isinstance(statement, Claim) and schedule_problem(without(schedule, index)) is None
    ]
    assert accepted == []


@pytest.mark.parametrize("name", SOUND)
def test_no_buffer_can_shrink_move_or_lose_a_copy(name: str) -> None:
    schedule = SOUND[name]
    moved = {s.buffer for s in plain(schedule) if isinstance(s, TileLoad | TileStore)}
    ahead = {s.buffer for s in plain(schedule) if isinstance(s, TileLoad) and s.ahead}
    for number, buffer in enumerate(schedule.buffers):

        def changed(number: int = number, **fields: object) -> str | None:
            buffers = list(schedule.buffers)
            buffers[number] = evolve(buffers[number], **fields)
            return schedule_problem(evolve(schedule, buffers=tuple(buffers)))

        assert changed(offset=schedule.memories.capacity(buffer.memory) - 64) is not None
        assert changed(offset=buffer.offset + 8) is not None
        neighbours = [b for b in schedule.buffers if b.memory is buffer.memory and b is not buffer]
        if neighbours:
            assert "share bytes" in (changed(offset=neighbours[0].offset) or "")
        for axis in range(len(buffer.shape)):
            shape = (*buffer.shape[:axis], buffer.shape[axis] // 2, *buffer.shape[axis + 1 :])
            assert changed(shape=shape) is not None, (buffer, axis)
        if buffer.name in ahead:
            assert "overwritten" in (changed(copies=1) or "") or "uses it" in (changed(copies=1) or "")
        if buffer.name in moved:
            other = next(b for b in schedule.buffers if b.name in moved and b.name != buffer.name)
            assert "channel" in (changed(channel=other.channel) or "")


def results(schedule: TileSchedule) -> dict[str, list[float]]:
    """What a schedule computes from small whole numbers, whose products and sums are exact; softmax to three digits."""
    rng = np.random.default_rng(1)
    found: list[dict[str, list[float]]] = []
    inputs = {
        o.name: rng.integers(-2, 3, schedule.operand_shape(o)).astype(NUMPY_DTYPES[o.dtype]) for o in schedule.operands
    }
    if "documents" in inputs:
        inputs["documents"] = np.arange(len(inputs["documents"]), dtype=np.int32) // 9 * 9
    for late in (False, True):
        operands = {name: array.copy() for name, array in inputs.items()}
        arrays = [np.full(buffer.shape, 0xFF, np.uint8) for buffer in memory_plan(schedule.memories)]
        memories = dict(
            zip((OnChipMemory.GSM, OnChipMemory.AM, OnChipMemory.SM), (arrays[0][None], *arrays[1:]), strict=True)
        )

        def place(ranges: Ranges, keys_first: bool) -> TilePosition:
            return TilePosition(ranges["q"], ranges["k"], np.float32(0.125), np.float32(0), schedule.window, keys_first)

        of = (
            place
            if "q" in dict(schedule.dims)
            else lambda _r, _k: TilePosition((0, 0), (0, 0), np.float32(1), 0, None, True)
        )
        with np.errstate(all="ignore"):
            TiledMemory(schedule, operands, of, memories, late).run()
        found.append({name: array.astype(float).round(3).ravel().tolist() for name, array in operands.items()})
    assert found[0] == found[1]
    return found[0]


def with_loop(schedule: TileSchedule, index: int, **fields: object) -> TileSchedule:
    count = -1

    def change(statement: Statement) -> tuple[Statement, ...]:
        nonlocal count
        if not isinstance(statement, Loop):
            return (statement,)
        count += 1
        return (evolve(statement, **fields),) if count == index else (statement,)

    return evolve(schedule, body=rewritten(schedule.body, change))


@pytest.mark.parametrize("name", SOUND)
def test_loops_cannot_take_other_pieces_or_cores(name: str) -> None:
    """What is accepted computes the same: some loops have one piece, or one core, whatever they say."""
    schedule = EXECUTED[name]
    extents, expected = dict(schedule.dims), results(schedule)
    inner_first: Iterator[Loop] = iter(_inner_first(schedule.body))
    for index, loop in enumerate(inner_first):
        mutations: list[dict[str, object]] = [{"tile": extents[loop.dim]}, {"cores": 1}, {"sees": ""}]
        mutations += [{"cores": cores, "stride": stride} for cores, stride in ((2, 1), (2, 3), (3, 1), (3, 2), (6, 1))]
        for fields in (fields for fields in mutations if any(getattr(loop, key) != fields[key] for key in fields)):
            mutant = with_loop(schedule, index, **fields)
            if schedule_problem(mutant) is None:
                assert results(mutant) == expected, (loop, fields)
        assert schedule_problem(with_loop(schedule, index, dim="z")) is not None
        assert schedule_problem(with_loop(schedule, index, tile=0)) is not None


def _inner_first(body: tuple[Statement, ...]) -> Iterator[Loop]:
    for statement in body:
        if isinstance(statement, Loop):
            yield from _inner_first(statement.body)
            yield statement


@pytest.mark.parametrize("name", SOUND)
def test_looking_further_ahead_than_there_are_copies_is_refused(name: str) -> None:
    schedule = SOUND[name]

    def change(statement: Statement) -> tuple[Statement, ...]:
        return (evolve(statement, ahead=2),) if isinstance(statement, TileLoad) and statement.ahead else (statement,)

    assert schedule_problem(evolve(schedule, body=rewritten(schedule.body, change))) is not None


def replaced(schedule: TileSchedule, old: Statement, *new: Statement) -> TileSchedule:
    found = rewritten(schedule.body, lambda statement: new if statement == old else (statement,))
    return evolve(schedule, body=found)


def test_meanings_are_followed() -> None:
    product = SOUND["gemm"]
    zero = Compute("zero", ("sum",), ())
    (factors,) = (s for s in plain(product) if isinstance(s, Compute) and s.kernel == "add_product")
    cases = {
        "'out' becomes": replaced(product, factors, evolve(factors, kernel="product")),
        "no product": replaced(product, factors, evolve(factors, reads=("a_strip", "b_tile"))),
        "different loops": replaced(replaced(product, zero), factors, zero, factors),
        "cannot take": replaced(product, factors, evolve(factors, reads=("b_turned", "a_strip"))),
        "no transfer from am": replaced(product, TileLoad("a_strip", "a_panel", 1), TileLoad("a_strip", "sum", 1)),
        "no micro-kernel": replaced(product, zero, Compute("clear", ("sum",), ())),
        "loaded at 2 places": replaced(product, Wait("a_strip"), TileLoad("a_strip", "a_panel", 1), Wait("a_strip")),
        "does not belong": evolve(product, body=(Loop("k", 75, product.body),)),
        "barriers": evolve(product, body=(*product.body, Loop("m", 200, (Barrier(),), cores=6))),
    }
    for reason, schedule in cases.items():
        assert reason in (schedule_problem(schedule) or "sound"), reason
    forward = SOUND["attention_forward"]
    turned = next(s for s in plain(forward) if isinstance(s, Compute) and s.kernel == "divide_turned")
    assert "'o' becomes" in (schedule_problem(replaced(forward, turned, evolve(turned, reads=("o_sum", "peak")))) or "")
    swapped = replaced(forward, TileLoad("k_panel", "k", 1), TileLoad("k_panel", "v", 1))
    swapped = replaced(swapped, TileLoad("k_panel", "k", 0), TileLoad("k_panel", "v", 0))
    assert "becomes" in (schedule_problem(swapped) or "")


def test_a_wait_after_the_use_is_too_late() -> None:
    product = SOUND["gemm"]
    (factors,) = (s for s in plain(product) if isinstance(s, Compute) and s.kernel == "add_product")
    late = replaced(replaced(product, Wait("a_strip")), factors, factors, Wait("a_strip"))
    assert "before it has arrived" in (schedule_problem(late) or "")


def test_a_dimension_that_no_operand_has_is_refused() -> None:
    """A loop over it would do a sum several times, or never end."""
    for schedule in SOUND.values():
        more = evolve(schedule, dims=(*schedule.dims, ("z", 2)))
        assert "no operand runs over its dimension 'z'" in (schedule_problem(more) or "")
        looped = evolve(more, body=(*more.body, Loop("z", 1, ())))
        assert schedule_problem(looped) is not None


def test_sums_are_not_kept_in_halves() -> None:
    for schedule in SOUND.values():
        kernels = {"add_product", "start_softmax", "product"}
        summed = {s.writes[0] for s in plain(schedule) if isinstance(s, Compute) and s.kernel in kernels}
        assert summed
        for number, buffer in enumerate(schedule.buffers):
            if buffer.name in summed:
                buffers = list(schedule.buffers)
                buffers[number] = evolve(buffer, dtype=Dtype.F16)
                assert "sums are f32" in (schedule_problem(evolve(schedule, buffers=tuple(buffers))) or "")


# Sums in float16, by runs.

RUN_STEP = Step("gemm", {"a": "a", "b": "b", "out": "out"}, {"half_run": 16})
RUN_TYPES = {"a": (HALF, (40, 100)), "b": (HALF, (100, 30)), "out": (HALF, (40, 30))}


def runs_of(run: int | None) -> TileSchedule:
    return gemm_tiles(GemmShape(40, 30, 100, HALF, HALF, HALF, half_run=run), MT3000)


def problem_of(schedule: TileSchedule, **options: int) -> str | None:
    return tiles_problem(evolve(RUN_STEP, options=options, on_chip={"gemm": schedule}), RUN_TYPES)


def test_tiles_sum_by_the_runs_of_their_step() -> None:
    assert problem_of(runs_of(16), half_run=16) is None
    assert problem_of(runs_of(512), half_run=512) is None, "one run, shorter than 512"
    assert problem_of(runs_of(None)) is None
    assert problem_of(runs_of(16)) == "tiles of gemm: they sum products in another way"
    assert problem_of(runs_of(None), half_run=16) == "tiles of gemm: they sum products in another way"
    assert problem_of(runs_of(16), half_run=32) == "tiles of gemm: they sum runs of 16 products in f16, not of 32"
    assert problem_of(runs_of(512), half_run=16) == "tiles of gemm: they sum runs of 100 products in f16, not of 16"


def test_runs_are_not_cut_short_by_a_loop_around_them() -> None:
    schedule = runs_of(16)
    panel = max(s.tile for s in statements(schedule.body) if isinstance(s, Loop) and s.dim == "k")
    assert 16 < panel < 100

    def shorter(statement: Statement) -> tuple[Statement, ...]:
        is_panel = isinstance(statement, Loop) and statement.dim == "k" and statement.tile == panel
        return (evolve(statement, tile=panel - 8) if is_panel else statement,)

    changed = evolve(schedule, body=rewritten(schedule.body, shorter))
    assert problem_of(changed, half_run=16) == "tiles of gemm: their loops over k cut runs of 16 products short"


def test_other_types_are_not_summed_in_float16_on_chip() -> None:
    schedule = gemm_tiles(GemmShape(40, 30, 100, Dtype.BF16, Dtype.BF16, HALF, half_run=16), MT3000)
    assert schedule_problem(schedule) == "'add_run' sums products of f16 in f16, not of bf16"
