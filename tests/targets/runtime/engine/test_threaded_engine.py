"""One thread for each engine: the same bits as in order, real overlap, failures and hangs that end the run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.running.run_checks import default_threads
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.runtime.engine.threaded import ThreadedEngine
from tests.end_to_end.tiny_runs import (
    MODEL,
    hanging_program,
    losses,
    make_plan,
    make_program,
    same_bits,
    start,
    train,
)
from tests.targets.runtime.engine.test_engine import LAYOUTS, updates_on_the_host


@pytest.mark.parametrize(
    ("name", "kernels"),
    [*((name, "fast") for name in [*LAYOUTS, "host-updates"]), ("2-stages-2-replicas", "reference")],
)
@pytest.mark.sampled(3)
def test_the_same_bits_as_in_order(name: str, kernels: str) -> None:
    program = make_program(**LAYOUTS[name]) if name in LAYOUTS else updates_on_the_host()
    ordered = train(program, 3, kernels=kernels)
    for _ in range(2):
        threaded = train(program, 3, kernels=kernels, threads=2, poison=True)
        assert isinstance(threaded.engine, ThreadedEngine)
        assert losses(threaded) == losses(ordered)
        same_bits(threaded, ordered)


def test_a_prescribed_order_is_kept() -> None:
    run = start(make_program(), 1, threads=2, interleave_seed=1)
    assert not isinstance(run.engine, ThreadedEngine)


def test_ranks_compute_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward ops of both replicas wait for each other: one after the other, neither would end."""
    run = start(make_program(pp=1), 1, threads=2)
    both = threading.Barrier(2, timeout=20)
    execute = run.engine.execute
    met: set[int] = set()

    def meet_once(members: Any, step: int) -> None:
        rank, instruction = members[0]
        if instruction.routine is not None and rank.replica not in met:
            met.add(rank.replica)
            both.wait()
        execute(members, step)

    monkeypatch.setattr(run.engine, "execute", meet_once)
    list(run.steps())
    assert met == {0, 1}


def test_a_collective_runs_beside_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reduce-scatter ends only after a block op has begun and ended meanwhile.

    Links are slow, so that allocation leaves the gradients' bytes alone while they are reduced.
    """
    machine = load_machine(None)
    slow = {"link_bandwidth": evolve(machine.constants["link_bandwidth"], value=1e3)}
    machine = evolve(machine, constants=machine.constants | slow)
    plan = make_plan(zero=2, reduce="each-micro-batch")
    run = start(api.emit(api.compile(MODEL, plan, machine=machine), machine=machine), 1, threads=2)
    execute = run.engine.execute
    computed, reducing, seen = threading.Event(), threading.Event(), threading.Lock()
    beside: list[bool] = []

    def watch(members: Any, step: int) -> None:
        _, instruction = members[0]
        first = instruction.keyword == "reduce_scatter" and seen.acquire(blocking=False)
        if first:
            reducing.set()
            beside.append(computed.wait(timeout=20))
        execute(members, step)
        if instruction.routine is not None and reducing.is_set():
            computed.set()

    monkeypatch.setattr(run.engine, "execute", watch)
    list(run.steps())
    assert beside == [True]


def test_what_an_engine_raises_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(make_program(), 1, threads=2)
    execute = run.engine.execute

    def break_down(members: Any, step: int) -> None:
        if members[0][1].keyword == "update":
            raise ArithmeticError("broken")
        execute(members, step)

    monkeypatch.setattr(run.engine, "execute", break_down)
    with pytest.raises(ArithmeticError, match="broken"):
        list(run.steps())


def test_a_hang_is_found_and_named() -> None:
    run = start(hanging_program(), 2, threads=2, verified=False)
    with pytest.raises(DiagnosticError, match=r"RT093.*the program hangs"):
        list(run.steps())


def test_each_engine_thread_has_its_own_scratch() -> None:
    engine = start(make_program(), 1, threads=2).engine
    ranks = [rank for ranks in engine.ranks for rank in ranks]
    kinds = (Engine.COMPUTE, Engine.COLLECTIVE, Engine.HOST)
    scratches = [engine.scratch_of(rank, kind) for rank in ranks for kind in kinds]
    assert len({id(scratch) for scratch in scratches}) == len(ranks) * len(kinds)
    assert engine.scratch_bytes == sum(scratch.capacity for scratch in scratches)


def test_an_evaluation_between_steps_gives_the_same_loss() -> None:
    found = []
    for threads in (1, 2):
        run = start(make_program(), 2, threads=threads)
        steps = run.steps()
        next(steps)
        loss = run.engine.run_forward(run.engine.batches, 5)
        next(steps)
        found.append((loss, losses(run)))
    assert found[0] == found[1]


def test_small_blocks_run_on_one_thread_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the same model: in blocks of few operations, or of as many as a long sequence has."""
    monkeypatch.setattr("ratrain.ratrainc.running.run_checks.available_threads", lambda: 7)
    model = evolve(MODEL, hidden_size=256, heads=4, kv_heads=4, head_dim=64, ffn_size=704)
    threads = {}
    for seq_len in (16, 1024):
        module = api.compile(model, make_plan(model, seq_len=seq_len))
        threads[seq_len] = default_threads(api.emit(module))
    assert threads == {16: 1, 1024: 7}
