"""The log of a run: whole after an interruption, and continued by the run that resumes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError
from ratrain.ratrainc.running.run_log import run_log
from tests.end_to_end.tiny_runs import make_program, start


def logged(path: Path, steps: int, place: str, *, resume: bool = False) -> list[int]:
    """Train so many steps with a log and a saved series; the steps that the log tells of then."""
    run = start(make_program(), steps, save=place, save_every=1, resume=place if resume else None)
    with run_log(str(path), run.first_step) as log:
        assert log is not None
        for step in run.steps():
            log.write(step)
    return [json.loads(line)["step"] for line in path.read_text("utf-8").splitlines()]


@pytest.fixture
def place(tmp_path: Path) -> str:
    return str(tmp_path / "series")


@pytest.mark.parametrize("end", ["", '{"step": 2, "loss"', '{"step": 2, "loss": 1.0}\n{"step": 3}\n'])
def test_a_resumed_run_goes_on_behind_the_steps_before_it(tmp_path: Path, place: str, end: str) -> None:
    path = tmp_path / "losses.jsonl"
    assert logged(path, 2, place) == [0, 1]
    first = path.read_text("utf-8")
    path.write_text(first + end, "utf-8")
    assert logged(path, 2, place, resume=True) == [0, 1, 2, 3]
    assert path.read_text("utf-8").startswith(first)


def test_a_resumed_run_may_begin_a_log(tmp_path: Path, place: str) -> None:
    logged(tmp_path / "before.jsonl", 1, place)
    assert logged(tmp_path / "losses.jsonl", 2, place, resume=True) == [1, 2]


def test_steps_that_are_missing_before_a_resumed_run_are_told(tmp_path: Path) -> None:
    """The disk was full under the log, and the state was saved elsewhere."""
    path = tmp_path / "losses.jsonl"
    for steps, told in ((3, "ends with step 2, and this run begins with step 5"), (5, "")):
        said: list[Diagnostic] = []
        path.write_text("".join(f'{{"step": {step}}}\n' for step in range(steps)), "utf-8")
        with run_log(str(path), 5, said.append):
            pass
        assert [told in warning.message for warning in said] == [True] * bool(told)
        assert path.read_text("utf-8").count("\n") == steps


def test_a_run_from_the_start_begins_its_log_anew(tmp_path: Path) -> None:
    path = tmp_path / "losses.jsonl"
    assert logged(path, 2, str(tmp_path / "first")) == [0, 1]
    assert logged(path, 1, str(tmp_path / "second")) == [0]


@pytest.mark.parametrize("text", ["a note\n", "a note", '{"step": 0}\n{"steps": 1}\n', '["step"]\n'])
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.sampled(2)
def test_a_file_that_is_no_log_is_left_alone(tmp_path: Path, place: str, text: str, *, resume: bool) -> None:
    if resume:
        logged(tmp_path / "before.jsonl", 1, place)
    path = tmp_path / "notes.txt"
    path.write_text(text, "utf-8")
    with pytest.raises(DiagnosticError, match=r"RT002.*not a line of a run's log"):
        logged(path, 1, place, resume=resume)
    assert path.read_text("utf-8") == text


def test_a_last_line_that_lacks_only_its_end_is_kept_as_a_line(tmp_path: Path, place: str) -> None:
    path = tmp_path / "losses.jsonl"
    logged(path, 2, place)
    path.write_text(path.read_text("utf-8").removesuffix("\n"), "utf-8")
    assert logged(path, 2, place, resume=True) == [0, 1, 2, 3]
