"""What is written to a terminal: all text of commands goes through here, and nothing in it can steer a terminal."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import current_process
from typing import Any

import click

from ratrain.ratrain_ir.diagnostics import printable
from ratrain.ratrain_ir.loops import UncachedWarning


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Write a text to stdout or stderr, made printable: names and contents of files may hold anything."""
    click.echo(printable(text), err=err, nl=nl)


def echo_document(text: str) -> None:
    """Write a file's content to stdout: printable on a terminal, and as it is for whoever reads it from a pipe or file."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def leave_lost_readers() -> None:
    """Send what is left for a reader who is gone to nowhere, so that the end of the process does not fail for it."""
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
    """Say what our own warnings say in one line, without a place in our code."""
    with warnings.catch_warnings():
        _show_in_words()
        yield


def warnings_of_worker() -> None:
    """The same for all the life of a process that others like it work beside: the first of them speaks for all."""
    if current_process().name.rpartition("-")[2] == "1":
        _show_in_words()
    else:
        warnings.simplefilter("ignore", UncachedWarning)


def _show_in_words() -> None:
    usual = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, UncachedWarning):
            echo(f"warning: {message}", err=True)
        else:
            usual(message, category, *place, **more)

    warnings.showwarning = show
