"""Time and traffic of a tile schedule on a cluster, read off its loop nest.

Barriers and the loops around them cut a schedule into sections. A section takes as long as the slowest of four: the
cores (cycles of their micro-kernels and of issuing transfers; the slowest core counts), their AM, GSM, DDR. Transfers
issued ahead overlap with the computation meanwhile. Before the first section the first tiles must arrive, after the
last one the last results must leave:

    fill | max(core, AM, GSM, DDR) of section 1 | ... of section 2 | ... | drain

Iterations that are alike are walked once and multiplied, so the cost depends on the nest and on the mask, hardly on the
extents; cores are numpy vectors. Traffic is exact: every byte of every transfer of every core. Seconds are an estimate.
"""

from __future__ import annotations

from math import prod
from typing import Any, TypeAlias

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.mt3000.tiles.micro_kernels import ADD_RUN, PRODUCTS
from ratrain.targets.mt3000.tiles.tile_schedule import (
    Axes,
    Barrier,
    Compute,
    Loop,
    OnChipBuffer,
    OnChipMemory,
    Statement,
    TileLoad,
    TileSchedule,
    TileStore,
    Wait,
    statements,
)
from ratrain.targets.mt3000.tiling.core import (
    LANE_BYTES,
    MULTIPLY_ADD_UNITS,
    Cluster,
    lanes,
    run_end_cycles,
    step_cycles,
)

PerCore: TypeAlias = NDArray[np.float64]
"""One number for each core."""
_Spans: TypeAlias = dict[str, tuple[Any, Any]]
"""Range of each dimension, the same on all cores (int) or one for each (array)."""

_VECTOR_OPERATIONS = {
    "zero": 1,
    "round_sum": 2,
    "start_softmax": 1,
    "softmax": 4,
    "log_sum_exp": 16,
    "row_product": 2,
    "score_gradient": 5,
    "round_turned": 2,
    "scale_turned": 3,
    "divide_turned": 3,
}
"""Vector operations on float32 for each element of the largest buffer, without exponentials of scores. Assumed: counted
off the formulas."""
_EXPONENTIALS = ("softmax", "score_gradient")


@frozen
class TileTime:
    """Time of a schedule that has the cluster to itself: seconds, and bytes by (source, destination) memory."""

    seconds: float
    core_seconds: float
    """of the slowest core in every section, added up; likewise for the other three"""
    am_seconds: float
    gsm_seconds: float
    ddr_seconds: float
    transfers: dict[tuple[str, str], int]

    @property
    def ddr_bytes(self) -> int:
        """Bytes that cross DDR."""
        return sum(nbytes for pair, nbytes in self.transfers.items() if "ddr" in pair)

    @property
    def bound(self) -> str:
        """Name of the resource that takes longest: core, am, gsm or ddr."""
        seconds = {"core": self.core_seconds, "am": self.am_seconds, "gsm": self.gsm_seconds, "ddr": self.ddr_seconds}
        return max(seconds, key=seconds.__getitem__)


def tile_time(schedule: TileSchedule, cluster: Cluster) -> TileTime:
    """Return time and traffic of a schedule."""
    walk = _Walk(schedule, cluster)
    walk.run(schedule.body, dict(schedule.ranges), np.ones(cluster.cores))
    walk.close()
    fill, drain = _fill_seconds(schedule, cluster), _drain_seconds(schedule, cluster)
    seconds = walk.closed
    total = seconds.total + fill + drain
    return TileTime(total, seconds.core, seconds.am, seconds.gsm, seconds.ddr, walk.transfers)


@define
class _Seconds:
    """Seconds of closed sections."""

    total: float = 0.0
    core: float = 0.0
    am: float = 0.0
    gsm: float = 0.0
    ddr: float = 0.0

    def scaled(self, times: float) -> _Seconds:
        return _Seconds(*(times * value for value in (self.total, self.core, self.am, self.gsm, self.ddr)))

    def plus(self, other: _Seconds) -> _Seconds:
        return _Seconds(
            self.total + other.total,
            self.core + other.core,
            self.am + other.am,
            self.gsm + other.gsm,
            self.ddr + other.ddr,
        )


@define(eq=False)
class _Section:
    """Work between two synchronisations: cycles of each core and its AM, bytes of the shared memories."""

    core: PerCore
    am: PerCore
    gsm: float = 0.0
    ddr: float = 0.0
    computes: bool = False


@define(eq=False)
class _Walk:
    """Sum over a loop nest; loops whose iterations are alike are walked once."""

    schedule: TileSchedule
    cluster: Cluster
    closed: _Seconds = field(factory=_Seconds)
    open: _Section = field(init=False)
    transfers: dict[tuple[str, str], int] = field(factory=dict)
    buffers: dict[str, OnChipBuffer] = field(init=False)
    synchronising: dict[int, bool] = field(factory=dict)
    repeats: float = 1.0
    """how often the closed sections of the loop being walked occur in all"""

    def __attrs_post_init__(self) -> None:
        self.buffers = {buffer.name: buffer for buffer in self.schedule.buffers}
        self.open = self.section()

    def section(self) -> _Section:
        return _Section(np.zeros(self.cluster.cores), np.zeros(self.cluster.cores))

    def close(self) -> None:
        """End the open section: add the time of its slowest resource to the closed sections."""
        part, cluster = self.open, self.cluster
        core, am = float(part.core.max()) / cluster.clock, float(part.am.max()) / cluster.clock
        gsm, ddr = part.gsm / cluster.gsm_bandwidth, part.ddr / cluster.ddr_bandwidth
        self.closed = self.closed.plus(_Seconds(max(core, am, gsm, ddr), core, am, gsm, ddr))
        self.open = self.section()

    def synchronises(self, statement: Statement) -> bool:
        """Return whether there is a barrier inside."""
        if not isinstance(statement, Loop):
            return False
        if id(statement) not in self.synchronising:
            self.synchronising[id(statement)] = any(isinstance(s, Barrier) for s in statements(statement.body))
        return self.synchronising[id(statement)]

    def run(self, body: tuple[Statement, ...], spans: _Spans, times: PerCore) -> None:
        """Add the work of a body; `times` is how often it runs within the open section, by core."""
        parted = any(self.synchronises(statement) for statement in body)
        for statement in body:
            # A loop with or next to a barrier is a section of its own. Without computation a section stays open: its
            # transfers belong to what follows.
            if parted and isinstance(statement, Loop) and self.open.computes:
                self.close()
            match statement:
                case Loop():
                    self.loop(statement, spans, times)
                case Barrier():
                    if self.open.computes:
                        self.close()
                case TileLoad(name, source):
                    self.transfer(self.buffers[name], source, spans, times, is_load=True)
                    self.expose(statement, spans, times)
                case TileStore(name, target):
                    self.transfer(self.buffers[name], target, spans, times, is_load=False)
                case Compute():
                    self.compute(statement, spans, times)
                case Wait():
                    pass  # counted with its transfer

    def loop(self, loop: Loop, spans: _Spans, times: PerCore) -> None:
        start, stop = self.seen(loop, spans)
        if loop.cores > 1:
            self.dealt(loop, spans, times, start, stop)
        # Pieces that the mask does not cut are alike, so one stands for all; those on the diagonal or the window's edge
        # are walked one by one.
        elif self.differs(loop):
            lows = [start + turn * loop.tile for turn in range(_turns(start, stop, loop.tile))]
            alike = [low for low in lows if self.is_all_seen(loop, spans, low, low + loop.tile)]
            if alike:
                self.repeated(loop, spans, times, len(alike), alike[0], alike[0] + loop.tile)
            for low in lows:
                if not self.is_all_seen(loop, spans, low, low + loop.tile):
                    self.piece(loop, spans, times, low, np.minimum(low + loop.tile, stop))
        else:
            length = np.maximum(stop - start, 0)
            whole, rest = length // loop.tile, length % loop.tile
            end = start + whole * loop.tile
            self.repeated(loop, spans, times, whole, start, start + np.where(whole > 0, loop.tile, 0))
            if np.any(rest):
                self.piece(loop, spans, times, end, end + rest)

    def differs(self, loop: Loop) -> bool:
        """Return whether iterations differ by more than their length, because the mask reaches loops inside."""
        inner = (s for s in statements(loop.body) if isinstance(s, Loop) and s.sees)
        return any(loop.dim in (s.sees, s.dim) for s in inner)

    def is_all_seen(self, loop: Loop, spans: _Spans, low: Any, high: Any) -> bool:
        """Return whether the mask lets all of a piece meet all of the range of the dimension that `sees` names.

        Such pieces are alike.
        """
        if not loop.sees:
            return False
        first, last = spans[loop.sees]
        window = self.schedule.window
        keys, queries = ((low, high), (first, last)) if loop.sees == "q" else ((first, last), (low, high))
        seen = np.all(keys[1] <= queries[0] + 1) and np.all(queries[1] <= self.schedule.extent("q"))
        return bool(seen and (window is None or np.all(keys[0] > queries[1] - 1 - window)))

    def piece(self, loop: Loop, spans: _Spans, times: PerCore, low: Any, high: Any) -> None:
        high = np.maximum(low, high)
        if np.any(high > low):
            active = times * (high > low)
            self.run(loop.body, {**spans, loop.dim: (low, high)}, active)

    def repeated(self, loop: Loop, spans: _Spans, times: PerCore, count: Any, low: Any, high: Any) -> None:
        """Add `count` iterations of equal length."""
        if not np.any(count):
            return
        if not self.synchronises(loop):
            self.piece(loop, spans, times * count, low, high)
            return
        number = int(np.max(count))  # loops around barriers are the same on all cores
        # Sections of one iteration are added up apart, then multiplied. Traffic is counted at once, hence `repeats`.
        outer, outer_repeats = self.closed, self.repeats
        self.closed, self.repeats = _Seconds(), outer_repeats * number
        self.piece(loop, spans, times, low, high)
        self.close()
        self.closed, self.repeats = outer.plus(self.closed.scaled(number)), outer_repeats

    def dealt(self, loop: Loop, spans: _Spans, times: PerCore, start: Any, stop: Any) -> None:
        """Add a loop whose pieces are dealt out to cores, in one order and then in reverse."""
        player = np.arange(self.cluster.cores) // loop.stride % loop.cores
        for turn in range(-(-_turns(start, stop, loop.tile) // loop.cores)):
            # Under a causal mask pieces grow along the loop. Turning round after each deal evens out the cores' sums: 0
            # 1 2 3 | 3 2 1 0 | 0 1 ...
            place = player if turn % 2 == 0 else loop.cores - 1 - player
            low = np.minimum(start + (turn * loop.cores + place) * loop.tile, stop)
            self.piece(loop, spans, times, low, np.minimum(low + loop.tile, stop))

    def seen(self, loop: Loop, spans: _Spans) -> tuple[Any, Any]:
        """Return the part of a range that a loop visits: from a whole piece on, as far as the mask lets it see."""
        start, stop = spans[loop.dim]
        if not loop.sees:
            return np.asarray(start), np.asarray(stop)
        first, last = spans[loop.sees]
        window = self.schedule.window
        if loop.sees == "q":
            low, high = (0 if window is None else first - window + 1), last
        else:
            low, high = first, (stop if window is None else last - 1 + window)
        low = np.maximum(start, low)
        return low - (low - start) % loop.tile, np.minimum(stop, high)

    def sizes(self, axes: Axes, spans: _Spans) -> Any:
        """Return the elements of a buffer's current tile, by core."""
        return prod(np.asarray(spans[dim][1] - spans[dim][0]) for axis in axes for dim in axis)

    def transfer(self, buffer: OnChipBuffer, other: str, spans: _Spans, times: PerCore, *, is_load: bool) -> None:
        nbytes = times * self.sizes(buffer.axes, spans) * buffer.dtype.itemsize
        calls = times
        if buffer.memory is OnChipMemory.GSM:  # core 0 moves it for all
            nbytes, calls = nbytes[:1], np.concatenate([times[:1], np.zeros(len(times) - 1)])
        near = buffer.memory.value
        far = self.buffers[other].memory.value if other in self.buffers else "ddr"
        pair = (far, near) if is_load else (near, far)
        total = float(nbytes.sum())
        self.transfers[pair] = self.transfers.get(pair, 0) + round(total * self.repeats)
        self.open.core = self.open.core + calls * self.cluster.dma_start
        if "ddr" in pair:
            self.open.ddr += total
        if "gsm" in pair:
            self.open.gsm += total

    def expose(self, load: TileLoad, spans: _Spans, times: PerCore) -> None:
        """Add the time a core waits for transfers that nothing hides.

        These are loads that are not issued ahead, and the first load from a GSM buffer that has just been filled.
        """
        cluster = self.cluster
        if load.ahead == 0:
            buffer = self.buffers[load.buffer]
            # All cores wait at the same time, so each has its share of the bandwidth.
            nbytes = self.sizes(buffer.axes, spans) * buffer.dtype.itemsize
            rate = cluster.gsm_bandwidth if load.source in self.buffers else cluster.ddr_bandwidth
            self.open.core = self.open.core + times * nbytes * cluster.cores / rate * cluster.clock
        for other in statements(self.schedule.body):
            if isinstance(other, TileLoad) and other.source == load.buffer and other.ahead:
                buffer = self.buffers[other.buffer]
                nbytes = prod(buffer.shape) * buffer.dtype.itemsize
                self.open.core = self.open.core + times * nbytes * cluster.cores / cluster.gsm_bandwidth * cluster.clock

    def compute(self, compute: Compute, spans: _Spans, times: PerCore) -> None:
        self.open.computes = True
        if compute.kernel in PRODUCTS:
            core, am = self.product(compute, spans)
        else:
            core, am = self.elementwise(compute, spans)
        self.open.core = self.open.core + times * core
        self.open.am = self.open.am + times * am / self.cluster.am_load

    def product(self, compute: Compute, spans: _Spans) -> tuple[Any, Any]:
        """Return the cycles, and the bytes that cross the vector units, of a product of scalars with vectors."""
        out, scalars, vectors = (self.buffers[name] for name in (*compute.writes, *compute.reads))
        height, width = (spans[axis[-1]][1] - spans[axis[-1]][0] for axis in out.axes)
        (inner,) = {axis[-1] for axis in scalars.axes} - {out.axes[0][-1]}
        depth = spans[inner][1] - spans[inner][0]
        dtype = max(scalars.dtype, vectors.dtype, key=lambda item: item.itemsize)
        rows, columns = compute.micro
        row_tiles = -(-np.asarray(height) // rows)
        registers = -(-np.asarray(width) // lanes(dtype))
        calls = row_tiles * -(-registers // columns)
        half_sums = compute.kernel == ADD_RUN
        start = self.cluster.micro_kernel_start + (run_end_cycles(compute.micro) if half_sums else 0)
        step = step_cycles(compute.micro) * self.cluster.sum_factor(dtype, half_sums=half_sums)
        cycles = calls * (depth * step + start * (depth > 0))
        # For every row of register tiles all vectors are loaded again; the sums are loaded and stored once.
        nbytes = row_tiles * depth * width * vectors.dtype.itemsize + 2 * height * width * out.dtype.itemsize
        return cycles, nbytes

    def elementwise(self, compute: Compute, spans: _Spans) -> tuple[Any, Any]:
        """Return the cycles, and the bytes of AM, of any other micro-kernel."""
        named = [self.buffers[name] for name in (*compute.writes, *compute.reads)]
        nbytes = sum(self.sizes(buffer.axes, spans) * buffer.dtype.itemsize for buffer in named)
        largest = max((self.sizes(buffer.axes, spans) for buffer in named), key=np.max)
        if compute.kernel == "transpose":
            return largest / self.cluster.transpose_rate, nbytes
        # Operations are on float32, on 32 lanes of each of the three units.
        operations = largest * _VECTOR_OPERATIONS[compute.kernel]
        if compute.kernel in _EXPONENTIALS:
            score = self.sizes(self.buffers[compute.reads[0]].axes, spans)
            operations = operations + score * self.cluster.exp_operations
        cycles = operations / (MULTIPLY_ADD_UNITS * LANE_BYTES // Dtype.F32.itemsize)
        if compute.kernel.endswith("_turned"):
            cycles = cycles + largest / self.cluster.transpose_rate
        return cycles, nbytes


def _turns(start: Any, stop: Any, tile: int) -> int:
    """Return the number of pieces of the core that has most."""
    return int(np.max(-(-np.maximum(stop - start, 0) // tile), initial=0))


def _fill_seconds(schedule: TileSchedule, cluster: Cluster) -> float:
    """Return the seconds until the first product can start: one tile of each buffer loaded from DDR before it."""
    buffers = {buffer.name: buffer for buffer in schedule.buffers}
    nbytes = 0.0
    for statement in statements(schedule.body):
        if isinstance(statement, Compute) and statement.kernel in PRODUCTS:
            break
        if isinstance(statement, TileLoad) and statement.source not in buffers and statement.ahead:
            nbytes += _first_bytes(schedule, buffers[statement.buffer], cluster)
    return nbytes / cluster.ddr_bandwidth


def _drain_seconds(schedule: TileSchedule, cluster: Cluster) -> float:
    """Return the seconds after the last micro-kernel: one tile of the last buffer that is stored."""
    buffers = {buffer.name: buffer for buffer in schedule.buffers}
    last = [s for s in statements(schedule.body) if isinstance(s, TileStore)][-1]
    return _first_bytes(schedule, buffers[last.buffer], cluster) / cluster.ddr_bandwidth


def _first_bytes(schedule: TileSchedule, buffer: OnChipBuffer, cluster: Cluster) -> float:
    """Return the bytes of a full tile, on all cores where each has its own, and not more than the operand has."""
    shape = [
        min(extent, prod(schedule.extent(dim) for dim in axis))
        for extent, axis in zip(buffer.shape, buffer.axes, strict=True)
    ]
    return prod(shape) * buffer.dtype.itemsize * (1 if buffer.memory is OnChipMemory.GSM else cluster.cores)
