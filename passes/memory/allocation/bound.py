"""Bound the arena without search: bytes that live at one time must be in it at that time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import AllocationProblem


@frozen
class LowerBound:
    """The largest number of live bytes, and its witness."""

    nbytes: int
    position: int
    """First time at which that many bytes live."""
    live: tuple[int, ...]
    """Buffers that live then, by index; their sizes add up to `nbytes`."""


def lower_bound(problem: AllocationProblem) -> LowerBound:
    """Find the largest number of bytes that live at once: no arena is smaller."""
    spans = [(start, stop, i) for i, intervals in enumerate(problem.intervals) for start, stop in _union(intervals)]
    if not spans:
        return LowerBound(0, 0, ())
    table = np.array(spans, np.int64)
    sizes = np.array(problem.sizes, np.int64)[table[:, 2]]
    times, places = np.unique(table[:, :2], return_inverse=True)
    curve = np.zeros(len(times), np.int64)
    places = places.reshape(table.shape[0], 2)
    np.add.at(curve, places[:, 0], sizes)
    np.subtract.at(curve, places[:, 1], sizes)
    live = np.cumsum(curve)
    peak = int(live.argmax())
    position = int(times[peak])
    holders = table[(table[:, 0] <= position) & (table[:, 1] > position) & (sizes > 0), 2]
    return LowerBound(int(live[peak]), position, tuple(sorted(holders.tolist())))


def _union(spans: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    """Drop empty intervals and join overlapping ones."""
    if len(spans) == 1:
        return [spans[0]] if spans[0][0] < spans[0][1] else []
    union: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        elif start < stop:
            union.append((start, stop))
    return union
