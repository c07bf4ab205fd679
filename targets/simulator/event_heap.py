"""Coming events by time: an indexed binary heap, in which an event can be moved when its flow's rate changes.

Each slot knows its place in the heap (`heap_place`), so that a move takes O(log n) without a search. Equal times are
ordered by slot: the order of events, so every result, does not depend on the order of insertions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.loops import part
from ratrain.targets.simulator.run_state import HEAP

if TYPE_CHECKING:
    from ratrain.targets.simulator.flat_program import Int64s, Records


@part
def put(slots: Records, heap: Records, sizes: Int64s, slot: int, time: float) -> None:
    """Enter a slot with the time of its event, or move it to another time."""
    place = slots[slot].heap_place
    if place < 0:
        place = sizes[HEAP]
        sizes[HEAP] += 1
    sift(slots, heap, sizes[HEAP], slot, time, place)


@part
def take_first(slots: Records, heap: Records, sizes: Int64s) -> int:
    """Remove and return the slot with the earliest time; among equal times the lowest slot."""
    slot: int = heap[0].slot
    slots[slot].heap_place = -1
    sizes[HEAP] -= 1
    last = sizes[HEAP]
    if last:
        sift(slots, heap, last, heap[last].slot, heap[last].time, 0)
    return slot


@part
def sift(slots: Records, heap: Records, size: int, slot: int, time: float, place: int) -> None:
    """Store a slot at its place in a heap of `size` entries, given a free `place`.

    The free place first moves up while its parent is later, then down while a child is earlier; at most one of the two
    loops moves it.
    """
    while place > 0:
        above = (place - 1) // 2
        parent, parent_time = heap[above].slot, heap[above].time
        if parent_time < time or (parent_time == time and parent < slot):
            break
        heap[place].slot, heap[place].time = parent, parent_time
        slots[parent].heap_place = place
        place = above
    # Of the two children the earlier one moves up, so that it precedes the other.
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        child, child_time = heap[below].slot, heap[below].time
        if below + 1 < size:
            other, other_time = heap[below + 1].slot, heap[below + 1].time
            if other_time < child_time or (other_time == child_time and other < child):
                below, child, child_time = below + 1, other, other_time
        if time < child_time or (time == child_time and slot < child):
            break
        heap[place].slot, heap[place].time = child, child_time
        slots[child].heap_place = place
        place = below
    heap[place].slot, heap[place].time = slot, time
    slots[slot].heap_place = place
