"""On-chip memory as numpy buffers of exactly its size, on which a tile schedule is executed with explicit copies.

Cores run one after another from barrier to barrier: GSM changes hands only at barriers, so any order gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ratrain.targets.mt3000.kernels import tiled_compute
from ratrain.targets.mt3000.tiles.core_program import Await, Event, Run, Transfer, core_events
from ratrain.targets.mt3000.tiles.micro_kernels import PRODUCTS, arguments_of
from ratrain.targets.mt3000.tiles.tile_schedule import (
    Barrier,
    Memories,
    OnChipBuffer,
    OnChipMemory,
    Ranges,
    TileSchedule,
    axis_range,
    elements,
)
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.interface import Array

PlaceOf = Callable[[Ranges, bool], tiled_compute.TilePosition]
"""Position of a micro-kernel from its ranges, and from whether scores have keys first."""


def memory_plan(memories: Memories) -> Plan:
    """Return the buffers of GSM of the cluster, AM and SM of all cores."""
    sizes = [(memories.gsm_bytes,), (memories.cores, memories.am_bytes), (memories.cores, memories.sm_bytes)]
    return [Buffer(size, np.uint8) for size in sizes]


@define(eq=False)
class TiledMemory:
    """Memories of a cluster, and the contents of their buffers."""

    schedule: TileSchedule
    operands: Mapping[str, Array]
    place_of: PlaceOf
    memories: dict[OnChipMemory, NDArray[np.uint8]]
    """bytes, [owner, capacity]"""
    late: bool = False
    """if True, transfers copy when they are waited for instead of when they are issued: both must give the same"""
    held: dict[tuple[str, int, int], Ranges] = field(factory=dict)
    """by buffer, owner and copy: the ranges of its contents"""
    pending: dict[tuple[int, int], list[Callable[[], None]]] = field(factory=dict)
    """by core and channel: transfers that have been issued but not made"""
    buffers: dict[str, OnChipBuffer] = field(init=False)
    axes: dict[str, Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.buffers = {buffer.name: buffer for buffer in self.schedule.buffers}
        self.axes = {operand.name: operand.axes for operand in self.schedule.operands}

    def run(self) -> None:
        """Execute the schedule: every core from barrier to barrier."""
        cores = [core_events(self.schedule, core) for core in range(self.schedule.memories.cores)]
        running = True
        while running:
            met = [self.run_to_barrier(core, events) for core, events in enumerate(cores)]
            running = met[0]
            assert all(barrier == running for barrier in met), "cores disagree about their barriers"
        for transfers in self.pending.values():
            for transfer in transfers:
                transfer()

    def run_to_barrier(self, core: int, events: Iterator[Event]) -> bool:
        """Execute a core up to its next barrier; return False at its end."""
        for event in events:
            match event:
                case Barrier():
                    return True
                case Transfer():
                    self.issue(core, event)
                case Await():
                    for transfer in self.pending.pop((core, event.channel), ()):
                        transfer()
                case Run():
                    self.compute(core, event)
        return False

    def issue(self, core: int, event: Transfer) -> None:
        """Make a core's transfer at once, or, if `late`, keep it until the core waits for its channel."""

        def copy() -> None:
            self.load(core, event) if event.is_load else self.store(core, event)

        if self.late:
            self.pending.setdefault((core, event.channel), []).append(copy)
        else:
            copy()

    def load(self, core: int, event: Transfer) -> None:
        """Copy into a buffer."""
        source = self.far_end(core, event)
        self.held[self.key(core, event.buffer, event.copy)] = event.ranges
        target = self.tile(core, event.buffer.name, event.copy, event.ranges)
        target[...] = source.reshape(target.shape)

    def store(self, core: int, event: Transfer) -> None:
        """Copy out of a buffer."""
        target = self.far_end(core, event)
        target[...] = self.tile(core, event.buffer.name, event.copy, event.ranges).reshape(target.shape)

    def far_end(self, core: int, event: Transfer) -> Array:
        """Return the part of an operand, or of a buffer, that a transfer reads or writes."""
        if event.other in self.buffers:
            return self.tile(core, event.other, event.other_copy, event.ranges)
        whole = self.schedule.ranges
        cut = tuple(slice(*axis_range(axis, event.ranges, whole)) for axis in self.axes[event.other])
        return self.operands[event.other][cut]

    def key(self, core: int, buffer: OnChipBuffer, copy: int) -> tuple[str, int, int]:
        """Return buffer, owner and copy; the owner of GSM buffers is 0, as all cores share them."""
        return buffer.name, 0 if buffer.memory is OnChipMemory.GSM else core, copy

    def tile(self, core: int, name: str, copy: int, ranges: Ranges) -> Array:
        """Return the part of a buffer's copy that ranges select, counted from the ranges of its contents."""
        buffer = self.buffers[name]
        owner = 0 if buffer.memory is OnChipMemory.GSM else core
        start = buffer.offset + copy * buffer.copy_bytes
        nbytes = prod(buffer.shape) * buffer.dtype.itemsize
        array = (
            self.memories[buffer.memory][owner, start : start + nbytes]
            .view(NUMPY_DTYPES[buffer.dtype])
            .reshape(buffer.shape)
        )
        held = self.held[name, owner, copy]
        tile: Array = array[tuple(slice(*axis_range(axis, ranges, held)) for axis in buffer.axes)]
        assert tile.size == elements(buffer.axes, ranges), f"'{name}' has no room for a tile"
        return tile

    def compute(self, core: int, event: Run) -> None:
        """Run a micro-kernel on its tiles."""
        compute = event.compute
        for argument, name in arguments_of(compute):
            if argument.mode == "=":
                self.held[self.key(core, self.buffers[name], event.copies[name])] = event.ranges
        tiles = [self.tile(core, name, event.copies[name], event.ranges) for name in (*compute.writes, *compute.reads)]
        if compute.kernel in PRODUCTS:
            tiles = self.factors(compute.writes[0], compute.reads, tiles)
        keys_first = any(self.buffers[name].axes[0] == ("k",) for name in compute.reads[:1])
        getattr(tiled_compute, compute.kernel)(self.place_of(event.ranges, keys_first), *tiles)

    def factors(self, out: str, reads: tuple[str, ...], tiles: list[Array]) -> list[Array]:
        """Return scalars as [row, inner] and vectors as [inner, column], however they are stored."""
        row, column = self.buffers[out].axes
        scalars, vectors = (self.buffers[name].axes for name in reads)
        return [
            tiles[0],
            tiles[1] if scalars[0] == row else tiles[1].T,
            tiles[2] if vectors[1] == column else tiles[2].T,
        ]
