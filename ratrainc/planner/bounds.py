"""Lower bounds on step time and peak bytes, in closed form, for whole arrays of plans. Nothing here is below what it bounds: it is never above.

For a stage s of P with f and b seconds of forward and backward a micro-batch, M micro-batches, k = min(P - s, M) in flight, c seconds of
a message, and D the seconds from the end of a forward on s to the arrival of its gradient (all later stages there and back):

- *order*: k forwards, then M - k times backward and forward, then k backwards. The first backward waits D for the first forward, the last
  backward D for the last forward: window >= max(k f, f + D) + (M - k)(f + b) + max((k - 1) b, D) + b.
- *round trips*: forward m + k comes after backward m, so every k-th micro-batch makes a chain: ceil(M / k)(f + D + b).
- *work*: the compute engine also does the recovery R and the updates: M (f + b) + R + updates.
- *state*: the first block of a stage is used in the next step only after its reduction, update and gather, which follow the window.
- *stages before s* are passed on the way down before the window, and up after it.
- *collectives*: their engine works one after another.

R follows from bytes. When a backward begins, all k micro-batches in flight hold what they keep, beside the state, the gradients and what this
backward itself needs. What is left of the capacity, shared evenly by all layers in flight, gives least recovery on the convex hull of all choices
(a convex function of the bytes: sharing evenly is the optimum of the relaxation in which choices may be mixed).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain_ir.types import ALIGNMENT_BYTES

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
        states = sorted({(s.dp, s.zero, s.reduce) for s in shapes})
        size_of = {size: i for i, size in enumerate(sizes)}
        state_of = {state: i for i, state in enumerate(states)}
        work = _table([profiles.work(size) for size in sizes], _WORK_COLUMNS)
        state = _table([profiles.state(*key) for key in states], _STATE_COLUMNS)
        work |= _segments([(profiles.work(size).kept_bytes, profiles.work(size).recovery) for size in sizes])
        work_rows = np.array([size_of[s.micro_batch_size] for s in shapes])
        state_rows = np.array([state_of[s.dp, s.zero, s.reduce] for s in shapes])
        return cls(
            pp=np.array([s.pp for s in shapes], float),
            micro_batches=np.array([s.micro_batches for s in shapes], float),
            layers=float(profiles.setting.model.layers),
            capacity=float(profiles.setting.machine.whole("ddr_capacity")),
            in_order=schedule == "1f1b",
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
    "message",
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


def stage_bounds(c: Columns, stage: Numbers, before: Numbers, layers: Numbers) -> StageBounds:
    """Bounds of stages that have `layers` layers after `before` layers of earlier stages; all arguments broadcast, `c` spread to fit."""
    first, last = stage == 0, stage == c.pp - 1
    flight = np.minimum(c.pp - stage, c.micro_batches)
    memory = _Memory(c, first, last, flight, layers)
    peak = memory.peak_bytes()
    seconds = np.maximum(_time(c, stage, before, layers, memory.recovery()), 0.0)
    return StageBounds(np.where(peak <= c.capacity, seconds, np.inf), peak)


def unit_sum(column: Numbers, first: Flags, last: Flags, layers: Numbers) -> Numbers:
    """A column summed over the units (embed, layers, head) of stages."""
    total: Numbers = first * column[..., _EMBED] + layers * column[..., _LAYER] + last * column[..., _HEAD]
    return total


def _time(c: Columns, stage: Numbers, before: Numbers, layers: Numbers, recovery: Numbers) -> Numbers:
    first, last = stage == 0, stage == c.pp - 1
    m, k = c.micro_batches, np.minimum(c.pp - stage, c.micro_batches)
    f, b = unit_sum(c.forward, first, last, layers), unit_sum(c.backward, first, last, layers)
    both = c.forward + c.backward
    layer, hop = both[..., _LAYER], 2 * c.message
    behind = c.layers - before - layers
    up = np.where(first, 0.0, both[..., _EMBED] + before * layer + hop * stage)
    down = np.where(last, 0.0, behind * layer + both[..., _HEAD] + hop * (c.pp - 1 - stage))
    work = m * (f + b) + recovery
    window = work
    if c.in_order:
        start = np.maximum(k * f, f + down)
        steady = start + (m - k) * (f + b) + np.maximum((k - 1) * b, down) + b
        short = (
            np.maximum(start + (k - 1) * b, m * f + down) + b
        )  # no steady part: the last forward may wait for nothing
        trips = np.ceil(m / k) * (f + down + b) + np.mod(m - 1, k) * f
        window = np.maximum(np.maximum(work, trips), np.where(m > k, steady, short))
    else:
        up = np.where(first, 0.0, c.forward[..., _EMBED] + before * c.forward[..., _LAYER] + hop * stage)
        window = np.where(first, work, m * f)  # elsewhere weight halves may run while earlier stages go on
    tail = np.where(first, c.tail[..., _EMBED], c.tail[..., _LAYER])
    alone = window + tail if c.in_order else work
    through = up + window + c.tail[..., _EMBED]
    busy = work + unit_sum(c.update, first, last, layers)
    link = unit_sum(c.link + m[..., None] * c.link_each, first, last, layers)
    return np.maximum(np.maximum(alone, through), np.maximum(busy, link))


@frozen(eq=False)
class _Memory:
    """The bytes of stages at two instants, each at the start of a backward of a whole number of micro-batches in flight.

    Early: the first backward, when no gradient is live yet. Late: any other while as many are in flight.
    """

    c: Columns
    first: Flags
    last: Flags
    flight: Numbers
    layers: Numbers

    @property
    def late_flight(self) -> Numbers:
        """Micro-batches in flight at the second backward: all that may be, or one less where no forward is left."""
        more = self.c.micro_batches > self.flight
        return np.where(more, self.flight, self.flight - 1)

    def fixed(self, *, late: bool) -> Numbers:
        c = self.c
        found = unit_sum(c.carried, self.first, self.last, self.layers) + ALIGNMENT_BYTES  # the loss scale
        return found + unit_sum(c.gradients, self.first, self.last, self.layers) if late else found

    def free(self, flight: Numbers, *, late: bool, head: bool, forwards_left: Flags) -> Numbers:
        """Bytes left for keeping more than checkpoints when the backward of the head, or of the last mlp, begins."""
        c = self.c
        held = flight * (self.layers * c.activation + self.first * c.inputs)  # labels are read by the head alone
        if head:
            own = c.head_scratch + 2 * c.activation + c.head_gradient + c.inputs
        else:
            own = c.mlp_scratch + c.mlp_saved + 3 * c.activation + c.mlp_gradient + c.mlp_view
        dead = np.where(self.first & ~forwards_left, c.embed_view, 0.0)
        return c.capacity - self.fixed(late=late) - held - own + dead

    def peak_bytes(self) -> Numbers:
        c = self.c
        left = c.micro_batches - self.flight
        early = self.least_free(self.flight, late=False, forwards_left=left >= 1)
        late = self.least_free(self.late_flight, late=True, forwards_left=left >= 2)
        return c.capacity - np.minimum(early, np.where(self.late_flight >= 1, late, np.inf))

    def least_free(self, flight: Numbers, *, late: bool, forwards_left: Flags) -> Numbers:
        mlp = self.free(flight, late=late, head=False, forwards_left=forwards_left)
        head = self.free(flight, late=late, head=True, forwards_left=forwards_left)
        return np.minimum(mlp, np.where(self.last, head, np.inf))

    def recovery(self) -> Numbers:
        """Seconds of recovery in a step: windows of micro-batches that are in flight together, the last when all forwards are done."""
        m, k = self.c.micro_batches, self.flight
        windows = np.floor((m - 1) / k)
        rest = m - windows * k
        more, done = m > k, np.zeros_like(m, dtype=bool)
        inner = self.of_window(k, k, late=True, forwards_left=~done)
        final = self.of_window(k, k, late=True, forwards_left=done)
        first = self.of_window(rest, k, late=False, forwards_left=more)
        seconds: Numbers = np.maximum(windows - 1, 0.0) * inner + np.minimum(windows, 1.0) * final + first
        return seconds

    def of_window(self, count: Numbers, flight: Numbers, *, late: bool, forwards_left: Flags) -> Numbers:
        """Least seconds of recovery of `count` micro-batches, of those in flight together; one layer, which begins its backward, is whole."""
        units = np.maximum(count * self.layers - 1, 0.0)
        share = self.least_free(flight, late=late, forwards_left=forwards_left) / np.maximum(units, 1.0)
        c = self.c
        most = np.zeros_like(share)
        for segment in range(c.hull_bytes.shape[-1]):  # a convex function is the largest of its segments' lines
            slope = c.hull_slope[..., segment]
            line = slope * share
            line += c.hull_seconds[..., segment] - slope * c.hull_bytes[..., segment]
            np.maximum(most, line, out=most)
        seconds: Numbers = units * most + (count * self.layers - units) * c.hull_seconds.min(axis=-1)
        return seconds


def recovery_seconds(c: Columns, stage: Numbers, layers: Numbers) -> Numbers:
    """Least seconds of recovery of stages in a step; arguments as for `stage_bounds`."""
    flight = np.minimum(c.pp - stage, c.micro_batches)
    return _Memory(c, stage == 0, stage == c.pp - 1, flight, layers).recovery()


def plan_bounds(c: Columns, layers: Numbers) -> StageBounds:
    """Bounds of plans with equal numbers of stages: seconds [plans], peak bytes [plans, stages]. `layers` [plans, stages]."""
    before = np.cumsum(layers, axis=1) - layers
    found = stage_bounds(c.spread(1), np.arange(layers.shape[1], dtype=float)[None, :], before, layers)
    return StageBounds(found.seconds.max(axis=1), found.peak_bytes)


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
