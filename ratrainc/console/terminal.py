"""Text output of commands. All text passes through here, so that no file content or name can steer a terminal."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any, Protocol

import click

from ratrain.ratrain_ir.support.diagnostics import printable
from ratrain.ratrain_ir.support.loops import UncachedWarning
from ratrain.ratrainc.console.wrapping import wrapped


def echo(text: str = "", *, err: bool = False, nl: bool = True, wrap: bool = True) -> None:
    """Write a text to stdout or stderr, made printable: names and contents of files may hold anything.

    On a terminal, long lines are wrapped at words. `wrap=False` keeps lines that readers take as a whole.
    """
    shown = printable(text)
    with above_what_moves():
        click.echo(wrapped(shown, terminal_columns(err=err)) if wrap else shown, err=err, nl=nl)


def echo_document(text: str) -> None:
    """Write a file's content to stdout: made printable on a terminal, unchanged into a pipe or file."""
    with above_what_moves():
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()


def terminal_columns(*, err: bool = False) -> int | None:
    """Return the width for lines of stdout or stderr: COLUMNS, else the terminal's width; None for a file or pipe."""
    said = os.environ.get("COLUMNS", "")
    if said.isascii() and said.isdigit() and 0 < int(said) < _WIDEST:
        return int(said)
    stream = sys.stderr if err else sys.stdout
    with suppress(OSError, ValueError, AttributeError):  # a stream that is closed, or is none of the system's
        if stream.isatty():
            return os.get_terminal_size(stream.fileno()).columns or None
    return None


class Moving(Protocol):
    """A drawing on a terminal that is repeated and can be removed: a bar, a spinner, a dashboard."""

    def start(self) -> None:
        """Draw it."""

    def stop(self) -> None:
        """Take it away."""


@contextmanager
def moving(shown: Moving) -> Iterator[None]:
    """Draw something while the block runs; all output of the block appears above it."""
    with _MOVES:
        _MOVING.append(shown)
        shown.start()
    try:
        yield
    finally:
        with _MOVES:
            _MOVING.remove(shown)
            shown.stop()


@contextmanager
def above_what_moves() -> Iterator[None]:
    """Remove moving drawings while the block writes lines, and draw them again below these lines."""
    with _MOVES:
        if not _MOVING:
            yield
            return
        shown = _MOVING[-1]
        shown.stop()
        try:
            yield
        finally:
            shown.start()


_MOVES = RLock()
_MOVING: list[Moving] = []
_WIDEST = 100_000


def leave_lost_readers() -> None:
    """Discard output for a reader that is gone, so that the end of the process does not fail on flushing it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):  # ValueError: a stream without a file
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:  # it is closed
            pass


@contextmanager
def warnings_in_words() -> Iterator[None]:
    """Print the project's own warnings in one line during the block, without a place in the code."""
    with warnings.catch_warnings():
        _show_in_words()
        yield


def warnings_of_worker(tell: Callable[[], None]) -> None:
    """Call `tell` in place of showing that loops are not kept: the command says it once, for all of its processes.

    The setting holds for the life of the process.
    """
    _show_with(lambda _message: tell())


def _show_in_words() -> None:
    _show_with(lambda message: echo(f"warning: {message}", err=True))


def _show_with(own: Callable[[Warning | str], None]) -> None:
    """Show the project's own warnings by a function of their message; others as before."""
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, UncachedWarning):
            own(message)
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show
