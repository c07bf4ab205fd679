"""Groups: what is born together is placed together, in the order of its deaths, so that what it frees bit by bit is free in one piece.

From the first moment at which most bytes live, a sweep goes through time. Of a micro-batch's saved tensors each backward frees some, and takes less or more
for what the weights' gradients wait for: stacks by size have then bytes of the one size free where the other is needed. Beside each other the freed ones
make one hole that grows, and what is taken fills it from one end.

Where the sweep finds no room it goes back a few sections, and on from there with other choices by chance. What was dead before the sweep begins comes
last, by first fit against time.
"""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.stacks import reached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Instance, Int64s

_DENSE = 0.9
"""Share of the time from its birth to its death in which a buffer lives at least, to be swept as if it lived all of it."""
_STAYS = 0.5
"""Share of all sections: what lives longer is no part of the sweep, but below it."""
_LOOKED = 100_000_000
"""Holes that the sweep looks at most: a quarter of a second."""
_LOOKS = 60
"""Holes that are looked at in the time of one placement of a sweep."""
_PER_BUFFER = 60
"""Holes that it may look at for each buffer, where that is more."""
_DEPTH = 512
"""Sections that the sweep can go back."""
_SPLIT = 2.0
"""Two buffers of a group of which one lives so many times as long make it two groups."""
_SPLITS = np.array([1.5, 2.0, 3.0])
"""What else that may be, after a failure."""


def groups_in_order(attempt: Attempt) -> None:
    """Sweep from the first peak on under what is near enough the bound, and complete what was found."""
    from ratrain.passes.memory.allocation.group_sweep import sweep_groups

    instance, room = attempt.instance, attempt.target()
    if instance.sides.any():
        return
    births, deaths = instance.births(), instance.deaths()
    spans = deaths - births
    swept = (instance.widths() > _DENSE * spans) & (spans <= _STAYS * instance.sections)
    below, floor = _below(instance, ~swept)
    peak = int(instance.load().argmax())
    placed = ~swept | (deaths > peak)
    entering = np.flatnonzero(swept & (births > peak))
    entering = entering[np.lexsort((-instance.sizes[entering], deaths[entering], births[entering]))]
    born = np.searchsorted(births[entering], np.arange(instance.sections + 1))
    begun, ended = (np.bincount(times, minlength=instance.sections + 1) for times in (births, deaths))
    most = int(np.cumsum(begun - ended).max())
    limit = max(_LOOKED, _PER_BUFFER * instance.count)
    live, offsets = _arranged(instance, np.flatnonzero(swept & placed & (births <= peak)), floor, below)
    if (offsets + instance.sizes)[live].max(initial=0) > room or not attempt.afford(limit // _LOOKS):
        return
    if not sweep_groups(
        peak + 1, live, born, entering, deaths, instance.sizes, floor, room, _SPLIT, _SPLITS, limit, _DEPTH, most, offsets
    ):  # fmt: skip
        return
    for order in _orders(instance, placed):
        if not attempt.good():
            attempt.offer("groups in order", *placed_in_order(instance, order, offsets, int(placed.sum())))


def _arranged(instance: Instance, there: Int64s, floor: Int64s, offsets: Int64s) -> tuple[Int64s, Int64s]:
    """What lives at the peak, from the lowest, the first to die, to the highest; and all offsets, with theirs above the floor."""
    births, deaths = instance.births(), instance.deaths()
    live = there[np.lexsort((-instance.sizes[there], births[there], deaths[there]))]
    offsets, end = offsets.copy(), 0
    for buffer in live.tolist():
        offsets[buffer] = max(end, floor[births[buffer] : deaths[buffer]].max())
        end = int(offsets[buffer] + instance.sizes[buffer])
    return live, offsets


def _below(instance: Instance, chosen: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
    """Offsets, with those of some buffers by first fit, and the highest byte that these take in each section."""
    offsets, floor = np.zeros(instance.count, np.int64), np.zeros(instance.sections, np.int64)
    numbers = np.flatnonzero(chosen)
    if not len(numbers):
        return offsets, floor
    alone = instance.kept(numbers)
    placed, _ = placed_in_order(alone, orders.by_size(alone))
    offsets[numbers] = placed
    return offsets, reached(alone, placed)


def _orders(instance: Instance, placed: NDArray[np.bool_]) -> Iterator[Int64s]:
    """What is placed, and then the rest in orders for first fit: the last to die first, the largest first, and others."""
    deaths, sizes = -instance.deaths(), -instance.sizes
    for order in chain(
        (np.lexsort((sizes, deaths)), np.lexsort((deaths, sizes))), map(itemgetter(1), orders.costly_orders(instance))
    ):
        yield np.concatenate((order[placed[order]], order[~placed[order]]))
