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
from ratrain.ratrain_ir.frontend.plan import Plan
from ratrain.ratrainc.weight_export import export_weights
from ratrain.targets.program.rtx import write_program
from tests.end_to_end.tiny_runs import MODEL

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.model_config import ModelConfig

MIB = 1 << 20
CONSTANT = 256 * MIB
"""Python, numpy, numba and its compiled kernels, the program, the built-in text; docs/runtime.md states it."""


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
    planned = said["arena_bytes"] + said["scratch_bytes"] + said["transport_bytes"]
    print(f"peak {peak / MIB:.0f} MiB = {planned / MIB:.0f} planned + {(peak - planned) / MIB:.0f}")  # noqa: T201
    assert 0.8 * planned < peak < planned + CONSTANT
    assert said["constant_bytes"] < CONSTANT
    assert abs(said["peak_resident_bytes"] - peak) < MIB, "what the run says is what its parent is told"


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
