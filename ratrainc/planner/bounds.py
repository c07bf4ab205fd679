"""Lower bounds on step time and peak bytes, in closed form, for whole arrays of plans: never above what the compiler and the simulator find.

For a stage s of P with f and b seconds of forward and backward a micro-batch, M micro-batches, k = min(P - s, M) in flight, c seconds of
a message, and D the seconds from the end of a forward on s to the arrival of its gradient (all later stages there and back):

- *work*: the compute engine also does the recovery R and the updates: M (f + b) + R + updates.
- *waits*: the first backward waits D for the first forward, and before it there are only k forwards; the last backward waits D for the last forward, and
  between them there are only k - 1 backwards and the recovery r of those k micro-batches. So, where M > k,
  window >= M (f + b) + R + max(0, D - (k - 1) f) + max(0, D - (k - 1) b - r). Recovery before the first backward is not part of R: what it
  recovers takes the bytes of what could have been kept.
- *round trips*: forward m + k comes after backward m, so every k-th micro-batch makes a chain: ceil(M / k)(f + D + b).
- *state*: the first block of a stage is used in the next step only after its reduction, update and gather, which follow the window.
- *stages before s* are passed on the way down before the window, and up after it.
- *collectives*: their engine works one after another.

R follows from bytes. When a backward begins, all k micro-batches in flight hold what they keep, beside the state, the gradients and what this
backward itself needs. What is left of the capacity, shared evenly by all layers in flight, gives least recovery on the convex hull of all choices
(a convex function of the bytes: sharing evenly is the optimum of the relaxation in which choices may be mixed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain_ir.types import ALIGNMENT_BYTES
from ratrainc.planner.profile import state_key

if TYPE_CHECKING:
    from ratrainc.planner.profile import Profiles
    from ratrainc.planner.space import Shape

Numbers = NDArray[np.float64]
Flags = NDArray[np.bool_]

_EMBED, _LAYER, _HEAD = range(3)


@frozen(eq=False)
class Columns:
    """What the bounds need of many shapes: one row a shape, units (embed, layer, head) or segments of the hull in the last axis."""

    pp: Numbers
    micro_batches: Numbers
    layers: float
    capacity: float
    forward: Numbers
    backward: Numbers
    activation: Numbers
    inputs: Numbers
    mlp_saved: Numbers
    mlp_scratch: Numbers
    head_scratch: Numbers
    message: Numbers
    hull_bytes: Numbers
    """where each segment of recovery over kept bytes starts"""
    hull_seconds: Numbers
    hull_slope: Numbers
    carried: Numbers
    gradients: Numbers
    mlp_gradient: Numbers
    head_gradient: Numbers
    mlp_view: Numbers
    embed_view: Numbers
    update: Numbers
    link: Numbers
    link_each: Numbers
    tail: Numbers
    in_order: bool
    """whether stages follow 1F1B exactly, so that the bounds of its order hold"""

    @classmethod
    def of(cls, profiles: Profiles, shapes: Sequence[Shape], *, schedule: str = "1f1b") -> Columns:
        """The columns of some shapes; profiles are made once for each micro-batch size and each state."""
        sizes = sorted({s.micro_batch_size for s in shapes})
        states = sorted({state_key(s) for s in shapes})
        size_of = {size: i for i, size in enumerate(sizes)}
        state_of = {state: i for i, state in enumerate(states)}
        work = _table([profiles.work(size) for size in sizes], _WORK_COLUMNS)
        state = _table([profiles.state(key) for key in states], _STATE_COLUMNS)
        work |= _segments([(profiles.work(size).kept_bytes, profiles.work(size).recovery) for size in sizes])
        work_rows = np.array([size_of[s.micro_batch_size] for s in shapes])
        state_rows = np.array([state_of[state_key(s)] for s in shapes])
        return cls(
            pp=np.array([s.pp for s in shapes], float),
            micro_batches=np.array([s.micro_batches for s in shapes], float),
            layers=float(profiles.setting.model.layers),
            capacity=float(profiles.setting.machine.whole("ddr_capacity")),
            in_order=schedule == "1f1b",
            message=np.array([profiles.message(s) for s in shapes]),
            **{name: column[work_rows] for name, column in work.items()},
            **{name: column[state_rows] for name, column in state.items()},
        )

    def rows(self, index: slice | NDArray[np.intp]) -> Columns:
        """Some of the shapes."""
        return self._mapped(lambda column: column[index])

    def spread(self, axes: int) -> Columns:
        """The same with axes of length one after the first, to be broadcast against stages and cuts."""
        return self._mapped(lambda column: column.reshape(column.shape[0], *(1,) * axes, *column.shape[1:]))

    def _mapped(self, change: Callable[[Numbers], Numbers]) -> Columns:
        changed: dict[str, Any] = {
            name: change(value)
            for name, value in attrs.asdict(self, recurse=False).items()
            if isinstance(value, np.ndarray)
        }
        return attrs.evolve(self, **changed)


_WORK_COLUMNS = (
    "forward",
    "backward",
    "activation",
    "inputs",
    "mlp_saved",
    "mlp_scratch",
    "head_scratch",
)
_STATE_COLUMNS = (
    "carried",
    "gradients",
    "mlp_gradient",
    "head_gradient",
    "mlp_view",
    "embed_view",
    "update",
    "link",
    "link_each",
    "tail",
)


def _table(rows: Sequence[object], names: Sequence[str]) -> dict[str, Numbers]:
    return {name: np.array([getattr(row, name) for row in rows], float) for name in names}


def _segments(hulls: Sequence[tuple[Numbers, Numbers]]) -> dict[str, Numbers]:
    """The segments of some hulls, as many for each: a convex function is the largest of its segments' lines."""
    most = max(len(x) for x, _ in hulls)
    starts, seconds, slopes = np.zeros((3, len(hulls), most))
    for row, (x, y) in enumerate(hulls):
        count = len(x)
        starts[row, :count], seconds[row, :count] = x, y
        slopes[row, : count - 1] = np.diff(y) / np.diff(x)
        seconds[row, count:] = y[-1]  # flat from the last corner on
    return {"hull_bytes": starts, "hull_seconds": seconds, "hull_slope": slopes}


@frozen(eq=False)
class StageBounds:
    """Lower bounds of stages: the step seconds each implies (infinite where it cannot fit), and its peak bytes."""

    seconds: Numbers
    peak_bytes: Numbers


def stage_bounds(c: Columns, before: Numbers, layers: Numbers) -> StageBounds:
    """Bounds of all stages of shapes, stage by stage along axis 1, that have `layers` layers after `before` layers of earlier stages.

    Arguments broadcast; `layers` has the stages' axis. `c` is spread to fit.
    """
    memory = _Memory.of(c, layers)
    peak = memory.peak_bytes()
    seconds = np.maximum(_time(c, memory, before), 0.0)
    return StageBounds(np.where(peak <= c.capacity, seconds, np.inf), peak)


def unit_sum(column: Numbers, layers: Numbers) -> Numbers:
    """A column summed over the units (embed, layers, head) of stages; `layers` has the stages along axis 1."""
    total = np.multiply(layers, column[..., _LAYER])
    total[:, 0] += column[:, 0, ..., _EMBED]
    total[:, -1] += column[:, 0, ..., _HEAD]
    return total


def _stage_numbers(layers: Numbers) -> Numbers:
    """The numbers of the stages, along axis 1 of `layers`."""
    stages = np.arange(layers.shape[1], dtype=float)
    return stages.reshape(1, -1, *(1,) * (layers.ndim - 2))


def _time(c: Columns, memory: _Memory, before: Numbers) -> Numbers:
    m, layers = c.micro_batches, memory.layers
    stage = _stage_numbers(layers)
    f, b = unit_sum(c.forward, layers), unit_sum(c.backward, layers)
    both = c.forward + c.backward
    hop = 2 * c.message
    up_columns = both if c.in_order else c.forward
    up = np.asarray(before * up_columns[..., _LAYER] + (up_columns[..., _EMBED] + hop * stage))
    up[:, 0] = 0.0
    work = m * (f + b)
    work += memory.recovery()
    if c.in_order:
        down = (c.layers - before - layers) * both[..., _LAYER] + (both[..., _HEAD] + hop * (c.pp - 1 - stage))
        down[:, -1] = 0.0
        window = _window_in_order(c, memory, f, b, down, work)
    else:
        window = np.where(stage == 0, work, m * f)  # elsewhere weight halves may run while earlier stages go on
    longest = up + window
    longest += c.tail[..., _EMBED]
    if c.in_order:  # a later stage's first block is an attention
        later = longest[:, 1:]
        np.maximum(later, window[:, 1:] + c.tail[..., _LAYER], out=later)
    work += unit_sum(c.update, layers)
    np.maximum(longest, work, out=longest)
    return np.maximum(longest, unit_sum(c.link + m[..., None] * c.link_each, layers), out=longest)


def _window_in_order(c: Columns, memory: _Memory, f: Numbers, b: Numbers, down: Numbers, work: Numbers) -> Numbers:
    """Seconds from the first forward to the last backward of stages that follow 1F1B: their work and waits, and the round trips."""
    m, k = c.micro_batches, memory.flight
    window = down - (k - 1) * f  # the wait before the first backward
    np.maximum(window, 0.0, out=window)
    window += work
    at_the_end = np.maximum(down - (k - 1) * b - memory.window_recovery, 0.0)
    if memory.has_steady_part.all():
        window += at_the_end
    else:
        last_trip = m * f + down + b  # the last forward may wait for nothing
        window = np.where(memory.has_steady_part, window + at_the_end, np.maximum(window, last_trip))
    trips = (memory.windows + 1) * (f + b + down)
    trips += (memory.rest - 1) * f
    return np.maximum(window, trips, out=window)


@frozen(eq=False)
class _Memory:
    """The bytes that are left of stages at two instants, each at the start of a backward of a whole number of micro-batches in flight.

    Early: the first backward, when no gradient is live yet. Late: any other while as many are in flight. The backward is that of the last mlp,
    or of the head, whichever needs more.
    """

    c: Columns
    layers: Numbers
    flight: Numbers
    """micro-batches in flight"""
    windows: Numbers
    """whole groups of micro-batches in flight together, after the first"""
    rest: Numbers
    """micro-batches of the first group"""
    has_steady_part: Flags
    """whether more micro-batches come than are in flight"""
    held: Numbers
    """bytes a micro-batch in flight holds whatever is kept"""
    early: Numbers
    late: Numbers
    updated: Numbers
    """bytes that the last stage has more in its last micro-batch: the head may be updated before the last mlp's backward begins"""

    @classmethod
    def of(cls, c: Columns, layers: Numbers) -> _Memory:
        """The bytes of stages; arguments as for `stage_bounds`."""
        m = c.micro_batches
        flight = np.minimum(c.pp - _stage_numbers(layers), m)
        windows = np.floor((m - 1) / flight)
        more = m > flight
        held = layers * c.activation
        held[:, 0] += c.inputs[:, 0]  # labels are read by the head alone
        own = c.mlp_scratch + c.mlp_saved + 3 * c.activation + c.mlp_gradient + c.mlp_view
        early = c.capacity - ALIGNMENT_BYTES - own - unit_sum(c.carried, layers)  # the loss scale takes an alignment
        head = c.head_scratch + 2 * c.activation + c.head_gradient + c.inputs
        early[:, -1] -= np.maximum(head - own, 0.0)[:, 0]
        updated = np.maximum(own, head) - np.maximum(own - c.gradients[..., _HEAD], head)
        early -= flight * held
        late = early - unit_sum(c.gradients, layers)
        early[:, 0] += np.where(more[:, 0], 0.0, c.embed_view[:, 0])  # nobody reads it after the last forward
        return cls(c, layers, flight, windows, m - windows * flight, more, held, early, late, updated[:, 0])

    def peak_bytes(self) -> Numbers:
        c = self.c
        late = self.late
        left = c.micro_batches - self.flight
        late = late + np.where(self.has_steady_part, 0.0, self.held)  # at the second backward one less is in flight
        late[:, 0] += np.where(left[:, 0] >= 2, 0.0, c.embed_view[:, 0])
        late[:, -1] += np.where(c.micro_batches[:, 0] > 2, 0.0, self.updated)
        there_is = self.has_steady_part | (self.flight >= 2)
        peak: Numbers = c.capacity - np.minimum(self.early, np.where(there_is, late, np.inf))
        return peak

    def recovery(self) -> Numbers:
        """Seconds of recovery in a step: windows of micro-batches that are in flight together, the last when all forwards are done.

        The bytes that are free in the last window alone are shared by all: by convexity that makes the sum no larger.
        """
        seconds = self.windows * self.window_recovery
        seconds += self.of_window(self.rest, self.early)
        return seconds

    @cached_property
    def window_recovery(self) -> Numbers:
        """Seconds of recovery in each window but the first."""
        late = self.late.copy()
        late[:, 0] += self.c.embed_view[:, 0] / np.maximum(self.windows[:, 0], 1.0)
        late[:, -1] += self.updated / np.maximum(self.windows[:, -1], 1.0)
        return self.of_window(self.flight, late)

    def of_window(self, count: Numbers, free: Numbers) -> Numbers:
        """Least seconds of recovery of `count` micro-batches, of those in flight together; one layer, which begins its backward, is whole."""
        c = self.c
        units = count * self.layers - 1
        np.maximum(units, 0.0, out=units)
        share = free / np.maximum(units, 1.0)
        least = c.hull_seconds.min(axis=-1)
        most: Numbers = np.maximum(np.zeros_like(share), least)
        for segment in np.flatnonzero(c.hull_slope.any(axis=tuple(range(c.hull_slope.ndim - 1)))):
            slope = c.hull_slope[..., segment]  # a convex function is the largest of its segments' lines
            line = slope * share
            line += c.hull_seconds[..., segment] - slope * c.hull_bytes[..., segment]
            np.maximum(most, line, out=most)
        most -= least
        most *= units
        most += count * self.layers * least
        return most


def recovery_seconds(c: Columns, layers: Numbers) -> Numbers:
    """Least seconds of recovery of stages in a step; arguments as for `stage_bounds`."""
    return _Memory.of(c, layers).recovery()


def plan_bounds(c: Columns, layers: Numbers) -> StageBounds:
    """Bounds of plans with equal numbers of stages: seconds [plans], peak bytes [plans, stages]. `layers` [plans, stages]."""
    plans, stages = layers.shape
    seconds, peaks = np.empty(plans), np.empty(layers.shape)
    step = max(1, _BLOCK // stages)
    for start in range(0, plans, step):
        rows = slice(start, start + step)
        part = layers[rows]
        found = stage_bounds(c.rows(rows).spread(1), np.cumsum(part, axis=1) - part, part)
        seconds[rows], peaks[rows] = found.seconds.max(axis=1), found.peak_bytes
    return StageBounds(seconds, peaks)


_BLOCK = 12288
"""Stages that are bounded together: intermediate arrays stay in the cache."""


def shape_bounds(c: Columns) -> Numbers:
    """Lower bounds of the step seconds of shapes under any cuts; infinite where the state alone exceeds all memory.

    With a seconds of forward and backward for the whole model: behind any stage the pipeline drains, so the step is at least
    a + (M - 1) times the heaviest stage, and some stage has a P-th of the work.
    """
    m, p = c.micro_batches, c.pp
    everything = np.array([1.0, c.layers, 1.0])
    both, backward = (c.forward + c.backward) @ everything, c.backward @ everything
    if c.in_order:
        drained = both + (m - 1) * np.where(m > p, both, backward) / p + 2 * c.message * (p - 1) + c.tail[..., _EMBED]
    else:
        drained = m * both / p
    recovery = c.layers * c.hull_seconds.min(axis=-1)
    updates = c.update @ everything
    busy = (m * (both + recovery) + updates) / p
    link = (c.link @ everything + m * (c.link_each @ everything)) / p
    return np.where(state_bytes(c) <= c.capacity, np.maximum(np.maximum(drained, busy), link), np.inf)


def state_bytes(c: Columns) -> Numbers:
    """Bytes of carried state that some stage of each shape has at least."""
    found: Numbers = c.carried @ np.array([1.0, c.layers, 1.0]) / c.pp
    return found
