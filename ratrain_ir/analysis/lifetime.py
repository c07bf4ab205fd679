"""Lifetimes: the intervals in which each tensor of a stage is live, over the cyclic list of a step's ops.

A tensor is live from the op that defines it to its last accessor, both included. `release` marks must agree with that
but do not define it. Workspace is live only while its op runs. A carried tensor lives across the end of the step: from
its (re)definition to the end, and from the start to its last access before that. Intervals are half-open in op
positions:

    op              0 write x   1 read x   2 -   3 update p (carried)   4 -
    x               [0 ------------- 2)
    p, updated      [0 ------------------------------------------------- 5)

Cost: one visit of each op and operand, then array operations over the intervals.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import cached_property
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.lifetime_sweep import swept_lives
from ratrain.ratrain_ir.analysis.op_rows import OpRows, pays
from ratrain.ratrain_ir.config.types import Home, StateKind, aligned
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops.tensor import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

Interval = tuple[int, int]
Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


@frozen(eq=False)
class Lifetimes:
    """Live intervals of a stage's tensors in one memory, in declaration order, and the live bytes at each op."""

    stage: Stage
    tensors: list[Tensor]
    counts: Int64s
    """number of intervals of each tensor"""
    starts: Int64s
    """of all intervals, tensor by tensor"""
    stops: Int64s
    """exclusive ends of all intervals"""
    sizes: Int64s
    """of all intervals: aligned bytes of their tensors"""

    @cached_property
    def intervals(self) -> dict[Tensor, tuple[Interval, ...]]:
        """Intervals of each tensor."""
        spans = list(zip(self.starts.tolist(), self.stops.tolist(), strict=True))
        if (self.counts == 1).all():
            return dict(zip(self.tensors, zip(spans, strict=True), strict=True))
        ends = np.cumsum(self.counts).tolist()
        return {
            tensor: tuple(spans[end - count : end])
            for tensor, count, end in zip(self.tensors, self.counts.tolist(), ends, strict=True)
        }

    @cached_property
    def live_bytes(self) -> Int64s:
        """Live bytes at each op, in aligned sizes."""
        curve = np.zeros(len(self.stage.ops) + 1, np.int64)
        np.add.at(curve, self.starts, self.sizes)
        np.subtract.at(curve, self.stops, self.sizes)
        return np.cumsum(curve)[:-1]

    @property
    def peak_bytes(self) -> int:
        """Largest number of live bytes: a lower bound of any arena."""
        return int(self.live_bytes.max(initial=0))

    @property
    def peak_position(self) -> int:
        """Position of the first op at the peak; 0 without ops."""
        return int(self.live_bytes.argmax()) if len(self.live_bytes) else 0

    @property
    def digest(self) -> bytes:
        """Digest of the sizes and intervals, which are all that a placement depends on."""
        found = hashlib.blake2b(len(self.stage.ops).to_bytes(8, "little"), digest_size=16)
        for array in (self.counts, self.starts, self.stops, self.sizes):
            found.update(np.ascontiguousarray(array).tobytes())
        return found.digest()

    def live_at(self, position: int) -> list[Tensor]:
        """Return the tensors live at an op, largest first."""
        live = [t for t, spans in self.intervals.items() if any(a <= position < b for a, b in spans)]
        return sorted(live, key=lambda t: (-t.type.nbytes, t.name))

    def bytes_by_kind(self, position: int) -> dict[StateKind, int]:
        """Return the live bytes at an op by state kind, largest first."""
        totals: dict[StateKind, int] = {}
        for tensor in self.live_at(position):
            totals[tensor.kind] = totals.get(tensor.kind, 0) + aligned(tensor.type.nbytes)
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def peak_bytes_of(self, kinds: Collection[StateKind]) -> int:
        """Return the most bytes that tensors of some kinds have live at once."""
        some = np.fromiter((tensor.kind in kinds for tensor in self.tensors), np.bool_, len(self.tensors))
        spans = np.repeat(some, self.counts)
        tensors = [tensor for tensor, chosen in zip(self.tensors, some.tolist(), strict=True) if chosen]
        return evolve(
            self,
            tensors=tensors,
            counts=self.counts[some],
            starts=self.starts[spans],
            stops=self.stops[spans],
            sizes=self.sizes[spans],
        ).peak_bytes


def lifetimes(stage: Stage, home: Home = Home.DDR) -> Lifetimes:
    """Compute the lifetimes of one stage's tensors in a memory, in one sweep over its ops."""
    rows = OpRows()
    places = rows.of(stage.ops)
    return lifetimes_and_completions(stage, rows, places, [0.0] * len(places), home, arrays=pays(len(places)))[0]


def lifetimes_and_completions(
    stage: Stage, rows: OpRows, places: Sequence[int], ends: Sequence[float] | Float64s, home: Home, *, arrays: bool
) -> tuple[Lifetimes, Float64s]:
    """Compute the lifetimes, and for each interval the time at which its last accessor has completed.

    `places` are the rows in `rows` of the stage's ops, `ends` the times at which these end. Completions are by
    interval, tensor by tensor; 0 for an interval that lasts to the end of the step in a carried tensor. `arrays`: use
    the compiled loop.
    """
    swept = swept_lives(rows, places, ends, arrays=arrays)
    tensors = [tensor for tensor in stage.tensors.values() if tensor.home is home]
    numbers = np.array(list(map(rows.tensors.numbers.get, tensors, repeat(-1))), np.int64)
    # from numbers of `rows` to places in `tensors`; -1 for tensors of other memories
    order_of = np.full(len(rows.tensors.numbers), -1)
    order_of[numbers[numbers >= 0]] = np.flatnonzero(numbers >= 0)
    owners = order_of[swept.tensors]
    touched = np.zeros(len(tensors), np.bool_)
    touched[owners[owners >= 0]] = True
    # a carried tensor that no op touches lives through the whole step
    idle = [at for at in np.flatnonzero(~touched).tolist() if tensors[at].carried]
    owners = np.concatenate((owners, np.array(idle, np.int64)))
    starts = np.concatenate((swept.starts, np.zeros(len(idle), np.int64)))
    stops = np.concatenate((swept.stops, np.full(len(idle), len(places))))
    completed = np.concatenate((swept.completed, np.zeros(len(idle))))
    # The sweep gives intervals in order of their ends; a stable sort keeps a tensor's intervals in that order.
    order = np.argsort(owners, kind="stable")
    order = order[np.searchsorted(owners[order], 0) :]  # drop the tensors of other memories, whose owner is -1
    counts = np.bincount(owners[order], minlength=len(tensors))
    sizes = rows.sizes_of(tensors, numbers)
    lives = Lifetimes(stage, tensors, counts, starts[order], stops[order], np.repeat(sizes, counts))
    return lives, completed[order]
