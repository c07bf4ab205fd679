"""Tile schedules as text: `ratrainc disasm --tiles`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ratrain.targets.mt3000.tiles.core_program import Await, Event, Run, Transfer, core_events
from ratrain.targets.mt3000.tiles.tile_schedule import Barrier, OnChipMemory

if TYPE_CHECKING:
    from ratrain.targets.mt3000.tiles.tile_schedule import Axes, Ranges, TileSchedule


def tile_lines(schedule: TileSchedule, steps: Sequence[str], core: int, limit: int) -> Iterator[str]:
    """Yield a tile schedule: the steps that have it, its buffers, and the first `limit` events of a core."""
    memories = schedule.memories
    extents = " ".join(f"{dim}={extent}" for dim, extent in schedule.dims)
    yield f"tiles {schedule.kernel} {extents}: {memories.cores} cores; {', '.join(steps)}"
    for memory in OnChipMemory:
        buffers = [buffer for buffer in schedule.buffers if buffer.memory is memory]
        used = max((buffer.end for buffer in buffers), default=0)
        yield f"  {memory.value}: {used} of {memories.capacity(memory)} bytes"
        for buffer in buffers:
            shape = f"{buffer.dtype.value}{list(buffer.shape)}"
            yield f"    {buffer.name} : {shape} x {buffer.copies} at {buffer.offset:#x}, channel {buffer.channel}"
    if core >= memories.cores:
        yield f"  there is no core {core}"
        return
    for number, event in enumerate(core_events(schedule, core), 1):
        if number > limit:
            yield f"  ... more than {limit} events (--limit)"
            return
        yield f"  {number:6d}  {_event_text(schedule, event)}"


def _event_text(schedule: TileSchedule, event: Event) -> str:
    match event:
        case Transfer():
            axes = event.buffer.axes
            near = f"{event.buffer.memory.value} {event.buffer.name}.{event.copy}"
            memory_of = {buffer.name: buffer.memory.value for buffer in schedule.buffers}
            held = event.other in memory_of
            far = f"{memory_of[event.other]} {event.other}.{event.other_copy}" if held else f"ddr {event.other}"
            source, target = (far, near) if event.is_load else (near, far)
            tile = _tile_text(axes, event.ranges)
            return f"move {source} -> {target} [{tile}] {event.nbytes} bytes, channel {event.channel}"
        case Await():
            return f"wait channel {event.channel} ({event.buffer.name}.{event.copy})"
        case Run():
            writes, reads = (
                ", ".join(f"{name}.{event.copies[name]}" for name in names)
                for names in (event.compute.writes, event.compute.reads)
            )
            tile = _tile_text(tuple((dim,) for dim in event.ranges), event.ranges)
            return f"{event.compute.kernel} {writes}" + (f" <- {reads}" if reads else "") + f" [{tile}]"
        case Barrier():
            return "barrier of all cores"


def _tile_text(axes: Axes, ranges: Ranges) -> str:
    return ", ".join(f"{dim} {ranges[dim][0]}:{ranges[dim][1]}" for axis in axes for dim in axis)
