"""Compiled loops where nothing can be kept: they compile, run, and one line says so."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from ratrain.ratrain_ir.support import loops
from ratrain.ratrainc.running.examples import example_path

ROOT = Path(__file__).parents[2]
MODEL, PLAN = str(example_path("tiny.json")), str(example_path("tiny.toml"))
HOMELESS = """\
import sys
from numba.core.caching import _CacheLocator

def refuse(self):
    raise PermissionError(13, "Permission denied")

_CacheLocator.ensure_cache_path = refuse
from ratrain.ratrain_ir.support import native_loops

native_loops.can_be_written = lambda folder: False
from ratrain.ratrainc.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""A command in a process whose package folder and home cannot be written: not to be had for the superuser."""


def run(folder: Path, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process, in a folder."""
    command = [sys.executable, "-c", script, *words]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_what_was_compiled_is_told_from_what_was_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def twice(x: int) -> int:
        return x + x

    before = loops.compiled_anew()
    assert not loops.is_kept(loops.compiled(twice))
    assert loops.compiled(twice)(3) == 6
    assert loops.compiled_anew() == before + 1
    assert loops.is_kept(loops.compiled(twice))
    assert loops.compiled(twice)(4) == 8
    assert loops.compiled_anew() == before + 1
    assert loops.is_kept(twice)  # a plain function is never compiled


def test_a_kernel_set_tells_whether_its_kernels_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from ratrain.targets.mt3000.kernels.tiled import Tiled
    from ratrain.targets.runtime.kernels.fast import fast
    from ratrain.targets.runtime.kernels.reference.reference import ReferenceKernels

    monkeypatch.setattr(fast, "is_kept", lambda loop: loop is not fast.fast_rows.swiglu_forward)
    assert fast.Fast().compiles_for({"gemm", "swiglu_forward"})
    assert not fast.Fast().compiles_for({"gemm", "swiglu_backward"})
    assert not ReferenceKernels().compiles_for({"swiglu_forward"})
    assert Tiled().compiles_for({"swiglu_forward"})
    monkeypatch.setattr(fast, "is_kept", lambda loop: loop is not fast.forward_head)
    assert fast.Fast().compiles_for({"attention_forward"})
    assert not Tiled().compiles_for({"attention_forward"})  # it has its own


@pytest.mark.full
def test_a_run_without_a_place_for_a_cache(tmp_path: Path) -> None:
    """The first command that needs a compiled loop says so once; compiling a small model needs none."""
    made = run(tmp_path, HOMELESS, "compile", "--model", MODEL, "--plan", PLAN, "-o", "a.rtx")
    assert made.returncode == 0, made.stderr
    assert "not kept" not in made.stderr
    found = run(tmp_path, HOMELESS, "run", "a.rtx", "--steps", "1")
    assert found.returncode == 0, found.stderr
    warned = [line for line in found.stderr.splitlines() if line.startswith("warning:")]
    assert len(warned) == 1, found.stderr
    assert warned[0].startswith("warning: compiled loops are not kept")
    assert "set NUMBA_CACHE_DIR" in warned[0]


@pytest.mark.full
def test_workers_of_a_search_say_it_once(tmp_path: Path) -> None:
    """They are processes of their own, which read the script again."""
    words = ("plan", "--model", MODEL, "--clusters", "2", "--global-batch", "8", "--seq-len", "32", "--seconds", "2")
    (tmp_path / "homeless.py").write_text(HOMELESS.replace("sys.exit", 'if __name__ == "__main__": sys.exit'))
    command = [sys.executable, "homeless.py", *words, "--jobs", "2"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stderr.count("not kept") == 1, found.stderr
    assert found.stderr.startswith("warning: compiled loops")


@pytest.mark.full
def test_kernels_and_loops_import_and_agree_without_a_cache(tmp_path: Path) -> None:
    """Every module that has compiled functions; one kernel and one loop are run."""
    script = HOMELESS.replace("from ratrain.ratrainc.cli import main\nsys.exit(main(sys.argv[1:]))\n", "")
    script += """
import warnings
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from ratrain.targets.runtime.kernels import kernel_set
    from ratrain.targets.runtime.kernels.fast import attention_loops, fast_flat, fast_head, fast_rows
    from ratrain.ratrain_ir.support.loops import compiled
    from ratrain.passes.memory.allocation import sweep, tree, valleys
    fast = kernel_set("fast", 1)
assert [str(each.category.__name__) for each in said] == ["UncachedWarning"], said
@compiled
def total(n):
    found = 0
    for i in range(n):
        found += i
    return found
assert total(5) == 10
assert total.stats.cache_path is None
print("compiled")
"""
    found = run(tmp_path, script)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "compiled\n"


def test_processes_that_start_together_compile_a_loop_once(tmp_path: Path) -> None:
    """One compiles it, and what it calls; the other waits, and reads both."""
    (tmp_path / "sums.py").write_text("""
import sys
from ratrain.ratrain_ir.support.loops import compiled

@compiled
def square(n):
    return n * n

@compiled
def squares(n):
    found = 0
    for i in range(n):
        found += square(i)
    return found

if __name__ == "__main__":
    from sums import squares
    print("ready", flush=True)
    sys.stdin.readline()
    assert squares(4) == 14
    print(sum(squares.stats.cache_misses.values()), sum(squares.stats.cache_hits.values()))
""")
    command = [sys.executable, "sums.py"]
    processes = [
        subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:  # from here on both compile
        process.stdin.write("\n")
        process.stdin.flush()
    found = sorted(process.communicate(timeout=300)[0] for process in processes)
    assert found == ["0 1\n", "1 0\n"]


def test_a_constant_of_another_file_is_not_kept_with_its_old_value(tmp_path: Path) -> None:
    """Nor what a function calls: numba itself looks at the time of the function's own file alone."""
    (tmp_path / "sums.py").write_text("""
import terms
from terms import FIRST
from ratrain.ratrain_ir.support.loops import compiled

term = terms.term

@compiled
def total(n):
    return FIRST + term(n)

print(total(3))
""")
    printed = []
    for first, factor in ((1, 1), (1, 1), (5, 1), (5, 2)):
        (tmp_path / "terms.py").write_text(f"""
from ratrain.ratrain_ir.support.loops import compiled

FIRST = {first}

@compiled
def term(n):
    return {factor} * n
""")
        printed.append(run(tmp_path, "import sums", PYTHONDONTWRITEBYTECODE="1"))
    assert [int(found.stdout) for found in printed] == [4, 4, 8, 11], printed[-1].stderr


def test_one_helper_keeps_compiled_functions() -> None:
    """Nothing else asks numba to cache: that raises where there is no place."""
    paths = [
        path for package in ("ratrain_ir", "passes", "targets", "ratrainc") for path in (ROOT / package).rglob("*.py")
    ]
    found = [
        path.relative_to(ROOT).as_posix()
        for path in paths
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.keyword) and node.arg == "cache"
    ]
    assert found == ["ratrain_ir/support/loops.py"]


@pytest.mark.parametrize("disabled", ["0", "1"])
@pytest.mark.sampled(2)
def test_doctor_says_where_kernels_are_kept(tmp_path: Path, disabled: str) -> None:
    found = run(tmp_path, HOMELESS, "doctor", NUMBA_DISABLE_JIT=disabled)
    assert "internal error" not in found.stderr
    wanted = "compiles nothing" if disabled == "1" else "no place to keep kernels"
    assert wanted in found.stdout
