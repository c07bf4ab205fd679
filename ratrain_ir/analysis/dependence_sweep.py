"""The inner loop of `ratrain.ratrain_ir.analysis.dependence`, over numbers alone: compiled for many ops, plain Python for few.

It takes lists as well as arrays. Ops are numbered by their place in the list, and both copies of the step are swept; tensors and lives are numbered
as they come; all memories lie behind one another in one space of addresses.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from attrs import frozen

from ratrain.ratrain_ir.support.loops import Allowance
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
    """of each op four ends, in `tensors`: of what it reads, of what it updates, of what it writes, of what it works in"""
    tensors: list[int]
    starts: list[int]
    """of each tensor its first byte; `NONE` where it has no address"""
    stops: list[int]
    posts: list[int]
    """of each op the number of what it sends away to be taken back; `NONE` of most"""
    awaits: list[int]
    """of each op the number of what it takes back, once it was sent; `NONE` of most"""


def reduced_waits(ops: SweptOps, engines: int, compute: int, collective: int) -> tuple[list[int], list[int]]:
    """What each op of the step that follows another waits for, transitively reduced.

    Of each op: how many waits it has; and the waits, op by op, the latest first, as positions in two copies of the list; whose engines are theirs.
    """
    count, tensors = len(ops.engines), len(ops.starts)
    lives = tensors + 2 * len(ops.tensors)
    sizes = (
        (lives, NONE),  # the last writer of each life
        (lives * engines, NONE),  # by life and engine the last access since, the writer's included
        (tensors, NONE),  # the life of each tensor
        (2 * tensors + 3, 0),  # disjoint segments of bytes in order: where each starts,
        (2 * tensors + 3, 0),  # where it stops,
        (2 * tensors + 3, 0),  # and which life last held it
        (count, NONE),  # where what is awaited was last sent away
        (engines, NONE),  # what an op needs, by engine the last position;
        (engines, NONE),  # what is known to be complete without asking;
        (engines, NONE),  # and the last op of each engine so far
        (2 * count * engines, NONE),  # what is known to be complete when an op is, by engine the last position
        (count, 0),
        (count * engines, 0),
    )
    given = (ops.engines, ops.blocks, ops.bounds, ops.tensors, ops.starts, ops.stops, ops.posts, ops.awaits)
    if ALLOWANCE.take(2 * len(ops.tensors)):
        made = [[value] * size for size, value in sizes]
        waits = sweep(*given, engines, compute, collective, *made)
        return made[-2], made[-1][:waits]
    import numpy as np

    arrays = [np.full(size, value, np.int64) for size, value in sizes]
    waits = _compiled()(*(np.array(each, np.int64) for each in given), engines, compute, collective, *arrays)
    return arrays[-2].tolist(), arrays[-1][:waits].tolist()


@cache
def _compiled() -> Any:
    return native(sweep)


def sweep(
    op_engines: Any, op_blocks: Any, bounds: Any, op_tensors: Any, starts: Any, stops: Any, posts: Any, awaits: Any,
    engines: int, compute: int, collective: int,
    writers: Any, accesses: Any, lives: Any, seg_starts: Any, seg_stops: Any, seg_lives: Any, sent: Any,
    needs: Any, known: Any, last: Any, clocks: Any, kept: Any, waits: Any,
) -> int:  # fmt: skip
    """Fill `kept` and `waits`; the number of waits."""
    count = len(op_engines)
    computed = blocking = NONE
    segments = made = total = 0
    for position in range(2 * count):
        op = position % count
        engine = op_engines[op]
        if engine == NONE:
            continue
        for other in range(engines):
            needs[other] = NONE
            known[other] = NONE if last[engine] == NONE else clocks[last[engine] * engines + other]
        first = 0 if op == 0 else bounds[4 * op - 1]
        reads, updates, end = bounds[4 * op], bounds[4 * op + 1], bounds[4 * op + 3]
        for place in range(first, end):
            tensor = op_tensors[place]
            life = lives[tensor]
            if life != NONE and place >= reads:  # who changes what is there waits for all who used it
                for other in range(engines):
                    needs[other] = max(needs[other], accesses[life * engines + other])
            if life == NONE or place >= updates:  # a new life, which waits for all who used its bytes before
                life = lives[tensor] = made
                made += 1
                if starts[tensor] != NONE:
                    start, stop = starts[tensor], stops[tensor]
                    low, beyond = 0, segments
                    while low < beyond:
                        middle = (low + beyond) // 2
                        if seg_stops[middle] <= start:
                            low = middle + 1
                        else:
                            beyond = middle
                    high = low
                    while high < segments and seg_starts[high] < stop:
                        high += 1
                    for former in range(low, high):
                        for other in range(engines):
                            needs[other] = max(needs[other], accesses[seg_lives[former] * engines + other])
                    # what is left of the segments at both ends stays with the lives they have
                    keeps_head = low < high and seg_starts[low] < start
                    keeps_tail = low < high and seg_stops[high - 1] > stop
                    tail_stop, tail_life = seg_stops[high - 1], seg_lives[high - 1]
                    grown = 1 + keeps_head + keeps_tail - (high - low)
                    if grown > 0:
                        for index in range(segments - 1, high - 1, -1):
                            seg_starts[index + grown] = seg_starts[index]
                            seg_stops[index + grown] = seg_stops[index]
                            seg_lives[index + grown] = seg_lives[index]
                    elif grown < 0:
                        for index in range(high, segments):
                            seg_starts[index + grown] = seg_starts[index]
                            seg_stops[index + grown] = seg_stops[index]
                            seg_lives[index + grown] = seg_lives[index]
                    segments += grown
                    at = low
                    if keeps_head:
                        seg_stops[at] = start
                        at += 1
                    seg_starts[at], seg_stops[at], seg_lives[at] = start, stop, life
                    if keeps_tail:
                        at += 1
                        seg_starts[at], seg_stops[at], seg_lives[at] = stop, tail_stop, tail_life
            if place >= reads:  # it waited for every access before it, so it stands for them all
                writers[life] = position
                for other in range(engines):
                    accesses[life * engines + other] = NONE
            elif writers[life] != NONE:
                writer = op_engines[writers[life] % count]
                needs[writer] = max(needs[writer], writers[life])
            accesses[life * engines + engine] = position
        if awaits[op] != NONE and sent[awaits[op]] != NONE:
            sender = op_engines[sent[awaits[op]] % count]
            needs[sender] = max(needs[sender], sent[awaits[op]])
        if posts[op] != NONE:
            sent[posts[op]] = position
        if engine == compute:
            needs[collective] = max(needs[collective], blocking)
            computed = position
        elif engine == collective and op_blocks[op]:
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
                known[other] = max(known[other], clocks[latest * engines + other])
            if position >= count:
                waits[total] = latest
                total += 1
                kept[op] += 1
        known[engine] = position
        for other in range(engines):
            clocks[position * engines + other] = known[other]
        last[engine] = position
    return total
