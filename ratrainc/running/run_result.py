"""The result of a run: exit code, figures, and a report in words."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import Diagnostic
from ratrain.ratrain_ir.support.loops import compiled_anew
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import output, say, size_text
from ratrain.ratrainc.console.failures import (
    EXIT_DIAGNOSED,
    EXIT_HUNG_UP,
    EXIT_INTERRUPTED,
    EXIT_SAVED,
    EXIT_TERMINATED,
)
from ratrain.ratrainc.console.parts import Part, Shown, html_of, show
from ratrain.ratrainc.running.loss_plot import Curves, chart_lines, curve_picture
from ratrain.targets.runtime.arena.process_memory import MemoryUse
from ratrain.targets.runtime.data.data import BYTE
from ratrain.targets.runtime.engine.first_use import BY_COMPILER, COMPILING
from ratrain.targets.runtime.training.best import Best
from ratrain.targets.runtime.training.training import TimedStep


@frozen(repr=False)
class RunResult(Shown):
    """The steps of a run with its figures, its memory and its problems."""

    steps: tuple[TimedStep, ...]
    seconds: float
    memory: MemoryUse
    live_peak_bytes: int | None
    """most bytes live at once on a rank; None unless memory was checked"""
    data: str
    held_out: str | None
    """name of the data evaluated on; None without evaluation"""
    saved: str | None
    """path of the saved state; None if none was saved"""
    stop_signal: int
    """signal that ended the run early, or 0"""
    problems: tuple[Diagnostic, ...] = ()
    """outputs other than the state that could not be written, and the error that nothing was trained"""
    token: str = BYTE
    """kind of the data's tokens, such as a byte"""
    early: Best | None = None
    """lowest held-out loss of a run that ended since none was lower for long; else None"""

    @property
    def interrupted(self) -> bool:
        """True if a signal ended the run early."""
        return self.stop_signal != 0

    @property
    def exit_code(self) -> int:
        """The exit code of the run: 0 if all went well, 1 if there are problems, or the code of its end by a signal.

        Ctrl-C gives 130. SIGTERM and SIGHUP give 75 if the state was saved, so that the job can be queued again, else
        143 and 129.
        """
        unsaved = {signal.SIGTERM: EXIT_TERMINATED, signal.SIGHUP: EXIT_HUNG_UP}
        for number, code in unsaved.items():
            if self.stop_signal == number:
                return EXIT_SAVED if self.saved else code
        if self.interrupted:
            return EXIT_INTERRUPTED
        return EXIT_DIAGNOSED if self.problems else 0

    def parts(self) -> Iterator[Part]:
        """Yield the report in sentences."""
        return run_parts(self)

    def html(self) -> str:
        """Return the sentences, and the losses as a line."""
        return html_of(self.parts()) + curve_picture(curves_of(self.steps))

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "steps": [step.to_json() for step in self.steps],
            "seconds": self.seconds,
            **self.memory.to_json(),
            "live_peak_bytes": self.live_peak_bytes,
            "data": self.data,
            "token": self.token,
            "held_out": self.held_out,
            "saved": self.saved,
            "stopped_early": self.early is not None,
            "interrupted": self.interrupted,
            "diagnostics": [problem.to_json() for problem in self.problems],
        }


def show_run(result: RunResult) -> None:
    """Print the report of a run, with a chart of the losses if the terminal has its characters."""
    show(run_parts(result))
    if output().encoding.startswith("utf"):
        for line in chart_lines(curves_of(result.steps)):
            say(line)


def run_parts(result: RunResult) -> Iterator[Part]:
    """Yield the report of a run."""
    if not result.steps:
        yield "no step was run"
        return
    first, last = result.steps[0].report, result.steps[-1].report
    tokens = sum(step.report.tokens for step in result.steps)
    tail = result.steps[-max(1, len(result.steps) // 10) :]
    mean = sum(step.report.loss for step in tail) / len(tail)
    yield (
        f"{number_of(len(result.steps), 'step')}, {number_of(tokens, 'token', ',')} in {result.seconds:.1f} s: "
        f"{tokens / result.seconds:,.0f} tokens/s"
    )
    of_several = f" (mean of the last {number_of(len(tail), 'step')}: {mean:.4f})" if len(tail) > 1 else ""
    yield f"loss {first.loss:.4f} -> {last.loss:.4f}{of_several}"
    yield from _held_out_line(result)
    utilisation = _mean_utilisation(result.steps)
    if utilisation is not None:
        yield f"model-flops utilisation {100 * utilisation:.0f} % of one core's matrix products, measured at the start"
    overflows = sum(1 for step in result.steps if step.report.skipped_blocks)
    if overflows:
        yield f"steps with an overflow somewhere: {overflows}; loss scale now {last.loss_scale:g}"
    yield from _memory_line(result.memory)
    yield from _files_line(result.memory, len(result.steps))
    if result.live_peak_bytes is not None:
        yield f"memory checked: every access inside its life; at most {result.live_peak_bytes} bytes live on a rank"
    if result.saved:
        yield f"saved {result.saved}"


def _memory_line(memory: MemoryUse) -> Iterator[Part]:
    """Compare the peak with the plan, of a run that compiled loops with the plan of one that does."""
    planned, peak = memory.planned_bytes, memory.peak_resident_bytes
    if planned is not None and peak is not None:
        messages = f", {size_text(memory.transport_bytes)} of it for messages" if memory.transport_bytes else ""
        anew = compiled_anew()
        made = ""
        if anew:
            made = f"; both include the one-time compilation of {number_of(anew, 'loop')}"
            planned += 0 if BY_COMPILER in memory.first_use else COMPILING
        share = 100 * (peak / planned - 1)
        side = "above" if share > 0 else "below"
        yield (
            f"memory: at most {size_text(peak, planned)} resident, {abs(share):.1f} % {side} the "
            f"{size_text(planned, peak)} planned{messages}{made}"
        )


def _files_line(memory: MemoryUse, steps: int) -> Iterator[Part]:
    planned = memory.files_a_step
    if planned.read or planned.written:
        moved = f"{size_text(memory.files.read)} read, {size_text(memory.files.written)} written"
        by_plan = f"{size_text(steps * planned.read)} and {size_text(steps * planned.written)}"
        yield f"files: {moved}; by the program {by_plan}, where no update is skipped"


def _mean_utilisation(steps: Sequence[TimedStep]) -> float | None:
    """Return the utilisation of all steps but the first, which loads or compiles kernels; None if none was measured."""
    mfus = [step.mfu for step in (steps[1:] or steps) if step.mfu]
    # steps have equal work, so the mean over time is the harmonic mean
    return len(mfus) / sum(1 / mfu for mfu in mfus) if mfus else None


def _held_out_line(result: RunResult) -> Iterator[Part]:
    held = [(step.report.step, step.eval_loss) for step in result.steps if step.eval_loss is not None]
    if held:
        words = " -> ".join(f"{loss:.4f}" for _, loss in dict.fromkeys((held[0], held[-1])))
        yield f"held-out loss {words} ({result.held_out}; after step {held[-1][0]})"
        best = min(held, key=lambda each: each[1])
        if best != held[-1]:
            yield f"lowest held-out loss: {best[1]:.4f}, after step {best[0]}"
    if result.early is not None:
        yield f"ended early: no lower one than {result.early.loss:.4f} in {result.early.since} evaluations"


def curves_of(steps: Sequence[TimedStep]) -> Curves:
    """Return the losses of steps as curves."""
    return Curves.of((step.report.step, step.report.loss, step.eval_loss) for step in steps)
