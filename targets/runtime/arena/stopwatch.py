"""Duration of instructions where they are executed: marks between kernels, and the seconds from mark to mark."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import thread_time
from typing import Any, Protocol

from attrs import frozen


class Stopwatch(Protocol):
    """Clock that places marks in the work that a memory's device executes."""

    def hold(self, seconds: float) -> None:
        """Let the device wait for about so long, so that work issued meanwhile follows without gaps."""

    def mark(self) -> Any:
        """Place a mark after all work issued so far."""

    def seconds(self, marks: Sequence[Any]) -> list[float]:
        """Return the seconds from each mark to the next; wait until the last mark is passed."""

    def now(self) -> float:
        """Wait for all issued work, then return the seconds of a host clock."""


class HostStopwatch:
    """`Stopwatch` of a host, where a kernel is done when it returns: CPU time of the calling thread.

    Unlike wall time it does not grow when other processes use the machine.
    """

    def hold(self, seconds: float) -> None:
        """Do nothing: a host executes what it issues."""

    def mark(self) -> float:
        """Return the CPU seconds of this thread so far."""
        return thread_time()

    def seconds(self, marks: Sequence[float]) -> list[float]:
        """Return the differences between consecutive marks."""
        return [after - before for before, after in pairwise(marks)]

    def now(self) -> float:
        """Return the CPU seconds of this thread so far."""
        return thread_time()


@frozen
class DeviceFacts:
    """Name and memory of a device as it reports them."""

    name: str
    """the maker's name of its model"""
    total: int
    """bytes of its memory"""
    taken: int
    """bytes of it that no arena can use: its context, its libraries, other processes"""
