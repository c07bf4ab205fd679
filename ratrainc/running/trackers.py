"""Experiment trackers that a run writes its figures to, through their own libraries: TensorBoard and Weights & Biases.

Both get the figures of a line of the log (`TimedStep.to_json`) under its keys. Checkpoints keep what a resumed run
needs to continue with the same tracker (`TrainingRun.notes`).
"""

from __future__ import annotations

import os
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from attrs import define, field

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Severity, fail
from ratrain.ratrain_ir.support.files import check_directory_writable, is_directory, made_directory, path_errors
from ratrain.ratrainc.console.extras import check_installed

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.run_choices import TrackerChoice
    from ratrain.targets.runtime.training.training import TimedStep, TrainingRun

FOLDER = "runs"
"""Folder in which TensorBoard's folders are made if none is named."""
_NOTE = "log_to"
"""Key of the trackers in a checkpoint's notes."""


@define(eq=False)
class Tracker(ABC):
    """An open tracker. Its first failure is reported and ends it; the run goes on."""

    title: ClassVar[str]
    tell: Callable[[Diagnostic], None]
    _lost_from: int | None = field(init=False, default=None)
    """first step that the tracker lacks; None if unknown"""
    _reason: str = field(init=False, default="")

    def write(self, step: TimedStep) -> None:
        """Add the figures of a step."""
        if not self._reason:
            number = step.report.step
            self._attempt(lambda: self.add(number, figures_of(step)), number)

    def close(self, *, failed: bool) -> None:
        """Flush and close the tracker; it shows whether the run failed."""
        if not self._reason:
            self._attempt(lambda: self.end(failed=failed), None)
        else:
            with suppress(Exception):  # its failure was reported already
                self.end(failed=failed)

    @property
    def problem(self) -> Diagnostic | None:
        """The steps that the tracker lacks, as a diagnostic; None if it has all."""
        if not self._reason:
            return None
        lacks = "may lack steps" if self._lost_from is None else f"lacks the steps from {self._lost_from} on"
        return Diagnostic("RT002", f"{self.title} {lacks}: {self._reason}")

    def _attempt(self, action: Callable[[], None], step: int | None) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a foreign library must not cost the state
            self._reason, self._lost_from = _words(error), step
            text = f"{self.title} cannot be written to: {self._reason}; training goes on without it"
            self.tell(Diagnostic("RT002", text, severity=Severity.WARNING))

    @property
    @abstractmethod
    def note(self) -> Any:
        """Data that a resumed run needs to continue with the tracker, as JSON types."""

    @abstractmethod
    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Add the figures of a step; failures are raised."""

    @abstractmethod
    def end(self, *, failed: bool) -> None:
        """Flush the waiting figures and close the tracker; failures are raised."""


@define(eq=False)
class TensorBoard(Tracker):
    """A file of events in a folder, written at each step by the training thread.

    TensorBoard's own `EventFileWriter` writes in a thread, whose failures (a full disk) appear as tracebacks amid the
    run's output.
    """

    title = "TensorBoard"
    folder: str
    _stream: IO[bytes]
    _write_record: Callable[[bytes], None]

    @classmethod
    def open(
        cls, choice: TrackerChoice, run: TrainingRun, note: object, tell: Callable[[Diagnostic], None]
    ) -> TensorBoard:
        """Begin a file in the named folder, else in the resumed run's folder if it still exists, else in a new one.

        TensorBoard hides older events of the steps that come again. Raises `DiagnosticError` RT002 if the file cannot
        be written.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        known = note if isinstance(note, str) and is_directory(note) else None
        place = choice.place or known or _new_folder(run.program.name)
        folder, now = str(made_directory(place)), time.time()
        # files are read in the order of their names, so the time comes first
        name = f"events.out.tfevents.{now:.6f}.{socket.gethostname()}.{os.getpid()}"
        with path_errors(f"cannot write TensorBoard's events in '{folder}'"):
            stream = (Path(folder) / name).open("xb")
            made = cls(tell, folder, stream, RecordWriter(stream).write)
            start = SessionLog(status=SessionLog.START)
            made._put(Event(wall_time=now, file_version="brain.Event:2"))
            made._put(Event(wall_time=now, step=run.first_step, session_log=start))
        return made

    @property
    def note(self) -> str:
        """The real path of its folder."""
        return os.path.realpath(self.folder)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Write an event with the figures of a step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._put(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _put(self, event: Any) -> None:
        self._write_record(event.SerializeToString())
        self._stream.flush()

    def end(self, *, failed: bool) -> None:
        """Close the file."""
        del failed
        self._stream.close()


@define(eq=False)
class Wandb(Tracker):
    """A run of Weights & Biases; its own settings (WANDB_MODE, WANDB_DIR, ...) say where it writes and if it sends."""

    title = "Weights & Biases"
    _run: Any

    @classmethod
    def open(cls, choice: TrackerChoice, run: TrainingRun, note: object, tell: Callable[[Diagnostic], None]) -> Wandb:
        """Begin a run, or continue the run of a resumed training. Raises `DiagnosticError` RT002 if that fails."""
        import wandb

        known = (
            {key: note[key] for key in ("entity", "project", "id") if note.get(key)} if isinstance(note, dict) else {}
        )
        if choice.place is not None and choice.place != known.get("project"):
            known = {"project": choice.place}
        manifest = {key: value for key, value in run.manifest().items() if key not in ("memory", "notes")}
        facts = {"program": run.program.name, "model": run.program.model.to_fields(), **manifest}
        try:
            opened = wandb.init(
                **known,
                resume="allow" if "id" in known else None,
                config=facts,
                settings=wandb.Settings(console="off"),  # it must not wrap stdout: bars, and JSON for scripts
            )
            # W&B's own step number must rise, but steps of a resumed run come again: so `step` is a metric.
            opened.define_metric("step")
            opened.define_metric("*", step_metric="step")
        except (wandb.Error, OSError) as error:
            fail(
                "RT002",
                f"cannot begin a run of Weights & Biases: {_words(error)}",
                help="log in with 'wandb login', or set WANDB_MODE=offline and send it later with 'wandb sync'",
            )
        return cls(tell, opened)

    @property
    def note(self) -> dict[str, str]:
        """The names of its run: entity, project and id."""
        names = {"entity": self._run.entity, "project": self._run.project, "id": self._run.id}
        return {key: value for key, value in names.items() if value}

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Log the figures of a step with its number."""
        self._run.log({"step": step, **figures})

    def end(self, *, failed: bool) -> None:
        """Send or write all figures, and end its services."""
        self._run.finish(exit_code=int(failed))


_OPENED: Mapping[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard.open, "wandb": Wandb.open}
_MODULES = {
    "tensorboard": ("tensorboard.summary.writer.record_writer", "tensorboard.compat.proto.event_pb2"),
    "wandb": ("wandb",),
}
"""Modules that each tracker needs. Package and extra have the tracker's name."""


def check_trackers(choices: Sequence[TrackerChoice], resumed: str | None) -> None:
    """Check that trackers can be opened, before any work of a run.

    Their libraries are loaded here, so that the run counts them in its process's memory from the start. The folder that
    a resumed run's checkpoint names is checked when the checkpoint is read. Raises `DiagnosticError` RT002 if a package
    or a place is missing.
    """
    for choice in choices:
        check_installed(choice.kind, choice.kind, f"--log-to {choice.kind}")
        try:
            for module in _MODULES[choice.kind]:
                import_module(module)
        except ImportError as error:
            help_text = f"pip install --upgrade 'ratrain[{choice.kind}]'"
            fail("RT002", f"--log-to {choice.kind}: {choice.kind} cannot be loaded: {_words(error)}", help=help_text)
        if choice.kind == "tensorboard" and (choice.place is not None or resumed is None):
            check_directory_writable(choice.place or FOLDER)


@contextmanager
def open_trackers(
    choices: Sequence[TrackerChoice], run: TrainingRun, tell: Callable[[Diagnostic], None]
) -> Iterator[list[Tracker]]:
    """Open the trackers of a run, and close them when the block ends; the run's checkpoints note how to continue them.

    Raises `DiagnosticError` RT002 if one cannot be opened.
    """
    notes = run.notes.get(_NOTE)
    kept = dict(notes) if isinstance(notes, dict) else {}
    opened: list[Tracker] = []
    with ExitStack() as closing:
        for choice in choices:
            tracker = _OPENED[choice.kind](choice, run, kept.get(choice.kind), tell)
            closing.push(lambda kind, *_, tracker=tracker: tracker.close(failed=kind is not None))
            opened.append(tracker)
            kept[choice.kind] = tracker.note
        if kept:
            run.notes[_NOTE] = kept
        yield opened


def figures_of(step: TimedStep) -> dict[str, float]:
    """Return the numbers of a log line by its keys, with compute seconds by stage; nulls are left out."""
    line = step.to_json()
    stages = line.pop("compute_seconds") or []
    del line["step"]
    figures = {key: float(value) for key, value in line.items() if value is not None}
    for number, stage in enumerate(stages):
        for which in ("least", "median", "most"):
            figures[f"compute_seconds/stage_{number}/{which}"] = float(stage[which])
    return figures


def _new_folder(name: str) -> str:
    """Return the path of a folder for a program's run that does not exist yet."""
    wanted = Path(FOLDER) / f"{name}-{time.strftime('%Y-%m-%d-%H%M%S')}"
    taken = 1
    while (place := wanted if taken == 1 else wanted.with_name(f"{wanted.name}-{taken}")).exists():
        taken += 1
    return str(place)


def _words(error: BaseException) -> str:
    return (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
