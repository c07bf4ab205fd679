"""Signals of a run: Ctrl-C, SIGTERM and SIGHUP end it after its step, SIGUSR1 asks for its position."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from attrs import define

from ratrain.ratrain_ir.support.time_limit import OutOfTime, end_early, endable

if TYPE_CHECKING:
    from types import FrameType


@define
class StopAsked:
    """The signal that asked for an end, or 0; a second Ctrl-C stops at once, and further ones change nothing."""

    signal: int = 0
    answer: str = "ending after this step"
    """text that is printed after the signal"""
    is_at_once: bool = False
    """True if it stops at once: the unfinished step is dropped, and the saved state is named"""
    speaks: bool = True
    """False for a process whose run another one answers for: a launcher hands a signal to all of them"""
    then: Callable[[], None] | None = None
    """called after the first signal, in its handler"""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal. Raises KeyboardInterrupt at the second Ctrl-C."""
        del frame
        if self.is_at_once:
            return
        if self.signal and number == signal.SIGINT:
            self.is_at_once = True
            raise KeyboardInterrupt
        # a launcher sends SIGTERM to all ranks at once, and maybe again: of these no terminal waits for an answer
        if not self.speaks:
            pass
        elif number == signal.SIGINT:
            _say_at_once(f"{self.answer}; Ctrl-C again stops at once")
        elif not self.signal:
            _say_at_once(self.answer)
        self.signal = number
        if self.then is not None:
            self.then()


def ending_signals() -> list[signal.Signals]:
    """Return Ctrl-C, SIGTERM, and SIGHUP unless it was ignored from the start, as under `nohup`."""
    hung_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hung_up]


@contextmanager
def ending_in_order(stop: StopAsked) -> Iterator[None]:
    """Ask for an orderly end on the first Ctrl-C, on SIGTERM and on SIGHUP.

    After a second Ctrl-C, further ones have no effect until the command ends (`cli.main`), so that the message about
    lost steps is printed.
    """
    before = {number: signal.signal(number, stop.handle) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if number != signal.SIGINT or not stop.is_at_once:
                signal.signal(number, handler)


@contextmanager
def ending_search() -> Iterator[StopAsked]:
    """Let the first Ctrl-C end a search with what it has found, and a second one stop at once.

    Raises `KeyboardInterrupt` if the search ends before it has found anything.
    """
    stop = StopAsked(answer="ending the search with what it has found", then=end_early)
    with endable(), ending_in_order(stop):
        try:
            yield stop
        except OutOfTime:
            raise KeyboardInterrupt("interrupted: nothing was found so far, and nothing was written") from None


@contextmanager
def saying_where(text: str) -> Iterator[None]:
    """Answer SIGUSR1 with a text during the block; without a handler it would end the process."""

    def answer(number: int, frame: FrameType | None) -> None:
        del number, frame
        _say_at_once(text)

    before = signal.signal(signal.SIGUSR1, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def _say_at_once(text: str) -> None:
    with suppress(OSError, ValueError):  # ValueError: a stream without a file
        # Write to the file descriptor: the signal may have interrupted a write to the stream, and Python refuses a
        # second write inside the first.
        os.write(sys.stderr.fileno(), f"\n{text}\n".encode())
