"""A training run: its steps, evaluations and checkpoints, for command line and notebooks; `preparation` makes one."""

from __future__ import annotations

import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from attrs import asdict, define, evolve, field, frozen

from ratrain.ratrain_ir.ops.compute import Update
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, fail
from ratrain.ratrain_ir.support.loops import compiled_anew
from ratrain.ratrain_ir.support.quantities import MIB, mib_text
from ratrain.targets.program.program import Program
from ratrain.targets.runtime.checkpoint.checkpoint import (
    is_sealed,
    left_over,
    save_checkpoint,
)
from ratrain.targets.runtime.checkpoint.checkpoint_series import (
    CheckpointSeries,
    what_is_left,
)
from ratrain.targets.runtime.checkpoint.manifest import run_manifest
from ratrain.targets.runtime.checkpoint.overrides import Overrides
from ratrain.targets.runtime.checkpoint.state import training_state
from ratrain.targets.runtime.data.data import TokenStream
from ratrain.targets.runtime.engine.engine import ProgramEngine, StepReport
from ratrain.targets.runtime.engine.evaluation import HeldOut
from ratrain.targets.runtime.engine.processes import Processes
from ratrain.targets.runtime.settings import RunSettings
from ratrain.targets.runtime.training.best import Best
from ratrain.targets.runtime.training.utilisation import Utilisation
from ratrain.targets.runtime.watch.positions import RankPhase, RunFolder
from ratrain.targets.runtime.watch.watchdog import Watchdog, Watched


@frozen
class TimedStep:
    """Step report with its speed, and the evaluation after it."""

    report: StepReport
    tokens_per_second: float
    learning_rate: float
    mfu: float | None = None
    """model-FLOPs utilisation; None if the machine's peak is unknown"""
    eval_loss: float | None = None
    """mean loss of the held-out data after the step's update; None if not evaluated"""

    def to_json(self) -> dict[str, Any]:
        """Return a line of the log."""
        load = self.report.experts
        return {
            "step": self.report.step,
            "loss": _finite(self.report.loss),
            "tokens": self.report.tokens,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "learning_rate": self.learning_rate,
            "loss_scale": self.report.loss_scale,
            "skipped_blocks": self.report.skipped_blocks,
            "gradient_norm": _finite(self.report.gradient_norm),
            "eval_loss": _finite(self.eval_loss),
            "resident_bytes": None if self.report.memory is None else self.report.memory.peak,
            "planned_bytes": None if self.report.memory is None else self.report.memory.planned,
            "compute_seconds": None if self.report.compute is None else [asdict(each) for each in self.report.compute],
            **({} if self.report.loss_tokens is None else {"loss_tokens": self.report.loss_tokens}),
            **({} if load is None else {"busiest_expert": load.busiest, "idle_experts": load.idle}),
            **({} if load is None or load.dropped_share is None else {"dropped_rows": load.dropped_share}),
        }


def _finite(value: float | None) -> float | None:
    """Return the number, or None if JSON cannot hold it (infinite or NaN)."""
    return value if value is not None and isfinite(value) else None


@frozen
class _Save:
    """Save that was begun: steps done, directory, and the identity of what stood there before."""

    step: int
    directory: str
    before: tuple[int, int] | None

    @classmethod
    def begun(cls, step: int, directory: str) -> _Save:
        """Return the save that begins at this moment."""
        return cls(step, directory, _identity(directory))

    @property
    def is_done(self) -> bool:
        """True if the new checkpoint stands in its place: saving puts another directory there."""
        return _identity(self.directory) not in (None, self.before)


def _identity(directory: str) -> tuple[int, int] | None:
    """Return device and inode of a directory; None if there is none."""
    with suppress(OSError, ValueError):
        status = Path(directory).stat()
        return status.st_dev, status.st_ino
    return None


@define(eq=False)
class TrainingRun:
    """One run: make it with `prepare` (`preparation.py`), iterate `steps()`, then call `save()` and `close()`."""

    program: Program
    settings: RunSettings
    engine: ProgramEngine
    stream: TokenStream
    first_step: int
    warnings: list[Diagnostic]
    processes: Processes
    series: CheckpointSeries | None
    """series for checkpoints during the run; None: at most one checkpoint, at the end"""
    held_out: HeldOut | None = None
    """data to evaluate on"""
    utilisation: Utilisation | None = None
    companions: Mapping[str, bytes] = field(factory=dict)
    """files that accompany the model's weights, which checkpoints keep"""
    overrides: Overrides = field(factory=dict)
    """optimizer keys that differ from the compiled plan's; they are in the program's plan"""
    notes: dict[str, Any] = field(factory=dict)
    """JSON data that followers of the run keep in its checkpoints; the training does not depend on it"""
    saved_step: int | None = None
    """steps done when a checkpoint of the series was last written"""
    saved_to: str = ""
    folder: RunFolder | None = None
    """folder in which the ranks record their positions"""
    folder_is_temporary: bool = False
    done: list[TimedStep] = field(factory=list)
    best: Best | None = None
    """lowest held-out loss; None if nothing is evaluated"""
    _saving: _Save | None = None
    """the save that was begun last"""
    places: ExitStack = field(factory=ExitStack)
    """locks on the places it writes to"""

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, self.places.close)

    def close(self) -> None:
        """Release the locks, so that other runs may write to these places."""
        self.places.close()

    @property
    def seed(self) -> int:
        """Seed of this run."""
        return self.program.plan.seed if self.settings.seed is None else self.settings.seed

    def steps(self, should_stop: Callable[[], int] = lambda: 0) -> Iterator[TimedStep]:
        """Run the steps and yield each one's report; stop before a step if `should_stop` returns a signal.

        Raises `DiagnosticError` RT093 if the loss is no longer finite, or if the process exceeds its memory limit.
        """
        for step in range(self.first_step, self.first_step + self.settings.steps):
            if should_stop():
                return
            start = time.perf_counter()
            report = self.engine.run_step(step)
            timed = self._timed(report, time.perf_counter() - start)
            self.done.append(timed)  # before the evaluation, which may fail
            held_out = self._evaluated(report)
            is_best = False
            if held_out is not None:
                timed = self.done[-1] = evolve(timed, eval_loss=held_out)
                is_best = self.best is not None and self.best.hear(held_out, step + 1)
            yield timed
            if not isfinite(report.loss):  # before saving: this state must not take the place of a better one
                text = f"the loss of step {step} is {report.loss}: the weights have diverged"
                fail("RT093", text, help="lower the learning rate or lengthen the warm-up")
            if is_best and self.settings.saving.best is not None:
                self._save_whole(self.settings.saving.best)
            every = self.settings.saving.every
            if every is not None and self.series is not None and (step + 1) % every == 0:
                self._save_to(self.series)
            self._keep_promise(report)
            if self.is_patient_no_more:
                return

    @property
    def is_patient_no_more(self) -> bool:
        """True if the held-out loss has not fallen for as many evaluations as the settings bear."""
        patience = self.settings.evaluation.patience
        return patience is not None and self.best is not None and self.best.since >= patience

    def _keep_promise(self, report: StepReport) -> None:
        """Raise `DiagnosticError` RT093 if this process has held more memory than `--ram` allows.

        The run promised at its start to stay below it, and here that was not true.
        """
        most = self.settings.execution.ram_bytes
        if most is None or report.memory is None or report.memory.peak <= most:
            return
        anew = compiled_anew()
        text = (
            f"the run has held {mib_text(report.memory.peak)} in memory, "
            f"{mib_text(report.memory.peak - most)} more than the {mib_text(most)} of --ram"
        )
        if anew:
            way_out = f"run it again: it compiled {anew} loops, which are kept now"
        else:
            way_out = f"--ram {ceil(report.memory.peak / MIB)}MiB; it had planned {mib_text(report.memory.planned)}"
        fail("RT093", text, help=way_out)

    def _timed(self, report: StepReport, seconds: float) -> TimedStep:
        """Return a finished step with its speed."""
        speed = report.tokens / seconds
        rate = self.program.plan.optimizer.learning_rate(report.step)
        mfu = self.utilisation.of(speed) if self.utilisation else None
        return TimedStep(report, speed, rate, mfu)

    def _evaluated(self, report: StepReport) -> float | None:
        """Return the loss of the held-out data if this step is one to evaluate after; otherwise None."""
        every, after = self.settings.evaluation.every, report.step + 1
        due = every is not None and (after % every == 0 or after == self.first_step + self.settings.steps)
        return self.held_out.loss(self.engine) if due and self.held_out and isfinite(report.loss) else None

    def save(self) -> str | None:
        """Write the checkpoint that the settings ask for; return its directory, or None if they ask for none.

        Raises `DiagnosticError` RT002 or RT092 when it cannot be written.
        """
        if self.series is not None:
            return self._save_to(self.series)
        directory = self.settings.saving.directory
        if directory is not None:
            self.engine.enter(RankPhase.SAVING, self.steps_done - 1)
            self._saving = _Save.begun(self.steps_done, directory)
            self._save_whole(directory)
        return directory

    def _save_whole(self, directory: str) -> None:
        state = training_state(self.engine, self.steps_done)
        save_checkpoint(directory, self.program.trained_model, state, self.manifest(), self.companions)

    def save_what_is_done(self) -> str | None:
        """Write the checkpoint that the settings ask for after the run was ended early; return its directory.

        None if there is nothing to save: no step has ended since the last save or none can be saved now, weights have
        diverged, the run ended amid a step's updates, or other processes would have to write their parts and may not
        know of the end.
        """
        known = self.first_step if self._saving is None else self._saving.step
        whole = self.processes.count == 1 and self.engine.has_whole_state
        if not whole or self.steps_done <= known or not isfinite(self.done[-1].report.loss):
            return None
        return self.save()

    @property
    def updates_a_step(self) -> int:
        """Block updates of a step, over all ranks."""
        plan, keyword = self.program.plan, Update.keyword
        streams = (stream for stage in self.program.stages for stream in stage.streams.values())
        updates = sum(instruction.keyword == keyword for stream in streams for instruction in stream)
        return plan.replicas * plan.tp * updates

    def newest_saved(self) -> tuple[int, str] | None:
        """Return steps done and directory of the newest checkpoint that this run has written; None if there is none.

        A checkpoint counts once it stands in its place, even if the save was interrupted after that.
        """
        if self._saving is not None and self._saving.is_done:
            return self._saving.step, self._saving.directory
        return (self.saved_step, self.saved_to) if self.saved_step is not None else None

    def left_over(self) -> tuple[list[str], list[str]]:
        """Return the directories that an interrupted save of this run left: (half-written ones, whole ones)."""
        directory = self.settings.saving.directory
        if directory is None:
            return [], []
        paths = self.series.left_over() if self.series is not None else left_over(directory)
        return [str(path) for path in paths if not is_sealed(path)], [str(path) for path in paths if is_sealed(path)]

    def remove_temporary_folder(self) -> None:
        """Remove the positions if nobody asked for them and nothing went wrong."""
        if self.folder is not None and self.folder_is_temporary and not self.folder.report():
            shutil.rmtree(self.folder.path, ignore_errors=True)

    def watchdog(self, tell: Callable[[Diagnostic], None]) -> Watchdog:
        """Return the run's watchdog, which reports to `tell`; without a folder of positions it only answers SIGUSR1."""
        own = [rank.position for ranks in self.engine.ranks for rank in ranks if rank.position is not None]
        advice = None
        if self.series is not None:
            advice = partial(what_is_left, self.series.directory)
        number, timeout = self.processes.number, self.settings.watch.hang_timeout if self.folder is not None else 0.0
        return Watchdog(Watched(self.program, self.folder, own, number, timeout, tell, advice))

    @property
    def steps_done(self) -> int:
        """Steps of the training so far, including those before a resumed run."""
        return self.first_step + len(self.done)

    def _save_to(self, series: CheckpointSeries) -> str:
        """Write a checkpoint of a series, unless this step's was written already; return its directory."""
        if self.saved_step != self.steps_done:
            self.engine.enter(RankPhase.SAVING, self.steps_done - 1)
            self._saving = _Save.begun(self.steps_done, series.place_of(self.steps_done))
            self.saved_to = series.save(self.processes, self.engine, self.steps_done, self.manifest(), self.companions)
            self.saved_step = self.steps_done
        return self.saved_to

    def manifest(self) -> dict[str, Any]:
        """Return the record of this run for its checkpoint.

        It has everything besides the state that the run depends on bit for bit, its memory use, and the notes of its
        followers.
        """
        run = run_manifest(self.program, self.stream, self.settings, self.seed, self.overrides)
        notes = {**self.notes, **(self.best.note() if self.best is not None else {})}
        return {**run, "memory": self.engine.memory_use().to_json(), **({"notes": notes} if notes else {})}
