"""How long work may compute: long work asks between its steps, and ends early where its time is over.

It is the computing time of its thread that counts: what others do on the machine changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_UNTIL: ContextVar[float | None] = ContextVar("until", default=None)


class OutOfTime(Exception):  # noqa: N818 - nothing is wrong with the work
    """The time that was given has passed."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Let what runs within compute so many seconds; None: as many as it needs."""
    token = _UNTIL.set(None if seconds is None else time.thread_time() + seconds)
    try:
        yield
    finally:
        _UNTIL.reset(token)


def is_limited() -> bool:
    """Whether there is a limit."""
    return _UNTIL.get() is not None


def go_on() -> None:
    """Raise `OutOfTime` where the time has passed; without a limit do nothing."""
    until = _UNTIL.get()
    if until is not None and time.thread_time() > until:
        raise OutOfTime
