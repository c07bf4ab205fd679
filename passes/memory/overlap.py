"""Bytes that stay taken while an op of another engine still works on them.

A tensor's bytes are free when its last accessor has *completed*. List order does not say when that is: a gradient that is being
reduced stands in the list before the backwards that run meanwhile. If one of them got the gradient's bytes, it would wait for the
link, and the overlap would be lost. So intervals are lengthened to where, by the target's own seconds, whoever comes next in the
list would not have to wait. That takes more bytes; a limit on how far an op may lag behind its place in the list trades them for time.
Scalars share their bytes with nothing, unless no lag fits: an op that wants the four bytes of a flag back would wait for a collective.

The times are those of one stage on its own (`passes/memory/list_times.py`).
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from ratrain.passes.memory.list_times import OpSeconds, TimedRows
from ratrain.ratrain_ir.analysis.lifetime import Lifetimes, lifetimes_and_completions
from ratrain.ratrain_ir.analysis.op_rows import pays
from ratrain.ratrain_ir.config.types import Home, StateKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

_HALVINGS = 12


@frozen(eq=False)
class Occupancy:
    """How long each tensor of a stage needs its bytes so that no op waits for them; made once for an order of ops.

    Arrays are by interval, intervals of a tensor one after the other.
    """

    lives: Lifetimes
    limits: NDArray[np.int64]
    """where the tensor's next interval starts, or the step ends"""
    issued: NDArray[np.float64]
    """by op: when its place in the list has come; ascending"""
    earliest: NDArray[np.float64]
    """by op: the earliest start of any op from there on"""
    completed: NDArray[np.float64]
    """when the interval's last accessor has completed"""
    apart: NDArray[np.bool_]
    """whether the interval is all of a scalar's"""
    _unhurried: NDArray[np.int64] = field(init=False)
    """the first op that starts when the interval's last accessor has completed"""

    @_unhurried.default
    def _until_completed(self) -> NDArray[np.int64]:
        return np.searchsorted(self.earliest, self.completed)

    def within(self, lag: float) -> Lifetimes:
        """Intervals in which an accessor may end up to `lag` seconds after its place in the list has come; 0: those of the list."""
        return evolve(self.lives, starts=self._taken(lag), stops=self._freed(lag))

    def peak_bytes(self, lag: float) -> int:
        """The most bytes that are taken at once under a lag."""
        return self.within(lag).peak_bytes

    def _taken(self, lag: float) -> NDArray[np.int64]:
        return np.where(self.apart, 0, self.lives.starts) if lag > 0 else self.lives.starts

    def _freed(self, lag: float) -> NDArray[np.int64]:
        """An op may lag behind the place in the list after which an interval ends."""
        late = np.searchsorted(self.earliest, self.issued + lag)
        stops = self.lives.stops
        later = np.minimum(self._unhurried, late[np.maximum(stops - 1, 0)] if len(late) else 0)
        freed = np.minimum(np.maximum(stops, later), self.limits)
        return np.where(self.apart, len(self.earliest), freed) if lag > 0 else freed

    def lag_within(self, capacity: int) -> float:
        """The largest lag under which the live bytes stay within a capacity; 0 where hardly any does."""
        if self.peak_bytes(inf) <= capacity:
            return inf
        low, high = 0.0, float(self.completed.max(initial=0.0))
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self.peak_bytes(middle) <= capacity:
                low = middle
            else:
                high = middle
        return low


def occupancy(stage: Stage, op_seconds: OpSeconds, home: Home = Home.DDR, timed: TimedRows | None = None) -> Occupancy:
    """The occupancy of a memory by a stage whose ops have their workspace; some of them may be `timed` already."""
    timed = timed or TimedRows()
    places = timed.of(stage, op_seconds)
    arrays = pays(2 * len(places))
    (times,) = timed.times(places, 1, arrays=arrays)
    ends = times.ends if arrays else times.ends.tolist()
    lives, completed = lifetimes_and_completions(stage, timed.rows, places, ends, home, arrays=arrays)
    limits = np.full(len(lives.starts), len(stage.ops), np.int64)
    limits[:-1] = lives.starts[1:]
    limits[np.cumsum(lives.counts)[lives.counts > 0] - 1] = len(stage.ops)  # the last one of each tensor
    scalars = np.fromiter((tensor.kind is StateKind.SCALAR for tensor in lives.tensors), np.bool_, len(lives.tensors))
    earliest = np.minimum.accumulate(times.starts[::-1])[::-1]
    apart = np.repeat(scalars & (lives.counts == 1), lives.counts)
    return Occupancy(lives, limits, times.issued, earliest, completed, apart)
