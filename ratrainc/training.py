"""Training from the command line: progress, log file, Ctrl-C, the report at the end."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from threadpoolctl import threadpool_limits

from ratrain.ratrain_ir.diagnostics import Diagnostic, DiagnosticError
from ratrain.ratrain_ir.files import check_directory_writable, check_writable
from ratrain.ratrain_ir.ops import Engine
from ratrain.ratrainc.cli import EXIT_DIAGNOSED, EXIT_HUNG_UP, EXIT_INTERRUPTED, EXIT_SAVED, EXIT_TERMINATED
from ratrain.ratrainc.console import errors, output, progress, say, size_text, status, unseen_progress
from ratrain.ratrainc.loss_plot import Curves, chart_lines, write_losses
from ratrain.ratrainc.run_log import RunLog, check_log, run_log
from ratrain.ratrainc.run_profile import write_profile
from ratrain.ratrainc.signals import StopAsked, ending_in_order, saying_where
from ratrain.ratrainc.telling import Telling, tell
from ratrain.ratrainc.training_data import DataChoice, open_data, tokenizer_files
from ratrain.targets.runtime.checkpoint import check_checkpoint_place
from ratrain.targets.runtime.checkpoint_series import check_no_series
from ratrain.targets.runtime.data import BYTE, in_words
from ratrain.targets.runtime.positions import RankPhase
from ratrain.targets.runtime.training import RunSettings, TimedStep, TrainingRun, prepare
from ratrain.targets.runtime.utilisation import Utilisation, measured_peak_flops

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.processes import Processes


LEAST_OPERATIONS = 2.5e8
"""Mean operations of a block from which on engines side by side gain more than they cost. Assumed: twice those of
`examples/tiny.json`, which does not pay for them (docs/runtime.md); a few milliseconds, against one of the interpreter's."""


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
    held_out: str | None
    """what was evaluated on"""
    saved: str | None
    stop_signal: int
    """the signal that ended it early, or 0"""
    problems: tuple[Diagnostic, ...] = ()
    """what could not be written beside the state"""
    token: str = BYTE
    """what a token of the data is"""

    @property
    def interrupted(self) -> bool:
        """Whether it was ended early."""
        return self.stop_signal != 0

    @property
    def exit_code(self) -> int:
        """130 after Ctrl-C; after SIGTERM or SIGHUP 75 where the state was saved, so that the job can be queued again, else 143 or 129.

        Otherwise 1 where something that was asked for could not be written, although the run was.
        """
        unsaved = {signal.SIGTERM: EXIT_TERMINATED, signal.SIGHUP: EXIT_HUNG_UP}
        for number, code in unsaved.items():
            if self.stop_signal == number:
                return EXIT_SAVED if self.saved else code
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_DIAGNOSED if self.problems else 0

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
            "token": self.token,
            "held_out": self.held_out,
            "saved": self.saved,
            "interrupted": self.interrupted,
            "diagnostics": [problem.to_json() for problem in self.problems],
        }


def default_threads(program: Program) -> int:
    """Threads for a run that names no number: one a core, or one alone where blocks are smaller than `LEAST_OPERATIONS`."""
    from ratrain.targets.simulator.figures import model_flops_per_token

    plan = program.plan
    blocks = sum(
        instruction.routine is not None for stage in program.stages for instruction in stage.streams[Engine.COMPUTE]
    )
    operations = model_flops_per_token(program.model, plan.seq_len) * plan.tokens_per_step
    small = operations < LEAST_OPERATIONS * blocks * plan.dp
    return 1 if small else RunSettings.available_threads()


def run_training(
    program: Program,
    data: DataChoice,
    settings: RunSettings,
    log: str | None,
    *,
    quiet: bool,
    plot: str | None = None,
    profile_path: str | None = None,
    live: bool = False,
    processes: Processes | None = None,
) -> RunResult:
    """Run a program on data, in this process alone or as one of several.

    Log, plot, profile and what is shown never cost the state: where they fail, training goes on, the state is saved first, and the
    result says what is missing. Raises `DiagnosticError` when data, weights, checkpoint or log cannot be used.
    """
    with ExitStack() as ending:
        ending.enter_context(saying_where("where the run is: it is being prepared, no step has begun"))
        run, threads = _prepare(program, data, settings, processes)
        ending.callback(run.close)
        if profile_path is not None:
            run.engine.profile = run.processes.begin_profile()
        for warning in run.warnings:
            tell(warning)
        stop = StopAsked()
        start = time.perf_counter()
        problems: list[Diagnostic] = []
        ending.enter_context(ending_in_order(stop))
        ending.enter_context(_counting_losses(run))
        with run_log(log, run.first_step, tell) as open_log:
            with threadpool_limits(limits=1), _watching(run):
                telling = Telling()
                if not quiet:
                    telling(lambda: _say_start(run))
                should_stop = run.engine.agreed_stop(lambda: stop.signal)
                _run_steps(run, should_stop, open_log, telling, quiet=quiet, live=live)
                stop.answer = "no step is to come: ending when all is written; Ctrl-C again stops at once"
                saved = run.save()
                stop_signal = should_stop()
                run.engine.enter(RankPhase.ENDED, run.steps_done - 1)
            if open_log is not None and open_log.problem is not None:
                problems.append(open_log.problem)
        ending.enter_context(saying_where("where the run is: all steps are done, its pictures are being written"))
        problems += _problems_of(lambda: _draw(run, plot))
        if profile_path is not None and run.engine.profile is not None:
            profile, concurrency = run.processes.merged_profile(run.engine.profile), run.engine.concurrency
            path = profile_path
            write = partial(write_profile, program, profile, path, concurrency, threads)
            problems += _problems_of(lambda: run.processes.first_only(write))
        for problem in problems:
            tell(problem)
        held_out = run.held_out
        return RunResult(
            tuple(run.done),
            time.perf_counter() - start,
            run.engine.arena_bytes,
            run.engine.scratch_bytes,
            run.engine.peak_transport_bytes,
            run.engine.monitor.peak_bytes if run.engine.monitor else None,
            run.stream.name,
            held_out.batches.stream.name if held_out else None,
            saved,
            stop_signal or stop.signal,
            tuple(problems),
            run.stream.token,
        )


def _prepare(
    program: Program, data: DataChoice, settings: RunSettings, processes: Processes | None
) -> tuple[TrainingRun, int]:
    """The run, ready for its first step, and the threads of its kernels."""
    from ratrain.targets.runtime.kernels import kernel_set

    with status("preparing"), threadpool_limits(limits=1):
        stream, held_out = open_data(program, data)
        threads = settings.kernel_threads(program.plan.clusters)
        kernels = kernel_set(settings.kernels, threads)
        utilisation = _utilisation(program)
        run = prepare(
            program,
            stream,
            settings,
            kernels,
            processes,
            held_out=held_out,
            utilisation=utilisation,
            tokenizer=tokenizer_files(data),
        )
    return run, threads


def _problems_of(action: Callable[[], None]) -> list[Diagnostic]:
    """What was wrong with something that the state does not depend on."""
    try:
        action()
    except DiagnosticError as error:
        return error.diagnostics
    return []


def check_outputs(
    settings: RunSettings, *, log: str | None, plot: str | None, profile_path: str | None, is_series: bool
) -> None:
    """Try all places that a run writes to, before any of its work.

    Raises `DiagnosticError` RT002 or RT092 where one cannot be written.
    """
    for path in (plot, profile_path):
        if path is not None:
            check_writable(path)
    if log is not None:
        check_log(log)
    if settings.save is not None:
        if is_series:
            check_directory_writable(settings.save)
        else:
            check_no_series(settings.save)
            check_checkpoint_place(settings.save)
    if settings.run_folder is not None:
        check_directory_writable(settings.run_folder)


def _utilisation(program: Program) -> Utilisation:
    from ratrain.targets.simulator.figures import model_flops_per_token

    return Utilisation(model_flops_per_token(program.model, program.plan.seq_len), measured_peak_flops())


def _draw(run: TrainingRun, path: str | None) -> None:
    """Write the losses as a picture, where one is asked for."""
    if path is not None:
        write_losses(path, _curves(run.done), f"{run.program.name}: {run.stream.name}")


def _curves(steps: Sequence[TimedStep]) -> Curves:
    return Curves.of((step.report.step, step.report.loss, step.eval_loss) for step in steps)


def _say_start(run: TrainingRun) -> None:
    scratch = size_text(run.engine.scratch_bytes)
    found = f" ({run.stream.found})" if run.stream.found else ""
    say(f"data: {in_words(run.stream.facts())}{found}")
    if run.held_out is not None:
        held = run.held_out
        say(f"held out: {held.batches.stream.name}; an evaluation takes {held.tokens:,} tokens of it")
    say(f"{run.engine.description}: arenas {size_text(run.engine.arena_bytes)}, kernel scratch {scratch}")


def _run_steps(
    run: TrainingRun,
    should_stop: Callable[[], int],
    log: RunLog | None,
    telling: Telling,
    *,
    quiet: bool,
    live: bool,
) -> None:
    """Run all steps, or those before a signal asks for the end."""
    total = run.settings.steps
    shown_every = max(1, total // 10)
    steps = unseen_progress(total)
    task = steps.tasks[0]
    live = live and errors().is_terminal
    with _display(run, telling, live=live) as show:
        for timed in run.steps(should_stop):
            if log is not None:
                log.write(timed)
            show(timed)
            steps.advance(task.id)
            index = timed.report.step - run.first_step
            if quiet or live:
                continue
            if index % shown_every == 0 or index == total - 1 or timed.eval_loss is not None:
                line = _step_line(timed, task.time_remaining)
                telling(partial(say, line))


@contextmanager
def _display(run: TrainingRun, telling: Telling, *, live: bool) -> Iterator[Callable[[TimedStep], None]]:
    """What is told of each step while a run goes on; where it cannot be, the block goes on without."""
    feeds: list[Callable[[TimedStep], None]] = []
    with ExitStack() as display:
        telling(lambda: feeds.append(display.enter_context(_live_view(run) if live else _progress_bar(run))))
        opened = display.pop_all()
    try:
        yield lambda timed: telling(lambda: [feed(timed) for feed in feeds])
    finally:
        with suppress(Exception):  # it was told when it began to fail
            opened.close()


@contextmanager
def _live_view(run: TrainingRun) -> Iterator[Callable[[TimedStep], None]]:
    from ratrain.ratrainc.live_view import live_view
    from ratrain.targets.runtime.progress import LocalProgress

    with live_view(run.program, LocalProgress(run.engine), run.settings.steps) as show:
        yield show


@contextmanager
def _progress_bar(run: TrainingRun) -> Iterator[Callable[[TimedStep], None]]:
    with progress(run.settings.steps, "training") as (bar, task):
        bar.update(task, status="first step: kernels are compiled where they never ran before")
        yield lambda timed: bar.update(
            task, advance=1, status=f"loss {timed.report.loss:.4f}  {timed.tokens_per_second:,.0f} tokens/s"
        )


def _step_line(timed: TimedStep, seconds_left: float | None) -> str:
    """A step in words: what a person watches."""
    report = timed.report
    parts = [f"step {report.step:5d}  loss {report.loss:.4f}"]
    if timed.eval_loss is not None:
        parts.append(f"held out {timed.eval_loss:.4f}")
    if report.gradient_norm is not None:
        parts.append(f"gradient norm {report.gradient_norm:.3g}")
    parts.append(f"{timed.tokens_per_second:10,.0f} tokens/s")
    if timed.mfu is not None:
        parts.append(f"MFU {100 * timed.mfu:.0f} %")
    if seconds_left:
        parts.append(f"ETA {timedelta(seconds=round(seconds_left))}")
    if report.skipped_blocks:
        parts.append(f"({report.skipped_blocks} block updates skipped: overflow)")
    return "  ".join(parts)


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
    _show_held_out(result)
    utilisation = _mean_utilisation(result.steps)
    if utilisation is not None:
        say(f"model-flops utilisation {100 * utilisation:.0f} % of one core's matrix products, measured at the start")
    overflows = sum(1 for step in result.steps if step.report.skipped_blocks)
    if overflows:
        say(f"{overflows} steps had an overflow somewhere; loss scale now {last.loss_scale:g}")
    if result.live_peak_bytes is not None:
        say(f"memory checked: every access inside its life; at most {result.live_peak_bytes} bytes live on a rank")
    if result.saved:
        say(f"saved {result.saved}")
    if output().encoding.startswith("utf"):
        for line in chart_lines(_curves(result.steps)):
            say(line)


def _mean_utilisation(steps: Sequence[TimedStep]) -> float | None:
    """That of all steps together, each with its time; without the first one, in which kernels are loaded or compiled."""
    mfus = [step.mfu for step in (steps[1:] or steps) if step.mfu]
    return len(mfus) / sum(1 / mfu for mfu in mfus) if mfus else None


def _show_held_out(result: RunResult) -> None:
    held = [(step.report.step, step.eval_loss) for step in result.steps if step.eval_loss is not None]
    if held:
        words = " -> ".join(f"{loss:.4f}" for _, loss in dict.fromkeys((held[0], held[-1])))
        say(f"held-out loss {words} ({result.held_out}; after step {held[-1][0]})")


@contextmanager
def _counting_losses(run: TrainingRun) -> Iterator[None]:
    """Have a second Ctrl-C say what is saved, and what is lost."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_lost_words(run)) from None


def _lost_words(run: TrainingRun) -> str:
    """What a run that stopped at once has saved, what it has lost, and what it left half-written."""
    saved, (half, whole) = run.newest_saved(), run.left_over()
    kept = saved[0] if saved else run.first_step
    if saved:
        where = f"'{saved[1]}' has the state after {kept} steps"
    elif run.settings.resume is not None and Path(run.settings.resume).exists():
        where = f"this run has saved nothing, and '{run.settings.resume}' is as it was"
    else:
        where = "this run has saved nothing"
    words = [f"interrupted at once: {where}; steps done since and lost: {run.steps_done - kept}"]
    words += [f"'{path}' is left half-written: the next save there removes it" for path in half]
    words += [f"'{path}' is left, and whole: the next save there removes it" for path in whole]
    return "\n".join(words)


@contextmanager
def _watching(run: TrainingRun) -> Iterator[None]:
    """Watch over the run, where its ranks say where they are."""
    run.engine.tell = tell
    watchdog = run.watchdog(tell)
    watchdog.start()
    try:
        yield
    except BaseException as error:
        run.engine.enter(RankPhase.FAILED, run.steps_done)
        if isinstance(error, DiagnosticError):
            _keep_reason(run, error)
        raise
    finally:
        watchdog.stop()
        run.remove_temporary_folder()


def _keep_reason(run: TrainingRun, error: DiagnosticError) -> None:
    """Leave what ended a run for `postmortem`, unless it was reported, or nobody would look there."""
    if run.folder is not None and not run.folder_is_temporary and run.folder.claim_report():
        with suppress(DiagnosticError):  # where the disk is full, this is too much as well
            run.folder.keep_report("\n".join(problem.render() for problem in error.diagnostics))
