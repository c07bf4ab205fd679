"""Memory intervals lengthened so that no op waits for bytes that another engine still works on.

A tensor's bytes are free when its last accessor has *completed*. List order does not say when that is:

    list:        reduce_scatter g1 | backward b2 | backward b3
    compute:                         [== b2 ==][== b3 ==]
    collective:  [======== g1 ========]                        g1 stays taken until here, not only until its line

If `b2` got the gradient's bytes, it would wait for the link, and the overlap would be lost. So intervals end where, by
the target's own seconds, the next user in the list would not have to wait. That takes more bytes. A limit on how far an
op may lag behind its place in the list trades bytes for time (`Occupancy.lag_within`). Scalars share their bytes with
nothing unless the lag is 0: an op that reuses the four bytes of a flag would wait for a collective.

The times are those of one stage on its own (`passes/trial/list_times.py`). Cost: one sweep over the ops, then a binary
search per interval for each lag.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, field, frozen
from numpy.typing import NDArray

from ratrain.passes.trial.list_times import OpSeconds, TimedRows
from ratrain.ratrain_ir.analysis.lifetime import Lifetimes, lifetimes_and_completions
from ratrain.ratrain_ir.analysis.op_rows import pays
from ratrain.ratrain_ir.config.types import Home, StateKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

_HALVINGS = 12
"""Steps of the bisection for the largest lag: 1/4096 of the step."""


@frozen(eq=False)
class Occupancy:
    """Time for which each tensor of a stage needs its bytes if no op shall wait for them; made once per order of ops.

    Arrays are by interval, with the intervals of a tensor one after the other, unless stated otherwise.
    """

    lives: Lifetimes
    limits: NDArray[np.int64]
    """Exclusive end limit: where the tensor's next interval starts, or the end of the list."""
    issued: NDArray[np.float64]
    """By op: seconds when its place in the list is reached; ascending."""
    earliest: NDArray[np.float64]
    """By op: the earliest start of this op and all later ones; ascending."""
    completed: NDArray[np.float64]
    """Seconds when the interval's last accessor has completed."""
    apart: NDArray[np.bool_]
    """True for the only interval of a scalar."""
    _unhurried: NDArray[np.int64] = field(init=False)
    """First op that starts after the interval's last accessor has completed."""

    @_unhurried.default
    def _until_completed(self) -> NDArray[np.int64]:
        return np.searchsorted(self.earliest, self.completed)

    def within(self, lag: float) -> Lifetimes:
        """Return the lifetimes lengthened for accessors that end up to `lag` seconds after their place in the list.

        With `lag` 0 they are the list's own lifetimes.
        """
        return evolve(self.lives, starts=self._taken(lag), stops=self._freed(lag))

    def peak_bytes(self, lag: float) -> int:
        """Return the most bytes taken at once under a lag in seconds."""
        return self.within(lag).peak_bytes

    def _taken(self, lag: float) -> NDArray[np.int64]:
        return np.where(self.apart, 0, self.lives.starts) if lag > 0 else self.lives.starts

    def _freed(self, lag: float) -> NDArray[np.int64]:
        """Return the exclusive end of each interval: no earlier than in the list, no later than its limit.

        In between it ends where its last accessor has completed, or where the op before the end would lag by more than
        `lag`.
        """
        late = np.searchsorted(self.earliest, self.issued + lag)
        stops = self.lives.stops
        later = np.minimum(self._unhurried, late[np.maximum(stops - 1, 0)] if len(late) else 0)
        freed = np.minimum(np.maximum(stops, later), self.limits)
        return np.where(self.apart, len(self.earliest), freed) if lag > 0 else freed

    def lag_within(self, capacity: int) -> float:
        """Return the largest lag in seconds under which the live bytes stay within `capacity`.

        Infinite if any lag fits; 0 if only very small ones do, or none.
        """
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
    """Return the occupancy of one memory (`home`) by a stage whose ops have their workspace.

    `timed` caches the rows and seconds of ops between calls.
    """
    timed = timed or TimedRows()
    places = timed.of(stage, op_seconds)
    arrays = pays(2 * len(places))
    (times,) = timed.times(places, 1, arrays=arrays)
    ends = times.ends if arrays else times.ends.tolist()
    lives, completed = lifetimes_and_completions(stage, timed.rows, places, ends, home, arrays=arrays)
    limits = np.full(len(lives.starts), len(stage.ops), np.int64)
    limits[:-1] = lives.starts[1:]
    limits[np.cumsum(lives.counts)[lives.counts > 0] - 1] = len(stage.ops)  # a tensor's last
    scalars = np.array([tensor.kind is StateKind.SCALAR for tensor in lives.tensors], np.bool_)
    earliest = np.minimum.accumulate(times.starts[::-1])[::-1]
    apart = np.repeat(scalars & (lives.counts == 1), lives.counts)
    return Occupancy(lives, limits, times.issued, earliest, completed, apart)
