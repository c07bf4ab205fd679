"""The test harness itself: a golden file that differs must fail, and the settings of the gate must be in force."""

from __future__ import annotations

import os
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
