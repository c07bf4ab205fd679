"""`ratrainc precompile`: what it compiled, no command that follows compiles again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COUNTING = """
import sys
from ratrain.ratrainc.cli import main
from ratrain.ratrain_ir.support.loops import compiled_anew

code = main(sys.argv[1:])
print(compiled_anew(), file=sys.stderr)
sys.exit(code)
"""


def compiled_by(folder: Path, *words: str, **variables: str) -> tuple[int, str]:
    """How many loops a command compiled, and what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTING, *words],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stderr.split()[-1]), done.stdout


@pytest.mark.full
def test_what_was_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    compiled_by(tmp_path, "precompile")
    count, printed = compiled_by(tmp_path, "precompile", "--json")
    assert count == json.loads(printed)["loops"] == 0
    assert compiled_by(tmp_path, "quickstart", "--steps", "1")[0] == 0


@pytest.mark.full
def test_a_first_run_finds_all_in_a_new_folder(tmp_path: Path) -> None:
    folder = {"NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    count, printed = compiled_by(tmp_path, "precompile", **folder)
    assert count > 30
    assert f"{count} loops compiled in " in printed
    assert f"kept in {folder['NUMBA_CACHE_DIR']}" in printed
    seven = ("--model", "llama-2-7b", "--plan", str(ROOT / "examples" / "llama-2-7b-8.toml"))
    for words in (  # as many buffers and ops as loops are worth
        ["quickstart", "--steps", "1"],
        ["compile", *seven, "-o", "7b.rtx"],
        ["report", "7b.rtx", "-o", "7b.html"],
        ["explain", "7b.rtx", "--time"],
    ):
        assert compiled_by(tmp_path, *words, **folder)[0] == 0, words
    more, _ = compiled_by(tmp_path, "precompile", "--dtype", "bf16", **folder)
    assert 0 < more < count


@pytest.mark.full
def test_what_is_compiled_beside_a_first_quickstart_is_what_it_needs(tmp_path: Path) -> None:
    """Attention as `ahead` calls it is kept for the types that the quickstart calls it with."""
    folder = {"NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    script = """
import sys
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.runtime.kernels.fast import ahead
ahead.attend(Dtype.F16)
"""
    subprocess.run([sys.executable, "-c", script], env={**os.environ, **folder}, check=True)
    kept = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "loops").rglob("attention_loops.*.nb?")}
    assert any("forward_head" in name for name in kept)
    assert any("backward_head" in name for name in kept)
    assert compiled_by(tmp_path, "quickstart", "--steps", "1", **folder)[0] > 0
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "loops").rglob("attention_loops.*.nb?")} == kept


def test_nothing_to_compile_with_is_refused(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "ratrain", "precompile"]
    done = subprocess.run(
        words, env={**os.environ, "NUMBA_DISABLE_JIT": "1"}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "unset NUMBA_DISABLE_JIT" in done.stderr
