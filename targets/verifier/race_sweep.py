"""The inner loop of `ratrain.targets.verifier.races`, over numbers alone: compiled for many operands, plain Python for few.

It takes lists as well as arrays. Instructions are numbered engine by engine, over `STEPS` steps of each stream; all memories lie behind one
another in one space of bytes. Segments of bytes with one history are kept in order of their starts; a history has a slot, which is used again.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from attrs import frozen

from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.support.native_loops import native

STEPS = 2
NEVER = -1
MOST_FOUND = 4096
"""Conflicts that are noted; the same two instructions may conflict in many places."""
_OPERANDS = 100_000
"""Half a second of plain Python: less than it takes to compile the loop where it is not kept."""
ALLOWANCE = Allowance(_OPERANDS)


@frozen
class SweptStage:
    """The streams of a stage as numbers, engine by engine."""

    lengths: list[int]
    """instructions of each engine"""
    operand_ends: list[int]
    """of each instruction, in what follows"""
    tensors: list[int]
    reads: list[int]
    """of each operand: whether it is only read"""
    wait_ends: list[int]
    """of each instruction, in what follows"""
    waits: list[int]
    """three numbers each: engine, count, whether of the previous step"""
    starts: list[int]
    """of each tensor its first byte"""
    stops: list[int]
    size: int
    """bytes of all memories"""


class Conflict(NamedTuple):
    """Two accesses that nothing orders, each by engine and number over all steps, the later found one first; and bytes of it."""

    engine: int
    number: int
    other_engine: int
    other_number: int
    start: int
    stop: int


class Swept(NamedTuple):
    """What a sweep has found."""

    conflicts: list[Conflict]
    done: list[int]
    """of each engine, how many instructions could run"""
    clocks: Any
    """by engine, number and other engine, flat: the last number that is known to be complete when it has run; its own for itself"""

    def clock(self, lengths: list[int], engine: int, number: int) -> list[int]:
        """What is known to be complete when an instruction has run, by engine."""
        engines = len(lengths)
        at = (STEPS * sum(lengths[:engine]) + number) * engines
        return [int(value) for value in self.clocks[at : at + engines]]


def swept(stage: SweptStage) -> Swept:
    """Run all streams of a stage as their waits allow, and hold every access against those of the same bytes before."""
    engines, tensors = len(stage.lengths), len(stage.starts)
    slots = 2 * tensors + 3
    sizes = (
        (slots, 0),  # where each segment starts, in order
        (slots, 0),  # the slot of its history
        (slots, 0),  # slots that are free
        (slots, NEVER),  # of each slot: the engine of the last writer,
        (slots, NEVER),  # its number,
        (slots * engines, NEVER),  # and by engine the number of the last reader since
        (engines, 0),  # the first instruction of each stream
        (engines, NEVER),  # the clock of the instruction at hand
        (STEPS * sum(stage.lengths) * engines, NEVER),  # clocks
        (engines, 0),  # instructions done
        (6 * MOST_FOUND, 0),
    )
    given = (
        stage.lengths, stage.operand_ends, stage.tensors, stage.reads, stage.wait_ends, stage.waits, stage.starts, stage.stops,
    )  # fmt: skip
    if ALLOWANCE.take(STEPS * len(stage.tensors)):
        made: list[Any] = [[value] * size for size, value in sizes]
        found = sweep_races(*given, stage.size, *made)
    else:
        import numpy as np

        made = [np.full(size, value, np.int64) for size, value in sizes]
        found = _compiled()(*(np.array(each, np.int64) for each in given), stage.size, *made)
    *_, clocks, done, conflicts = made
    numbers = [int(value) for value in conflicts[: 6 * found]]
    return Swept(
        [Conflict(*numbers[at : at + 6]) for at in range(0, len(numbers), 6)], [int(count) for count in done], clocks
    )


@cache
def _compiled() -> Any:
    return native(sweep_races)


def sweep_races(
    lengths: Any, operand_ends: Any, tensors: Any, reads: Any, wait_ends: Any, waits: Any, starts: Any, stops: Any,
    size: int,
    seg_starts: Any, seg_slots: Any, free: Any, writer_engines: Any, writers: Any, readers: Any,
    bases: Any, clock: Any, clocks: Any,
    done: Any, conflicts: Any,
) -> int:  # fmt: skip
    """Fill `clocks`, `done` and `conflicts`; the number of conflicts."""
    engines = len(lengths)
    for engine in range(1, engines):
        bases[engine] = bases[engine - 1] + lengths[engine - 1]
    slots = len(seg_starts)
    for slot in range(slots):
        free[slot] = slots - 1 - slot
    frees = slots - 1  # the slot 0 has the history of all bytes: none
    seg_starts[0] = 0
    seg_slots[0] = 0
    segments = 1
    seg_starts[1] = size
    found = 0
    running = True
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
                    clock[other] = NEVER if number == 0 else clocks[row - engines + other]
                met = True
                for wait in range(0 if item == 0 else wait_ends[item - 1], wait_ends[item]):
                    awaited, count, previous = waits[3 * wait], waits[3 * wait + 1], waits[3 * wait + 2]
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
                    for end in range(2):  # segments that start where the access starts, and where it stops
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
                        # the last writer, and for who writes the last reader on each engine
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
                    if not only_reads:  # one history from here on
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
