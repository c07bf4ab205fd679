"""Signs of life without a terminal: a line on stderr at intervals while work goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread

from ratrain.ratrainc.console.terminal import echo, terminal_columns

EVERY_SECONDS = 10.0
_SILENT = [False]
"""True in its only entry if another process reports for this one."""


@contextmanager
def speaking(speaks: bool) -> Iterator[None]:
    """Silence the heartbeat of this process in the block unless `speaks`; another process reports for it."""
    before, _SILENT[0] = _SILENT[0], not speaks
    try:
        yield
    finally:
        _SILENT[0] = before


@contextmanager
def said_while_working(line: Callable[[], str]) -> Iterator[None]:
    """Print the text of `line` and the time passed, every `EVERY_SECONDS` of the block."""
    done, start = Event(), time.monotonic()

    def beat() -> None:
        while not done.wait(EVERY_SECONDS):
            if _SILENT[0]:
                continue
            with suppress(OSError, ValueError):  # stderr is closed: the work does not depend on it
                echo(_timed(line(), timedelta(seconds=round(time.monotonic() - start))), err=True)

    thread = Thread(target=beat, daemon=True, name="heartbeat")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _timed(text: str, passed: timedelta) -> str:
    """Add the time passed to a text; in few words where a line of the terminal has no room for more."""
    timed, width = f"{text} ({passed} so far)", terminal_columns(err=True)
    return timed if width is None or len(timed) <= width else f"{text} ({passed})"
