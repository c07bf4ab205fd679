"""What an instruction takes where it is executed: marks between kernels, and the seconds from each to the next."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import thread_time
from typing import Any, Protocol

from attrs import frozen


class Stopwatch(Protocol):
    """Marks in what a memory's device executes."""

    def mark(self) -> Any:
        """A mark behind everything that was asked for so far."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Seconds from each mark to the next; returns when the last of them was passed."""

    def now(self) -> float:
        """Seconds of a clock of the host when everything that was asked for is done."""


class HostStopwatch:
    """`Stopwatch` of a host, where a kernel is done when it returns: CPU time of the thread that runs it.

    What others do on the machine meanwhile makes a kernel no longer, as it would by the clock on the wall.
    """

    def mark(self) -> float:
        """What the thread has taken so far."""
        return thread_time()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """Differences of moments."""
        return [after - before for before, after in pairwise(marks)]

    def now(self) -> float:
        """What the thread has taken so far."""
        return thread_time()


@frozen
class DeviceFacts:
    """A device, as it says itself."""

    name: str
    """of its kind, in its maker's words"""
    total: int
    """bytes of its memory"""
    taken: int
    """bytes of them in which no arena can be: its context, its libraries, others that use it"""
