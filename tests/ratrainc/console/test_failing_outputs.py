"""Whatever a run writes or shows beside its state may fail: training goes on, the state is saved, and the end says what is missing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, fail
from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs
from ratrain.ratrainc.console import console
from ratrain.ratrainc.running import run_display, run_log, training
from ratrain.ratrainc.running.training import run_training
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.checkpoint.checkpoint import load_checkpoint
from ratrain.targets.runtime.settings import RunSettings, Saving
from tests.end_to_end.tiny_runs import MODEL, make_program

if TYPE_CHECKING:
    from ratrain.ratrainc.running.run_result import RunResult

SMALL = evolve(MODEL, vocab_size=256)
PROGRAM = make_program(SMALL, pp=1, dp=1, micro_batches=1)
STEPS = 4


def no_space(*words: Any, **named: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def refused(*words: Any, **named: Any) -> Any:
    fail("RT002", f"cannot write: {os.strerror(errno.ENOSPC)}")


def broken(*words: Any, **named: Any) -> Any:
    raise LookupError("a fault of the picture")


class Terminal:
    is_terminal = True

    def __getattr__(self, name: str) -> Any:
        return getattr(console.errors(), name)


def breaks(name: str) -> Callable[[pytest.MonkeyPatch, Path], Outputs]:
    """Break one output; what it is asked for with."""

    def apply(patch: pytest.MonkeyPatch, folder: Path) -> Outputs:
        if name == "log":
            return Outputs(log="/dev/full")
        if name in ("plot", "profile"):
            patch.setattr(training, {"plot": "write_losses", "profile": "write_profile"}[name], refused)
            return Outputs(**{name: str(folder / name)})
        if name == "live":
            patch.setattr(run_display, "errors", Terminal)
            patch.setattr(run_display, "_live_view", broken)
            return Outputs()
        patch.setattr(run_display, {"words": "say", "bar": "_progress_bar"}[name], no_space)
        return Outputs()

    return apply


KINDS = {"log": 1, "plot": 1, "profile": 1, "live": 0, "words": 0, "bar": 0}
"""What can fail, and the exit code then: what was to be read afterwards is missing, what was to be seen is gone."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_failing_output_never_costs_the_state(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "run1"
    outputs = breaks(kind)(monkeypatch, tmp_path)
    settings = RunSettings(steps=STEPS, saving=Saving(str(place)))
    result: RunResult = run_training(PROGRAM, DataChoice(), settings, outputs, Display(live=kind == "live"))
    assert len(result.steps) == STEPS
    assert load_checkpoint(str(place), SMALL)[0].step == STEPS
    assert result.exit_code == KINDS[kind]
    assert len(result.problems) == KINDS[kind]
    assert len(result.to_json()["diagnostics"]) == KINDS[kind]
    said = capfd.readouterr().err
    assert said.count("warning[RT002]") == (0 if kind in ("plot", "profile") else 1)
    assert said.count("error[RT002]") == KINDS[kind]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.sampled(2)
def test_a_run_whose_reader_is_gone_goes_on_and_saves(as_json: bool, tmp_path: Path) -> None:
    place, file = tmp_path / "run1", tmp_path / "t.rtx"
    write_program(PROGRAM, str(file))
    inbox, outbox = os.pipe()
    os.close(inbox)
    words = ["run", str(file), "--steps", "3", "--save", str(place), *(["--json"] if as_json else [])]
    done = subprocess.run(
        [sys.executable, "-m", "ratrain", *words], check=False, stdout=outbox, stderr=subprocess.PIPE, text=True
    )
    os.close(outbox)
    assert load_checkpoint(str(place), SMALL)[0].step == 3
    assert (done.returncode, done.stderr.count("continues without being shown")) == (0, 0 if as_json else 1)
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["passes"], ["passes", "--help"]])
def test_a_command_whose_reader_is_gone_ends_quietly(words: list[str]) -> None:
    inbox, outbox = os.pipe()
    os.close(inbox)
    done = subprocess.run(
        [sys.executable, "-m", "ratrain", *words], check=False, stdout=outbox, stderr=subprocess.PIPE, text=True
    )
    os.close(outbox)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_log_goes_on_where_it_stopped_when_there_is_space_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind half a line; no step is missing, none is there twice, and it is told once."""
    told: list[Diagnostic] = []
    original, calls = os.write, [0]

    def write(handle: int, data: Any) -> int:
        calls[0] += 1
        if calls[0] in (2, 4, 5):
            no_space()
        return original(handle, bytes(data)[: 7 if calls[0] == 3 else None])

    path = tmp_path / "log"
    result = run_training(PROGRAM, DataChoice(), RunSettings(steps=5), Outputs(), Display(quiet=True))
    with monkeypatch.context() as patched, run_log.run_log(str(path), 0, told.append) as log:
        assert log is not None
        patched.setattr(run_log.os, "write", write)
        for step in result.steps:
            log.write(step)
        assert log.problem is None
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3, 4]
    assert len(told) == 1


def test_a_plot_that_was_there_stays_until_the_new_one_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = tmp_path / "loss.svg"
    plot.write_text("the old one")
    original = training.prepare

    def prepare(*words: Any, **named: Any) -> Any:
        assert plot.read_text() == "the old one"
        return original(*words, **named)

    monkeypatch.setattr(training, "prepare", prepare)
    monkeypatch.setattr(
        "ratrain.targets.runtime.engine.local.LocalEngine.run_step", lambda engine, step: fail("RT093", "diverged")
    )
    with pytest.raises(Exception, match="diverged"):
        run_training(PROGRAM, DataChoice(), RunSettings(steps=1), Outputs(plot=str(plot)), Display(quiet=True))
    assert plot.read_text() == "the old one"
