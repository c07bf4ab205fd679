"""A training run on the local engine: start or resume, steps, log, save. The command line and notebooks both call this."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, evolve, field, frozen

from ratrain.ratrain_ir.diagnostics import Diagnostic, Note, Severity, fail
from ratrain.targets.program.program import Program
from ratrain.targets.program.rtx import write_program
from ratrain.targets.runtime.checkpoint import (
    check_checkpoint_place,
    clear_leftovers,
    hold_checkpoint_place,
    is_sealed,
    left_over,
    save_checkpoint,
)
from ratrain.targets.runtime.checkpoint_series import (
    RUN_FOLDER,
    CheckpointSeries,
    check_no_series,
    facts_of,
    load_latest,
)
from ratrain.targets.runtime.data import Batches, Order, TokenStream, in_words
from ratrain.targets.runtime.evaluation import HeldOut
from ratrain.targets.runtime.kernels import KernelName
from ratrain.targets.runtime.local import LocalEngine, StepReport
from ratrain.targets.runtime.optimizer import INITIAL_SCALE
from ratrain.targets.runtime.positions import RankPhase, RunFolder
from ratrain.targets.runtime.processes import Processes
from ratrain.targets.runtime.state import start_from_state, start_from_weights, training_state
from ratrain.targets.runtime.utilisation import Utilisation
from ratrain.targets.runtime.watchdog import Watchdog, Watched
from ratrain.targets.runtime.weights import check_config_beside, random_weights, read_weights

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.plan import Plan
    from ratrain.targets.runtime.kernels import KernelSet
    from ratrain.targets.runtime.locks import Lock


@frozen
class RunSettings:
    """What a run is told beside its program and data."""

    steps: int
    """steps of this run; a resumed one goes on from where the checkpoint stopped"""
    kernels: KernelName = "fast"
    order: Order = "shuffled"
    seed: int | None = None
    """of initial weights and data order; None: the plan's"""
    interleave_seed: int | None = None
    threads: int = 1
    """with more than one, the engines of all ranks run side by side, and ranks share out these threads for their kernels"""
    init: str | None = None
    """weights to start from, Hugging Face names"""
    resume: str | None = None
    """checkpoint directory to go on from"""
    save: str | None = None
    """checkpoint directory to write at the end; with `save_every`, or several processes, a series of them"""
    save_every: int | None = None
    """steps between checkpoints"""
    keep_last: int = 2
    """checkpoints of a series that are kept"""
    run_folder: str | None = None
    """where ranks say where they are, for the watchdog and for `postmortem`; None: beside a series of checkpoints, if any"""
    hang_timeout: float = 8.0
    """seconds without progress after which the watchdog judges; 0: never"""
    sums: str = "rank order"
    """how gradients are summed over replicas: part of what the bits depend on"""
    new_data: bool = False
    """go on from a checkpoint whose run had other data"""
    eval_every: int = 0
    """steps from one evaluation to the next, and one at the end; 0: none"""
    check_memory: bool = False
    """hold every access against the program's lives"""
    poison: bool = False
    """fill freed bytes with NaNs; implies `check_memory`"""

    @staticmethod
    def available_threads() -> int:
        """The cores that this process may use."""
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def kernel_threads(self, ranks: int) -> int:
        """Threads that share the work of one kernel, where so many ranks compute in this process."""
        return max(1, self.threads // ranks)


@frozen
class TimedStep:
    """A step's report, how fast it was, and what was evaluated after it."""

    report: StepReport
    tokens_per_second: float
    learning_rate: float
    mfu: float | None = None
    """model-flops utilisation, where the machine's peak is known"""
    eval_loss: float | None = None
    """mean loss of the held-out data after the step's update"""

    def to_json(self) -> dict[str, Any]:
        """A line of the log."""
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
        }


def _finite(value: float | None) -> float | None:
    """A number as JSON can hold it."""
    return value if value is not None and isfinite(value) else None


@frozen
class _Save:
    """A save that was begun: steps done, directory, and what stood there before."""

    step: int
    directory: str
    before: tuple[int, int] | None

    @classmethod
    def begun(cls, step: int, directory: str) -> _Save:
        """The save that begins now."""
        return cls(step, directory, _identity(directory))

    @property
    def is_done(self) -> bool:
        """Whether what it has written stands in its place."""
        return _identity(self.directory) not in (None, self.before)


def _identity(directory: str) -> tuple[int, int] | None:
    """Which directory has this name; None where there is none."""
    with suppress(OSError, ValueError):
        found = Path(directory).stat()
        return found.st_dev, found.st_ino
    return None


@define(eq=False)
class TrainingRun:
    """One run. Make it with `prepare`, iterate `steps()`, then `save()` and `close()`."""

    program: Program
    settings: RunSettings
    engine: LocalEngine
    stream: TokenStream
    first_step: int
    warnings: list[Diagnostic]
    processes: Processes
    series: CheckpointSeries | None
    """where checkpoints go as the run goes on; None: there is at most one, at the end"""
    held_out: HeldOut | None = None
    """what is evaluated on"""
    utilisation: Utilisation | None = None
    tokenizer: Mapping[str, bytes] = field(factory=dict)
    """Files of the model's tokenizer, which checkpoints keep."""
    saved_step: int | None = None
    """Steps done when a checkpoint of the series was last written."""
    saved_to: str = ""
    folder: RunFolder | None = None
    """Where the ranks say where they are."""
    folder_is_temporary: bool = False
    done: list[TimedStep] = field(factory=list)
    _saving: _Save | None = None
    """the save that was begun last"""
    places: ExitStack = field(factory=ExitStack)
    """The locks on the places it writes to."""

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, self.places.close)

    def close(self) -> None:
        """Let other runs write where this one did."""
        self.places.close()

    @property
    def seed(self) -> int:
        """The seed of this run."""
        return self.program.plan.seed if self.settings.seed is None else self.settings.seed

    def steps(self, should_stop: Callable[[], int] = lambda: 0) -> Iterator[TimedStep]:
        """Run the steps one by one; `should_stop` is asked between them.

        Raises `DiagnosticError` RT093 when the loss is no longer a number.
        """
        for step in range(self.first_step, self.first_step + self.settings.steps):
            if should_stop():
                return
            start = time.perf_counter()
            report = self.engine.run_step(step)
            timed = self._timed(report, time.perf_counter() - start)
            self.done.append(timed)
            yield timed
            if not isfinite(report.loss):  # before saving: this state must not take the place of a better one
                text = f"the loss of step {step} is {report.loss}: the weights have diverged"
                fail("RT093", text, help="lower the learning rate or lengthen the warm-up")
            every = self.settings.save_every
            if every is not None and self.series is not None and (step + 1) % every == 0:
                self._save_to(self.series)

    def _timed(self, report: StepReport, seconds: float) -> TimedStep:
        """A finished step, evaluated if it is one of those."""
        speed = report.tokens / seconds
        rate = self.program.plan.optimizer.learning_rate(report.step)
        mfu = self.utilisation.of(speed) if self.utilisation else None
        return TimedStep(report, speed, rate, mfu, self._evaluated(report))

    def _evaluated(self, report: StepReport) -> float | None:
        """The loss of the held-out data after a step, if that is one to evaluate after."""
        every, after = self.settings.eval_every, report.step + 1
        due = every and (after % every == 0 or after == self.first_step + self.settings.steps)
        return self.held_out.loss(self.engine) if due and self.held_out and isfinite(report.loss) else None

    def save(self) -> str | None:
        """Write the checkpoint the settings ask for; its directory.

        Raises `DiagnosticError` RT002 or RT092 when it cannot be written.
        """
        if self.series is not None:
            return self._save_to(self.series)
        directory = self.settings.save
        if directory is not None:
            self.engine.enter(RankPhase.SAVING, self.steps_done - 1)
            self._saving = _Save.begun(self.steps_done, directory)
            state = training_state(self.engine, self.steps_done)
            save_checkpoint(directory, self.program.model, state, self.manifest(), self.tokenizer)
        return directory

    def newest_saved(self) -> tuple[int, str] | None:
        """Steps done and directory of the newest checkpoint that this run has written, as it stands on the disk."""
        if self._saving is not None and self._saving.is_done:
            return self._saving.step, self._saving.directory
        return (self.saved_step, self.saved_to) if self.saved_step is not None else None

    def left_over(self) -> tuple[list[str], list[str]]:
        """What a save that was interrupted has left where it writes: half of a checkpoint, and whole ones."""
        directory = self.settings.save
        if directory is None:
            return [], []
        found = self.series.left_over() if self.series is not None else left_over(directory)
        return [str(path) for path in found if not is_sealed(path)], [str(path) for path in found if is_sealed(path)]

    def remove_temporary_folder(self) -> None:
        """Remove the positions where nobody asked for them and nothing went wrong."""
        if self.folder is not None and self.folder_is_temporary and not self.folder.report():
            shutil.rmtree(self.folder.path, ignore_errors=True)

    def watchdog(self, tell: Callable[[Diagnostic], None]) -> Watchdog:
        """What watches over the run and tells of it; where ranks leave their positions nowhere, it only answers who asks."""
        own = [rank.position for ranks in self.engine.ranks for rank in ranks if rank.position is not None]
        advice = None
        if self.series is not None:
            advice = f"nothing that was saved is lost: go on with --resume {self.series.directory}"
        number, timeout = self.processes.number, self.settings.hang_timeout if self.folder is not None else 0.0
        return Watchdog(Watched(self.program, self.folder, own, number, timeout, tell, advice))

    @property
    def steps_done(self) -> int:
        """Steps of the training so far, those before a resumed run included."""
        return self.first_step + len(self.done)

    def _save_to(self, series: CheckpointSeries) -> str:
        """Write a checkpoint of a series unless that of this step was written already."""
        if self.saved_step != self.steps_done:
            self.engine.enter(RankPhase.SAVING, self.steps_done - 1)
            self._saving = _Save.begun(self.steps_done, series.place_of(self.steps_done))
            self.saved_to = series.save(self.processes, self.engine, self.steps_done, self.manifest(), self.tokenizer)
            self.saved_step = self.steps_done
        return self.saved_to

    def manifest(self) -> dict[str, Any]:
        """What the bits of this run depend on beside its state."""
        return run_manifest(self.program, self.stream, self.settings, self.seed)


def prepare(
    program: Program,
    stream: TokenStream,
    settings: RunSettings,
    kernels: KernelSet,
    processes: Processes | None = None,
    *,
    held_out: HeldOut | None = None,
    utilisation: Utilisation | None = None,
    tokenizer: Mapping[str, bytes] | None = None,
) -> TrainingRun:
    """An engine with its state filled: from a checkpoint, from weights, or at random.

    `processes` are those of the run; None: this one alone. `tokenizer` has the files of the model's, if there is one. Places that are
    written are locked until the run is closed. Raises `DiagnosticError` when data, weights or checkpoint do not fit the program, or another
    run writes to the same place.
    """
    with ExitStack() as places:
        run = _prepared(
            program,
            stream,
            settings,
            kernels,
            processes or Processes(),
            places,
            held_out=held_out,
            utilisation=utilisation,
            tokenizer=tokenizer,
        )
        run.places.push(places.pop_all())
    return run


def _prepared(
    program: Program,
    stream: TokenStream,
    settings: RunSettings,
    kernels: KernelSet,
    processes: Processes,
    places: ExitStack,
    *,
    held_out: HeldOut | None,
    utilisation: Utilisation | None,
    tokenizer: Mapping[str, bytes] | None,
) -> TrainingRun:
    series, lock, said = _open_place(settings, processes, places)
    seed = program.plan.seed if settings.seed is None else settings.seed
    batches = Batches(stream, program.plan, settings.order, seed)
    first_step = 0
    loaded = load_latest(settings.resume, program.model, processes) if settings.resume is not None else None
    if loaded is not None:
        first_step = loaded.state.step
    if series is not None:
        series.check_start(processes, first_step, loaded.damaged if loaded else ())
        said += series.clear_leftovers(processes, lock)
    warnings = said
    if loaded is not None:
        now = run_manifest(program, stream, settings, seed)
        new_scale = _scale_that_starts_anew(loaded.run.get("plan"), program.plan)
        warnings = (
            said
            + loaded.warnings
            + _data_differences(settings, loaded.run, now)
            + _differences(loaded.run, now)
            + new_scale
        )
        program, tokenizer = _with_inert(program, loaded.inert), tokenizer or loaded.tokenizer
        engine = processes.make_engine(program, kernels, batches, settings.interleave_seed, settings.threads)
        start_from_state(engine, loaded.state, keep_scale=not new_scale)
    else:
        if settings.init:
            inert, missing = check_config_beside(settings.init, program.model)
            warnings = said + missing
            program = _with_inert(program, inert)
        source = read_weights(settings.init, program.model) if settings.init else random_weights(program.model, seed)
        engine = processes.make_engine(program, kernels, batches, settings.interleave_seed, settings.threads)
        start_from_weights(engine, source)
    _watch(engine, settings)
    run = TrainingRun(
        program,
        settings,
        engine,
        stream,
        first_step,
        warnings,
        processes,
        series,
        held_out,
        utilisation,
        tokenizer or {},
    )
    place = settings.run_folder or (str(Path(series.directory) / RUN_FOLDER) if series else None)
    if place is None and processes.count > 1:
        place = processes.exchange(tempfile.mkdtemp(prefix="ratrain-") if processes.number == 0 else "")[0]
        run.folder_is_temporary = True
    if place is not None:
        run.folder = RunFolder(place)
    _leave_positions(run, run.folder, places)
    return run


def _open_place(
    settings: RunSettings, processes: Processes, places: ExitStack
) -> tuple[CheckpointSeries | None, Lock | None, list[Diagnostic]]:
    """Lock the place of checkpoints and see that they can be written there; the series, if it is one, process 0's lock, and what there is to say.

    Raises `DiagnosticError` RT002 or RT092 on all processes.
    """
    directory = settings.save
    if directory is None:
        return None, None, []
    is_series = settings.save_every is not None or processes.count > 1
    locks: list[Lock] = []
    processes.first_only(
        lambda: locks.append(places.enter_context(hold_checkpoint_place(directory, make_parents=is_series)))
    )
    said = [lock.warning for lock in locks if lock.warning is not None]
    lock = locks[0] if locks else None
    if is_series:
        series = CheckpointSeries(directory, settings.keep_last)
        series.open(processes)
        return series, lock, said
    check_no_series(directory)
    check_checkpoint_place(directory)
    return None, lock, said + clear_leftovers(directory, locks[0])


def _leave_positions(run: TrainingRun, folder: RunFolder | None, places: ExitStack) -> None:
    """Have the ranks of this process say where they are: in a folder, or in this process's memory for those who ask it.

    Raises `DiagnosticError` RT002 where they cannot, RT093 where those of another run do.
    """
    ranks = [rank for ranks in run.engine.ranks for rank in ranks]
    if folder is None:
        for number, rank in enumerate(ranks):
            rank.position = rank.new_position(None, number)
        return

    def begin() -> None:
        lock = places.enter_context(folder.hold())
        if lock.warning is not None:
            run.warnings.append(lock.warning)
        folder.clear()
        write_program(run.program, folder.program_path)

    run.processes.first_only(begin)
    try:
        for number, rank in enumerate(ranks, run.processes.started_as):
            folder.path.mkdir(exist_ok=True)  # on another machine it may not be there
            rank.position = rank.new_position(folder.path, number)
    except OSError as error:
        fail("RT002", f"cannot write '{folder.directory}': {error.strerror or error}")
    run.processes.exchange(None)  # all are there before any looks for the others


def _watch(engine: LocalEngine, settings: RunSettings) -> None:
    if settings.check_memory or settings.poison:
        engine.watch_memory(poison=settings.poison)


def run_manifest(program: Program, stream: TokenStream, settings: RunSettings, seed: int) -> dict[str, Any]:
    """Everything that must be equal for a resumed run to give the same bits."""
    plan = json.dumps(evolve(program.plan, mapping=None).to_fields(), sort_keys=True)
    return {
        "plan": json.loads(plan),
        "ratrain": _version("ratrain"),
        "numpy": _version("numpy"),
        "numba": _version("numba"),
        "plan_hash": hashlib.sha256(plan.encode()).hexdigest(),
        "kernels": settings.kernels,
        "kernel_threads": settings.kernel_threads(program.plan.clusters),
        "seed": seed,
        "order": settings.order,
        "sums": settings.sums,
        "data": stream.digest,
        "stream": stream.facts(),
        **blas_facts(),
    }


def blas_facts() -> dict[str, Any]:
    """Which BLAS multiplies in `fast` kernels, for which core type, and that it uses one thread."""
    from ratrain.targets.runtime.kernels import openblas

    return {"blas": openblas.VERSION, "blas_core_type": openblas.core_type(), "blas_threads": 1}


_SAID_ELSEWHERE = frozenset({"plan", "data", "stream"})
"""Entries of a manifest that `_differences` leaves to others: a plan's hash stands for it, data has words of its own."""


def _with_inert(program: Program, inert: Mapping[str, object]) -> Program:
    """The program with what its model's `config.json` says beside the mathematics, completed from another one's."""
    if inert.keys() <= program.model.inert.keys():
        return program
    return evolve(program, model=evolve(program.model, inert={**inert, **program.model.inert}))


def _data_differences(settings: RunSettings, saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Diagnostic]:
    """A warning where a run goes on with other data than the checkpoint's, which it was told to.

    Raises `DiagnosticError` RT092 where it was not.
    """
    if "data" not in saved or saved["data"] == now["data"]:
        return []
    facts = facts_of(saved)
    then = in_words(facts) if facts else f"other data ({str(saved['data']).partition('-')[0]} bytes of tokens)"
    text = f"this run's data are not those of the checkpoint '{settings.resume}'"
    notes = [Note(f"then: {then}"), Note(f"now: {in_words(now['stream'])}")]
    if facts == now["stream"]:
        notes.append(Note("what is in it has changed"))
    if not settings.new_data:
        way_out = "give the data, the tokenizer and the held-out part of then, or go on with those of now by --new-data"
        fail("RT092", text, notes=notes, help=way_out)
    return [Diagnostic("RT092", text, notes=notes, severity=Severity.WARNING)]


_SCALED = ("view_dtype", "grad_dtype", "grad_shard_dtype")


def _scale_that_starts_anew(saved: object, plan: Plan) -> list[Diagnostic]:
    """A warning where the loss scale of a checkpoint's run says nothing of this one: of other types, or fixed and not adapted."""
    if not isinstance(saved, dict) or not {"loss_scale", *_SCALED} <= saved.keys():
        return []
    if not isinstance(saved["loss_scale"], int | float | None):
        return []
    types = [
        f"{key} {saved[key]} then, {getattr(plan, key)} now" for key in _SCALED if saved[key] != getattr(plan, key)
    ]
    if not types and (saved["loss_scale"] is None) == (plan.loss_scale is None):
        return []
    was, is_now = (
        "dynamic" if scale is None else f"fixed at {scale:g}" for scale in (saved["loss_scale"], plan.loss_scale)
    )
    start = INITIAL_SCALE if plan.loss_scale is None else plan.loss_scale
    text = f"the loss scale starts anew at {start:g}: it was {was}, and is {is_now} now"
    return [Diagnostic("RT092", text, notes=[Note(words) for words in types], severity=Severity.WARNING)]


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[Diagnostic]:
    """Warnings about what has changed since the checkpoint was written."""
    found = []
    for key, value in now.items():
        if key in _SAID_ELSEWHERE or key not in saved or saved[key] == value:
            continue
        text = f"the checkpoint was written with {key} = {saved[key]}, this run has {value}: not bit for bit the same"
        notes = _plan_differences(saved.get("plan"), now["plan"]) if key == "plan_hash" else []
        found.append(Diagnostic("RT092", text, notes=notes, severity=Severity.WARNING))
    return found


def _plan_differences(saved: object, now: dict[str, Any]) -> list[Note]:
    """What has changed in the plan; older checkpoints have its hash only."""
    if not isinstance(saved, dict):
        return []
    changed = [key for key in now if saved.get(key) != now[key]]
    return [Note(f"plan: {key} = {saved.get(key)} then, {now[key]} now") for key in changed]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
