"""What a run holds in memory: the arena, the scratch that it prints, messages on their way, and a constant."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.frontend.plan import Plan
from ratrain.targets.program.rtx import write_program
from tests.end_to_end.tiny_runs import MODEL

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


def resident(folder: Path, layers: int, *, threads: int) -> tuple[int, dict[str, Any]]:
    """Peak resident bytes of two steps of a program of one rank, and what the run said."""
    model = evolve(
        MODEL, vocab_size=4096, hidden_size=512, layers=layers, heads=8, kv_heads=8, head_dim=64, ffn_size=1376
    )
    path = folder / "one.rtx"
    write_program(api.emit(api.compile(model, Plan(1, 1, (), 4, 1, 512))), str(path))
    command = [sys.executable, "-m", "ratrain", "run", str(path), "--steps", "2", "--threads", str(threads), "--json"]
    measured = [sys.executable, "-c", _MEASURED, *command]
    result = subprocess.run(measured, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    said, _, kibibytes = result.stdout.rstrip().rpartition("\n")
    return int(kibibytes) * 1024, json.loads(said)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux only")
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
    peak, said = resident(tmp_path, layers, threads=threads)
    assert said["arena_bytes"] >= arena
    planned = said["arena_bytes"] + said["scratch_bytes"] + said["transport_bytes"]
    print(f"peak {peak / MIB:.0f} MiB = {planned / MIB:.0f} planned + {(peak - planned) / MIB:.0f}")  # noqa: T201
    assert 0.8 * planned < peak < planned + CONSTANT
