"""SIGTERM, SIGHUP and Ctrl-C end a run after its step, and the exit code says which, and whether the state was saved; SIGUSR1 asks where it is."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console.failures import show_failure
from ratrain.ratrainc.console.signals import StopAsked, ending_signals
from ratrain.ratrainc.running import training
from ratrain.ratrainc.running.training import run_training
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.checkpoint import checkpoint_places
from ratrain.targets.runtime.checkpoint.checkpoint_series import saved_steps
from ratrain.targets.runtime.engine.local import LocalEngine
from ratrain.targets.runtime.training.training import TrainingRun
from tests.end_to_end.tiny_runs import MODEL, make_program, run_settings

if TYPE_CHECKING:
    from ratrain.targets.runtime.engine.engine import StepReport


@pytest.fixture(autouse=True)
def _signals_as_at_a_terminal() -> Iterator[None]:
    """Take signals as at a terminal: under `nohup`, or behind a `&` of a script, tests start with some of them ignored.

    A second Ctrl-C leaves it without effect until the command ends.
    """
    at_terminal = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in at_terminal.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("number", "saves", "code"),
    [
        (signal.SIGTERM, True, 75),
        (signal.SIGTERM, False, 143),
        (signal.SIGHUP, True, 75),
        (signal.SIGHUP, False, 129),
        (signal.SIGINT, True, 130),
    ],
)
@pytest.mark.sampled(2)
def test_a_signal_ends_a_run_after_its_step(number: int, saves: bool, code: int, tmp_path: Path) -> None:
    program = make_program(evolve(MODEL, vocab_size=256))
    log, place = tmp_path / "losses.jsonl", tmp_path / "run"
    settings = run_settings(100_000, save=str(place) if saves else None, save_every=1000 if saves else None)

    def send() -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") > 2):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    sender = threading.Thread(target=send)
    sender.start()
    result = run_training(program, DataChoice(), settings, Outputs(log=str(log)), Display(quiet=True))
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


def test_one_process_of_a_run_answers_a_signal(capfd: pytest.CaptureFixture[str]) -> None:
    """All of them take it: the others end after the same step, and at once on a second Ctrl-C."""
    for speaks in (True, False, False):
        stop = StopAsked(speaks=speaks)
        stop.handle(signal.SIGINT, None)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            stop.handle(signal.SIGINT, None)
        StopAsked(speaks=speaks).handle(signal.SIGTERM, None)
    assert capfd.readouterr().err.count("ending after this step") == 2


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


def test_nohup_keeps_ignoring(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending_signals() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ending_signals() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def signalled(monkeypatch: pytest.MonkeyPatch, *at: int, number: int) -> None:
    """Have a process send itself a signal when it comes to these steps, and listen for a moment."""
    original = LocalEngine.run_step

    def run_step(engine: LocalEngine, step: int) -> StepReport:
        if step in at:
            os.kill(os.getpid(), number)
            time.sleep(0.3)
        return original(engine, step)

    monkeypatch.setattr(LocalEngine, "run_step", run_step)


@pytest.mark.parametrize("run_folder", [False, True])
@pytest.mark.sampled(2)
def test_who_asks_a_run_that_gets_on_hears_where_it_is_and_no_blame(
    run_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = make_program(evolve(MODEL, vocab_size=256))
    signalled(monkeypatch, 1, 2, number=signal.SIGUSR1)
    settings = run_settings(3, run_folder=str(tmp_path / "run") if run_folder else None)
    result = run_training(program, DataChoice(), settings, Outputs(), Display(quiet=True))
    assert len(result.steps) == 3
    said = capfd.readouterr().err
    assert said.count("where the run is: it makes progress") == 2
    assert said.count("stage @1 replica 1") >= 2
    assert "fault" not in said
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if run_folder else [])


@pytest.mark.parametrize("when", ["prepare", "_draw"])
def test_who_asks_before_or_after_the_steps_is_answered(
    when: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = getattr(training, when)

    def asked(*words: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return original(*words, **named)

    monkeypatch.setattr(training, when, asked)
    program = make_program(evolve(MODEL, vocab_size=256))
    run_training(program, DataChoice(), run_settings(1), Outputs(), Display(quiet=True))
    assert ("being prepared" if when == "prepare" else "all steps are done") in capfd.readouterr().err


@pytest.mark.parametrize("when", ["TrainingRun.save", "_draw"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)])
@pytest.mark.sampled(2)
def test_a_signal_after_the_last_step_ends_with_its_code_when_all_is_written(
    when: str,
    number: int,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    owner, name = (TrainingRun, "save") if "." in when else (training, when)
    original = getattr(owner, name)

    def signalled_first(*words: Any) -> Any:
        os.kill(os.getpid(), number)
        return original(*words)

    monkeypatch.setattr(owner, name, signalled_first)
    plot = tmp_path / "loss.svg"
    program = make_program(evolve(MODEL, vocab_size=256), pp=1, dp=1, micro_batches=1)
    settings = run_settings(1, save=str(tmp_path / "run1"))
    result = run_training(program, DataChoice(), settings, Outputs(plot=str(plot)), Display(quiet=True))
    assert result.exit_code == code
    assert plot.exists()
    assert (tmp_path / "run1").exists()
    assert "no step is left" in capfd.readouterr().err


def test_only_what_this_run_wrote_is_called_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a damaged checkpoint of a later step that an earlier run has left."""
    place = str(tmp_path / "series")
    program = make_program(evolve(MODEL, vocab_size=256), pp=1, dp=1, micro_batches=1)
    run_training(program, DataChoice(), run_settings(2, save=place, save_every=1), Outputs(), Display(quiet=True))
    for path in (tmp_path / "series" / "step-00000002").glob("*.safetensors"):
        path.write_bytes(b"damaged")
    signalled(monkeypatch, 1, number=signal.SIGINT)
    original = LocalEngine.run_step
    monkeypatch.setattr(
        LocalEngine, "run_step", lambda engine, step: (os.kill(os.getpid(), signal.SIGINT), original(engine, step))[1]
    )
    settings = run_settings(2, save=place, save_every=1, resume=place)
    with pytest.raises(KeyboardInterrupt, match=f"saved nothing, and '{place}' is as it was; .* lost: 0$"):
        run_training(program, DataChoice(), settings, Outputs(), Display(quiet=True))


@pytest.mark.parametrize("exchanging", [False, True])
@pytest.mark.sampled(2)
def test_a_key_that_is_held_loses_neither_the_undoing_nor_the_words(
    exchanging: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C comes all the time from a rename of the save on, until the command has said what it lost."""
    handler = signal.getsignal(signal.SIGINT)
    place, file = tmp_path / "run1", tmp_path / "t.rtx"
    write_program(make_program(evolve(MODEL, vocab_size=256), pp=1, dp=1, micro_batches=1), str(file))
    words = ["run", str(file), "--steps", "1", "--save", str(place)]
    assert main(words) == 0
    before = (place / "manifest.json").read_bytes()
    if not exchanging:
        monkeypatch.setattr(checkpoint_places, "_renameat2", lambda: None)

    pressed, released = threading.Event(), threading.Event()

    def hold_key() -> None:
        end = time.monotonic() + 30
        if not pressed.wait(20):
            return
        while not released.wait(1e-4) and time.monotonic() < end:
            os.kill(os.getpid(), signal.SIGINT)

    def show_and_release(*words: Any, **named: Any) -> int:
        code = show_failure(*words, **named)
        released.set()
        holder.join()
        return code

    holder = threading.Thread(target=hold_key, daemon=True)
    holder.start()
    original = checkpoint_places.sync_folder if exchanging else Path.rename

    def held(path: Path, *others: Any) -> Any:
        found = original(path, *others)
        if exchanging or path == place:
            pressed.set()
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return found

    monkeypatch.setattr(*((checkpoint_places, "sync_folder") if exchanging else (Path, "rename")), held)
    monkeypatch.setattr("ratrain.ratrainc.cli.show_failure", show_and_release)
    capfd.readouterr()
    assert main([*words, "--seed", "9"]) == 130
    said = capfd.readouterr().err
    assert "this run has saved nothing; steps done since and lost: 1" in said
    assert (place / "manifest.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run1", "t.rtx"]
    assert signal.getsignal(signal.SIGINT) is handler


PLACES: dict[str, dict[str, Any]] = {"nothing": {}, "single": {"save": True}, "series": {"save": True, "save_every": 2}}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("during_save", [False, True])
@pytest.mark.sampled(2)
def test_a_second_ctrl_c_says_what_is_saved_and_what_is_lost(
    place: str, during_save: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At step 3, or in the save at the end after an earlier run has left a checkpoint of as many steps there."""
    target = tmp_path / "run1"
    keys = PLACES[place] | ({"save": str(target)} if "save" in PLACES[place] else {})
    program = make_program(evolve(MODEL, vocab_size=256))

    def interrupted(*words: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    if during_save:
        if place == "single":
            run_training(program, DataChoice(), run_settings(5, **keys, seed=9), Outputs(), Display(quiet=True))
        monkeypatch.setattr("ratrain.targets.runtime.checkpoint.checkpoint.write_manifest", interrupted)
        monkeypatch.setattr("ratrain.targets.runtime.checkpoint.checkpoint_shards.write_manifest", interrupted)
        if place == "nothing":
            monkeypatch.setattr(TrainingRun, "save", interrupted)
    else:
        original = LocalEngine.run_step
        monkeypatch.setattr(
            LocalEngine, "run_step", lambda engine, step: original(engine, step) if step < 3 else interrupted()
        )
    with pytest.raises(KeyboardInterrupt) as caught:
        run_training(program, DataChoice(), run_settings(5, **keys), Outputs(), Display(quiet=True))
    said = str(caught.value)
    if place == "series" and not during_save:
        assert f"'{target}/step-00000002' has the state after 2 steps" in said
        assert said.endswith("lost: 1")
    else:
        assert "this run has saved nothing" in said
        done = 3 if not during_save else 2 if place == "series" else 5
        assert said.endswith(f"lost: {done}")
    assert not list(tmp_path.glob("run1.*"))
    assert not list(tmp_path.glob("run1/.writing*"))


def test_what_the_second_ctrl_c_says_is_heard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    signalled(monkeypatch, 1, number=signal.SIGINT)
    original = LocalEngine.run_step

    def twice(engine: LocalEngine, step: int) -> StepReport:
        if step == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return original(engine, step)

    monkeypatch.setattr(LocalEngine, "run_step", twice)
    assert main(["quickstart", "--steps", "3"]) == 130
    assert "this run has saved nothing; steps done since and lost: 1" in capsys.readouterr().err
