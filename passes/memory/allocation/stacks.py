"""Place large buffers from the top down and the others from the bottom up, each kind as if the other did not exist.

Large buffers may come and go (views that are gathered for each use) while small ones stay (activations between forward
and backward). One order for all leaves holes of one kind that the other cannot use. Apart, each kind is packed well:

    arena  |  VVVV   VVVV   VVVV        views, hanging from the top
           |  VVVV     aaaaaaaaaaaa
           |  aaaaaaaaaaaaaaaaaaaaaaaa  activations, standing on the ground
           +-------------------------- time

The arena is the largest sum, over time, of what the two reach: less than both together if they are not full at once.

Cost: four orders of both kinds for at most twelve sizes from which on a buffer is large. Guarantee: none; the lowest
placement counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.problem import Int64s

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Instance

_THRESHOLDS = 12
"""Most sizes tried from which on a buffer is large."""
_MOST_PLACED = 400_000
"""Most buffers to place over all thresholds and orders: half a second."""
_ORDERS = 4
"""Orders tried of each kind."""


@frozen(eq=False)
class _Stack:
    """Buffers of one kind, placed from 0 up."""

    chosen: Int64s
    offsets: Int64s
    reached: Int64s
    """End of the highest taken byte in each section."""


def two_stacks(attempt: Attempt) -> None:
    """Offer two stacks for each threshold between large and small, while there is work left.

    Of the orders tried for each stack, the best pair counts.
    """
    instance = attempt.instance
    if instance.sides.any():
        return
    per_threshold = _ORDERS * instance.count
    for threshold in _thresholds(instance, min(_THRESHOLDS, max(1, _MOST_PLACED // per_threshold))):
        if attempt.good() or not attempt.afford(TREE_WORK * per_threshold):
            return
        large = instance.sizes >= threshold
        # The fewer buffers first: where no stack of theirs is of use, the others need no stack.
        few, many = (large, ~large) if 2 * large.sum() < len(large) else (~large, large)
        stacks = list(_stacks(instance, few, attempt.height))
        others = list(_stacks(instance, many, attempt.height)) if stacks else []
        if not others:
            continue
        upper, lower = (stacks, others) if few is large else (others, stacks)
        pairs = [(int((one.reached + other.reached).max()), one, other) for one in upper for other in lower]
        # The upper stack is mirrored, so the two touch where their sum is largest.
        height, one, other = min(pairs, key=lambda pair: pair[0])
        offsets = np.empty(instance.count, np.int64)
        offsets[other.chosen] = other.offsets
        offsets[one.chosen] = height - one.offsets - instance.sizes[one.chosen]
        attempt.offer("two stacks by size", offsets, height)


def _thresholds(instance: Instance, most: int) -> Int64s:
    """Choose the sizes with most area (bytes times sections), ascending.

    Never the smallest, which would leave none below.
    """
    sizes, place = np.unique(instance.sizes, return_inverse=True)
    area = np.bincount(place, weights=instance.sizes * instance.widths())
    # Index 0 is the smallest size.
    area[0] = -1.0
    heaviest = np.sort(np.argsort(-area, kind="stable")[:most])
    return sizes[heaviest[heaviest > 0]]


def _stacks(
    instance: Instance, is_chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], below: int
) -> Iterator[_Stack]:
    """Place the chosen buffers by first fit in each of some orders; yield the stacks that may end `below` a height.

    Above a stack the other kind needs its live bytes at least.
    """
    chosen = np.flatnonzero(is_chosen)
    if not len(chosen):
        yield _Stack(chosen, chosen, np.zeros(instance.sections, np.int64))
        return
    part, others = instance.kept(chosen), instance.load_of(~is_chosen)
    named = islice(orders.costly_orders(part), _ORDERS - 2)
    for order in (orders.by_size(part), orders.by_start(part), *(order for _, order in named)):
        offsets, height = placed_in_order(part, order, limit=below)
        if height < below:
            stack = _Stack(chosen, offsets, reached(part, offsets))
            if int((stack.reached + others).max()) < below:
                yield stack


def reached(part: Instance, offsets: Int64s) -> Int64s:
    """Return the end of the highest taken byte in each section.

    Each interval is two overlapping entries in a table of maxima over powers of two, which is then handed down to
    single sections.
    """
    tops = (offsets + part.sizes)[part.owners]
    level = np.frexp((part.stops - part.starts).astype(np.float64))[1] - 1  # floor of log2, exact for integers
    table = np.zeros((int(level.max()) + 1, part.sections), np.int64)
    np.maximum.at(table, (level, part.starts), tops)
    np.maximum.at(table, (level, part.stops - (1 << level)), tops)
    for k in range(len(table) - 1, 0, -1):
        half = 1 << (k - 1)
        np.maximum(table[k - 1], table[k], out=table[k - 1])
        np.maximum(table[k - 1][half:], table[k][:-half], out=table[k - 1][half:])
    reached: Int64s = table[0]
    return reached
