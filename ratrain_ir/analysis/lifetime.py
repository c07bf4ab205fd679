"""Lifetimes: when each tensor of a stage is live, over the cyclic list of a step's ops.

A tensor is live from the op that defines it to its last accessor, both included; `release` marks must agree but do not
define it. Workspace is live only while its op runs. A carried tensor lives across the step's end: from its (re)definition
to the end and from the start to its last access before that. Intervals are half-open in op positions: [start, stop).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops import Release, Tensor
from ratrain.ratrain_ir.types import Home, StateKind, aligned

Interval = tuple[int, int]
Int64s = NDArray[np.int64]


@define(eq=False)
class _Life:
    """Accumulates one tensor's intervals during the sweep."""

    start: int | None
    last: int
    completed: float = 0.0
    """when the last of its accessors since `start` has completed"""
    intervals: list[Interval] = field(factory=list)
    completions: list[float] = field(factory=list)


@frozen(eq=False)
class Lifetimes:
    """Live intervals of a stage's tensors in a memory, in declaration order, and the live-byte curve they make."""

    stage: Stage
    intervals: dict[Tensor, tuple[Interval, ...]]
    live_bytes: Int64s
    """Bytes live at each op, aligned sizes."""

    @property
    def peak_bytes(self) -> int:
        """The largest number of live bytes: a lower bound of any arena."""
        return int(self.live_bytes.max()) if len(self.live_bytes) else 0

    @property
    def peak_position(self) -> int:
        """Position of the first op at the peak."""
        return int(self.live_bytes.argmax()) if len(self.live_bytes) else 0

    def live_at(self, position: int) -> list[Tensor]:
        """Tensors live at an op, largest first."""
        live = [t for t, spans in self.intervals.items() if any(a <= position < b for a, b in spans)]
        return sorted(live, key=lambda t: (-t.type.nbytes, t.name))

    def bytes_by_kind(self, position: int) -> dict[StateKind, int]:
        """Live bytes at an op by state kind, largest first."""
        totals: dict[StateKind, int] = {}
        for tensor in self.live_at(position):
            totals[tensor.kind] = totals.get(tensor.kind, 0) + aligned(tensor.type.nbytes)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def peak_bytes_of(self, kinds: Collection[StateKind]) -> int:
        """The most bytes that tensors of some kinds have live at once."""
        some = {tensor: spans for tensor, spans in self.intervals.items() if tensor.kind in kinds}
        return int(_live_bytes(some, len(self.live_bytes)).max(initial=0))


class Spans(NamedTuple):
    """Intervals as arrays: those of a tensor one after the other, tensors in declaration order."""

    counts: Int64s
    """of each tensor: how many"""
    starts: Int64s
    stops: Int64s
    sizes: Int64s
    """bytes, aligned"""


def spans_of(intervals: Mapping[Tensor, Sequence[Interval]]) -> Spans:
    """The intervals of tensors as arrays."""
    counts = np.fromiter(map(len, intervals.values()), np.int64, len(intervals))
    ends = np.array([end for spans in intervals.values() for span in spans for end in span], np.int64)
    sizes = np.fromiter((aligned(tensor.type.nbytes) for tensor in intervals), np.int64, len(intervals))
    return Spans(counts, ends[0::2], ends[1::2], np.repeat(sizes, counts))


def lifetimes(stage: Stage, home: Home = Home.DDR) -> Lifetimes:
    """The lifetimes of one stage's tensors in a memory, in one sweep over its ops."""
    return lifetimes_and_completions(stage, [0.0] * len(stage.ops), home)[0]


def lifetimes_and_completions(
    stage: Stage, ends: Sequence[float], home: Home = Home.DDR
) -> tuple[Lifetimes, list[float]]:
    """The lifetimes, and when the last accessor of each interval has completed where each op ends at these times.

    Completions are by interval, tensor by tensor. What lives on across the step's end is said to be completed at 0.
    """
    lives: dict[Tensor, _Life] = {}
    for position, op in enumerate(stage.ops):
        if type(op) is Release:
            continue
        end = ends[position]
        for tensor in op.scratch:
            life = lives.get(tensor) or lives.setdefault(tensor, _Life(None, position))
            life.intervals.append((position, position + 1))
            life.completions.append(end)
        for tensor in op.reads + op.updates if op.updates else op.reads:
            life = lives.get(tensor) or lives.setdefault(tensor, _Life(0 if tensor.carried else position, 0))
            life.last = position
            if end > life.completed:  # noqa: PLR1730 - the innermost loop makes no calls
                life.completed = end
        for tensor in op.writes:
            earlier = lives.get(tensor)
            if earlier is None:
                lives[tensor] = _Life(position, position, end)
                continue
            if earlier.start is not None:
                earlier.intervals.append((earlier.start, earlier.last + 1))
                earlier.completions.append(earlier.completed)
            earlier.start = earlier.last = position
            earlier.completed = end
    return _finished(stage, home, lives)


def _finished(stage: Stage, home: Home, lives: dict[Tensor, _Life]) -> tuple[Lifetimes, list[float]]:
    count = len(stage.ops)
    intervals: dict[Tensor, tuple[Interval, ...]] = {}
    completions: list[float] = []
    for tensor in stage.tensors.values():
        if tensor.home is not home:
            continue
        life = lives.get(tensor)
        if life is None:
            intervals[tensor] = ((0, count),) if tensor.carried else ()
            completions += [0.0] * tensor.carried
            continue
        if life.start is not None:
            life.intervals.append((life.start, count if tensor.carried else life.last + 1))
            life.completions.append(0.0 if tensor.carried else life.completed)
        intervals[tensor] = tuple(life.intervals)
        completions += life.completions
    return Lifetimes(stage, intervals, _live_bytes(intervals, count)), completions


def _live_bytes(intervals: Mapping[Tensor, Sequence[Interval]], count: int) -> Int64s:
    """Bytes that tensors have live at each of so many ops, aligned sizes."""
    spans = spans_of(intervals)
    curve = np.zeros(count + 1, np.int64)
    np.add.at(curve, spans.starts, spans.sizes)
    np.subtract.at(curve, spans.stops, spans.sizes)
    return np.cumsum(curve)[:count]
