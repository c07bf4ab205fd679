"""What a run holds in memory: the arena, the scratch that it prints, messages on their way, and a constant."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.running.weight_export import export_weights
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.arena.process_memory import MemoryUse
from ratrain.targets.runtime.training import preparation, training
from tests.end_to_end.tiny_runs import MODEL, train

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

MIB = 1 << 20
CONSTANTS = {"fast": 232, "reference": 96, "torch": 420, "torch-device": 300}
"""MiB by kernel set: Python, libraries, the program, the built-in text, before the arenas are made; docs/runtime.md states what was measured."""


_MEASURED = """
import os, subprocess, sys
with subprocess.Popen(sys.argv[1:]) as process:
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
print(usage.ru_maxrss)
sys.exit(process.returncode)
"""
"""Runs a command and prints its peak. In between because a process's peak counts what its parent held when it was started."""


def resident(folder: Path, model: ModelConfig, plan: Plan, *options: str) -> tuple[int, dict[str, Any]]:
    """Peak resident bytes of a run of a program of one rank, and what the run said."""
    path = folder / "one.rtx"
    write_program(api.emit(api.compile(model, plan)), str(path))
    command = [sys.executable, "-m", "ratrain", "run", str(path), "--json", *options]
    measured = [sys.executable, "-c", _MEASURED, *command]
    result = subprocess.run(measured, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    said, _, kibibytes = result.stdout.rstrip().rpartition("\n")
    return int(kibibytes) * 1024, json.loads(said)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")


@pytest.mark.parametrize(
    ("layers", "threads", "arena"),
    [
        pytest.param(1, 2, 128 * MIB, id="small"),
        pytest.param(14, 1, 1024 * MIB, id="1-GiB", marks=pytest.mark.full),
        pytest.param(14, 2, 1024 * MIB, id="1-GiB-2-threads", marks=pytest.mark.full),
    ],
)
def test_resident_memory_is_arena_and_scratch_and_a_constant(
    tmp_path: Path, layers: int, threads: int, arena: int
) -> None:
    model = evolve(
        MODEL, vocab_size=4096, hidden_size=512, layers=layers, heads=8, kv_heads=8, head_dim=64, ffn_size=1376
    )
    peak, said = resident(tmp_path, model, Plan(1, 1, (), 4, 1, 512), "--steps", "2", "--threads", str(threads))
    assert said["arena_bytes"] >= arena
    planned = said["certified_bytes"] + said["constant_bytes"] + sum(said["first_use"].values())
    print(f"peak {peak / MIB:.0f} MiB of {planned / MIB:.0f} MiB: {(peak - planned) / MIB:+.0f}")  # noqa: T201
    assert 0.8 * planned < peak <= planned
    assert said["constant_bytes"] < CONSTANTS["fast"] * MIB
    assert abs(said["peak_resident_bytes"] - peak) < MIB, "what the run says is what its parent is told"


@pytest.mark.parametrize(
    "kernels",
    ["fast", "reference", *(pytest.param(name, marks=pytest.mark.full) for name in ("torch", "torch-device"))],
)
def test_what_a_run_says_it_takes_at_most_holds_it_whatever_its_kernels(tmp_path: Path, kernels: str) -> None:
    if kernels.startswith("torch"):
        pytest.importorskip("torch")
    options = ("--steps", "2", "--threads", "1", "--kernels", kernels)
    peak, said = resident(tmp_path, evolve(MODEL, vocab_size=512), Plan(1, 1, (), 2, 1, 32), *options)
    planned = said["certified_bytes"] + said["constant_bytes"] + sum(said["first_use"].values())
    assert said["first_use"]
    assert peak <= planned
    assert said["constant_bytes"] < CONSTANTS[kernels] * MIB


def test_a_run_that_may_not_hold_what_libraries_take_does_not_begin(tmp_path: Path) -> None:
    """The bound lies between what was resident before the arenas and what it takes with what is loaded later."""
    program = api.emit(api.compile(MODEL, Plan(1, 1, (), 2, 1, 32)))
    engine = train(program, 0).engine
    engine.expect_steps(3)
    memory = engine.memory_use()
    assert memory.constant_bytes is not None
    assert memory.planned_bytes is not None
    without = memory.certified_bytes + memory.constant_bytes
    assert without < memory.planned_bytes
    preparation._check_ram(memory, memory.planned_bytes)
    with pytest.raises(DiagnosticError, match=r"RT093.*what interpreter and libraries take.*--ram"):
        preparation._check_ram(memory, without)


def test_a_limit_below_interpreter_and_libraries_is_told_the_least_one_and_no_plan() -> None:
    """The limit that is named suffices; a plan is advised only where one can help, and its pipeline can be typed."""
    memory = MemoryUse(100 * MIB, MIB, 0, 120 * MIB, None, {}, first_use={"compiled loops": 8 * MIB + 5})
    preparation._check_ram(memory, 230 * MIB)
    for most, helps in ((128 * MIB, False), (129 * MIB, True)):
        with pytest.raises(DiagnosticError, match=r"this run holds 229\.00 MiB") as refused:
            preparation._check_ram(memory, most)
        (problem,) = refused.value.diagnostics
        assert problem.help is not None
        assert problem.help.startswith("--ram 230MiB")
        assert ("--passes" in problem.help) == helps
    passes = problem.help.partition("--passes '")[2].partition("'")[0]
    machine = Path(__file__).resolve().parents[4] / "examples" / "small-memory.toml"
    assert "file_capacity" in machine.read_text()
    api.compile(MODEL, Plan(1, 1, (), 2, 1, 32, zero=3), passes=passes, machine=str(machine))


def test_a_run_that_has_held_more_than_it_may_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(api.emit(api.compile(MODEL, Plan(1, 1, (), 2, 1, 32))), 0)
    report = run.engine.run_step(0)
    assert report.memory is not None
    peak = report.memory.peak
    for most, anew, words in (
        (peak, 0, None),
        (peak - 1, 0, f"--ram {-(-peak // MIB)}MiB"),
        (peak - 1, 5, "compiled 5 loops"),
    ):
        execution = evolve(run.settings.execution, ram_bytes=most)
        run.settings = evolve(run.settings, execution=execution)
        monkeypatch.setattr(training, "compiled_anew", lambda anew=anew: anew)
        if words is None:
            run._keep_promise(report)
            continue
        with pytest.raises(DiagnosticError, match=f"RT093(.|\n)*{words}"):
            run._keep_promise(report)


VOCABULARY = evolve(MODEL, vocab_size=1 << 17, hidden_size=128, layers=1, ffn_size=64, tied_embeddings=True)
"""A model that is a table of 64 MiB, which embedding and head hold each."""
BEYOND = 32 * MIB
"""More than pieces of a table on their way, and less than half a table. Tables that were drawn as a whole took 98 MiB."""


def beyond(folder: Path, *options: str) -> int:
    """Bytes of a step of that model above what the run said it takes before it began."""
    plan = Plan(1, 1, (), 1, 1, 32)
    options = ("--steps", "1", "--threads", "1", "--kernels", "reference", *options)
    peak, said = resident(folder, VOCABULARY, plan, *options)
    assert said["arena_bytes"] > 384 * MIB
    return int(peak - said["arena_bytes"] - said["scratch_bytes"] - said["constant_bytes"])


@pytest.mark.full
def test_a_large_vocabulary_is_drawn_where_it_stays(tmp_path: Path) -> None:
    assert beyond(tmp_path) < BEYOND


@pytest.mark.full
def test_a_large_vocabulary_is_saved_and_read_where_it_stays(tmp_path: Path) -> None:
    saved, weights = str(tmp_path / "ck"), str(tmp_path / "hf")
    assert beyond(tmp_path, "--save", saved) < BEYOND
    assert beyond(tmp_path, "--resume", saved) < BEYOND
    export_weights(saved, weights)
    assert beyond(tmp_path, "--init", weights, "--tokenizer", "bytes") < BEYOND
