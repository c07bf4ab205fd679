"""The inner loop of `ratrain.ratrain_ir.analysis.dependence`: compiled for many ops, plain Python for few.

Ops are numbered by their place in the list, and both copies of the step are swept; tensors and lives are numbered as
they come; all memories lie behind one another in one space of addresses.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from attrs import astuple, frozen

from ratrain.ratrain_ir.support.loops import Allowance, part
from ratrain.ratrain_ir.support.native_loops import native

NONE = -1
_ACCESSES = 100_000
"""Half a second of plain Python: less than it takes to compile the loop where it is not kept."""
ALLOWANCE = Allowance(_ACCESSES)


@frozen
class SweptOps:
    """The ops of a stage as numbers."""

    engines: list[int]
    """of each op; `NONE` of a release, which is no work"""
    blocks: list[int]
    """whether it is a collective that blocks the compute engine"""
    bounds: list[int]
    """of each op four ends, in `tensors`: of what it reads, updates, writes and works in"""
    tensors: list[int]
    starts: list[int]
    """of each tensor its first byte; `NONE` where it has no address"""
    stops: list[int]
    posts: list[int]
    """of each op the number of what it sends away to be taken back; `NONE` of most"""
    awaits: list[int]
    """of each op the number of what it takes back, once it was sent; `NONE` of most"""


def reduced_waits(ops: SweptOps, engines: int, compute: int, collective: int) -> tuple[list[int], list[int]]:
    """Find what each op of the step that follows another waits for, transitively reduced.

    Returns of each op how many waits it has; and the waits, op by op, the latest first, as positions in two copies of
    the list.
    """
    count, tensors = len(ops.engines), len(ops.starts)
    lives = tensors + 2 * len(ops.tensors)
    segments = 2 * tensors + 3
    as_lists = ALLOWANCE.take(2 * len(ops.tensors))

    def made(size: int, value: int) -> Any:
        return [value] * size if as_lists else np.full(size, value, np.int64)

    rows = Rows(*(each if as_lists else np.array(each, np.int64) for each in astuple(ops, recurse=False)))
    held = Lives(made(lives, NONE), made(lives * engines, NONE), made(tensors, NONE))
    taken = Segments(made(segments, 0), made(segments, 0), made(segments, 0), made(2, 0))
    clocks = Clocks(*(made(size, NONE) for size in (engines, engines, engines, 2 * count * engines)))
    sent, kept, waits = made(count, NONE), made(count, 0), made(count * engines, 0)
    loop = sweep if as_lists else _compiled()
    total = loop(rows, (engines, compute, collective), held, taken, clocks, sent, kept, waits)
    return (kept, waits[:total]) if as_lists else (kept.tolist(), waits[:total].tolist())


class Rows(NamedTuple):
    """The ops of a stage, as in `SweptOps`, in lists or arrays."""

    engines: Any
    blocks: Any
    bounds: Any
    tensors: Any
    starts: Any
    stops: Any
    posts: Any
    awaits: Any


class Lives(NamedTuple):
    """Lives of tensors, numbered as they begin."""

    writers: Any
    """of each its last writer"""
    accesses: Any
    """by life and engine the last access since, the writer's included"""
    of_tensors: Any
    """by tensor the life that it has"""


class Segments(NamedTuple):
    """Disjoint segments of bytes in order of address, and the life that last held each."""

    starts: Any
    stops: Any
    lives: Any
    counts: Any
    """how many segments there are, and how many lives"""


class Clocks(NamedTuple):
    """Positions by engine: vector clocks."""

    needs: Any
    """what the op needs"""
    known: Any
    """what is known to be complete without asking"""
    last: Any
    """the last op so far"""
    at: Any
    """by position: what is known to be complete when the op there is"""


@cache
def _compiled() -> Any:
    return native(sweep)


def sweep(
    ops: Rows, of_engines: tuple[int, int, int], lives: Lives, segments: Segments, clocks: Clocks, sent: Any, kept: Any,
    waits: Any,
) -> int:  # fmt: skip
    """Fill `kept` and `waits` of each op; return the number of waits.

    `of_engines`: how many there are, the one that computes, the one of collectives. `sent`: by number the place where
    what is awaited was last sent away.
    """
    engines, compute, collective = of_engines
    count = len(ops.engines)
    computed = blocking = NONE
    total = 0
    needs, known = clocks.needs, clocks.known
    for position in range(2 * count):
        op = position % count
        engine = ops.engines[op]
        if engine == NONE:
            continue
        for other in range(engines):
            needs[other] = NONE
            known[other] = NONE if clocks.last[engine] == NONE else clocks.at[clocks.last[engine] * engines + other]
        _access(op, position, engine, engines, ops, lives, segments, needs)
        if ops.awaits[op] != NONE and sent[ops.awaits[op]] != NONE:
            sender = ops.engines[sent[ops.awaits[op]] % count]
            needs[sender] = max(needs[sender], sent[ops.awaits[op]])
        if ops.posts[op] != NONE:
            sent[ops.posts[op]] = position
        if engine == compute:
            needs[collective] = max(needs[collective], blocking)
            computed = position
        elif engine == collective and ops.blocks[op]:
            needs[compute] = max(needs[compute], computed)
            blocking = position
        while True:  # the latest need that nothing known implies
            latest, of_engine = NONE, NONE
            for other in range(engines):
                if other != engine and needs[other] > known[other] and needs[other] > latest:
                    latest, of_engine = needs[other], other
            if of_engine == NONE:
                break
            for other in range(engines):
                known[other] = max(known[other], clocks.at[latest * engines + other])
            if position >= count:
                waits[total] = latest
                total += 1
                kept[op] += 1
        known[engine] = position
        for other in range(engines):
            clocks.at[position * engines + other] = known[other]
        clocks.last[engine] = position
    return total


@part
def _access(
    op: int, position: int, engine: int, engines: int, ops: Any, lives: Any, segments: Any, needs: Any
) -> None:  # fmt: skip
    """Note the accesses of an op to its tensors, and what these need: by engine the last position."""
    count = len(ops.engines)
    first = 0 if op == 0 else ops.bounds[4 * op - 1]
    reads, updates, end = ops.bounds[4 * op], ops.bounds[4 * op + 1], ops.bounds[4 * op + 3]
    for place in range(first, end):
        tensor = ops.tensors[place]
        life = lives.of_tensors[tensor]
        if life != NONE and place >= reads:  # who changes what is there waits for all who used it
            for other in range(engines):
                needs[other] = max(needs[other], lives.accesses[life * engines + other])
        if life == NONE or place >= updates:  # a new life, which waits for all who used its bytes before
            life = lives.of_tensors[tensor] = segments.counts[1]
            segments.counts[1] += 1
            if ops.starts[tensor] != NONE:
                _take(ops.starts[tensor], ops.stops[tensor], life, engines, lives, segments, needs)
        if place >= reads:  # it waited for every access before it, so it stands for them all
            lives.writers[life] = position
            for other in range(engines):
                lives.accesses[life * engines + other] = NONE
        elif lives.writers[life] != NONE:
            writer = ops.engines[lives.writers[life] % count]
            needs[writer] = max(needs[writer], lives.writers[life])
        lives.accesses[life * engines + engine] = position


@part
def _take(start: int, stop: int, life: int, engines: int, lives: Any, segments: Any, needs: Any) -> None:
    """Give bytes to a life that begins, and need all accesses of the lives that had some of them."""
    starts, stops, of_lives, count = segments.starts, segments.stops, segments.lives, segments.counts[0]
    low, beyond = 0, count
    while low < beyond:
        middle = (low + beyond) // 2
        if stops[middle] <= start:
            low = middle + 1
        else:
            beyond = middle
    high = low
    while high < count and starts[high] < stop:
        high += 1
    for former in range(low, high):
        for other in range(engines):
            needs[other] = max(needs[other], lives.accesses[of_lives[former] * engines + other])
    # what is left of the segments at both ends stays with the lives they have
    keeps_head = low < high and starts[low] < start
    keeps_tail = low < high and stops[high - 1] > stop
    tail_stop, tail_life = stops[high - 1], of_lives[high - 1]
    grown = 1 + keeps_head + keeps_tail - (high - low)
    if grown > 0:
        for index in range(count - 1, high - 1, -1):
            starts[index + grown], stops[index + grown] = starts[index], stops[index]
            of_lives[index + grown] = of_lives[index]
    elif grown < 0:
        for index in range(high, count):
            starts[index + grown], stops[index + grown] = starts[index], stops[index]
            of_lives[index + grown] = of_lives[index]
    segments.counts[0] = count + grown
    at = low
    if keeps_head:
        stops[at] = start
        at += 1
    starts[at], stops[at], of_lives[at] = start, stop, life
    if keeps_tail:
        at += 1
        starts[at], stops[at], of_lives[at] = stop, tail_stop, tail_life
