"""A training run on the local engine: start or resume, steps, log, save. The command line and notebooks both call this."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from typing import IO, TYPE_CHECKING, Any

from attrs import define, field, frozen

from ratrain_ir.diagnostics import Diagnostic, Severity, fail
from targets.program import Program
from targets.runtime.checkpoint import check_checkpoint_place, load_checkpoint, save_checkpoint
from targets.runtime.data import Batches, Order, TokenStream
from targets.runtime.evaluation import HeldOut
from targets.runtime.kernels import KernelName
from targets.runtime.local import LocalEngine, StepReport
from targets.runtime.state import start_from_state, start_from_weights, training_state
from targets.runtime.threaded import ThreadedEngine
from targets.runtime.utilisation import Utilisation
from targets.runtime.weights import random_weights, read_weights

if TYPE_CHECKING:
    from targets.runtime.kernels import KernelSet


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
    """checkpoint directory to write at the end"""
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


@define(eq=False)
class TrainingRun:
    """One run. Make it with `prepare`, iterate `steps()`, then `save()`."""

    program: Program
    settings: RunSettings
    engine: LocalEngine
    stream: TokenStream
    first_step: int
    warnings: list[Diagnostic]
    held_out: HeldOut | None = None
    """what is evaluated on"""
    utilisation: Utilisation | None = None
    done: list[TimedStep] = field(factory=list)

    @property
    def seed(self) -> int:
        """The seed of this run."""
        return self.program.plan.seed if self.settings.seed is None else self.settings.seed

    def steps(self, should_stop: Callable[[], bool] = lambda: False) -> Iterator[TimedStep]:
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
            if not isfinite(report.loss):
                text = f"the loss of step {step} is {report.loss}: the weights have diverged"
                fail("RT093", text, help="lower the learning rate or lengthen the warm-up")

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
        directory = self.settings.save
        if directory is not None:
            state = training_state(self.engine, self.first_step + len(self.done))
            save_checkpoint(directory, self.program.model, state, self.manifest())
        return directory

    def manifest(self) -> dict[str, Any]:
        """What the bits of this run depend on beside its state."""
        return run_manifest(self.program, self.stream, self.settings, self.seed)


def prepare(
    program: Program,
    stream: TokenStream,
    settings: RunSettings,
    kernels: KernelSet,
    *,
    held_out: HeldOut | None = None,
    utilisation: Utilisation | None = None,
) -> TrainingRun:
    """An engine with its state filled: from a checkpoint, from weights, or at random.

    Raises `DiagnosticError` when data, weights or checkpoint do not fit the program.
    """
    if settings.save is not None:
        check_checkpoint_place(settings.save)
    seed = program.plan.seed if settings.seed is None else settings.seed
    batches = Batches(stream, program.plan, settings.order, seed)
    warnings: list[Diagnostic] = []
    if settings.resume is not None:
        state, manifest = load_checkpoint(settings.resume, program.model)
        warnings = _differences(manifest, run_manifest(program, stream, settings, seed))
        engine = _engine(program, kernels, batches, settings)
        start_from_state(engine, state)
        _watch(engine, settings)
        return TrainingRun(program, settings, engine, stream, state.step, warnings, held_out, utilisation)
    source = read_weights(settings.init, program.model) if settings.init else random_weights(program.model, seed)
    engine = _engine(program, kernels, batches, settings)
    start_from_weights(engine, source)
    _watch(engine, settings)
    return TrainingRun(program, settings, engine, stream, 0, warnings, held_out, utilisation)


def _engine(program: Program, kernels: KernelSet, batches: Batches, settings: RunSettings) -> LocalEngine:
    """Engines side by side where there are threads for it; one after the other where the order is prescribed."""
    if settings.threads > 1 and settings.interleave_seed is None:
        return ThreadedEngine(program, kernels, batches)
    return LocalEngine(program, kernels, batches, interleave_seed=settings.interleave_seed)


def _watch(engine: LocalEngine, settings: RunSettings) -> None:
    if settings.check_memory or settings.poison:
        engine.watch_memory(poison=settings.poison)


def run_manifest(program: Program, stream: TokenStream, settings: RunSettings, seed: int) -> dict[str, Any]:
    """Everything that must be equal for a resumed run to give the same bits."""
    plan = json.dumps(program.plan.to_fields(), sort_keys=True)
    return {
        "ratrain": _version("ratrain"),
        "numpy": _version("numpy"),
        "numba": _version("numba"),
        "plan_hash": hashlib.sha256(plan.encode()).hexdigest(),
        "kernels": settings.kernels,
        "kernel_threads": settings.kernel_threads(program.plan.clusters),
        "seed": seed,
        "order": settings.order,
        "data": stream.digest,
        **blas_facts(),
    }


def blas_facts() -> dict[str, Any]:
    """Which BLAS multiplies here, for which core type, and that it uses one thread."""
    from threadpoolctl import threadpool_info

    found = [pool for pool in threadpool_info() if pool.get("user_api") == "blas"]
    first = found[0] if found else {}
    return {
        "blas": f"{first.get('internal_api', 'unknown')} {first.get('version', '')}".strip(),
        "blas_core_type": str(first.get("architecture", "unknown")),
        "blas_threads": 1,
    }


def write_log_line(stream: IO[str], step: TimedStep) -> None:
    """Append one step to a log of JSON lines, at once."""
    stream.write(json.dumps(step.to_json()) + "\n")
    stream.flush()


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[Diagnostic]:
    """Warnings about what has changed since the checkpoint was written."""
    found = []
    for key, value in now.items():
        if key in saved and saved[key] != value:
            text = (
                f"the checkpoint was written with {key} = {saved[key]}, this run has {value}: not bit for bit the same"
            )
            found.append(Diagnostic("RT092", text, severity=Severity.WARNING))
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
