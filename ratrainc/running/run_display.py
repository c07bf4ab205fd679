"""Output during a run: lines of text, a progress bar or a dashboard."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.model.blocks import trained_words
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import errors, progress, say, size_text, unseen_progress
from ratrain.targets.runtime.arena.kernel_memory import HOST
from ratrain.targets.runtime.checkpoint.overrides import words
from ratrain.targets.runtime.data.data import in_words

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.run_choices import Display
    from ratrain.ratrainc.console.safe_messages import SafeMessages
    from ratrain.ratrainc.running.run_log import RunLog
    from ratrain.ratrainc.running.trackers import Tracker
    from ratrain.targets.runtime.arena.process_memory import MemoryUse
    from ratrain.targets.runtime.training.training import TimedStep, TrainingRun


def say_start(run: TrainingRun) -> None:
    """Print the data, the engine and the memory of a run."""
    say(f"data: {in_words(run.stream.facts(), run.stream.found)}")
    sequences, needed = run.engine.batches.sequences, run.program.plan.global_batch
    if sequences < needed:
        few = number_of(sequences, "sequence")
        say(f"note: it has {few}, and a step takes {needed}: a step uses some more than once")
    if run.held_out is not None:
        held = run.held_out
        say(f"held out: {held.batches.stream.name}; an evaluation takes {number_of(held.tokens, 'token', ',')} of it")
    warned_of = {warning.key for warning in run.warnings}
    if overrides := {name: key for name, key in run.overrides.items() if name not in warned_of}:
        told = (f"{name} {words(key.run)} (plan: {words(key.plan)})" for name, key in overrides.items())
        say(f"optimizer: {', '.join(told)}")
    if trained := trained_words(run.program.trained_model):
        say(trained)
    say(run.engine.description)
    kernels = run.engine.kernels
    place = f", arenas on {kernels.memory.place}" if kernels.memory.place != HOST.place else ""
    reason = run.settings.execution.kernels_reason
    if place or reason:
        say(f"kernels: {kernels.name}{place}" + (f" ({reason})" if reason else ""))
    say(_memory_line(run.engine.memory_use()))
    in_files = sum(rank.stage.bytes_in(Home.FILE) for ranks in run.engine.ranks for rank in ranks)
    if in_files:
        folder = run.settings.execution.store_folder or tempfile.gettempdir()
        say(f"stored in files: {size_text(in_files)} in {folder}")


def _memory_line(memory: MemoryUse) -> str:
    """Return the bytes that this process is going to hold, by purpose."""
    parts = [f"arenas {size_text(memory.arena_bytes)}", f"scratch {size_text(memory.scratch_bytes)}"]
    named = [f"{name} {count:,} bytes" for name, count in memory.declared.items() if count]
    parts.append(f"other buffers {size_text(sum(memory.declared.values()))} ({', '.join(named)})")
    if memory.constant_bytes is None or memory.planned_bytes is None:
        return f"memory: {' + '.join(parts)}"
    parts.append(f"constant {size_text(memory.constant_bytes)} (interpreter, libraries, program)")
    if memory.first_use:
        later = ", ".join(f"{name} {size_text(count)}" for name, count in memory.first_use.items())
        parts.append(f"at most {size_text(sum(memory.first_use.values()))} on first use ({later})")
    return f"memory: {' + '.join(parts)} = {size_text(memory.planned_bytes)}"


def run_steps(
    run: TrainingRun,
    should_stop: Callable[[], int],
    writers: Sequence[RunLog | Tracker],
    messages: SafeMessages,
    display: Display,
) -> None:
    """Run all steps, or those until a signal asks for the end; pass each finished step to the writers and the display.

    Every tenth of the run, and every evaluated step, is printed as a line.
    """
    total = run.settings.steps
    shown_every = max(1, total // 10)
    steps = unseen_progress(total)
    task = steps.tasks[0]
    live = display.live and errors().is_terminal
    with _display(run, messages, live=live) as show:
        for timed in run.steps(should_stop):
            for writer in writers:
                writer.write(timed)
            show(timed)
            if display.each_step is not None:
                display.each_step(timed)
            steps.advance(task.id)
            index = timed.report.step - run.first_step
            if display.quiet or live:
                continue
            if index % shown_every == 0 or index == total - 1 or timed.eval_loss is not None:
                line = _step_line(timed, task.time_remaining)
                messages(partial(say, line))


@contextmanager
def _display(run: TrainingRun, messages: SafeMessages, *, live: bool) -> Iterator[Callable[[TimedStep], None]]:
    """Open the progress bar or dashboard; yield a function that shows a step.

    If it cannot be opened, the run goes on without it.
    """
    feeds: list[Callable[[TimedStep], None]] = []
    with ExitStack() as opening:
        messages(lambda: feeds.append(opening.enter_context(_live_view(run) if live else _progress_bar(run))))
        opened = opening.pop_all()
    try:
        yield lambda timed: messages(lambda: [feed(timed) for feed in feeds])
    finally:
        with suppress(Exception):  # its first failure was reported already
            opened.close()


@contextmanager
def _live_view(run: TrainingRun) -> Iterator[Callable[[TimedStep], None]]:
    from ratrain.ratrainc.running.live_view import live_view
    from ratrain.targets.runtime.engine.live_progress import LocalProgress

    with live_view(run.program, LocalProgress(run.engine), run.settings.steps) as show:
        yield show


@contextmanager
def _progress_bar(run: TrainingRun) -> Iterator[Callable[[TimedStep], None]]:
    with progress(run.settings.steps, "training") as (bar, task):
        bar.update(task, status="first step: new kernels are compiled")
        yield lambda timed: bar.update(
            task,
            advance=1,
            status=f"loss {timed.report.loss:.4f}  {timed.tokens_per_second:,.0f} tokens/s",
        )


def _step_line(timed: TimedStep, seconds_left: float | None) -> str:
    """Return a line about a step."""
    report = timed.report
    parts = [f"step {report.step:5d}  loss {report.loss:.4f}"]
    if timed.eval_loss is not None:
        parts.append(f"held out {timed.eval_loss:.4f}")
    if report.gradient_norm is not None:
        parts.append(f"norm {report.gradient_norm:.3g}")
    parts.append(f"{timed.tokens_per_second:,.0f} tokens/s")
    if timed.mfu is not None:
        parts.append(f"MFU {100 * timed.mfu:.0f} %")
    if report.experts is not None:
        parts.append(f"busiest expert {report.experts.busiest:.2g}x")
        if (share := report.experts.dropped_share) is not None:
            parts.append(f"{100 * share:.2g} % of rows dropped")
    if seconds_left:
        parts.append(f"ETA {timedelta(seconds=round(seconds_left))}")
    if report.skipped_blocks:
        parts.append(f"({report.skipped_blocks} block updates skipped: overflow)")
    return "  ".join(parts)
