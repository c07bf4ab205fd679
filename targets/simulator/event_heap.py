"""The events to come, by time: a binary heap that knows where each slot stands, so that an event can be moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.loops import part
from ratrain.targets.simulator.run_state import HEAP

if TYPE_CHECKING:
    from ratrain.targets.simulator.flat_program import Int64s, Records


@part
def put(slots: Records, sizes: Int64s, slot: int, time: float) -> None:
    """Enter a slot, or move it to another time."""
    place = slots[slot].heap_place
    if place < 0:
        place = sizes[HEAP]
        sizes[HEAP] += 1
    slots[slot].time = time
    sift(slots, sizes[HEAP], slot, place)


@part
def take_first(slots: Records, sizes: Int64s) -> int:
    """Remove the slot whose time is the earliest; of equal ones the lowest slot."""
    slot: int = slots[0].heap
    slots[slot].heap_place = -1
    sizes[HEAP] -= 1
    if sizes[HEAP]:
        sift(slots, sizes[HEAP], slots[sizes[HEAP]].heap, 0)
    return slot


@part
def sift(slots: Records, size: int, slot: int, place: int) -> None:
    """Put a slot where it belongs in a heap of a size; `place` is free."""
    time = slots[slot].time
    while place > 0:
        parent = slots[(place - 1) // 2].heap
        if slots[parent].time < time or (slots[parent].time == time and parent < slot):
            break
        slots[place].heap = parent
        slots[parent].heap_place = place
        place = (place - 1) // 2
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        child = slots[below].heap
        if below + 1 < size:
            other = slots[below + 1].heap
            if slots[other].time < slots[child].time or (slots[other].time == slots[child].time and other < child):
                below, child = below + 1, other
        if time < slots[child].time or (time == slots[child].time and slot < child):
            break
        slots[place].heap = child
        slots[child].heap_place = place
        place = below
    slots[place].heap = slot
    slots[slot].heap_place = place
