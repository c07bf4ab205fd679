"""A tile schedule as the program of one core: transfers, waits, barriers and micro-kernels in the order of issue.

A load is issued ahead of the visit that needs it:

    nest (ahead = 1):   load 0, use 0, load 1, use 1, load 2, use 2
    core's program:     issue 0, issue 1, use 0 | issue 2, use 1 | use 2

The cost is linear in the visits of the nest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from attrs import define, field, frozen

from ratrain.targets.mt3000.tiles.tile_schedule import (
    Barrier,
    Claim,
    Compute,
    Loop,
    OnChipBuffer,
    OnChipMemory,
    Ranges,
    Statement,
    TileLoad,
    TileSchedule,
    TileStore,
    Wait,
    elements,
    statements,
)


@frozen
class Transfer:
    """Issue of a DMA transfer into (`is_load`) or out of copy `copy` of a buffer."""

    buffer: OnChipBuffer
    copy: int
    number: int
    """number of the load, or claim, of the buffer, from 0"""
    other: str
    """operand or buffer at the far end"""
    other_copy: int
    """its copy; 0 for an operand"""
    other_number: int
    ranges: Ranges
    is_load: bool

    @property
    def nbytes(self) -> int:
        """Bytes it moves."""
        return elements(self.buffer.axes, self.ranges) * self.buffer.dtype.itemsize

    @property
    def channel(self) -> int:
        """The DMA channel."""
        return self.buffer.channel + self.copy


@frozen
class Await:
    """Wait of the core for the channel of a copy."""

    buffer: OnChipBuffer
    copy: int

    @property
    def channel(self) -> int:
        """The DMA channel."""
        return self.buffer.channel + self.copy


@frozen
class Run:
    """Run of a micro-kernel on these copies of its buffers."""

    compute: Compute
    copies: dict[str, int]
    ranges: Ranges


Event: TypeAlias = Transfer | Await | Barrier | Run
Piece: TypeAlias = tuple[int, int]
_Visit: TypeAlias = tuple[Statement, Ranges]


def seen(schedule: TileSchedule, loop: Loop, ranges: Ranges) -> Piece:
    """Return the part of a loop's range that it visits: from the start of a tile on, as far as the mask lets it see."""
    start, stop = ranges[loop.dim]
    if not loop.sees:
        return start, stop
    first, last = ranges[loop.sees]
    if loop.sees == "q":  # keys that queries see
        low = 0 if schedule.window is None else first - schedule.window + 1
        high = last
    else:  # queries that see keys
        low = first
        high = stop if schedule.window is None else last - 1 + schedule.window
    low = max(start, low)
    # Down to a whole tile from the start of the range, so that all cores and queries cut the range at the same places.
    return low - (low - start) % loop.tile, min(stop, high)


def pieces(
    schedule: TileSchedule, loop: Loop, ranges: Ranges, core: int, period: int = 0, *, differ: bool = False
) -> Iterator[Piece]:
    """Yield the pieces a core visits, as (first, exclusive end).

    With a `period`, visits only enough of them to show every state of copies that are used in turn: a multiple of
    `period` is left out before the last piece, or, where pieces `differ` in the number of pieces of loops inside, in
    the middle.
    """
    start, stop = seen(schedule, loop, ranges)
    count = max(0, -(-(stop - start) // loop.tile))
    numbers = range(count) if loop.cores == 1 else _dealt(count, loop, core)
    if period:
        # Pieces at both ends stay: the first ones fill the copies, and under a mask the last ones are shorter. What is
        # left out is a multiple of `period`, so the piece behind the gap finds the copies in the state it expects.
        tail = period + 1 if differ else 1
        left_out = max(0, len(numbers) - tail - period - 1) // period * period
        numbers = [*numbers[: len(numbers) - tail - left_out], *numbers[len(numbers) - tail :]] if left_out else numbers
    for number in numbers:
        low = start + number * loop.tile
        yield low, min(low + loop.tile, stop)


def _dealt(count: int, loop: Loop, core: int) -> list[int]:
    """Return the numbers of a core's pieces, dealt out in one order and then in reverse."""
    player = core // loop.stride % loop.cores
    turns = range(-(-count // loop.cores))
    numbers = [turn * loop.cores + (player if turn % 2 == 0 else loop.cores - 1 - player) for turn in turns]
    return [number for number in numbers if number < count]


def core_events(schedule: TileSchedule, core: int, period: int = 0) -> Iterator[Event]:
    """Yield the events of a core, in order; `period` as in `pieces`."""
    return _Core(schedule, core, period).events()


@define(eq=False)
class _Core:
    """Walk over a nest for one core, done twice: to see the pieces each load needs, then to issue them early."""

    schedule: TileSchedule
    core: int
    period: int
    buffers: dict[str, OnChipBuffer] = field(init=False)
    counts: dict[str, int] = field(factory=dict)
    """by buffer, how many loads or claims of it were visited"""
    needed: dict[str, list[tuple[int, Ranges]]] = field(factory=dict)
    """by loaded buffer, all visits of its load: the number of its source's load that they read, and the ranges"""
    cut_inside: dict[int, bool] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.buffers = {buffer.name: buffer for buffer in self.schedule.buffers}

    def visits(self) -> list[_Visit]:
        visits: list[_Visit] = []
        self.visit(self.schedule.body, self.schedule.ranges, visits)
        return visits

    def visit(self, body: tuple[Statement, ...], ranges: Ranges, visits: list[_Visit]) -> None:
        for statement in body:
            if isinstance(statement, Loop):
                differ = self.decides_inner_counts(statement)
                for piece in pieces(self.schedule, statement, ranges, self.core, self.period, differ=differ):
                    self.visit(statement.body, {**ranges, statement.dim: piece}, visits)
            else:
                visits.append((statement, ranges))

    def decides_inner_counts(self, loop: Loop) -> bool:
        """Return whether loops inside visit more or fewer pieces as this one goes on."""
        if id(loop) not in self.cut_inside:
            inner = (s for s in statements(loop.body) if isinstance(s, Loop) and s.sees)
            self.cut_inside[id(loop)] = any(loop.dim in (s.sees, s.dim) for s in inner)
        return self.cut_inside[id(loop)]

    def events(self) -> Iterator[Event]:
        visits = self.visits()
        loads = dict.fromkeys(self.buffers, 0)
        for statement, ranges in visits:
            if isinstance(statement, TileLoad):
                loads[statement.buffer] += 1
                # The number of times the source has been loaded before this visit; 0 for an operand, which is always
                # there.
                scope = loads.get(statement.source, 0)
                self.needed.setdefault(statement.buffer, []).append((scope, ranges))
        for statement, ranges in visits:
            match statement:
                case TileLoad():
                    yield from self.load(statement)
                case TileStore(name, target):
                    buffer = self.buffers[name]
                    yield Transfer(buffer, self.copy(name), self.number(name), target, 0, 0, ranges, is_load=False)
                case Claim(name):
                    self.counts[name] = self.counts.get(name, 0) + 1
                case Wait(name):
                    if self.acts(self.buffers[name]):
                        yield Await(self.buffers[name], self.copy(name))
                case Barrier():
                    yield statement
                case Compute():
                    names = (*statement.writes, *statement.reads)
                    yield Run(statement, {name: self.copy(name) for name in names}, ranges)

    def load(self, statement: TileLoad) -> Iterator[Event]:
        """Yield the transfers of a visit of a load; it looks ahead as far as its source's contents reach."""
        name, buffer = statement.buffer, self.buffers[statement.buffer]
        position = self.counts.get(name, 0)
        self.counts[name] = position + 1
        if not self.acts(buffer):
            return
        visits = self.needed[name]
        # A scope is one filling of the source. Its first visit issues `ahead` + 1 transfers, each later visit one, and
        # none goes beyond the scope: the next filling has not arrived.
        scope = visits[position][0]
        starts = position == 0 or visits[position - 1][0] != scope
        source = self.copy(statement.source), self.number(statement.source)
        for number in range(position + (0 if starts else statement.ahead), position + statement.ahead + 1):
            if number < len(visits) and visits[number][0] == scope:
                ranges = visits[number][1]
                yield Transfer(buffer, number % buffer.copies, number, statement.source, *source, ranges, is_load=True)

    def acts(self, buffer: OnChipBuffer) -> bool:
        """Return whether this core issues and awaits the transfers of a buffer: core 0 does so for shared buffers."""
        return buffer.memory is not OnChipMemory.GSM or self.core == 0

    def number(self, name: str) -> int:
        """Return the number of a buffer's current load or claim; 0 for an operand."""
        return max(0, self.counts.get(name, 0) - 1)

    def copy(self, name: str) -> int:
        """Return the current copy of a buffer; 0 for an operand."""
        return self.number(name) % self.buffers[name].copies if name in self.buffers else 0
