"""Hazards of a tile schedule, followed core by core: no buffer is overfilled, or overwritten while it is read.

A transfer may take any time between its issue and the wait for it. So a copy counts as in use for that whole span, and
a GSM buffer, which other cores read, is judged by the barriers in between:

    core 0:   issue load of GSM | wait | barrier 1 |               | barrier 2 | issue load of the same copy
    core 5:                            |           | issue, wait   |           |

A read must lie between an arrival and the next issue with a barrier on each side. The cost is linear in the events of
the cores that are followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm, prod

from attrs import define, field

from ratrain.targets.mt3000.tiles.core_program import Await, Run, Transfer, core_events
from ratrain.targets.mt3000.tiles.micro_kernels import arguments_of
from ratrain.targets.mt3000.tiles.tile_schedule import (
    Axes,
    Barrier,
    Loop,
    OnChipBuffer,
    OnChipMemory,
    Ranges,
    Statement,
    TileSchedule,
    UnsoundTilesError,
    flat,
    is_contiguous,
    statements,
)

_MOST_EVENTS = 1_000_000
"""Most events of one core: a longer schedule cannot be followed in reasonable time."""
_UNFINISHED = 1 << 60
"""Phase in which a transfer ends that was never waited for: after every barrier."""


@define(eq=False)
class _Copy:
    """One copy of a buffer as a core sees it."""

    held: Ranges | None = None
    arriving: Ranges | None = None
    leaving: int = 0
    """transfers out of it that were not waited for"""


@define
class _Filling:
    """One load of a GSM buffer: its ranges, and the barriers between which it came and was read."""

    ranges: Ranges
    issued: int
    arrived: int | None = None
    last_read: int = -1


_Fillings = dict[tuple[str, int], _Filling]


def check_hazards(schedule: TileSchedule) -> None:
    """Raise `UnsoundTilesError` unless every tile fits, arrives before it is used and stays until it was used."""
    # After lcm(copies) iterations all buffers are at the same copies again: leaving out a multiple changes no state.
    period = lcm(*(buffer.copies for buffer in schedule.buffers))
    fillings: _Fillings = {}
    barriers = None
    for core in _representatives(schedule):
        followed = _Follower(schedule, core, fillings)
        for number, event in enumerate(core_events(schedule, core, period)):
            followed.event(event)
            if number > _MOST_EVENTS:
                raise UnsoundTilesError("it is too long to be followed")
        followed.end()
        if followed.phase != (followed.phase if barriers is None else barriers):
            raise UnsoundTilesError(f"core {core} meets {followed.phase} barriers, core 0 {barriers}")
        barriers = followed.phase
    # The next load into the same copy of a GSM buffer must be issued in a later phase than the last read.
    for (name, number), filling in fillings.items():
        copies = next(b.copies for b in schedule.buffers if b.name == name)
        later = fillings.get((name, number + copies))
        if later is not None and filling.last_read >= later.issued:
            raise UnsoundTilesError(f"'{name}' is overwritten while a core reads it")


def _representatives(schedule: TileSchedule) -> list[int]:
    """Return cores whose pieces differ in length from the pieces of all cores before; core 0 first."""
    cores: dict[tuple[object, ...], int] = {}
    for core in range(schedule.memories.cores):
        cores.setdefault(tuple(_lengths(schedule, schedule.body, dict(schedule.dims), core)), core)
    return list(cores.values())


def _lengths(
    schedule: TileSchedule, body: tuple[Statement, ...], last: dict[str, int], core: int
) -> Iterator[tuple[int, ...]]:
    """Yield for each dealt loop the length of a core's piece, or its number where lengths do not tell.

    The loops around are in their last iteration.
    """
    for loop in body:
        if not isinstance(loop, Loop):
            continue
        if loop.cores > 1:
            player = core // loop.stride % loop.cores
            masked = any(isinstance(s, Loop) and loop.dim == s.sees for s in statements(loop.body))
            rest = max(0, min(loop.tile, last[loop.dim] - player * loop.tile))
            turns = last[loop.dim] > loop.tile * loop.cores
            yield (player,) if masked or turns else (rest,)
        inner = last[loop.dim] % loop.tile or min(loop.tile, last[loop.dim])
        yield from _lengths(schedule, loop.body, {**last, loop.dim: inner if loop.cores == 1 else loop.tile}, core)


@define(eq=False)
class _Follower:
    """State of one core while its events are followed."""

    schedule: TileSchedule
    core: int
    fillings: _Fillings
    phase: int = 0
    copies: dict[tuple[str, int], _Copy] = field(factory=dict)
    coming: dict[int, Transfer] = field(factory=dict)
    """by channel, the transfer that was not waited for"""
    whole: Ranges = field(init=False)
    operands: dict[str, Axes] = field(init=False)
    buffers: dict[str, OnChipBuffer] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.whole = self.schedule.ranges
        self.operands = {operand.name: operand.axes for operand in self.schedule.operands}
        self.buffers = {buffer.name: buffer for buffer in self.schedule.buffers}

    def event(self, event: Transfer | Await | Barrier | Run) -> None:
        match event:
            case Transfer():
                self.load(event) if event.is_load else self.store(event)
            case Await():
                self.wait(event)
            case Run():
                self.run(event)
            case Barrier():
                self.phase += 1

    def end(self) -> None:
        """Let transfers that were never waited for end after the last barrier."""
        for transfer in self.coming.values():
            if transfer.other in self.buffers:
                self.fillings[transfer.other, transfer.other_number].last_read = _UNFINISHED

    def copy(self, name: str, number: int) -> _Copy:
        return self.copies.setdefault((name, number), _Copy())

    def load(self, event: Transfer) -> None:
        buffer, copy = event.buffer, self.copy(event.buffer.name, event.copy)
        self.fits(buffer, event.ranges)
        if copy.arriving is not None or copy.leaving:
            raise UnsoundTilesError(f"copy {event.copy} of '{buffer.name}' is overwritten while a transfer uses it")
        if event.other in self.buffers:
            self.read_shared(event)
        else:
            self.reaches(event, self.operands[event.other], self.whole)
        # From its issue on the transfer may write, so the old contents are gone; the new ones count from the wait.
        copy.held, copy.arriving = None, event.ranges
        self.coming[event.channel] = event
        if buffer.memory is OnChipMemory.GSM:
            self.fillings[buffer.name, event.number] = _Filling(event.ranges, self.phase)

    def read_shared(self, event: Transfer) -> None:
        """Check a transfer out of GSM: it must be issued after the barrier that follows the arrival."""
        filling = self.fillings.get((event.other, event.other_number))
        # It arrived in an earlier phase exactly if a barrier lies in between: only then do other cores know of it.
        if filling is None or filling.arrived is None or filling.arrived >= self.phase:
            raise UnsoundTilesError(f"'{event.buffer.name}' is loaded from '{event.other}' before all cores may")
        self.within(event.other, filling.ranges, event.ranges)
        self.reaches(event, self.buffers[event.other].axes, filling.ranges)

    def store(self, event: Transfer) -> None:
        copy = self.ready(event.buffer.name, event.copy, event.ranges)
        self.reaches(event, self.operands[event.other], self.whole)
        if event.channel in self.coming:
            raise UnsoundTilesError(f"channel {event.channel} of '{event.buffer.name}' is still busy")
        copy.leaving += 1
        self.coming[event.channel] = event

    def wait(self, event: Await) -> None:
        transfer = self.coming.pop(event.channel, None)
        # A wait for an idle channel ends at once.
        if transfer is None:
            return
        copy = self.copy(transfer.buffer.name, transfer.copy)
        if not transfer.is_load:
            copy.leaving -= 1
            return
        copy.held, copy.arriving = copy.arriving, None
        if transfer.buffer.memory is OnChipMemory.GSM:
            self.fillings[transfer.buffer.name, transfer.number].arrived = self.phase
        # The transfer read GSM between its issue and now; the latest phase counts.
        if transfer.other in self.buffers:
            filling = self.fillings[transfer.other, transfer.other_number]
            filling.last_read = max(filling.last_read, self.phase)

    def run(self, event: Run) -> None:
        compute = event.compute
        for argument, name in arguments_of(compute):
            number = event.copies[name]
            if argument.mode == "=":
                copy = self.copy(name, number)
                self.fits(self.buffers[name], event.ranges)
                if copy.arriving is not None or copy.leaving:
                    raise UnsoundTilesError(f"'{compute.kernel}' overwrites '{name}' while a transfer uses it")
                copy.held = event.ranges
            else:
                copy = self.ready(name, number, event.ranges)
                if argument.mode and copy.leaving:
                    raise UnsoundTilesError(f"'{compute.kernel}' changes '{name}' while a transfer reads it")

    def ready(self, name: str, number: int, ranges: Ranges) -> _Copy:
        """Return a copy after checking that it holds these ranges."""
        copy = self.copy(name, number)
        if copy.arriving is not None:
            raise UnsoundTilesError(f"'{name}' is used before it has arrived")
        if copy.held is None:
            raise UnsoundTilesError(f"'{name}' is used before anything is in it")
        self.within(name, copy.held, ranges)
        return copy

    def within(self, name: str, held: Ranges, ranges: Ranges) -> None:
        # Of all dimensions, not only the buffer's: a tile [keys, head_dim] belongs to one sequence and head.
        for dim in held:
            if not held[dim][0] <= ranges[dim][0] <= ranges[dim][1] <= held[dim][1]:
                raise UnsoundTilesError(f"'{name}' holds {dim} = {held[dim]} where {ranges[dim]} is meant")

    def fits(self, buffer: OnChipBuffer, ranges: Ranges) -> None:
        for axis, room in zip(buffer.axes, buffer.shape, strict=True):
            size = prod(ranges[dim][1] - ranges[dim][0] for dim in axis)
            if size > room:
                raise UnsoundTilesError(f"'{buffer.name}' has room for {room} along {axis}, the tile has {size}")

    def reaches(self, event: Transfer, far: Axes, held: Ranges) -> None:
        """Check that the tile is a rectangle at the far end, of the same elements."""
        near = {*flat(event.buffer.axes)}
        for axis in far:
            if not is_contiguous(axis, event.ranges, held):
                raise UnsoundTilesError(f"a tile of '{event.other}' is no rectangle: {event.ranges}")
            for dim in axis:
                if dim not in near and event.ranges[dim][1] - event.ranges[dim][0] != 1:
                    raise UnsoundTilesError(f"'{event.buffer.name}' has no dimension '{dim}' of '{event.other}'")
