"""Inner loop of `ratrain.ratrain_ir.analysis.dependence`: compiled for many ops, plain Python for few.

Ops are positions in the list; the list is swept twice, as two steps. A *life* is the time of one content of a tensor,
from the write that begins it; lives are numbered as they begin. *Segments* say which life last used each range of bytes
in the joint address space of all memories.

Vector clocks: `at[p, e]` is the last position on engine e that is surely complete when the op at p is. An op starts
from the clock of the op before it on its engine. Its needs are taken latest first, and each taken need brings its own
clock, which implies many of the others. Taking the latest first gives the fewest waits.
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
"""Accesses swept in plain Python: half a second, less than compiling the loop takes if it is not cached."""
ALLOWANCE = Allowance(_ACCESSES)


@frozen
class SweptOps:
    """Ops of a stage as numbers."""

    engines: list[int]
    """of each op; `NONE` for a release, which is no work"""
    blocks: list[int]
    """of each op, 1 for a collective that blocks the compute engine"""
    bounds: list[int]
    """four exclusive ends in `tensors` for each op: of its reads, updates, writes and scratch"""
    tensors: list[int]
    """operands of all ops, by number"""
    starts: list[int]
    """first byte of each tensor; `NONE` without an address"""
    stops: list[int]
    """exclusive end of each tensor's bytes"""
    posts: list[int]
    """of each op, the number of what it sends away for a later return; `NONE` for most"""
    awaits: list[int]
    """of each op, the number of what it takes back after it was sent; `NONE` for most"""


def reduced_waits(ops: SweptOps, engines: int, compute: int, collective: int) -> tuple[list[int], list[int]]:
    """Find what each op waits for in a step that follows another, transitively reduced.

    Returns (counts, waits): the number of waits of each op; and the waits op by op, the latest first, as positions in
    two copies of the list.
    """
    count, tensors = len(ops.engines), len(ops.starts)
    lives = tensors + 2 * len(ops.tensors)
    segments = 2 * tensors + 3
    as_lists = ALLOWANCE.take(2 * len(ops.tensors), _is_kept)

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
    """`SweptOps` in lists or arrays."""

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
    """by life, its last writer"""
    accesses: Any
    """by life and engine, the last access since that write, the writer included"""
    of_tensors: Any
    """by tensor, its current life"""


class Segments(NamedTuple):
    """Disjoint segments of bytes in order of address, each with the life that last held it."""

    starts: Any
    stops: Any
    lives: Any
    counts: Any
    """number of segments, and number of lives"""


class Clocks(NamedTuple):
    """Positions by engine: vector clocks."""

    needs: Any
    """needs of the current op"""
    known: Any
    """positions surely complete when the current op starts"""
    last: Any
    """the last op so far"""
    at: Any
    """by position and engine: the last position surely complete when the op there is"""


@cache
def _compiled() -> Any:
    return native(sweep)


@cache
def _is_kept() -> bool:
    """Tell whether the loop was compiled before, and kept on disk."""
    none = np.empty(0, np.int64)
    held, taken, clocks = Lives(none, none, none), Segments(none, none, none, none), Clocks(none, none, none, none)
    kept: bool = _compiled().is_kept(Rows(*[none] * 8), (0, 0, 0), held, taken, clocks, none, none, none)
    return kept


def sweep(
    ops: Rows, of_engines: tuple[int, int, int], lives: Lives, segments: Segments, clocks: Clocks, sent: Any, kept: Any,
    waits: Any,
) -> int:  # fmt: skip
    """Fill `kept` (waits of each op) and `waits`; return the number of waits.

    `of_engines`: the number of engines, the compute engine, the collective engine. `sent`: for each number of `posts`,
    the position that last sent it away.
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
        # Take the latest need that is not implied yet: its clock may imply earlier ones, never the other way round.
        while True:
            latest, of_engine = NONE, NONE
            for other in range(engines):
                if other != engine and needs[other] > known[other] and needs[other] > latest:
                    latest, of_engine = needs[other], other
            if of_engine == NONE:
                break
            for other in range(engines):
                known[other] = max(known[other], clocks.at[latest * engines + other])
            if position >= count:  # only the second step is reported: it sees waits on the step before
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
    """Record the accesses of an op to its tensors; raise `needs` to the last position on each engine they wait for."""
    count = len(ops.engines)
    first = 0 if op == 0 else ops.bounds[4 * op - 1]
    reads, updates, end = ops.bounds[4 * op], ops.bounds[4 * op + 1], ops.bounds[4 * op + 3]
    for place in range(first, end):
        tensor = ops.tensors[place]
        life = lives.of_tensors[tensor]
        if life != NONE and place >= reads:  # a change waits for all former accesses
            for other in range(engines):
                needs[other] = max(needs[other], lives.accesses[life * engines + other])
        if life == NONE or place >= updates:  # a new life waits for all former accesses of its bytes
            life = lives.of_tensors[tensor] = segments.counts[1]
            segments.counts[1] += 1
            if ops.starts[tensor] != NONE:
                _take(ops.starts[tensor], ops.stops[tensor], life, engines, lives, segments, needs)
        if place >= reads:  # this op has waited for every access before it, so it stands for them all
            lives.writers[life] = position
            for other in range(engines):
                lives.accesses[life * engines + other] = NONE
        elif lives.writers[life] != NONE:
            writer = ops.engines[lives.writers[life] % count]
            needs[writer] = max(needs[writer], lives.writers[life])
        lives.accesses[life * engines + engine] = position


@part
def _take(start: int, stop: int, life: int, engines: int, lives: Any, segments: Any, needs: Any) -> None:
    """Give bytes to a life that begins; add to `needs` all accesses of the lives that held some of them."""
    starts, stops, of_lives, count = segments.starts, segments.stops, segments.lives, segments.counts[0]
    low, beyond = 0, count
    while low < beyond:  # bisect: the first segment that ends behind `start`
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
    # The rests of the segments at both ends stay with their lives. Then segments low .. high - 1 are replaced by one to
    # three, and those behind move by `grown` places.
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
