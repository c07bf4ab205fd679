"""Relays in slots: each relay (`relays.py`) is placed as one buffer, in a stack of slots of its own beside those of every other size.

A stack has as many slots as are needed where the memory is full, and of those that are free the latest one is taken, so that the others stay
free for longer. What they do not hold, which lives elsewhere or shortly, comes beside them, where there is room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.problem import Instance
from ratrain.passes.memory.allocation.relays import Relay, RelayFinder, full_sections
from ratrain.passes.memory.allocation.slots import SHORT, dense, lasting

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Int64s

_SHAPES = 2
"""Shapes of relays that are used at most."""
_FINDING = 2000
"""To look for relays costs as much for each buffer as so many placements of a sweep."""


def relays_in_slots(attempt: Attempt) -> None:
    """Place with relays of some shapes, and what is beside the slots in two orders, while there is work left."""
    instance = attempt.instance
    if instance.sides.any() or not attempt.afford(_FINDING * instance.count):
        return
    finder = RelayFinder(instance, attempt.bound)
    for relays in _ways(finder):
        for offsets, height in _placements(attempt, instance, relays):
            attempt.offer("relays in slots", offsets, height)
            if attempt.good():
                return


def _ways(finder: RelayFinder) -> Iterator[list[Relay]]:
    """Relays of one shape, and of more; and loose ones beside those of one."""
    relays = finder.evened(1)
    yield relays
    if len(finder.shapes) > 1:
        yield finder.evened(_SHAPES)
    loose = finder.loose(relays)
    if loose:
        yield relays + loose


def _joined(instance: Instance, relays: list[Relay]) -> Instance:
    """What is in no relay, and after it each relay as one buffer."""
    births, deaths = instance.births(), instance.deaths()
    rest = instance.kept(_alone(instance, relays))
    spans = [(births[relay.buffers].min(), deaths[relay.buffers].max()) for relay in relays]
    table = np.array(spans, np.int64).reshape(-1, 2)
    return Instance(
        np.concatenate((rest.sizes, [relay.nbytes for relay in relays])),
        np.zeros(rest.count + len(relays), np.int64),
        np.concatenate((rest.first, len(rest.starts) + np.arange(1, len(relays) + 1))),
        np.concatenate((rest.starts, table[:, 0])),
        np.concatenate((rest.stops, table[:, 1])),
        instance.sections,
    )


def _alone(instance: Instance, relays: list[Relay]) -> Int64s:
    """The buffers that are in no relay."""
    alone = np.ones(instance.count, np.bool_)
    for relay in relays:
        alone[relay.buffers] = False
    return np.flatnonzero(alone)


def _placements(attempt: Attempt, instance: Instance, relays: list[Relay]) -> Iterator[tuple[Int64s, int]]:
    """Offsets of all buffers, and the height, where it is of use: stacks of slots, and what is beside them by birth, or by size."""
    if not relays:
        return
    joined, alone, inside = _joined(instance, relays), _alone(instance, relays), _inside(instance, relays)
    members = np.concatenate((alone, *(relay.buffers for relay in relays)))
    counts = np.concatenate((np.ones(len(alone), np.int64), [len(relay.buffers) for relay in relays]))
    births, deaths, sizes, is_dense = joined.births(), joined.deaths(), joined.sizes, dense(joined)
    by_birth = np.lexsort((-sizes, deaths, births, is_dense))
    by_size = np.lexsort((deaths, births, -sizes, is_dense))
    for short in SHORT:
        stacked, slotted, top = _stacks(joined, lasting(joined, short))
        for order in (by_birth, by_size):
            limit = attempt.of_use_below()
            if top >= limit or not attempt.afford(TREE_WORK * joined.count):
                break
            slotted_first = np.concatenate((order[slotted[order]], order[~slotted[order]]))
            placed, height = placed_in_order(joined, slotted_first, stacked, int(slotted.sum()), limit)
            if height < limit:
                offsets = inside.copy()
                offsets[members] += np.repeat(placed, counts)
                yield offsets, height


def _inside(instance: Instance, relays: list[Relay]) -> Int64s:
    """Offsets in relays: of the first by their deaths, and from the end that these free first of the others by their births."""
    births, deaths, sizes = instance.births(), instance.deaths(), instance.sizes
    offsets = np.zeros(instance.count, np.int64)
    for relay in relays:
        for buffers, times in ((relay.first, deaths), (relay.then, births)):
            ordered = buffers[np.lexsort((-sizes[buffers], times[buffers]))]
            offsets[ordered] = np.cumsum(sizes[ordered]) - sizes[ordered]
    return offsets


def _stacks(joined: Instance, stacked: NDArray[np.bool_]) -> tuple[Int64s, NDArray[np.bool_], int]:
    """Offsets of what gets a slot of some buffers, the largest size lowest; which these are; and the height of all stacks."""
    from ratrain.passes.memory.allocation.sweep import latest_slots

    full = full_sections(joined)
    at_full = np.flatnonzero(full)
    slotted = stacked & (np.searchsorted(at_full, joined.births()) < np.searchsorted(at_full, joined.deaths()))
    offsets, top = np.zeros(joined.count, np.int64), 0
    for size in np.unique(joined.sizes[slotted])[::-1]:
        alike = np.flatnonzero(slotted & (joined.sizes == size))
        part = joined.kept(alike)
        most = int(part.load()[full].max()) // int(size)
        slots = latest_slots(part.events(), part.count, most)
        slotted[alike[slots < 0]] = False
        offsets[alike] = top + size * slots
        top += most * int(size)
    return offsets, slotted, top
