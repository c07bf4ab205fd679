"""Placing tensors in a stage's arena: largest first, best fit, over cyclic lifetimes.

A problem is sizes and, for each buffer, one or more half-open intervals of op positions. Buffers that are live the whole
step (optimizer state) go to the bottom in one block, nothing below them; the rest follow largest first, each into the
smallest gap among the buffers it meets in time, or on top.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain_ir.analysis.lifetime import Interval

Int64s = NDArray[np.int64]


@frozen(eq=False)
class AllocationProblem:
    """Sizes in bytes, already aligned, and live intervals of buffers over `positions` op positions."""

    sizes: list[int]
    intervals: list[tuple[Interval, ...]]
    positions: int
    sides: list[int] | None = None
    """Buffers of side 1 share no byte with buffers of side -1, whenever they live; 0 (everywhere, when None) is free."""


@frozen(eq=False)
class Allocation:
    """Offsets in bytes, in the problem's order, and the height they need."""

    offsets: list[int]
    arena_bytes: int


def allocate(problem: AllocationProblem) -> Allocation:
    """Place every buffer; deterministic, ties broken by the first start and then by order."""
    count = len(problem.sizes)
    offsets = [0] * count
    whole = [i for i in range(count) if problem.intervals[i] == ((0, problem.positions),)]
    bottom = 0
    for index in whole:
        offsets[index] = bottom
        bottom += problem.sizes[index]
    resident = set(whole)
    rest = [i for i in range(count) if i not in resident and problem.intervals[i] and problem.sizes[i]]
    rest.sort(key=lambda i: (-problem.sizes[i], problem.intervals[i][0][0], i))
    top = _best_fit(problem, rest, offsets, bottom)
    return Allocation(offsets, max(top, bottom))


def _best_fit(problem: AllocationProblem, order: list[int], offsets: list[int], bottom: int) -> int:
    """Place buffers in order above `bottom`; the highest end.

    Placed intervals stand in columns sorted by nothing; a conflict mask over them is one vector operation a buffer.
    """
    capacity = sum(len(problem.intervals[i]) for i in order)
    starts, stops = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
    lows, highs = np.zeros(capacity, np.int64), np.zeros(capacity, np.int64)
    sides = np.zeros(capacity, np.int8)
    used = 0
    top = bottom
    for index in order:
        side = problem.sides[index] if problem.sides else 0
        spans = problem.intervals[index]
        if len(spans) == 1:
            ((start, stop),) = spans
            meets = (starts[:used] < stop) & (stops[:used] > start)
        else:
            live = np.zeros(problem.positions + 1, np.int64)
            for start, stop in spans:
                live[start + 1 : stop + 1] = 1
            cumulative = np.cumsum(live)
            meets = cumulative[stops[:used]] > cumulative[starts[:used]]
        if side:
            meets |= sides[:used] == -side
        offset = _best_gap(lows[:used][meets], highs[:used][meets], problem.sizes[index], bottom)
        offsets[index] = offset
        end = offset + problem.sizes[index]
        top = max(top, end)
        for start, stop in spans:
            starts[used], stops[used], lows[used], highs[used] = start, stop, offset, end
            sides[used] = side
            used += 1
    return top


def _best_gap(lows: Int64s, highs: Int64s, size: int, bottom: int) -> int:
    """Start of the smallest gap of at least `size` between occupied ranges, or the end of the highest."""
    if len(lows) == 0:
        return bottom
    order = np.argsort(lows, kind="stable")
    reached = np.maximum(np.maximum.accumulate(highs[order]), bottom)
    gap_starts = np.concatenate(([bottom], reached[:-1]))
    gaps = lows[order] - gap_starts
    fitting = np.flatnonzero(gaps >= size)
    if len(fitting) == 0:
        return int(reached[-1])
    return int(gap_starts[fitting[np.argmin(gaps[fitting])]])
