"""A dashboard of a run on the terminal: loss, speed, and the present work of each stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

from attrs import define, field
from rich.console import Group
from rich.panel import Panel
from rich.progress import Progress
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ratrain.ratrainc.console.console import drawn, errors, size_text, unseen_progress
from ratrain.ratrainc.running.loss_plot import Curves, chart_lines
from ratrain.targets.program.program import Program
from ratrain.targets.runtime.engine.live_progress import ProgressSource, StageWatch
from ratrain.targets.runtime.training.training import TimedStep

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable, RichCast


_REFRESHES = 4  # per second
_BAR = 10  # columns
_CHARTED = 2048  # most steps in the chart; the last ones are shown
Feed = Callable[["TimedStep"], None]
"""A function that is called with each finished step."""


@define(eq=False)
class LiveView:
    """The dashboard's contents; a thread of `rich` renders them several times a second."""

    program: Program
    source: ProgressSource
    total_steps: int
    steps: list[TimedStep] = field(factory=list)
    progress: Progress = field(init=False)
    watch: StageWatch = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.progress = unseen_progress(self.total_steps)
        self.watch = StageWatch(self.program)

    def step_done(self, step: TimedStep) -> None:
        """Show a finished step."""
        self.progress.advance(self.progress.tasks[0].id)
        self.steps.append(step)

    def __rich__(self) -> ConsoleRenderable | RichCast:
        curves = Curves.of((step.report.step, step.report.loss, step.eval_loss) for step in self.steps[-_CHARTED:])
        chart = Text("\n".join(chart_lines(curves)))
        return Panel(Group(self._figures(), self._stages(), chart), title=Text(self.program.name))

    def _figures(self) -> Text:
        """Return loss, speed and remaining time in a line."""
        if not self.steps:
            return Text(f"step 0 of {self.total_steps}, the first one is running")
        last, done = self.steps[-1], len(self.steps)
        parts = [
            f"step {done} of {self.total_steps}",
            f"loss {last.report.loss:.4f}",
            f"{last.tokens_per_second:,.0f} tokens/s",
        ]
        left = self.progress.tasks[0].time_remaining
        if left is not None:
            parts.append(f"ETA {timedelta(seconds=round(left))}")
        if last.mfu is not None:
            parts.insert(3, f"MFU {100 * last.mfu:.0f} %")
        evaluated = [step.eval_loss for step in self.steps if step.eval_loss is not None]
        if evaluated:
            parts.insert(2, f"held out {evaluated[-1]:.4f}")
        return Text("  ".join(parts))

    def _stages(self) -> Table:
        table = Table(header_style="bold", expand=True)
        for name in ("stage", "phase", "step", "live", "arena"):
            table.add_column(name, no_wrap=True)
        for view in self.watch.views(self.source):
            share = f"{size_text(view.live_bytes)} / {size_text(view.arena_bytes)}"
            bar = ProgressBar(total=view.arena_bytes, completed=view.live_bytes, width=_BAR)
            table.add_row(f"@{view.stage}", view.phase, f"{100 * view.done:.0f} %", share, bar)
        return table


@contextmanager
def live_view(program: Program, source: ProgressSource, total_steps: int) -> Iterator[Feed]:
    """Show the dashboard on stderr while the block runs; nothing is shown if stderr is not a terminal.

    Yields the function that is to be called with each finished step.
    """
    if not errors().is_terminal:
        yield lambda _: None
        return
    view = LiveView(program, source, total_steps)
    with drawn(lambda: view, per_second=_REFRESHES):
        yield view.step_done
