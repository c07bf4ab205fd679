"""One run alone writes to a place: a second is refused and told who is there, a killed one blocks nobody."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Severity
from ratrain.ratrainc.running.run_log import run_log
from ratrain.ratrainc.running.supervisor import Supervisor
from ratrain.targets.runtime.arena import locks
from ratrain.targets.runtime.arena.locks import hold
from ratrain.targets.runtime.checkpoint.checkpoint_series import saved_steps
from ratrain.targets.runtime.watch.positions import RunFolder
from tests.end_to_end.tiny_runs import make_program, start, train

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = make_program(pp=1, dp=1, micro_batches=1)

HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from ratrain.ratrainc.running.run_log import run_log
from ratrain.targets.runtime.checkpoint.checkpoint import hold_checkpoint_place
from ratrain.targets.runtime.watch.positions import RunFolder
kind, place = sys.argv[2:]
held = {"save": hold_checkpoint_place, "log": lambda p: run_log(p, 0), "run": lambda p: RunFolder(p).hold()}[kind](place)
with held:
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(kind: str, place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has locked a place, until the block ends; then it was killed."""
    words = [sys.executable, "-c", HOLDER, str(ROOT), kind, str(place)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def write_log(path: Path) -> None:
    with run_log(str(path), 0) as log:
        assert log is not None


WRITERS: dict[str, tuple[str, Any]] = {
    "a single checkpoint": ("save", lambda place: train(PROGRAM, 1, save=str(place))),
    "a series": ("save", lambda place: train(PROGRAM, 1, save=str(place), save_every=1)),
    "a log": ("log", write_log),
    "a run folder": ("run", lambda place: start(PROGRAM, 1, run_folder=str(place))),
    "a launcher": ("run", lambda place: Supervisor(RunFolder(str(place)), None).run([sys.executable, "-c", ""], {})),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_second_writer_is_refused_by_name_and_a_killed_one_blocks_nobody(writer: str, tmp_path: Path) -> None:
    kind, write = WRITERS[writer]
    place = tmp_path / "place"
    with another_process(kind, place) as other:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        with pytest.raises(DiagnosticError) as caught:
            write(place)
        (problem,) = caught.value.diagnostics
        assert f"process {other.pid} on" in problem.message
        assert f"'{place}'" in problem.message
        assert problem.help
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert list(tmp_path.rglob(".*lock"))  # it was killed, and has left its lock file
    write(place)
    assert not list(tmp_path.rglob(".*lock"))
    assert place.exists()


def test_a_run_keeps_its_place_until_it_is_closed(tmp_path: Path) -> None:
    """Also between its start and its first save, and when it is just let go."""
    run = start(PROGRAM, 1, save=str(tmp_path / "place"))
    assert (tmp_path / ".place.lock").exists()
    list(run.steps())
    run.save()
    assert (tmp_path / ".place.lock").exists()
    run.close()
    assert not (tmp_path / ".place.lock").exists()
    run = start(PROGRAM, 1, save=str(tmp_path / "place"))
    del run
    assert not (tmp_path / ".place.lock").exists()


def test_a_series_below_a_folder_that_is_not_there_yet_is_locked(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there" / "place"
    run = start(PROGRAM, 1, save=str(place), save_every=1)
    assert not run.warnings
    assert (place.parent / ".place.lock").exists()
    run.close()


def test_a_series_that_a_run_may_not_add_to_is_left_as_it_is(tmp_path: Path) -> None:
    """What a save has left there too."""
    place = tmp_path / "place"
    train(PROGRAM, 1, save=str(place), save_every=1).close()
    left = place / ".writing-00000002"
    left.mkdir()
    with pytest.raises(DiagnosticError, match="this run starts after step 0"):
        start(PROGRAM, 1, save=str(place), save_every=1)
    assert left.exists()
    start(PROGRAM, 1, save=str(place), save_every=1, resume=str(place)).close()
    assert not left.exists()


def test_a_run_that_cannot_start_keeps_nothing(tmp_path: Path) -> None:
    with pytest.raises(DiagnosticError) as caught:
        start(PROGRAM, 1, save=str(tmp_path / "place"), resume=str(tmp_path / "missing"))
    assert "missing" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, None])
def test_without_locks_a_run_says_so_and_goes_on(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an interrupted save has left is not cleared then: nothing proves that its writer is gone."""

    class NoLocks:
        LOCK_EX = LOCK_NB = 0

        @staticmethod
        def flock(handle: int, operation: int) -> None:
            assert number is not None
            raise OSError(number, os.strerror(number))

    place, left = tmp_path / "place", tmp_path / "place.tmp-ab12cd34"
    train(PROGRAM, 1, save=str(place)).close()
    left.mkdir()
    monkeypatch.setattr(locks, "fcntl", None if number is None else NoLocks)
    run = start(PROGRAM, 1, save=str(place))
    said = [warning.message for warning in run.warnings]
    assert any("cannot be locked" in text and os.strerror(number or errno.ENOSYS) in text for text in said)
    assert any(str(left) in text and "if no run writes there" in text for text in said)
    assert left.exists()
    assert {warning.severity for warning in run.warnings} == {Severity.WARNING}
    told: list[Diagnostic] = []
    with run_log(str(tmp_path / "log"), 0, told.append):
        assert "cannot be locked" in told[0].message


def test_a_lock_file_that_vanished_is_locked_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder ended between opening and locking: a lock on a file without a name would keep nobody away."""
    place, original, opened = tmp_path / "lock", locks._opened, list[int]()

    def removed_once(name: str) -> int:
        opened.append(original(name))
        if len(opened) == 1:
            place.unlink()
        return opened[-1]

    monkeypatch.setattr(locks, "_opened", removed_once)
    with hold(place, "RT092", "x") as lock:
        assert lock.is_held
        assert len(opened) == 2
        assert place.exists()


def test_a_link_in_place_of_a_lock_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep me")
    (tmp_path / "lock").symlink_to(tmp_path / "mine")
    with hold(tmp_path / "lock", "RT092", "x") as lock:
        assert not lock.is_held
    assert (tmp_path / "mine").read_text() == "keep me"


def test_a_directory_above_that_cannot_be_written_holds_no_lock_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "above" / "series"
    place.mkdir(parents=True)
    monkeypatch.setattr(locks.os, "access", lambda path, mode: Path(path) != place.parent)
    train(PROGRAM, 1, save=str(place), save_every=1)
    assert locks.lock_path(str(place)).parent == place
    assert [step for step, _ in saved_steps(str(place))] == [1]
