"""`run --log-to`: trackers get the figures of the log; what fails there costs no step. With stand-ins, and with the libraries where they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs, TrackerChoice
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.console import extras
from ratrain.ratrainc.running.trackers import check_trackers, figures_of
from ratrain.ratrainc.running.training import run_training
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.settings import Evaluation, RunSettings, Saving, Start
from tests.end_to_end.tiny_runs import MODEL, make_program

PROGRAM = make_program(evolve(MODEL, vocab_size=256), pp=1, dp=1, micro_batches=1)


class Wandb(ModuleType):
    """What a run uses of wandb; it keeps what it is told."""

    Error = RuntimeError

    def __init__(self) -> None:
        super().__init__("wandb")
        self.began: list[dict[str, Any]] = []
        self.logged: list[dict[str, float]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.ended: list[int] = []
        self.fails_at: int | None = None

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **told: Any) -> Any:
        self.began.append(told)
        project, name = told.get("project") or "uncategorized", told.get("id") or "abc123"
        return SimpleNamespace(
            entity=None, project=project, id=name, log=self.log, finish=self.finish, define_metric=self.define_metric
        )

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, figures: dict[str, float]) -> None:
        if figures["step"] == self.fails_at:
            raise BrokenPipeError(32, "the service is gone")
        self.logged.append(figures)

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


class Message:
    """A protocol buffer that is written as JSON."""

    def __init__(self, **fields: Any) -> None:
        self.fields = {key: getattr(value, "fields", value) for key, value in fields.items()}

    def SerializeToString(self) -> bytes:
        return json.dumps(self.fields).encode()


class RecordWriter:
    """A record a line."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, record: bytes) -> None:
        self.stream.write(record + b"\n")


def stand_in(patch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    module = ModuleType(name)
    module.__dict__.update(names)
    patch.setitem(sys.modules, name, module)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(extras, "is_installed", lambda package: True)
    return module


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event(Message):
        pass

    class Summary(Message):
        def __init__(self, value: list[dict[str, Any]]) -> None:
            super().__init__(value=value)

        Value = dict

    class SessionLog(Message):
        START = "start"

    monkeypatch.setattr(extras, "is_installed", lambda package: True)
    for name in ("tensorboard", "tensorboard.summary", "tensorboard.summary.writer", "tensorboard.compat"):
        stand_in(monkeypatch, name)
    stand_in(monkeypatch, "tensorboard.compat.proto")
    stand_in(monkeypatch, "tensorboard.summary.writer.record_writer", RecordWriter=RecordWriter)
    stand_in(monkeypatch, "tensorboard.compat.proto.event_pb2", Event=Event, SessionLog=SessionLog)
    stand_in(monkeypatch, "tensorboard.compat.proto.summary_pb2", Summary=Summary)


def train(place: Path, *trackers: TrackerChoice, steps: int = 3, resume: bool = False) -> Any:
    """A run with a log, an evaluation and a checkpoint in `place`, and these trackers; its result."""
    ck = str(place / "ck")
    settings = RunSettings(
        steps=steps,
        start=Start(checkpoint=ck if resume else None),
        saving=Saving(ck),
        evaluation=Evaluation(every=2, batches=1),
    )
    outputs = Outputs(log=str(place / "l.jsonl"), trackers=trackers)
    return run_training(PROGRAM, DataChoice(), settings, outputs, Display(quiet=True))


def log_lines(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "l.jsonl").read_text("utf-8").splitlines()]


def expected(line: dict[str, Any]) -> dict[str, float]:
    """The figures of a line of the log, in the words of a tracker."""
    found = {key: value for key, value in line.items() if value is not None and key not in ("step", "compute_seconds")}
    for stage, told in enumerate(line["compute_seconds"] or []):
        found |= {f"compute_seconds/stage_{stage}/{which}": told[which] for which in ("least", "median", "most")}
    return found


def events_of(folder: Path) -> list[list[dict[str, Any]]]:
    """The events of each file of a folder."""
    paths = sorted(folder.glob("events.out.tfevents.*"))
    return [[json.loads(line) for line in path.read_text("utf-8").splitlines()] for path in paths]


def test_wandb_gets_what_the_log_gets_and_a_resumed_run_goes_on_in_its_run(tmp_path: Path, wandb: Wandb) -> None:
    assert train(tmp_path, TrackerChoice("wandb", "tiny")).exit_code == 0
    assert train(tmp_path, TrackerChoice("wandb"), steps=2, resume=True).exit_code == 0
    lines = log_lines(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert wandb.logged == [{"step": line["step"], **expected(line)} for line in lines]
    assert {"loss", "eval_loss", "tokens_per_second", "gradient_norm", "loss_scale"} <= set(wandb.logged[1])
    assert wandb.axes[:2] == [("step", None), ("*", "step")]
    first, second = wandb.began
    assert (first["project"], first["resume"], "id" in first) == ("tiny", None, False)
    assert (second["project"], second["resume"], second["id"]) == ("tiny", "allow", "abc123")
    assert first["config"]["plan"]["pp"] == 1
    assert first["config"]["model"]["vocab_size"] == 256
    json.dumps(first["config"])
    assert wandb.ended == [0, 0]


def test_tensorboard_gets_what_the_log_gets_and_hides_steps_that_come_again(
    tmp_path: Path, tensorboard: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(tmp_path, TrackerChoice("tensorboard")).exit_code == 0
    assert train(tmp_path, TrackerChoice("tensorboard"), steps=2, resume=True).exit_code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    before, after = events_of(folder)
    assert [events[0]["file_version"] for events in (before, after)] == ["brain.Event:2"] * 2
    assert [(events[1]["step"], events[1]["session_log"]) for events in (before, after)] == [
        (0, {"status": "start"}),
        (3, {"status": "start"}),
    ]
    told = {
        event["step"]: {value["tag"]: value["simple_value"] for value in event["summary"]["value"]}
        for event in [*before[2:], *after[2:]]
    }
    assert told == {line["step"]: expected(line) for line in log_lines(tmp_path)}
    assert list(told) == [0, 1, 2, 3, 4]


def test_a_new_run_has_a_folder_of_its_own(tmp_path: Path, tensorboard: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        train(tmp_path / name, TrackerChoice("tensorboard"), steps=1)
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_tracker_that_fails_costs_no_step(tmp_path: Path, wandb: Wandb, capsys: pytest.CaptureFixture[str]) -> None:
    wandb.fails_at = 1
    result = train(tmp_path, TrackerChoice("wandb"))
    assert len(result.steps) == len(log_lines(tmp_path)) == 3
    assert [figures["step"] for figures in wandb.logged] == [0]
    assert result.exit_code == 1
    assert [problem.message for problem in result.problems] == [
        "Weights & Biases lacks the steps from 1 on: the service is gone"
    ]
    assert capsys.readouterr().err.count("warning[RT002]") == 1


def test_a_full_disk_under_tensorboard_costs_no_step(tmp_path: Path, tensorboard: None) -> None:
    class Full(RecordWriter):
        def write(self, record: bytes) -> None:
            if b'"step": 2' in record:
                raise OSError(28, "No space left on device")
            super().write(record)

    sys.modules["tensorboard.summary.writer.record_writer"].__dict__["RecordWriter"] = Full
    result = train(tmp_path, TrackerChoice("tensorboard", str(tmp_path / "tb")))
    assert (len(result.steps), result.exit_code) == (3, 1)
    assert "TensorBoard lacks the steps from 2 on: No space left on device" in result.problems[0].message
    (events,) = events_of(tmp_path / "tb")
    assert [event["step"] for event in events[1:]] == [0, 0, 1]


def test_what_ends_a_run_is_told_to_the_tracker(tmp_path: Path, wandb: Wandb, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ratrain.ratrainc.running.training.run_steps", broken)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, TrackerChoice("wandb"))
    assert wandb.ended == [1]


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_extra_is_named_before_the_run(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    write_program(PROGRAM, str(tmp_path / "t.rtx"))
    assert main(["run", str(tmp_path / "t.rtx"), "--log-to", kind]) == 1
    said = capsys.readouterr()
    assert f"--log-to {kind} needs {kind}, which is not installed" in said.err
    assert f"pip install 'ratrain[{kind}]'" in said.err
    assert said.out == ""


def test_a_folder_of_a_package_s_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_by_a_tracker").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not extras.is_installed("left_by_a_tracker")
    (tmp_path / "left_by_a_tracker" / "__init__.py").touch()
    assert extras.is_installed("left_by_a_tracker")


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path, tensorboard: None) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiagnosticError, match="RT002"):
        check_trackers([TrackerChoice("tensorboard", str(tmp_path / "file"))], None)


REFUSED = {
    "mlflow": "is none of tensorboard",
    "tensorboard:": "ends where its folder",
    "wandb:": "ends where its project",
    "tensorboard:ck": "is the same file as",
    "tensorboard:ck/in": "is in the place of the checkpoint",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_contradicts_is_refused(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_program(PROGRAM, "t.rtx")
    assert main(["run", "t.rtx", "--save", "ck", "--log-to", word]) == 2
    assert REFUSED[word] in capsys.readouterr().err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["t.rtx"]


def test_one_of_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(PROGRAM, str(tmp_path / "t.rtx"))
    assert main(["run", str(tmp_path / "t.rtx"), "--log-to", "wandb:a", "--log-to", "wandb:b"]) == 2
    assert "is given 2 times" in capsys.readouterr().err


def test_the_library_of_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    place = TrackerChoice("tensorboard", str(tmp_path / "tb"))
    result = train(tmp_path, place)
    train(tmp_path, place, steps=2, resume=True)
    read = reading.EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    lines = log_lines(tmp_path)
    assert set(read.Tags()["scalars"]) == set().union(*map(expected, lines))
    for tag in read.Tags()["scalars"]:
        wanted = [(line["step"], expected(line)[tag]) for line in lines if tag in expected(line)]
        assert [event.step for event in read.Scalars(tag)] == [step for step, _ in wanted]
        assert [event.value for event in read.Scalars(tag)] == pytest.approx([value for _, value in wanted], rel=1e-6)
    assert set(figures_of(result.steps[0])) <= set(read.Tags()["scalars"])


def test_wandb_itself_keeps_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", exc_type=ImportError)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    assert train(tmp_path, TrackerChoice("wandb", "tiny")).exit_code == 0
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = file.read_bytes()
    for name in figures_of_line(log_lines(tmp_path)[1]):
        assert name.encode() in written


def figures_of_line(line: dict[str, Any]) -> set[str]:
    return {part for name in expected(line) for part in name.split("/")}
