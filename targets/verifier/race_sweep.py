"""Inner loop of `ratrain.targets.verifier.races`, over numbers alone: compiled for many operands, else Python.

It takes lists as well as arrays. The streams run for `STEPS` steps, and an instruction is numbered within its engine
over all steps. All memories lie one after the other in one address space, which is divided into *segments*: maximal
ranges of bytes with the same history of accesses.

    write [0, 8) by A, read [4, 12) by B
    segments     [0, 4)         [4, 8)                      [8, 12)
    history      written by A   written by A, read by B     read by B

A history is the last write, and the last read on each engine since that write. It is kept in a *slot*; slots are
reused. An access splits the segments at its ends, and is compared with the history of each segment in between. A write
then joins these segments to one. So the number of segments is bounded by twice the number of tensors.

Cost: for each operand a binary search, a shift of the sorted segments where they are split or joined, and the number of
engines for each segment it covers.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.support.native_loops import native

Int64s = NDArray[np.int64]
STEPS = 2
NEVER = -1
MOST_FOUND = 4096
"""Most conflicts that are recorded; two instructions may conflict in many places."""
_OPERANDS = 100_000
"""Operands that plain Python handles in half a second: less than compiling the loop takes if it is not cached."""
ALLOWANCE = Allowance(_OPERANDS)


@frozen(eq=False)
class SweptStage:
    """The streams of a stage as numbers, engine by engine in the order of `ENGINES`."""

    lengths: list[int]
    """number of instructions of each engine"""
    operand_ends: Int64s
    """exclusive end of the operands of each instruction, in `tensors` and `reads`"""
    tensors: Int64s
    reads: Int64s
    """for each operand, 1 if it is only read, else 0"""
    wait_ends: Int64s
    """exclusive end of the waits of each instruction, counted in waits"""
    waits: Int64s
    """three numbers for each wait: engine, count, whether it means the previous step"""
    starts: Int64s
    """first byte of each tensor; `stops` has the exclusive ends"""
    stops: Int64s
    size: int
    """bytes of all memories"""


class Conflict(NamedTuple):
    """Two accesses that nothing orders, the later found one first, and bytes that both touch.

    Each access is given by its engine and its number over all steps.
    """

    engine: int
    number: int
    other_engine: int
    other_number: int
    start: int
    stop: int


class Swept(NamedTuple):
    """Result of a sweep."""

    conflicts: list[Conflict]
    done: list[int]
    """number of instructions of each engine that could run"""
    clocks: Any
    """vector clocks, flat by (engine, number, other engine); an instruction's own entry is its own number"""

    def clock(self, lengths: list[int], engine: int, number: int) -> list[int]:
        """Return an instruction's vector clock: by engine, the last number known to be complete when it has run."""
        engines = len(lengths)
        at = (STEPS * sum(lengths[:engine]) + number) * engines
        return [int(value) for value in self.clocks[at : at + engines]]


def swept(stage: SweptStage) -> Swept:
    """Run all streams of a stage as far as their waits allow, and find conflicting accesses that nothing orders."""
    engines, tensors = len(stage.lengths), len(stage.starts)
    # Each tensor has two ends, so there are never more than 2 * tensors + 1 segments, and one slot for each.
    slots = 2 * tensors + 3
    sizes = (
        (slots, 0),  # where each segment starts, in order
        (slots, 0),  # the slot of its history
        (slots, 0),  # stack of free slots
        (slots, NEVER),  # for each slot: engine of the last writer,
        (slots, NEVER),  # number of the last writer,
        (slots * engines, NEVER),  # and for each engine the number of the last reader since
        (engines, 0),  # the first instruction of each stream
        (engines, NEVER),  # clock of the current instruction
        (STEPS * sum(stage.lengths) * engines, NEVER),  # clocks
        (engines, 0),  # instructions done
        (6 * MOST_FOUND, 0),
    )
    given = (
        np.array(stage.lengths, np.int64), stage.operand_ends, stage.tensors, stage.reads, stage.wait_ends, stage.waits,
        stage.starts, stage.stops,
    )  # fmt: skip
    if ALLOWANCE.take(STEPS * len(stage.tensors), partial(_is_kept, len(given), len(sizes))):
        made: list[Any] = [[value] * size for size, value in sizes]
        listed: list[Any] = [*(each.tolist() for each in given), stage.size, *made]
        found = sweep_races(*listed)
    else:
        made = [np.full(size, value, np.int64) for size, value in sizes]
        found = _compiled()(*given, stage.size, *made)
    *_, clocks, done, conflicts = made
    numbers = [int(value) for value in conflicts[: 6 * found]]
    return Swept(
        [Conflict(*numbers[at : at + 6]) for at in range(0, len(numbers), 6)], [int(count) for count in done], clocks
    )


@cache
def _compiled() -> Any:
    return native(sweep_races)


@cache
def _is_kept(given: int, made: int) -> bool:
    """Tell whether the loop was compiled before, and kept on disk; it takes `given` and `made` arrays."""
    none = np.empty(0, np.int64)
    kept: bool = _compiled().is_kept(*[none] * given, 0, *[none] * made)
    return kept


def sweep_races(
    lengths: Any, operand_ends: Any, tensors: Any, reads: Any, wait_ends: Any, waits: Any, starts: Any, stops: Any,
    size: int,
    seg_starts: Any, seg_slots: Any, free: Any, writer_engines: Any, writers: Any, readers: Any,
    bases: Any, clock: Any, clocks: Any,
    done: Any, conflicts: Any,
) -> int:  # fmt: skip
    """Fill `clocks`, `done` and `conflicts` (six numbers each); return the number of conflicts."""
    engines = len(lengths)
    for engine in range(1, engines):
        bases[engine] = bases[engine - 1] + lengths[engine - 1]
    slots = len(seg_starts)
    for slot in range(slots):
        free[slot] = slots - 1 - slot
    frees = slots - 1  # slot 0 is in use: one segment of all bytes, without any access
    seg_starts[0] = 0
    seg_slots[0] = 0
    segments = 1
    seg_starts[1] = size
    found = 0
    running = True
    # Any order in which the waits let the instructions run gives the same clocks: an instruction runs when all that it
    # waits for has run. Engines take turns, each as far as it gets, until none gets further.
    while running:
        running = False
        for engine in range(engines):
            length = lengths[engine]
            while done[engine] < STEPS * length:
                number = done[engine]
                step = number // length
                item = bases[engine] + number % length
                row = (STEPS * bases[engine] + number) * engines
                for other in range(engines):
                    # Happens-before by the stream: everything the instruction before it knows.
                    clock[other] = NEVER if number == 0 else clocks[row - engines + other]
                met = True
                for wait in range(0 if item == 0 else wait_ends[item - 1], wait_ends[item]):
                    awaited, count, previous = waits[3 * wait], waits[3 * wait + 1], waits[3 * wait + 2]
                    # Happens-before by waits: everything that the awaited instruction knows, and that one itself.
                    if previous and step == 0:
                        continue
                    at = (step - previous) * lengths[awaited] + count - 1
                    if at >= done[awaited]:
                        met = False
                        break
                    known = (STEPS * bases[awaited] + at) * engines
                    for other in range(engines):
                        clock[other] = max(clock[other], clocks[known + other])
                if not met:
                    break
                for operand in range(0 if item == 0 else operand_ends[item - 1], operand_ends[item]):
                    start, stop = starts[tensors[operand]], stops[tensors[operand]]
                    if stop <= start:
                        continue
                    first = last = 0
                    # Split the segments so that one starts at each end of the access.
                    for end in range(2):
                        byte = start if end == 0 else stop
                        low, high = 0, segments
                        while low < high:
                            middle = (low + high) // 2
                            if seg_starts[middle] < byte:
                                low = middle + 1
                            else:
                                high = middle
                        if seg_starts[low] != byte:
                            for index in range(segments, low - 1, -1):
                                seg_starts[index + 1] = seg_starts[index]
                                seg_slots[index + 1] = seg_slots[index]
                            segments += 1
                            frees -= 1
                            slot = free[frees]
                            # The new segment begins with a copy of the history of the one that is split.
                            before = seg_slots[low - 1]
                            writer_engines[slot], writers[slot] = writer_engines[before], writers[before]
                            for other in range(engines):
                                readers[slot * engines + other] = readers[before * engines + other]
                            seg_starts[low], seg_slots[low] = byte, slot
                        if end == 0:
                            first = low
                        else:
                            last = low
                    only_reads = reads[operand]
                    for index in range(first, last):
                        slot = seg_slots[index]
                        # A read conflicts with the last writer (-1), a write also with the last reader on each engine.
                        # `of` is ordered before this instruction if its clock has reached it.
                        for which in range(-1, 0 if only_reads else engines):
                            by = writer_engines[slot] if which < 0 else which
                            of = writers[slot] if which < 0 else readers[slot * engines + which]
                            if by not in (NEVER, engine) and of > clock[by] and found < MOST_FOUND:
                                conflicts[6 * found] = engine
                                conflicts[6 * found + 1] = number
                                conflicts[6 * found + 2] = by
                                conflicts[6 * found + 3] = of
                                conflicts[6 * found + 4] = start
                                conflicts[6 * found + 5] = stop
                                found += 1
                        if only_reads:
                            readers[slot * engines + engine] = number
                    if not only_reads:  # the written segments have one history from here on: join them
                        slot = seg_slots[first]
                        writer_engines[slot], writers[slot] = engine, number
                        for other in range(engines):
                            readers[slot * engines + other] = NEVER
                        for index in range(first + 1, last):
                            free[frees] = seg_slots[index]
                            frees += 1
                        gone = last - first - 1
                        if gone > 0:
                            for index in range(last, segments + 1):
                                seg_starts[index - gone] = seg_starts[index]
                                seg_slots[index - gone] = seg_slots[index]
                            segments -= gone
                for other in range(engines):
                    clocks[row + other] = clock[other]
                clocks[row + engine] = number
                done[engine] = number + 1
                running = True
    return found
