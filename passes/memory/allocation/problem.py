"""Problems of allocation, and the form that methods work on.

Time is compressed: a *section* is a run of starts with no stop between them, so that its last moment holds every buffer
that is live in it:

    time      0  1  2  3  4  5            events  start a, start b | stop a, start c | stop b, stop c
    a         [======)                    section 0: a and b,  section 1: b and c
    b            [=========)
    c                  [======)

Two buffers meet if and only if they share a section, and there are no more sections than intervals. A strictly
increasing map of time does not change the sections.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.lifetime import Interval

Int64s = NDArray[np.int64]


@frozen(eq=False)
class AllocationProblem:
    """Sizes in bytes, already aligned, and live intervals of buffers over `positions` op positions."""

    sizes: list[int]
    intervals: list[tuple[Interval, ...]]
    """Half-open intervals [start, stop) of each buffer, one or more; none if it is never live."""
    positions: int
    sides: list[int] | None = None
    """Buffers of side 1 share no byte with buffers of side -1, whenever they live; 0 (for all, when None) is free."""

    @property
    def columns(self) -> ProblemColumns:
        """Return the same problem as arrays."""
        counts = np.fromiter(map(len, self.intervals), np.int64, len(self.sizes))
        points = chain.from_iterable(chain.from_iterable(self.intervals))
        flat = np.fromiter(points, np.int64, 2 * int(counts.sum()))
        sizes = np.array(self.sizes, np.int64)
        sides = np.array(self.sides, np.int64) if self.sides else np.zeros(len(sizes), np.int64)
        return ProblemColumns(sizes, sides, counts, flat[::2], flat[1::2])


@frozen(eq=False)
class ProblemColumns:
    """Problem as arrays: buffer `i` has `counts[i]` intervals, those of buffer 0 first in `starts` and `stops`."""

    sizes: Int64s
    sides: Int64s
    counts: Int64s
    starts: Int64s
    stops: Int64s
    """exclusive"""


@frozen(eq=False)
class Instance:
    """Buffers of a problem that have bytes and a lifetime, over sections of time.

    Buffer `i` lives in the sections [starts[k], stops[k]) for k in [first[i], first[i + 1]); these do not touch each
    other.
    """

    sizes: Int64s
    sides: Int64s
    first: Int64s
    starts: Int64s
    stops: Int64s
    sections: int

    @property
    def count(self) -> int:
        """Number of buffers."""
        return len(self.sizes)

    @property
    def owners(self) -> Int64s:
        """Buffer of each interval."""
        return np.repeat(np.arange(self.count), np.diff(self.first))

    @property
    def plain(self) -> bool:
        """True where every buffer has one interval and no side."""
        return len(self.starts) == self.count and not self.sides.any()

    def births(self) -> Int64s:
        """Return the first section of each buffer."""
        return self.starts[self.first[:-1]]

    def deaths(self) -> Int64s:
        """Return the section after the last of each buffer."""
        return self.stops[self.first[1:] - 1]

    def widths(self) -> Int64s:
        """Count the sections in which each buffer lives."""
        total = _offsets(self.stops - self.starts)
        return total[self.first[1:]] - total[self.first[:-1]]

    def load(self) -> Int64s:
        """Sum the live bytes of each section."""
        return self.load_of(np.ones(self.count, np.bool_))

    def lives_in(self, section: int) -> NDArray[np.bool_]:
        """Tell which buffers live in a section."""
        live = np.zeros(self.count, np.bool_)
        live[self.owners[(self.starts <= section) & (section < self.stops)]] = True
        return live

    def events(self, *, backwards: bool = False) -> Int64s:
        """Return births b and deaths ~b in the order of time: within a section deaths first, then by number."""
        births, deaths = self.births(), self.deaths()
        numbers = np.arange(self.count)
        if backwards:
            births, deaths = self.sections - deaths, self.sections - births
        order = np.argsort(np.concatenate((deaths, births)), kind="stable")
        return np.concatenate((~numbers, numbers))[order]

    def bound(self) -> int:
        """Return a lower bound of the height: live bytes at one time, or of the two sides, each at its own time."""
        apart = 0
        if self.sides.any():
            apart = sum(int(self.load_of(self.sides == side).max()) for side in (1, -1))
        return max(int(self.load().max(initial=0)), apart)

    def part(self, chosen: Int64s) -> Instance:
        """Return the buffers `chosen`, over the sections they use."""
        counts = np.diff(self.first)[chosen]
        spans = _ranges(self.first[:-1][chosen], counts)
        starts, stops, sections = _sections(self.starts[spans], self.stops[spans])
        return Instance(self.sizes[chosen], self.sides[chosen], _offsets(counts), starts, stops, sections)

    def kept(self, chosen: Int64s) -> Instance:
        """Return the buffers `chosen`, over all sections."""
        counts = np.diff(self.first)[chosen]
        spans = _ranges(self.first[:-1][chosen], counts)
        starts, stops = self.starts[spans], self.stops[spans]
        return Instance(self.sizes[chosen], self.sides[chosen], _offsets(counts), starts, stops, self.sections)

    def load_of(self, chosen: NDArray[np.bool_]) -> Int64s:
        """Sum the live bytes of some buffers (a mask) in each section."""
        # Difference array: sizes are added at starts, subtracted at stops, and summed up.
        curve = np.zeros(self.sections + 1, np.int64)
        sizes = np.where(chosen, self.sizes, 0)[self.owners]
        np.add.at(curve, self.starts, sizes)
        np.subtract.at(curve, self.stops, sizes)
        return np.cumsum(curve)[:-1]


def instance_of(problem: AllocationProblem | ProblemColumns) -> tuple[Instance, Int64s]:
    """Turn a problem into an instance with its buffers by first start.

    Return it with the index of each in the problem.
    """
    columns = problem.columns if isinstance(problem, AllocationProblem) else problem
    sizes, starts, stops, counts = columns.sizes, columns.starts, columns.stops, columns.counts
    owners = np.repeat(np.arange(len(sizes)), counts)
    # Buffers without bytes, and empty intervals, conflict with nothing and are left out.
    live = (sizes[owners] > 0) & (stops > starts)
    if not live.all():
        owners, starts, stops = owners[live], starts[live], stops[live]
    if len(owners) > 1 and counts.max() > 1:
        owners, starts, stops = _merged(owners, starts, stops)
    first = np.flatnonzero(np.diff(owners, prepend=-1))  # owners ascend
    kept, counts = owners[first], np.diff(first, append=len(owners))
    by_start = np.argsort(starts[first], kind="stable")
    spans = _ranges(first[by_start], counts[by_start])
    kept, counts = kept[by_start], counts[by_start]
    starts, stops, sections = _sections(starts[spans], stops[spans])
    return Instance(sizes[kept], columns.sides[kept], _offsets(counts), starts, stops, sections), kept


def _merged(owners: Int64s, starts: Int64s, stops: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Sort intervals by owner and start, and join a buffer's intervals that touch or overlap."""
    lowest = int(starts.min())
    span = int(stops.max()) - lowest + 1  # owners are shifted so far apart that intervals of two never touch
    shift = owners * span - lowest
    order = np.argsort(starts + shift, kind="stable")
    owners, shift = owners[order], shift[order]
    starts, stops = starts[order] + shift, stops[order] + shift
    reached = np.maximum.accumulate(stops)
    begins = np.ones(len(owners), np.bool_)
    begins[1:] = (starts[1:] > reached[:-1]) | (owners[1:] != owners[:-1])
    heads = np.flatnonzero(begins)
    ends = np.append(heads[1:], len(owners)) - 1
    return owners[heads], starts[heads] - shift[heads], reached[ends] - shift[heads]


def _sections(starts: Int64s, stops: Int64s) -> tuple[Int64s, Int64s, int]:
    """Turn starts and stops into sections: a new one begins with the first start after a stop."""
    count = len(starts)
    if count == 0:
        return starts, stops, 0
    order = np.argsort(np.concatenate((stops, starts)), kind="stable")
    begins = order >= count  # at one time stops come first, since intervals are half-open
    new = np.zeros(2 * count, np.int64)
    new[1:] = begins[1:] & ~begins[:-1]
    section = np.cumsum(new)
    places = np.empty(2 * count, np.int64)
    places[order] = section
    # A stop lies in the last section of its interval; the exclusive end is one more.
    return places[count:], places[:count] + 1, int(section[-1]) + 1


def _offsets(counts: Int64s) -> Int64s:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def _ranges(starts: Int64s, counts: Int64s) -> Int64s:
    """Return the numbers from each start on, as many as its count, one run after another."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts - starts, counts)


@frozen(eq=False)
class Allocation:
    """Offsets in bytes, in the problem's order, and the height they need."""

    offsets: list[int]
    arena_bytes: int
    lower_bound_bytes: int = 0
    """Most bytes that live at once."""
    proved_bytes: int = 0
    """Proved lower bound of any arena.

    The live bytes, or more where the sides, holes in lives or an exhaustive search prove more.
    """
    method: str = ""
    """Name of the method that placed the buffers."""
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """Share of the lower bound by which the arena exceeds it."""
        return (self.arena_bytes - self.lower_bound_bytes) / max(1, self.lower_bound_bytes)
