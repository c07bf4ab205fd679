"""A training run of the command line: preparation, steps, Ctrl-C, saving, and all other outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

from ratrain.ratrain_ir.model.trained_flops import trained_flops_per_token
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Severity
from ratrain.ratrain_ir.support.files import check_directory_writable, check_writable
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.choices.kernel_choice import with_kernels
from ratrain.ratrainc.console.console import status
from ratrain.ratrainc.console.safe_messages import SafeMessages, show_safely
from ratrain.ratrainc.console.signals import StopAsked, ending_in_order, saying_where
from ratrain.ratrainc.running.loss_plot import write_losses
from ratrain.ratrainc.running.run_display import run_steps, say_start
from ratrain.ratrainc.running.run_end import check_trained, saved_first
from ratrain.ratrainc.running.run_log import check_log, run_log
from ratrain.ratrainc.running.run_profile import write_profile
from ratrain.ratrainc.running.run_result import RunResult, curves_of
from ratrain.ratrainc.running.trackers import check_trackers, open_trackers
from ratrain.ratrainc.running.training_data import companion_files, open_data
from ratrain.targets.runtime.checkpoint.checkpoint import check_checkpoint_place
from ratrain.targets.runtime.checkpoint.checkpoint_series import check_no_series
from ratrain.targets.runtime.training.preparation import prepare
from ratrain.targets.runtime.training.utilisation import Utilisation, measured_peak_flops
from ratrain.targets.runtime.watch.positions import RankPhase
from ratrain.targets.runtime.weights.weights import check_weights_config, check_weights_place

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.run_choices import DataChoice, Display, Outputs
    from ratrain.ratrainc.running.run_log import RunLog
    from ratrain.ratrainc.running.trackers import Tracker
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.engine.processes import Processes
    from ratrain.targets.runtime.settings import RunSettings
    from ratrain.targets.runtime.training.training import TrainingRun


def run_training(
    program: Program,
    data: DataChoice,
    settings: RunSettings,
    outputs: Outputs,
    display: Display,
    processes: Processes | None = None,
) -> RunResult:
    """Run a program on data, in this process alone or as one of several.

    Log, trackers, plot, profile and display never cost the state. If they fail, training goes on, the state is saved
    first, and the result names the problem. An exception during the steps leaves the finished steps saved. Raises
    `DiagnosticError` if data, weights, checkpoint or log cannot be used.
    """
    with ExitStack() as ending:
        # Contexts are left in reverse order: signal handlers are restored before the run is closed.
        ending.enter_context(saying_where("where the run is: it is being prepared, no step has begun"))
        run, threads = _prepare(program, data, settings, processes)
        ending.callback(run.close)
        if outputs.profile is not None:
            run.engine.profile = run.processes.begin_profile()
        for warning in run.warnings:
            show_safely(warning)
        stop = StopAsked(speaks=run.processes.number == 0)
        start = time.perf_counter()
        problems: list[Diagnostic] = []
        ending.enter_context(ending_in_order(stop))
        ending.enter_context(_counting_losses(run))
        with (
            run_log(outputs.log, run.first_step, show_safely) as open_log,
            open_trackers(outputs.trackers, run, show_safely) as trackers,
        ):
            writers: list[RunLog | Tracker] = [*([] if open_log is None else [open_log]), *trackers]
            with threadpool_limits(limits=1), _watching(run):
                messages = SafeMessages()
                if not display.quiet:
                    messages(lambda: say_start(run))
                # all processes must end after the same step, so they agree on the signal
                should_stop = run.engine.agreed_stop(lambda: stop.signal)
                with saved_first(run):
                    run_steps(run, should_stop, writers, messages, display)
                stop.answer = "no step is left: ending when everything is written"
                with status("saving the state") if settings.saving.directory is not None else nullcontext():
                    saved = run.save()
                stop_signal = should_stop()
                run.engine.enter(RankPhase.ENDED, run.steps_done - 1)
        problems += [writer.problem for writer in writers if writer.problem is not None]
        ending.enter_context(saying_where("where the run is: all steps are done, its pictures are being written"))
        problems += _problems_of(lambda: _draw(run, outputs.plot))
        if outputs.profile is not None and run.engine.profile is not None:
            profile, concurrency = run.processes.merged_profile(run.engine.profile), run.engine.concurrency
            write = partial(write_profile, program, profile, outputs.profile, concurrency, threads)
            problems += _problems_of(lambda: run.processes.first_only(write))
        of_training = check_trained(run)
        problems += [each for each in of_training if each.severity is Severity.ERROR]
        for problem in (*problems, *(each for each in of_training if each not in problems)):
            show_safely(problem)
        held_out = run.held_out
        return RunResult(
            tuple(run.done),
            time.perf_counter() - start,
            run.engine.memory_use(),
            run.engine.monitor.peak_bytes if run.engine.monitor else None,
            run.stream.name,
            held_out.batches.stream.name if held_out else None,
            saved,
            stop_signal or stop.signal,
            tuple(problems),
            run.stream.token,
            run.best if run.is_patient_no_more else None,
        )


def _prepare(
    program: Program, data: DataChoice, settings: RunSettings, processes: Processes | None
) -> tuple[TrainingRun, int]:
    """Return the run, ready for its first step, and the number of its kernels' threads."""
    from ratrain.targets.runtime.kernels import kernel_set

    with status("preparing"), threadpool_limits(limits=1):
        if settings.start.weights is not None:
            # First: without weights, or with those of another model, tokens and tokenizer are not what is wrong.
            check_weights_place(settings.start.weights)
            if settings.start.checkpoint is None:
                check_weights_config(settings.start.weights, program.model)
        stream, held_out = open_data(program, data, settings.evaluation, settings.start)
        settings = with_kernels(program, settings, several=processes is not None and processes.count > 1)
        threads = settings.execution.kernel_threads(program.plan.clusters)
        kernels = kernel_set(settings.execution.kernels, threads, settings.execution.device)
        utilisation = Utilisation(trained_flops_per_token(program.model, program.plan), measured_peak_flops())
        run = prepare(
            program,
            stream,
            settings,
            kernels,
            processes,
            held_out=held_out,
            utilisation=utilisation,
            companions=companion_files(data, settings.start),
        )
    return run, threads


def _problems_of(action: Callable[[], None]) -> list[Diagnostic]:
    """Return the diagnostics of an action that the state does not depend on."""
    try:
        action()
    except DiagnosticError as error:
        return error.diagnostics
    return []


def check_outputs(settings: RunSettings, outputs: Outputs, processes: int) -> None:
    """Check every place that a run writes to, before any of its work; `processes` is their number.

    Raises `DiagnosticError` RT002 or RT092 if one cannot be written.
    """
    check_trackers(outputs.trackers, settings.start.checkpoint)
    for path in (outputs.plot, outputs.profile):
        if path is not None:
            check_writable(path)
    if outputs.log is not None:
        check_log(outputs.log)
    directory = settings.saving.directory
    if directory is not None:
        if settings.saving.is_series(processes):
            check_directory_writable(directory)
        else:
            check_no_series(directory)
            check_checkpoint_place(directory)
    if settings.saving.best is not None:
        check_no_series(settings.saving.best)
        check_checkpoint_place(settings.saving.best)
    if settings.watch.folder is not None:
        check_directory_writable(settings.watch.folder)


def _draw(run: TrainingRun, path: str | None) -> None:
    """Write the losses as a picture if one is asked for."""
    if path is not None:
        write_losses(path, curves_of(run.done), f"{run.program.name}: {run.stream.name}")


@contextmanager
def _counting_losses(run: TrainingRun) -> Iterator[None]:
    """Let a second Ctrl-C name what is saved and how many steps are lost."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_lost_words(run)) from None


def _lost_words(run: TrainingRun) -> str:
    """Say what an interrupted run has saved, how many steps it lost, and which files it left half-written."""
    saved, (half, whole) = run.newest_saved(), run.left_over()
    kept = saved[0] if saved else run.first_step
    if saved:
        where = f"'{saved[1]}' has the state after {number_of(kept, 'step')}"
    elif (resumed := run.settings.start.checkpoint) is not None and Path(resumed).exists():
        where = f"this run has saved nothing, and '{resumed}' is as it was"
    else:
        where = "this run has saved nothing"
    words = [f"interrupted at once: {where}; steps done since and lost: {run.steps_done - kept}"]
    words += [f"'{path}' is left half-written: the next save there removes it" for path in half]
    words += [f"'{path}' is left, and whole: the next save there removes it" for path in whole]
    return "\n".join(words)


@contextmanager
def _watching(run: TrainingRun) -> Iterator[None]:
    """Run the watchdog while the block runs, and record a failure as the ranks' phase."""
    run.engine.tell = show_safely
    watchdog = run.watchdog(show_safely)
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
    """Leave the error that ended a run for `postmortem`, unless one is reported already or the folder is temporary."""
    if run.folder is not None and not run.folder_is_temporary and run.folder.claim_report():
        with suppress(DiagnosticError):  # if the disk is full, this cannot be written either
            run.folder.keep_report("\n".join(problem.render() for problem in error.diagnostics))
