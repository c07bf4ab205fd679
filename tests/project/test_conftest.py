"""The test harness itself: a golden file that differs must fail, and the settings of the gate must be in force."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from threadpoolctl import threadpool_info


@pytest.fixture
def make_golden(golden: Any, tmp_path: Path) -> Any:
    """Make a `Golden` on a folder of its own, whether or not this run updates the real one."""
    return lambda *, update: type(golden)(tmp_path, update)


def test_golden_accepts_the_same_text(make_golden: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\ntwø\n".encode())
    make_golden(update=False)("a.txt", "one\ntwø\n")


@pytest.mark.parametrize("text", ["one\n", "one\n2\n", "one\ntwo", "one\r\ntwo\n", ""])
def test_golden_rejects_any_other_text(make_golden: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\n")
    with pytest.raises(pytest.fail.Exception, match="--update-golden") as failure:
        make_golden(update=False)("a.txt", text)
    assert "--- golden/a.txt" in str(failure.value)
    assert (tmp_path / "a.txt").read_bytes() == b"one\ntwo\n"


def test_golden_rejects_a_missing_file(make_golden: Any, tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="no golden file"):
        make_golden(update=False)("a.txt", "one\n")
    assert not (tmp_path / "a.txt").exists()


def test_golden_update_writes_what_is_accepted_afterwards(make_golden: Any, tmp_path: Path) -> None:
    make_golden(update=True)("deep/a.txt", "new\r\n")
    assert (tmp_path / "deep" / "a.txt").read_bytes() == b"new\r\n"
    make_golden(update=False)("deep/a.txt", "new\r\n")


def test_golden_shows_a_bounded_part_of_a_long_difference(make_golden: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old\n" * 5000)
    with pytest.raises(pytest.fail.Exception, match="more lines") as failure:
        make_golden(update=False)("a.txt", "new\n" * 5000)
    assert str(failure.value).count("\n") < 250


def test_blas_has_one_thread() -> None:
    matrix = np.ones((2, 2), dtype=np.float32)
    assert (matrix @ matrix).sum() == 8  # BLAS is loaded
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    assert [pool["num_threads"] for pool in pools] == [1] * max(1, len(pools))
    assert os.environ["OPENBLAS_NUM_THREADS"] == "1"


def test_the_gate_is_derandomised(pytestconfig: pytest.Config) -> None:
    profile = pytestconfig.getoption("--hypothesis-profile") or "gate"
    assert settings.get_current_profile_name() == profile
    assert settings().derandomize == (profile == "gate")


@pytest.mark.xdist_group("kept-together")
def test_groups_of_tests_are_kept_together(request: pytest.FixtureRequest) -> None:
    """Under `--dist loadgroup` a test's id ends with its group, by which pytest-xdist sends it to one process."""
    wanted = getattr(request.config.option, "loadgroup", False)
    assert request.node.nodeid.endswith("@kept-together") == wanted


ROOT = Path(__file__).parents[2]
SAMPLED = """
import pytest


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
@pytest.mark.sampled(7)
def test_of_families(family, seed): ...


@pytest.mark.parametrize(("dtype", "seed"), [("f16", 0), ("f16", 1), ("bf16", 0), ("f16", 2)])
@pytest.mark.sampled(4)
def test_of_dtypes(dtype, seed): ...


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.sampled(3, first=1)
def test_of_seeds(seed): ...


@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("seed", range(5))
def test_of_a_group(seed): ...
"""


def collected(folder: Path, *options: str) -> list[str]:
    """The tests that pytest finds in `SAMPLED` under the conftest of this project."""
    (folder / "test_sampled.py").write_text(SAMPLED, "utf-8")
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "tests.conftest", "--collect-only"]
    done = subprocess.run(
        [*command, "-o", "addopts=", "--import-mode=importlib", "-q", *options, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [line.rpartition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert names, done.stdout + done.stderr
    return names


def test_a_sample_has_one_of_each_kind(tmp_path: Path) -> None:
    names = collected(tmp_path, "-m", "not full", "-k", "not group")
    families = [name for name in names if "families" in name]
    assert {name.split("[")[1].split("-")[0] for name in families} == {"llama", "gpt2", "phi3"}
    assert len(families) <= 5, "one in seven, and what these lack"
    assert [name for name in names if "dtypes" in name] == ["test_of_dtypes[f16-0]", "test_of_dtypes[bf16-0]"]
    assert [name for name in names if "seeds" in name] == ["test_of_seeds[1]", "test_of_seeds[4]"]


def test_shards_make_up_all_tests_and_keep_groups(tmp_path: Path) -> None:
    whole, shards = collected(tmp_path), [collected(tmp_path, "--shard", f"{k}/3") for k in (1, 2, 3)]
    assert sorted(name for shard in shards for name in shard) == sorted(whole)
    assert all(sum("group" in name for name in shard) in (0, 5) for shard in shards)


def test_tests_execute_programs_out_of_their_files() -> None:
    """A program that is only in memory hides what a reader refuses."""
    preparing = "runtime.preparation import prepare"
    found = [path.name for path in sorted((ROOT / "tests").rglob("*.py")) if preparing in path.read_text("utf-8")]
    assert found == [Path(__file__).name]
