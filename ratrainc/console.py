"""What people see: tables and progress on a terminal, one JSON object for scripts, diagnostics on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ratrain.ratrain_ir.diagnostics import Diagnostic, Severity, printable
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from rich.segment import Segment

_SHOWN = 20
_WIDTH = 160
"""Columns of tables that go to a file or a pipe."""
GIB = 1 << 30
MIB = 1 << 20


class PlainConsole(Console):
    """A console that takes texts as they are, without markup, and writes them printable; only its own layout steers the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """The segments of what is to be shown."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))

    def on_broken_pipe(self) -> None:
        """Called while a `BrokenPipeError` is handled, and raises it: that its reader is gone need not end what a command does."""
        raise  # noqa: PLE0704 - inside the console's handler


@cache
def errors() -> Console:
    """The console for progress and diagnostics."""
    return PlainConsole(stderr=True, soft_wrap=True)


@cache
def output() -> Console:
    """The console for results."""
    console = PlainConsole()
    return console if console.is_terminal else PlainConsole(width=_WIDTH)


def print_json(data: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    echo(json.dumps(data, allow_nan=False).replace("\x7f", "\\u007f"))  # the one control character that stays in ASCII


def show_diagnostics(diagnostics: Sequence[Diagnostic], *, as_json: bool) -> None:
    """Diagnostics in words on stderr, with a count; as data on stdout too where a script asked for it."""
    if as_json:
        print_json({"diagnostics": [d.to_json() for d in diagnostics]})
    for diagnostic in diagnostics[:_SHOWN]:
        echo(diagnostic.render(), err=True)
    if len(diagnostics) > _SHOWN:
        echo(f"... and {len(diagnostics) - _SHOWN} more", err=True)
    count = sum(d.severity is Severity.ERROR for d in diagnostics)
    if count > 1:
        echo(f"{count} errors", err=True)


@contextmanager
def progress(total: int | None, title: str) -> Iterator[tuple[Progress, Any]]:
    """A progress bar on stderr; quiet where that is no terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[status]}", markup=False),
    )
    shown = errors().is_terminal
    with Progress(*columns, console=errors(), transient=True, disable=not shown, speed_estimate_period=inf) as bar:
        yield bar, bar.add_task(title, total=total, status="")


def unseen_progress(total: int, clock: Callable[[], float] | None = None) -> Progress:
    """A progress that is not shown, with one task: its `time_remaining` are the seconds to the end, None before two advances.

    They are judged by what followed the first advance, before which kernels are loaded or compiled. `clock` gives seconds.
    """
    unseen = Progress(console=errors(), disable=True, speed_estimate_period=inf, get_time=clock)
    unseen.add_task("", total=total)
    return unseen


@contextmanager
def status(title: str) -> Iterator[None]:
    """A spinner on stderr for work of unknown length; quiet where that is no terminal."""
    if errors().is_terminal:
        with errors().status(Text(title)):
            yield
    else:
        yield


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, most: int = 64) -> None:
    """A table on stdout: first column to the left, others to the right; a very long one is cut in the middle."""
    made = Table(header_style="bold")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    shown = list(rows)
    if len(shown) > most:
        shown = [*shown[: most // 2], ["..."] * len(columns), *shown[-most // 2 :]]
    for row in shown:
        made.add_row(*(Text(printable(cell)) for cell in row))
    output().print(title, style="bold", soft_wrap=True)
    output().print(made, soft_wrap=True)


def say(text: str) -> None:
    """A line of a result on stdout."""
    output().print(text, soft_wrap=True)


def size_text(count: int) -> str:
    """Bytes for people: GiB where it is large, MiB below."""
    return f"{count / GIB:.2f} GiB" if count >= GIB // 4 else f"{count / MIB:.2f} MiB"


def capacity_text(count: int) -> str:
    """Bytes to compare with what others publish, in all units in use: exact, decimal and binary."""
    decimal = f"{count / 10**9:.2f} GB" if count >= 10**8 else f"{count / 10**6:.2f} MB"
    return f"{count} bytes ({decimal}, {size_text(count)})"


def seconds_text(seconds: float) -> str:
    """Seconds for people."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
