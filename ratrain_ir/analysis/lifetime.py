"""Lifetimes: when each tensor of a stage is live, over the cyclic list of a step's ops.

A tensor is live from the op that defines it to its last accessor, both included; `release` marks must agree but do not
define it. Workspace is live only while its op runs. A carried tensor lives across the step's end: from its (re)definition
to the end and from the start to its last access before that. Intervals are half-open in op positions: [start, stop).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
from attrs import define, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops import Release, Tensor
from ratrain.ratrain_ir.types import Home, StateKind, aligned

Interval = tuple[int, int]


@define(eq=False)
class _Life:
    """Accumulates one tensor's intervals during the sweep."""

    tensor: Tensor
    start: int | None
    last: int
    intervals: list[Interval]


@frozen(eq=False)
class Lifetimes:
    """Live intervals of a stage's tensors in a memory, in declaration order, and the live-byte curve they make."""

    stage: Stage
    intervals: dict[Tensor, tuple[Interval, ...]]
    live_bytes: NDArray[np.int64]
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


def lifetimes(stage: Stage, home: Home = Home.DDR) -> Lifetimes:
    """The lifetimes of one stage's tensors in a memory, in one sweep over its ops."""
    count = len(stage.ops)
    lives: dict[Tensor, _Life] = {}
    for position, op in enumerate(stage.ops):
        if type(op) is Release:
            continue
        for tensor in op.scratch:
            life = lives.get(tensor) or lives.setdefault(tensor, _Life(tensor, None, position, []))
            life.intervals.append((position, position + 1))
        for tensor in op.reads + op.updates:
            life = lives.get(tensor) or lives.setdefault(
                tensor, _Life(tensor, 0 if tensor.carried else position, 0, [])
            )
            life.last = position
        for tensor in op.writes:
            earlier = lives.get(tensor)
            if earlier is None:
                lives[tensor] = _Life(tensor, position, position, [])
            else:
                if earlier.start is not None:
                    earlier.intervals.append((earlier.start, earlier.last + 1))
                earlier.start = earlier.last = position
    return _finished(stage, home, lives, count)


def _finished(stage: Stage, home: Home, lives: dict[Tensor, _Life], count: int) -> Lifetimes:
    intervals: dict[Tensor, tuple[Interval, ...]] = {}
    for tensor in stage.tensors.values():
        if tensor.home is not home:
            continue
        life = lives.get(tensor)
        if life is None:
            spans: list[Interval] = [(0, count)] if tensor.carried else []
        else:
            spans = life.intervals
            if life.start is not None:
                spans.append((life.start, count if tensor.carried else life.last + 1))
        intervals[tensor] = tuple(spans)
    return Lifetimes(stage, intervals, _live_bytes(intervals, count))


def _live_bytes(intervals: Mapping[Tensor, Iterable[Interval]], count: int) -> NDArray[np.int64]:
    """Bytes that tensors have live at each of so many ops, aligned sizes."""
    curve = [0] * (count + 1)
    for tensor, spans in intervals.items():
        size = aligned(tensor.type.nbytes)
        for start, stop in spans:
            curve[start] += size
            curve[stop] -= size
    return np.cumsum(curve, dtype=np.int64)[:count]
