"""Training from the command line: progress, log file, Ctrl-C, the report at the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

import click
from attrs import define, frozen

from ratrain_ir.diagnostics import fail
from ratrainc.console import progress, say, size_text, status
from targets.runtime.training import RunSettings, TimedStep, TrainingRun, prepare, write_log_line

if TYPE_CHECKING:
    from types import FrameType

    from targets.program import Program


@frozen
class RunResult:
    """What a run did. Bytes are of all ranks of the process together."""

    steps: tuple[TimedStep, ...]
    seconds: float
    arena_bytes: int
    scratch_bytes: int
    transport_bytes: int
    live_peak_bytes: int | None
    """most bytes live at once on a rank, where memory was checked"""
    data: str
    saved: str | None
    interrupted: bool

    def to_json(self) -> dict[str, Any]:
        """The result as plain data."""
        return {
            "steps": [step.to_json() for step in self.steps],
            "seconds": self.seconds,
            "arena_bytes": self.arena_bytes,
            "scratch_bytes": self.scratch_bytes,
            "transport_bytes": self.transport_bytes,
            "live_peak_bytes": self.live_peak_bytes,
            "data": self.data,
            "saved": self.saved,
            "interrupted": self.interrupted,
        }


@define
class _StopAsked:
    """Whether Ctrl-C was pressed; the second one stops at once."""

    asked: bool = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        click.echo("\nending after this step; Ctrl-C again stops at once", err=True)


def run_training(
    program: Program, data: str | None, data_dtype: str | None, settings: RunSettings, log: str | None, *, quiet: bool
) -> RunResult:
    """Run a program on data.

    Raises `DiagnosticError` when data, weights, checkpoint or log cannot be used.
    """
    from threadpoolctl import threadpool_limits

    from targets.runtime.data import builtin_text_tokens, open_tokens
    from targets.runtime.kernels import kernel_set

    with status("preparing"), threadpool_limits(limits=1):
        vocab = program.model.vocab_size
        if data is None:
            stream = builtin_text_tokens(vocab_size=vocab)
        else:
            stream = open_tokens(data, vocab_size=vocab, dtype=data_dtype)
        kernels = kernel_set("reference" if settings.kernels == "reference" else "fast")
        run = prepare(program, stream, settings, kernels)
    for warning in run.warnings:
        click.echo(warning.render(), err=True)
    stop = _StopAsked()
    start = time.perf_counter()
    with _log_file(log) as stream_out, _on_interrupt(stop), threadpool_limits(limits=1):
        if not quiet:
            _say_start(run)
        _run_steps(run, stop, stream_out, quiet=quiet)
        saved = run.save()
    return RunResult(
        tuple(run.done),
        time.perf_counter() - start,
        run.engine.arena_bytes,
        run.engine.scratch.capacity,
        run.engine.peak_transport_bytes,
        run.engine.monitor.peak_bytes if run.engine.monitor else None,
        stream.name,
        saved,
        stop.asked,
    )


def _say_start(run: TrainingRun) -> None:
    scratch = size_text(run.engine.scratch.capacity)
    ranks = run.program.plan.clusters
    say(f"data: {run.stream.name}, {len(run.stream.tokens):,} tokens")
    say(f"{ranks} ranks in this process: arenas {size_text(run.engine.arena_bytes)}, kernel scratch {scratch}")


def _run_steps(run: TrainingRun, stop: _StopAsked, log: IO[str] | None, *, quiet: bool) -> None:
    total = run.settings.steps
    shown_every = max(1, total // 10)
    with progress(total, "training") as (bar, task):
        for timed in run.steps(lambda: stop.asked):
            if log is not None:
                _write_log(log, timed)
            report = timed.report
            bar.update(task, advance=1, status=f"loss {report.loss:.4f}  {timed.tokens_per_second:,.0f} tokens/s")
            index = report.step - run.first_step
            if not quiet and (index % shown_every == 0 or index == total - 1):
                skipped = (
                    f"  ({report.skipped_blocks} block updates skipped: overflow)" if report.skipped_blocks else ""
                )
                say(
                    f"step {report.step:5d}  loss {report.loss:.4f}  {timed.tokens_per_second:10,.0f} tokens/s{skipped}"
                )


def _write_log(log: IO[str], timed: TimedStep) -> None:
    try:
        write_log_line(log, timed)
    except OSError as error:
        fail("RT002", f"cannot write the log '{log.name}': {error.strerror}")


def show_run(result: RunResult) -> None:
    """The report of a run."""
    if not result.steps:
        say("no step was run")
        return
    first, last = result.steps[0].report, result.steps[-1].report
    tokens = sum(step.report.tokens for step in result.steps)
    tail = result.steps[-max(1, len(result.steps) // 10) :]
    mean = sum(step.report.loss for step in tail) / len(tail)
    say(
        f"{len(result.steps)} steps, {tokens:,} tokens in {result.seconds:.1f} s: {tokens / result.seconds:,.0f} tokens/s"
    )
    say(f"loss {first.loss:.4f} -> {last.loss:.4f} (mean of the last {len(tail)} steps: {mean:.4f})")
    overflows = sum(1 for step in result.steps if step.report.skipped_blocks)
    if overflows:
        say(f"{overflows} steps had an overflow somewhere; loss scale now {last.loss_scale:g}")
    if result.live_peak_bytes is not None:
        say(f"memory checked: every access inside its life; at most {result.live_peak_bytes} bytes live on a rank")
    if result.saved:
        say(f"saved {result.saved}")


@contextmanager
def _log_file(path: str | None) -> Iterator[IO[str] | None]:
    """The log, written line by line so that a crash loses nothing."""
    if path is None:
        yield None
        return
    try:
        stream = open(path, "w", encoding="utf-8")  # noqa: PTH123, SIM115 - closed below, opened here for its error
    except (OSError, ValueError) as error:  # a ValueError: no path has a zero byte
        fail("RT002", f"cannot write the log '{path}': {getattr(error, 'strerror', None) or error}")
    try:
        yield stream
    finally:
        with suppress(OSError):  # every line was flushed when it was written, and a failure reported then
            stream.close()


@contextmanager
def _on_interrupt(stop: _StopAsked) -> Iterator[None]:
    """Ask for an orderly end on the first Ctrl-C."""
    before = signal.signal(signal.SIGINT, stop.handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
