"""SIGTERM and Ctrl-C end a run after its step; the exit code says which, and whether the state was saved."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from attrs import evolve

from ratrainc.cli import main
from ratrainc.training import StopAsked, run_training
from ratrainc.training_data import DataChoice
from targets.runtime.checkpoint_series import saved_steps
from targets.runtime.local import LocalEngine, StepReport
from targets.runtime.training import RunSettings
from tests.unit.tiny_runs import MODEL, make_program


@pytest.mark.parametrize(
    ("number", "saves", "code"),
    [(signal.SIGTERM, True, 75), (signal.SIGTERM, False, 143), (signal.SIGINT, True, 130)],
)
def test_a_signal_ends_a_run_after_its_step(number: int, saves: bool, code: int, tmp_path: Path) -> None:
    program = make_program(evolve(MODEL, vocab_size=256))
    log, place = tmp_path / "losses.jsonl", tmp_path / "run"
    settings = RunSettings(steps=100_000, save=str(place) if saves else None, save_every=1000 if saves else None)

    def send() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") > 2):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    sender = threading.Thread(target=send)
    sender.start()
    result = run_training(program, DataChoice(), settings, str(log), quiet=True)
    sender.join()
    assert result.exit_code == code
    assert result.interrupted
    assert 2 < len(result.steps) < 100_000
    assert signal.getsignal(number) is handler
    if saves:
        assert [step for step, _ in saved_steps(str(place))] == [len(result.steps)]


def test_a_signal_that_comes_while_stderr_is_written_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python refuses to write to a stream from a handler that has interrupted a write to it."""
    inbox, outbox = os.pipe()

    class Busy(io.StringIO):
        def write(self, text: str) -> int:
            raise RuntimeError("reentrant call")

        def fileno(self) -> int:
            return outbox

    stop = StopAsked()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", Busy())
        stop.handle(signal.SIGTERM, None)
    os.close(outbox)
    with os.fdopen(inbox, "rb") as said:
        assert b"ending after this step" in said.read()
    assert stop.signal == signal.SIGTERM


def test_a_stream_without_a_file_disturbs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopAsked()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", io.StringIO())
        stop.handle(signal.SIGINT, None)
    with pytest.raises(KeyboardInterrupt):
        stop.handle(signal.SIGINT, None)


def test_quickstart_ends_with_the_code_of_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LocalEngine.run_step

    def terminated(engine: LocalEngine, step: int) -> StepReport:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(engine, step)

    monkeypatch.setattr(LocalEngine, "run_step", terminated)
    assert main(["quickstart", "--steps", "3"]) == 143
