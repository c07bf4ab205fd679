"""Bytes that stay taken while an op of another engine still works on them.

A tensor's bytes are free when its last accessor has *completed*. List order does not say when that is: a gradient that is being
reduced stands in the list before the backwards that run meanwhile. If one of them got the gradient's bytes, it would wait for the
link, and the overlap would be lost. So intervals are lengthened to where, by the target's own seconds, whoever comes next in the
list would not have to wait. That takes more bytes; a limit on how far an op may lag behind its place in the list trades them for time.
Scalars share their bytes with nothing, unless no lag fits: an op that wants the four bytes of a flag back would wait for a collective.

The times are those of one stage on its own: each engine in list order, messages from other stages on time. A blocking collective
takes the time of the compute engine too.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.lifetime import Lifetimes, lifetimes_and_completions, spans_of
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops import Engine, Op, Release, Tensor, is_blocking
from ratrain.ratrain_ir.types import Home, StateKind

_HALVINGS = 12


@frozen(eq=False)
class ListTimes:
    """When each op of a stage would start and end, in seconds from the step's start."""

    issued: NDArray[np.float64]
    """when the compute engine comes to the op's place in the list; ascending"""
    starts: NDArray[np.float64]
    ends: NDArray[np.float64]


OpSeconds = Callable[[Stage, Op], float]
"""Seconds an op of a stage takes on its engine when it runs alone."""


def list_times(stage: Stage, op_seconds: OpSeconds) -> ListTimes:
    """The times of a stage's ops in a step from cold; releases take none and never wait."""
    return _Walk(stage, op_seconds).step()


def step_period(stage: Stage, op_seconds: OpSeconds) -> float:
    """Seconds from step to step of a stage on its own: the distance of the ends of the second and the third."""
    walk = _Walk(stage, op_seconds)
    _, second, third = (float(walk.step().ends.max(initial=0.0)) for _ in range(3))
    return third - second


@define(eq=False)
class _Walk:
    """Goes through a stage's list, step after step."""

    stage: Stage
    op_seconds: OpSeconds
    free: dict[Engine, float] = field(factory=dict)
    """when each engine has done what it has been given"""
    written: dict[Tensor, float] = field(factory=dict)
    now: float = 0.0
    """when the compute engine has come to the place in the list"""

    def step(self) -> ListTimes:
        issued: list[float] = []
        starts: list[float] = []
        ends: list[float] = []
        free, written, now = self.free, self.written, self.now
        stage, op_seconds, computes = self.stage, self.op_seconds, free.get(Engine.COMPUTE, 0.0)
        # the innermost loop of many trials makes few calls
        for op in stage.ops:
            if type(op) is Release:
                issued.append(now)
                starts.append(inf)
                ends.append(now)
                continue
            engine = op.engine
            takes_compute = engine is Engine.COMPUTE or is_blocking(op)
            start = free.get(engine, 0.0)
            if now > start:  # noqa: PLR1730
                start = now
            if takes_compute and computes > start:
                start = computes
            for tensor in op.reads + op.updates if op.updates else op.reads:
                ready = written.get(tensor)
                if ready is not None and ready > start:
                    start = ready
            end = start + op_seconds(stage, op)
            free[engine] = end
            for tensor in op.writes + op.updates if op.updates else op.writes:
                written[tensor] = end
            if takes_compute:
                free[Engine.COMPUTE] = computes = end
                now = start
            issued.append(now)
            starts.append(start)
            ends.append(end)
        self.now = now
        return ListTimes(np.array(issued), np.array(starts), np.array(ends))


@frozen(eq=False)
class Occupancy:
    """How long each tensor of a stage needs its bytes so that no op waits for them; made once for an order of ops.

    Arrays are by interval, intervals of a tensor one after the other.
    """

    lives: Lifetimes
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    limits: NDArray[np.int64]
    """where the tensor's next interval starts, or the step ends"""
    issued: NDArray[np.float64]
    """when the place in the list after which the interval ends has come"""
    completed: NDArray[np.float64]
    """when the interval's last accessor has completed"""
    earliest: NDArray[np.float64]
    """earliest start of any op from a position of the list on"""
    apart: NDArray[np.bool_]
    """whether the interval is all of a scalar's"""

    def within(self, lag: float) -> Lifetimes:
        """Intervals in which an accessor may end up to `lag` seconds after its place in the list has come; 0: those of the list."""
        spans = zip(self._taken(lag).tolist(), self._freed(lag).tolist(), strict=True)
        intervals = {tensor: tuple(next(spans) for _ in lives) for tensor, lives in self.lives.intervals.items()}
        return Lifetimes(self.lives.stage, intervals, self._live_bytes(lag))

    def peak_bytes(self, lag: float) -> int:
        """The most bytes that are taken at once under a lag."""
        return int(self._live_bytes(lag).max(initial=0))

    def _taken(self, lag: float) -> NDArray[np.int64]:
        return np.where(self.apart, 0, self.starts) if lag > 0 else self.starts

    def _freed(self, lag: float) -> NDArray[np.int64]:
        until = np.minimum(self.completed, self.issued + lag)
        later = np.searchsorted(self.earliest, until).astype(np.int64)
        freed = np.minimum(np.maximum(self.stops, later), self.limits)
        return np.where(self.apart, len(self.earliest), freed) if lag > 0 else freed

    def _live_bytes(self, lag: float) -> NDArray[np.int64]:
        curve = np.zeros(len(self.earliest) + 1, np.int64)
        np.add.at(curve, self._taken(lag), self.sizes)
        np.subtract.at(curve, self._freed(lag), self.sizes)
        return np.cumsum(curve)[:-1]

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


def occupancy(stage: Stage, op_seconds: OpSeconds, home: Home = Home.DDR) -> Occupancy:
    """The occupancy of a memory by a stage whose ops have their workspace."""
    times = list_times(stage, op_seconds)
    lives, completed = lifetimes_and_completions(stage, times.ends.tolist(), home)
    spans = spans_of(lives.intervals)
    limits = np.full(len(spans.starts), len(stage.ops), np.int64)
    limits[:-1] = spans.starts[1:]
    limits[np.cumsum(spans.counts)[spans.counts > 0] - 1] = len(stage.ops)  # the last one of each tensor
    scalars = np.fromiter((tensor.kind is StateKind.SCALAR for tensor in lives.intervals), np.bool_, len(spans.counts))
    return Occupancy(
        lives,
        spans.sizes,
        spans.starts,
        spans.stops,
        limits,
        times.issued[np.maximum(spans.stops - 1, 0)] if len(stage.ops) else np.zeros(len(spans.stops)),
        np.array(completed, np.float64),
        np.minimum.accumulate(times.starts[::-1])[::-1],
        np.repeat(scalars & (spans.counts == 1), spans.counts),
    )
