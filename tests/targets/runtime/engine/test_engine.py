"""The local engine: any legal order gives the same bits, a run resumes where it stopped, overflow is skipped, memory is as planned."""

from __future__ import annotations

import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.runtime.arena.kernel_memory import HostMemory
from ratrain.targets.runtime.arena.scalars import LossScale
from ratrain.targets.runtime.engine import local
from tests.end_to_end.tiny_runs import (
    MODEL,
    instructions,
    losses,
    make_plan,
    make_program,
    same_bits,
    start,
    state,
    train,
)
from tests.end_to_end.toys import GPT2

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun

TIED = evolve(MODEL, tied_embeddings=True)
F32: dict[str, Any] = {"view_dtype": "f32"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "2-stages-2-replicas": {},
    "reduced-each-micro-batch": {"zero": 2, "reduce": "each-micro-batch"},
    "gpt2": {"model": GPT2, "zero": 2},
    "3-stages-tied": {"model": TIED, "pp": 3, "micro_batches": 4},
    "views-gathered-for-each-use": {"zero": 3, "reduce": "each-micro-batch"},
    "nothing-sharded": {"zero": 0, "pp": 1},
}


def updates_on_the_host() -> Program:
    """The program for a machine whose updates run on the host, beside its compute engine."""
    machine = evolve(load_machine(None), update_engine=Engine.HOST)
    module = api.compile(MODEL, make_plan(), machine=machine)
    program = api.emit(module, machine=machine)
    assert {engine for _, engine, _, _ in instructions(program, "update")} == {Engine.HOST}
    return program


# Interleaving


@pytest.mark.parametrize("name", [*LAYOUTS, "host-updates"])
@pytest.mark.sampled(3)
def test_every_order_the_waits_allow_gives_the_same_bits(name: str) -> None:
    program = make_program(**LAYOUTS[name]) if name in LAYOUTS else updates_on_the_host()
    ordered = train(program, 3)
    for seed in (1, 2, 3):
        shuffled = train(program, 3, interleave_seed=seed)
        assert losses(shuffled) == losses(ordered)
        same_bits(shuffled, ordered)


def test_interleaving_runs_instructions_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would compare a run with itself."""
    program = make_program()
    orders = []
    for seed in (None, 1, 2):
        seen: list[str] = []
        run = start(program, 1, interleave_seed=seed)
        execute = run.engine.execute
        monkeypatch.setattr(
            run.engine,
            "execute",
            lambda members, step, seen=seen, execute=execute: (
                seen.extend(f"{rank.name} {instruction.title}" for rank, instruction in members),
                execute(members, step),
            ),
        )
        list(run.steps())
        orders.append(seen)
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2] != orders[0]


# Resuming


def resumed(program: Program, tmp_path: Any, first: int, second: int, other: Program | None = None) -> TrainingRun:
    """A run that stops after `first` steps, and goes on for `second` from its checkpoint."""
    place = str(tmp_path / "checkpoint")
    train(program, first, save=place)
    return train(other or program, second, resume=place)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.sampled(2)
def test_a_resumed_run_is_the_run_that_never_stopped(name: str, tmp_path: Any) -> None:
    program = make_program(**LAYOUTS[name])
    whole = train(program, 5)
    rest = resumed(program, tmp_path, 2, 3)
    assert not rest.warnings
    assert [step.report for step in rest.done] == [step.report for step in whole.done[2:]]
    same_bits(rest, whole)


def test_loss_scale_and_update_counts_go_on_after_an_overflow(tmp_path: Any) -> None:
    program = make_program()
    place = str(tmp_path / "checkpoint")

    def begin(steps: int, **settings: Any) -> TrainingRun:
        run = start(program, steps, **settings)
        for rank in (rank for ranks in run.engine.ranks for rank in ranks):
            rank.fill("scale", "", (2.0**22, 7.0))
        return run

    whole = begin(6)
    list(whole.steps())
    first = begin(2, save=place)
    list(first.steps())
    first.save()
    rest = train(program, 4, resume=place)
    assert losses(rest) == losses(whole)[2:]
    same_bits(rest, whole)
    scales = [step.report.loss_scale for step in whole.done]
    assert scales[1] == 2.0**20 > scales[-1]


@pytest.mark.parametrize(
    "keys",
    [{"dp": 1, "micro_batches": 6}, {"pp": 3}, {"pp": 1, "dp": 3, "micro_batches": 2}, {"zero": 0}],
    ids=["one-replica", "three-stages", "one-stage-three-replicas", "nothing-sharded"],
)
@pytest.mark.sampled(2)
def test_a_checkpoint_resumes_under_another_plan(keys: dict[str, Any], tmp_path: Any) -> None:
    whole = train(make_program(**F32), 6)
    rest = resumed(make_program(**F32), tmp_path, 3, 3, make_program(**F32, **keys))
    (said,) = [warning.message for warning in rest.warnings if "another plan: " in warning.message]
    assert all(key in said for key in keys)
    notes = [note.message for warning in rest.warnings for note in warning.notes]
    for key, value in keys.items():
        assert any(note.startswith(f"plan: {key} = ") and note.endswith(f"{value} now") for note in notes)
    np.testing.assert_allclose(losses(rest), losses(whole)[3:], rtol=1e-6)


def test_a_plan_with_a_fixed_scale_keeps_it_after_a_dynamic_run(tmp_path: Any) -> None:
    rest = resumed(make_program(), tmp_path, 2, 2, make_program(loss_scale=512.0))
    assert [step.report.loss_scale for step in rest.done] == [512.0, 512.0]


@pytest.mark.parametrize("scale", [(0.0, 0.0), (2.0**40, 0.0), (1.0, -1.0), (1.0, 1e9)])
def test_a_checkpoint_with_an_impossible_loss_scale_is_refused(scale: tuple[float, float], tmp_path: Any) -> None:
    program = make_program()
    run = start(program, 1, save=str(tmp_path / "checkpoint"))
    for ranks in run.engine.ranks:
        for rank in ranks:
            rank.fill("scale", "", scale)
    run.save()
    with pytest.raises(DiagnosticError, match="RT092"):
        start(program, 1, resume=str(tmp_path / "checkpoint"))


# ZeRO, reduction, layouts


@pytest.mark.parametrize(
    ("view_dtype", "dp"),
    [
        *(("f16", 2), ("bf16", 3), ("f32", 2)),
        *(pytest.param(*others, marks=pytest.mark.full) for others in (("f16", 3), ("bf16", 2), ("f32", 3))),
    ],
)
@pytest.mark.sampled(3)
def test_zero_levels_train_the_same(view_dtype: str, dp: int) -> None:
    steps = 10
    keys = {"view_dtype": view_dtype, "dp": dp}
    plain, *others = (losses(train(make_program(zero=zero, **keys), steps)) for zero in (0, 1, 2, 3))
    assert all(found == plain for found in others)
    assert plain[-1] < plain[0] - 0.3
    each = losses(train(make_program(zero=2, reduce="each-micro-batch", **keys), steps))
    assert each != plain  # it rounds more often
    np.testing.assert_allclose(each, plain, rtol=1e-3)


def test_three_replicas_train_what_one_trains() -> None:
    three = losses(train(make_program(dp=3, **F32), 8))
    one = losses(train(make_program(dp=1, micro_batches=9, **F32), 8))
    np.testing.assert_allclose(three, one, rtol=1e-6)


@pytest.mark.parametrize("model", [MODEL, GPT2], ids=["llama", "gpt2"])
def test_kernel_sets_agree(model: ModelConfig) -> None:
    program = make_program(model)
    np.testing.assert_allclose(losses(train(program, 4, kernels="reference")), losses(train(program, 4)), rtol=1e-5)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(
    ("model", "pp", "dp"),
    [*((TIED, pp, dp) for pp, dp in ((1, 1), (1, 2), (2, 1), (2, 3), (3, 2))), (GPT2, 1, 2), (GPT2, 2, 3)],
    ids=str,
)
@pytest.mark.sampled(4)
def test_both_copies_of_a_tied_matrix_stay_equal(model: ModelConfig, pp: int, dp: int, zero: int) -> None:
    program = make_program(model, pp=pp, dp=dp, zero=zero, reduce="each-micro-batch" if zero == 2 else "last")
    run = start(program, 5)
    before = run.engine.ranks[0][0].carried("p", "embed").copy()
    table = MODEL.vocab_size * MODEL.hidden_size
    for _ in run.steps():
        for replica in range(dp):
            first, last = run.engine.ranks[0][replica], run.engine.ranks[pp - 1][replica]
            for what in ("p", "m1", "m2", "w"):
                one, other = first.carried(what, "embed"), last.carried(what, "head")
                shard = slice(_table_part(table, len(one), replica, what, dp, zero))
                assert one[shard].tobytes() == other[shard].tobytes()
    assert not np.array_equal(before, run.engine.ranks[0][0].carried("p", "embed"))


def _table_part(table: int, elements: int, replica: int, what: str, dp: int, zero: int) -> int:
    """How many elements of a replica's tensor belong to the table: what follows in `head` is its norm."""
    start_of_part = replica * elements if zero and dp > 1 and what in ("p", "m1", "m2") else 0
    return max(0, min(elements, table - start_of_part))


# Overflow


def test_a_fixed_scale_that_overflows_skips_every_block_and_goes_on() -> None:
    program = make_program(loss_scale=2.0**32)
    run = start(program, 3)
    before = {name: array.copy() for name, array in state(run).items()}
    list(run.steps())
    updates = sum(1 for _ in instructions(program, "update"))
    assert [step.report.skipped_blocks for step in run.done] == [updates * program.plan.dp] * 3
    assert all(np.isfinite(losses(run)))
    assert all(array.tobytes() == before[name].tobytes() for name, array in state(run).items())


def test_a_dynamic_scale_comes_down_until_nothing_overflows() -> None:
    run = start(make_program(), 14)
    for rank in (rank for ranks in run.engine.ranks for rank in ranks):
        rank.fill("scale", "", (2.0**24, 0.0))
    list(run.steps())
    skipped = [step.report.skipped_blocks for step in run.done]
    scales = [step.report.loss_scale for step in run.done]
    overflows = sum(1 for count in skipped if count)
    assert 2 <= overflows < 10
    assert skipped[overflows:] == [0] * (14 - overflows)
    assert scales[:overflows] == [2.0 ** (23 - i) for i in range(overflows)]
    assert set(scales[overflows:]) == {scales[overflows - 1]}
    for ranks in run.engine.ranks:
        for rank in ranks:
            for what, unit in rank.stage.carried:
                if what == "t":
                    applied = 14 - overflows
                    assert applied <= rank.carried("t", unit)[0] < 14
    assert losses(run)[-1] < losses(run)[0]


def test_one_overflowing_block_is_skipped_alone_on_all_replicas() -> None:
    program = make_program(loss_scale=2.0**19)  # the head's gradient is the first to overflow
    run = start(program, 1)
    before = {name: array.copy() for name, array in state(run).items()}
    list(run.steps())
    skipped = {
        (rank.stage_index, unit)
        for ranks in run.engine.ranks
        for rank in ranks
        for what, unit in rank.stage.carried
        if what == "t" and rank.carried("t", unit)[0] == 0
    }
    assert 0 < len(skipped) < sum(1 for _ in instructions(program, "update"))
    for ranks in run.engine.ranks:
        for rank in ranks:
            for what, unit in rank.stage.carried:
                if what in ("p", "m1", "m2"):
                    name = rank.stage.tensors[rank.stage.carried[what, unit][0]].name
                    same = before[f"{rank.stage_index}.{rank.lane}.{name}"].tobytes()
                    changed = rank.carried(what, unit).tobytes() != same
                    assert changed is ((rank.stage_index, unit) not in skipped)
    assert run.done[0].report.skipped_blocks == len(skipped) * program.plan.dp


def test_an_overflow_is_skipped_whatever_the_buckets() -> None:
    keys = {"loss_scale": 2.0**19}
    bucketed, bulk = (train(make_program(name=name, **keys), 3) for name in ("ratrain", "baseline-1f1b"))
    assert losses(bucketed) == losses(bulk)
    assert [s.report.skipped_blocks for s in bucketed.done] == [s.report.skipped_blocks for s in bulk.done]
    assert bucketed.done[0].report.skipped_blocks


def test_the_loss_scale_doubles_after_enough_steps_without_overflow() -> None:
    values = np.zeros(2, np.float32)
    scale = LossScale(values)
    scale.start(None)
    for _ in range(2000):
        scale.advance(overflow=False)
    assert values.tolist() == [2.0**17, 0.0]
    scale.advance(overflow=True)
    assert values.tolist() == [2.0**16, 0.0]
    for _ in range(20):
        scale.advance(overflow=True)
    assert values.tolist() == [1.0, 0.0]
    values[:] = 2.0**24, 1999.0
    scale.advance(overflow=False)
    assert values.tolist() == [2.0**24, 0.0]


# Memory


@pytest.mark.parametrize("name", LAYOUTS)
def test_arenas_have_exactly_the_bytes_the_program_says(name: str) -> None:
    program = make_program(**LAYOUTS[name])
    engine = start(program, 1).engine
    for stage, ranks in zip(program.stages, engine.ranks, strict=True):
        for rank in ranks:
            assert rank.arena.nbytes == stage.arena_bytes == max(tensor.end for tensor in stage.tensors)
            assert rank.arena.ctypes.data % 64 == 0
            for view, tensor in zip(rank.views, stage.tensors, strict=True):
                assert view.ctypes.data == rank.arena.ctypes.data + tensor.offset
                assert view.nbytes == tensor.type.nbytes
    assert engine.arena_bytes == program.plan.dp * sum(stage.arena_bytes for stage in program.stages)


@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize(
    "keys",
    [
        {},
        F32,
        {"grad_dtype": "f32", "grad_shard_dtype": "f16"},
        {"grad_dtype": "f16", "grad_shard_dtype": "f32"},
        {"zero": 0, "grad_dtype": "f32", "grad_shard_dtype": "f32"},
        {"view_dtype": "bf16", "grad_shard_dtype": "f32"},
        {"zero": 2, "reduce": "each-micro-batch", "grad_shard_dtype": "f32"},
        {"model": TIED, "dp": 3},
        {"model": evolve(MODEL, family="qwen2", qkv_bias=True, sliding_window=4)},
    ],
)
@pytest.mark.sampled(2)
def test_scratch_sized_before_the_first_step_suffices(keys: dict[str, Any], kernels: str) -> None:
    run = start(make_program(**keys), 2, kernels=kernels)
    sized = run.engine.scratch.capacity
    list(run.steps())
    assert run.engine.scratch.capacity == sized
    assert run.engine.scratch.high_water == sized, "more than is ever used"


def test_a_step_allocates_nothing_of_the_size_of_a_tensor() -> None:
    """A step takes less than a tenth of an activation; the first one makes the messages that later ones use again."""
    model = evolve(MODEL, hidden_size=64, head_dim=16, ffn_size=172)
    program = make_program(model, seq_len=384, micro_batches=2)
    kinds = {"activation", "boundary", "checkpoint", "saved"}
    largest = max(t.type.nbytes for stage in program.stages for t in stage.tensors if t.kind.value in kinds)
    engine = start(program, 4).engine
    engine.run_step(0)
    tracemalloc.start()
    try:
        for step in (1, 2, 3):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            engine.run_step(step)
            after, peak = tracemalloc.get_traced_memory()
            assert peak - before < largest / 10
            assert after - before < largest / 10
    finally:
        tracemalloc.stop()
    assert engine.channels.nbytes == 0


def test_a_program_larger_than_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    program = make_program()
    pages = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10}
    monkeypatch.setattr(local.os, "sysconf", pages.__getitem__)
    with pytest.raises(DiagnosticError, match=r"RT093.*this machine has 40960"):
        start(program, 1)


def test_engines_that_overlap_have_scratch_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device executes several behind the program."""
    monkeypatch.setattr(HostMemory, "overlaps", True)
    engine: Any = start(make_program(), 1).engine
    own = [
        engine.scratch_of(rank, each)
        for ranks in engine.ranks
        for rank in ranks
        for each in (Engine.COMPUTE, Engine.COLLECTIVE, Engine.HOST)
    ]
    assert len({id(scratch) for scratch in own}) == len(own) == 12
    assert engine.scratch_bytes == sum(scratch.capacity for scratch in own)
    assert np.isfinite(engine.run_step(0).loss)
