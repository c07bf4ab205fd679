"""Limit of computing time: long work calls `go_on` between its steps, and ends early when its time is over.

The limit counts the CPU time of the current thread, so other load on the machine does not change results. Work in an
`endable` block also ends when `end_early` is called, which a handler of signals may do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_UNTIL: ContextVar[float | None] = ContextVar("until", default=None)


class _End:
    """The state of `end_early`, of the process as signals are."""

    asked = False
    heard_by: tuple[Callable[[], None], ...] = ()


def end_early() -> None:
    """Ask all work of the process for an early end: `go_on` raises `OutOfTime` from now on."""
    _End.asked = True
    for hear in _End.heard_by:
        hear()


def is_ended() -> bool:
    """Tell whether an early end was asked for."""
    return _End.asked


@contextmanager
def endable() -> Iterator[None]:
    """Forget after the block that an early end was asked for within it."""
    _End.asked = False
    try:
        yield
    finally:
        _End.asked = False


@contextmanager
def passing_the_end_on(hear: Callable[[], None]) -> Iterator[None]:
    """Call `hear` if an early end is asked for during the block; it may be called in a handler of signals."""
    before = _End.heard_by
    _End.heard_by = (*before, hear)
    try:
        yield
    finally:
        _End.heard_by = before


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
    """Raise `OutOfTime` if the time has passed, or an early end was asked for."""
    if _End.asked:
        raise OutOfTime
    until = _UNTIL.get()
    if until is not None and time.thread_time() > until:
        raise OutOfTime
