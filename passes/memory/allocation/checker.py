"""Check placements by a sweep over time with the live buffers by address.

It shares no code with the placing methods.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import AllocationProblem

MOST = 1000
"""Most violations that are reported."""
_STOP, _START = 0, 1
"""At one time stops come first: intervals are half-open."""


@frozen
class Violation:
    """Two buffers that share bytes although they may not, with a time at which they do.

    Or one buffer without a place.
    """

    first: int
    second: int
    """Equals `first` where an offset is missing or negative."""
    position: int


def check_allocation(problem: AllocationProblem, offsets: list[int]) -> list[Violation]:
    """Return the violations of a placement, in O(n log n) where there are none.

    When a buffer is born its bytes must be free. One that meets others is reported with each of them and kept apart, to
    be compared with every buffer that is born while it lives. At most `MOST` violations are reported.
    """
    missing = [i for i in range(len(problem.sizes)) if i >= len(offsets) or offsets[i] < 0]
    if missing:
        return [Violation(i, i, problem.intervals[i][0][0] if problem.intervals[i] else 0) for i in missing]
    return _in_time(problem, offsets) + _across_sides(problem, offsets)


def _in_time(problem: AllocationProblem, offsets: list[int]) -> list[Violation]:
    events = []
    for index, spans in enumerate(problem.intervals):
        if problem.sizes[index]:
            for start, stop in spans:
                if start < stop:
                    events += [(start, _START, index), (stop, _STOP, index)]
    events.sort()
    violations = []
    live: list[tuple[int, int]] = []  # offset and buffer; their bytes are disjoint
    apart: list[int] = []  # live buffers that share bytes with others
    times: dict[int, int] = {}  # of a live buffer, how many of its intervals are open: they may overlap each other
    for position, kind, index in events:
        key = (offsets[index], index)
        if kind == _STOP:
            times[index] -= 1
            if times[index] == 0:
                del times[index]
                if index in apart:
                    apart.remove(index)
                else:
                    live.pop(bisect_left(live, key))
            continue
        times[index] = times.get(index, 0) + 1
        if times[index] > 1:
            continue
        end = offsets[index] + problem.sizes[index]
        met = [i for i in apart if offsets[i] < end and offsets[index] < offsets[i] + problem.sizes[i]]
        at = bisect_left(live, key)
        fits = at == 0 or live[at - 1][0] + problem.sizes[live[at - 1][1]] <= offsets[index]
        if not fits:
            met.append(live[at - 1][1])
        while at < len(live) and live[at][0] < end:
            met.append(live[at][1])
            fits = False
            at += 1
        violations += [Violation(other, index, position) for other in met]
        if len(violations) >= MOST:
            return violations[:MOST]
        if fits:
            insort(live, key)
        else:
            apart.append(index)
    return violations


def _across_sides(problem: AllocationProblem, offsets: list[int]) -> list[Violation]:
    if not problem.sides:
        return []
    ranges = sorted(
        (offsets[i], i)
        for i, side in enumerate(problem.sides)
        if side and problem.sizes[i] and any(start < stop for start, stop in problem.intervals[i])
    )
    violations = []
    reached: dict[int, tuple[int, int]] = {}  # of each side, the highest end so far and whose it is
    for low, index in ranges:
        side = problem.sides[index]
        if -side in reached and reached[-side][0] > low:
            other = reached[-side][1]
            position = max(problem.intervals[i][0][0] for i in (other, index))
            violations.append(Violation(other, index, position))
        end = low + problem.sizes[index]
        if side not in reached or reached[side][0] < end:
            reached[side] = (end, index)
    return violations
