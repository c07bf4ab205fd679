"""Limit of computing time: long work calls `go_on` between its steps, and ends early when its time is over.

The limit counts the CPU time of the current thread, so other load on the machine does not change results.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_UNTIL: ContextVar[float | None] = ContextVar("until", default=None)


class OutOfTime(Exception):  # noqa: N818 - nothing is wrong with the work
    """Signal that the given time has passed; no error."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Limit the CPU time of the block, in seconds; None removes the limit."""
    token = _UNTIL.set(None if seconds is None else time.thread_time() + seconds)
    try:
        yield
    finally:
        _UNTIL.reset(token)


def is_limited() -> bool:
    """Tell whether a limit is set."""
    return _UNTIL.get() is not None


def go_on() -> None:
    """Raise `OutOfTime` if the time has passed; do nothing without a limit."""
    until = _UNTIL.get()
    if until is not None and time.thread_time() > until:
        raise OutOfTime
