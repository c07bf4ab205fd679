"""Output of commands: tables and progress on a terminal, one JSON object for scripts, diagnostics on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import cache, partial
from math import inf
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.spinner import Spinner
from rich.table import Column, Table
from rich.text import Text

from ratrain.ratrain_ir.support import quantities
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Note, Severity, printable
from ratrain.ratrainc.console.heartbeat import said_while_working
from ratrain.ratrainc.console.progress import with_lines
from ratrain.ratrainc.console.terminal import above_what_moves, echo, moving, terminal_columns
from ratrain.ratrainc.console.wrapping import records, wrapped

if TYPE_CHECKING:
    from rich.segment import Segment

    from ratrain.ratrainc.console.progress import OnProgress

_SHOWN = 20
size_text = quantities.size_text
"""Format of bytes, in the unit of the larger one where two stand side by side."""
_WIDEST = 1 << 16
"""Width in columns for tables in a file or a pipe, so that they need not be narrowed."""


class PlainConsole(Console):
    """A console without markup that makes texts printable, so that only its own layout steers the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments of a renderable, made printable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Raise the `BrokenPipeError` being handled instead of exiting: a command may go on without its reader."""
        raise  # noqa: PLE0704 - inside the console's handler


@cache
def errors() -> Console:
    """Return the console on stderr, for progress and diagnostics."""
    return PlainConsole(stderr=True, soft_wrap=True)


@cache
def output() -> Console:
    """Return the console on stdout, for results."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=_WIDEST)


def show_diagnostic(diagnostic: Diagnostic) -> None:
    """Print a diagnostic on stderr, wrapped to the terminal except for the source line that it points at."""
    width = terminal_columns(err=True)
    echo(diagnostic.render(lambda text: wrapped(printable(text), width)), err=True, wrap=False)


def print_json(data: dict[str, Any]) -> None:
    """Print one JSON object on stdout."""
    text = json.dumps(data, allow_nan=False).replace("\x7f", "\\u007f")
    echo(text, wrap=False)  # the one control character that stays in ASCII


def show_diagnostics(diagnostics: Sequence[Diagnostic], *, as_json: bool) -> None:
    """Print diagnostics on stderr, with a count; with `as_json` print them as data on stdout too."""
    if as_json:
        print_json({"diagnostics": [d.to_json() for d in diagnostics]})
    for diagnostic in diagnostics[:_SHOWN]:
        show_diagnostic(diagnostic)
    if len(diagnostics) > _SHOWN:
        echo(f"... and {len(diagnostics) - _SHOWN} more", err=True)
    count = sum(d.severity is Severity.ERROR for d in diagnostics)
    if count > 1:
        echo(f"{count} errors", err=True)


def show_refusal(error: DiagnosticError) -> None:
    """Print the diagnostics of an error on stderr at once, before the work goes on."""
    show_diagnostics(error.diagnostics, as_json=False)


def show_notes(notes: Sequence[Note]) -> None:
    """Print notes that were added to diagnostics that are on stderr already."""
    width = terminal_columns(err=True)
    for note in notes:
        echo(wrapped(printable(f"  note: {note.message}"), width), err=True, wrap=False)


class _Drawn:
    """A drawing on stderr's terminal. It is made anew on each start, else `rich` would erase the lines above it."""

    def __init__(self, shown: Callable[[], RenderableType], per_second: float) -> None:
        self.live = partial(
            Live,
            get_renderable=shown,
            console=errors(),
            refresh_per_second=per_second,
            transient=True,
            redirect_stdout=False,
        )
        self.now = self.live()

    def start(self) -> None:
        self.now = self.live()
        self.now.start(refresh=True)

    def stop(self) -> None:
        self.now.stop()


def drawn(shown: Callable[[], RenderableType], *, per_second: float = 10) -> AbstractContextManager[None]:
    """Show a drawing on stderr, which must be a terminal, while the block runs; other output appears above it."""
    return moving(_Drawn(shown, per_second))


@contextmanager
def progress(total: int | None, title: str, *, even: bool = True) -> Iterator[tuple[Progress, Any]]:
    """Show a progress bar on stderr; without a terminal, print a line every few seconds.

    With `even`, steps are alike, and the time that is left is estimated.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(table_column=Column(no_wrap=True)),  # bar and words give way, not figures
        TimeRemainingColumn(table_column=Column(no_wrap=True)) if even else TimeElapsedColumn(),
        _StatusColumn("{task.fields[status]}", markup=False, table_column=Column()),
    )
    bar = Progress(*columns, console=errors(), disable=True, speed_estimate_period=inf)
    task = bar.add_task(title, total=total, status="")
    with (
        drawn(bar.get_renderable)
        if errors().is_terminal
        else said_while_working(lambda: _progress_line(bar.tasks[0], even=even))
    ):
        yield bar, task


class _StatusColumn(TextColumn):
    """A column of words on one line, shortened together with the bar."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


def _progress_line(task: Task, *, even: bool) -> str:
    """Return a task's progress as a line of words."""
    of = "" if task.total is None else f" of {task.total:.0f}"
    left = "" if task.time_remaining is None or not even else f", {timedelta(seconds=round(task.time_remaining))} left"
    said = f": {task.fields['status']}" if task.fields["status"] else ""
    return f"{task.description}, {task.completed:.0f}{of} done{left}{said}"


@contextmanager
def bar(total: float | None, title: str) -> Iterator[OnProgress]:
    """Show a bar for work that reports its progress; the work may also report the total.

    It shows the time that has passed: steps of searches differ too much to foretell when the last one ends. Texts that
    stay are written above it, on stderr.
    """
    with progress(None if total is None else round(total), title, even=False) as (shown, task):
        yield with_lines(
            lambda now: shown.update(task, completed=now.done, total=now.total, status=now.text),
            lambda text: echo(text, err=True),
        )


@contextmanager
def spinner(title: str, first: str) -> Iterator[OnProgress]:
    """Show a spinner with the text that the work reports; `first` until it reports one."""
    with status(f"{title}: {first}") as tell:
        yield lambda now: tell(f"{title}: {now.text}")


def unseen_progress(total: int, clock: Callable[[], float] | None = None) -> Progress:
    """Make a progress that is not shown, with one task whose `time_remaining` estimates the seconds to the end.

    It is None before two advances. The estimate ignores the time before the first one, in which kernels are loaded or
    compiled. `clock` returns seconds; None is the usual clock.
    """
    unseen = Progress(console=errors(), disable=True, speed_estimate_period=inf, get_time=clock)
    unseen.add_task("", total=total)
    return unseen


@contextmanager
def status(title: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner on stderr for work of unknown length; without a terminal, print a line every few seconds.

    Yield a function that sets the text.
    """
    shown = [title]
    if errors().is_terminal:
        spinner = Spinner("dots", Text(title))
        with drawn(lambda: spinner):
            yield lambda text: spinner.update(text=Text(text))
    else:
        with said_while_working(lambda: shown[0]):
            yield lambda text: shown.__setitem__(0, text)


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, most: int = 64) -> None:
    """Print a table on stdout: first column to the left, the rest to the right; above `most` rows, cut the middle.

    A table wider than the terminal loses its lines; if it is still too wide, each row becomes several lines.
    """
    shown = shortened(columns, rows, most)
    width, count = terminal_columns(), len(columns)
    needed = sum(max(map(cell_len, cells)) for cells in zip(columns, *shown, strict=True))
    _print(wrapped(printable(title), width), style="bold")
    if width is None or needed + 3 * count + 1 <= width:
        _print(_drawn(columns, shown, Table(header_style="bold")))
    elif needed + 2 * (count - 1) <= width:
        _print(_drawn(columns, shown, Table(header_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)))
    else:
        for line in records(columns, shown, width):
            _print(line)


def rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, most: int) -> Table:
    """Return a table of texts with lines around its cells, as `table` shows it if there is room."""
    return _drawn(columns, shortened(columns, rows, most), Table(header_style="bold"))


def shortened(columns: Sequence[str], rows: Sequence[Sequence[str]], most: int) -> list[list[str]]:
    """Make rows printable; of more than `most`, keep the first and the last, with dots between."""
    shown = [[printable(cell) for cell in row] for row in rows]
    return shown if len(shown) <= most else [*shown[: most // 2], ["..."] * len(columns), *shown[-most // 2 :]]


def _drawn(columns: Sequence[str], rows: Sequence[Sequence[str]], made: Table) -> Table:
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def _print(shown: RenderableType, **options: Any) -> None:
    with above_what_moves():
        output().print(shown, soft_wrap=True, **options)


def say(text: str) -> None:
    """Print a line of a result on stdout, wrapped at words on a terminal."""
    _print(wrapped(text, terminal_columns()))


def capacity_text(count: int) -> str:
    """Format bytes for comparison with published figures: exact, decimal and binary."""
    decimal = f"{count / 10**9:.2f} GB" if count >= 10**8 else f"{count / 10**6:.2f} MB"
    return f"{count} bytes ({decimal}, {size_text(count)})"


def seconds_text(seconds: float) -> str:
    """Format seconds with two digits after the point in s or ms, or one in us."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
