"""Place buffers in slots: buffers of one size that live at different times share one; a size's slots make a stack.

A schedule repeats a few tensors for every micro-batch, so most bytes are of a few sizes. Buffers of one size alone are
placed perfectly, in as many slots as live at once. Where every size is at its most at the peak, the stacks on top of
each other are as high as the live bytes; first fit in one order for all sizes may exceed them:

    address
      |  |__8__|  |__8__| |__8__|        one slot of size 8
      |  |==24=========||==24====|       two slots of size 24:
      |  |==24====| |==24===========|    each holds one buffer after another
      +------------------------------ time

Short lives, lives with holes, and sizes that do not occur at the peak get no slot: first fit places them where there is
room. A buffer takes the slot that became free latest, so that the others stay free for longer and leave room to such
buffers.

A relay (`relays.py`) gets a slot as one buffer. `stacks_of_slots` uses none; `relays_in_slots` tries relays of one
shape, and of two.

Cost: two sorts, and one first fit for each of four lengths of short lives and two orders. Guarantee: none; the lowest
placement counts.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.problem import Instance
from ratrain.passes.memory.allocation.relays import Relay, RelayFinder, full_sections
from ratrain.ratrain_ir.support.native_loops import native

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Int64s

_SHORT = (2, 1, 4, 8)
"""Longest lives, in sections, that get no slot; each is tried."""
_DENSE = 0.9
"""Smallest share of its span that a buffer with a slot lives; the slot is its own for all of it."""
_SHAPES = 2
"""Most shapes of relays that are used together."""
_FINDING = 2000
"""Cost of looking for relays, in placements of a sweep for each buffer."""


def stacks_of_slots(attempt: Attempt) -> None:
    """Offer placements with a stack of slots for each size."""
    if not attempt.instance.sides.any():
        _offer(attempt, "slots by size", [])


def relays_in_slots(attempt: Attempt) -> None:
    """Offer placements in slots with relays of one shape, then of two shapes, while there is work left."""
    instance = attempt.instance
    if instance.sides.any() or not attempt.afford(_FINDING * instance.count):
        return
    finder = RelayFinder(instance, attempt.bound)
    for shapes in range(1, min(_SHAPES, len(finder.shapes)) + 1):
        relays = finder.evened(shapes)
        if relays and not attempt.good():
            _offer(attempt, "relays in slots", relays)


def _offer(attempt: Attempt, method: str, relays: list[Relay]) -> None:
    """Offer placements with some relays until one is good."""
    for offsets, height in _placements(attempt, attempt.instance, relays):
        attempt.offer(method, offsets, height)
        if attempt.good():
            return


def _joined(instance: Instance, relays: list[Relay]) -> Instance:
    """Return an instance of the buffers in no relay, followed by each relay as one buffer."""
    births, deaths = instance.births(), instance.deaths()
    rest = instance.kept(_alone(instance, relays))
    spans = [(births[relay.buffers].min(), deaths[relay.buffers].max()) for relay in relays]
    table = np.array(spans, np.int64).reshape(-1, 2)
    return Instance(
        np.concatenate((rest.sizes, np.array([relay.nbytes for relay in relays], np.int64))),
        np.zeros(rest.count + len(relays), np.int64),
        np.concatenate((rest.first, len(rest.starts) + np.arange(1, len(relays) + 1))),
        np.concatenate((rest.starts, table[:, 0])),
        np.concatenate((rest.stops, table[:, 1])),
        instance.sections,
    )


def _alone(instance: Instance, relays: list[Relay]) -> Int64s:
    """List the buffers that are in no relay."""
    alone = np.ones(instance.count, np.bool_)
    for relay in relays:
        alone[relay.buffers] = False
    return np.flatnonzero(alone)


def _placements(attempt: Attempt, instance: Instance, relays: list[Relay]) -> Iterator[tuple[Int64s, int]]:
    """Yield offsets and height of useful placements: stacks first, then the other buffers by birth, or by size."""
    joined, alone, inside = _joined(instance, relays), _alone(instance, relays), _inside(instance, relays)
    members = np.concatenate((alone, *(relay.buffers for relay in relays)))
    counts = np.array([1] * len(alone) + [len(relay.buffers) for relay in relays], np.int64)
    births, deaths, sizes, is_dense = joined.births(), joined.deaths(), joined.sizes, _dense(joined)
    by_birth = np.lexsort((-sizes, deaths, births, is_dense))
    by_size = np.lexsort((deaths, births, -sizes, is_dense))
    tried: set[tuple[bytes, bytes]] = set()
    for lasting in _lasting(joined):
        stacked, slotted, top = _stacks(joined, lasting)
        stacks = stacked.tobytes(), slotted.tobytes()
        for order in (by_birth, by_size):
            limit = attempt.of_use_below()
            # Without work left, or with stacks that are as high as the best placement, there is nothing to gain.
            if top >= limit or not attempt.afford(TREE_WORK * joined.count):
                break
            if stacks in tried:
                continue  # the placements would be the same: only their work counts
            slotted_first = np.concatenate((order[slotted[order]], order[~slotted[order]]))
            placed, height = placed_in_order(joined, slotted_first, stacked, int(slotted.sum()), limit)
            if height < limit:
                # A buffer's offset is that of its slot, and within a relay its place there.
                offsets = inside.copy()
                offsets[members] += np.repeat(placed, counts)
                yield offsets, height
        tried.add(stacks)


def _inside(instance: Instance, relays: list[Relay]) -> Int64s:
    """Return offsets within relays: first buffers in the order of their deaths, the others in that of their births.

    So the first free one hole that grows from the relay's begin, and the others fill it from there.
    """
    births, deaths, sizes = instance.births(), instance.deaths(), instance.sizes
    offsets = np.zeros(instance.count, np.int64)
    for relay in relays:
        for buffers, times in ((relay.first, deaths), (relay.then, births)):
            ordered = buffers[np.lexsort((-sizes[buffers], times[buffers]))]
            offsets[ordered] = np.cumsum(sizes[ordered]) - sizes[ordered]
    return offsets


def _dense(instance: Instance) -> NDArray[np.bool_]:
    """Tell which buffers live nearly all the time from birth to death."""
    found: NDArray[np.bool_] = instance.widths() > _DENSE * (instance.deaths() - instance.births())
    return found


def _lasting(instance: Instance) -> Iterator[NDArray[np.bool_]]:
    """Yield, for each length of short lives, the dense buffers that live longer and have a size of one at the peak."""
    dense, lives, peak = _dense(instance), instance.deaths() - instance.births(), instance.load().argmax()
    at_peak = instance.lives_in(int(peak))
    kinds, kind_of = np.unique(instance.sizes, return_inverse=True)
    for short in _SHORT:
        stacked = dense & (lives > short)
        is_held = np.zeros(len(kinds), np.bool_)
        is_held[kind_of[stacked & at_peak]] = True
        yield stacked & is_held[kind_of]


def _stacks(joined: Instance, stacked: NDArray[np.bool_]) -> tuple[Int64s, NDArray[np.bool_], int]:
    """Give slots to some buffers, the largest size lowest.

    Return offsets, which buffers got a slot, and the height of stacks.

    A stack has as many slots as are taken at once in full sections. If more buffers live elsewhere, the others get
    none.
    """
    full = full_sections(joined)
    at_full = np.flatnonzero(full)
    # Only buffers that live in some full section: the others can use what is free outside the peak.
    slotted = stacked & (np.searchsorted(at_full, joined.births()) < np.searchsorted(at_full, joined.deaths()))
    offsets, top = np.zeros(joined.count, np.int64), 0
    for size in np.unique(joined.sizes[slotted])[::-1]:
        alike = np.flatnonzero(slotted & (joined.sizes == size))
        part = joined.kept(alike)
        # All buffers of `part` have one size, so its load divided by that is the number of live ones.
        most = int(part.load()[full].max()) // int(size)
        slots = latest_slots(part.events(), part.count, most)
        slotted[alike[slots < 0]] = False
        offsets[alike] = top + size * slots
        top += most * int(size)
    return offsets, slotted, top


def latest_slots(events: Int64s, count: int, most: int) -> Int64s:
    """Give each of `count` buffers one of `most` slots, or -1 where none is free.

    It is the slot that became free latest, so that the others stay free for longer.
    """
    slots, free = np.full(count, -1, np.int64), np.arange(most, dtype=np.int64)[::-1].copy()
    _loop()(events, slots, free)
    return slots


@cache
def _loop() -> Any:
    return native(take_latest)


def take_latest(events: Any, slots: Any, free: Any) -> None:
    """Fill `slots`, all -1, for `latest_slots`; `free` are the slots, of which the last is taken next."""
    left = len(free)
    for place in range(len(events)):
        event = events[place]
        if event < 0:
            if slots[~event] >= 0:
                free[left] = slots[~event]
                left += 1
        elif left > 0:
            left -= 1
            slots[event] = free[left]
