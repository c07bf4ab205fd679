"""Slots: buffers of one size that live at different times share one, and the slots of a size are a stack that everything else leaves alone.

A schedule repeats a few tensors for each micro-batch, and most bytes are of a few sizes. Buffers of one size are placed perfectly by
themselves, in as many slots as live at once. Where all sizes are at their most at the peak, their stacks on top of each other are as high as the
live bytes; first fit in one order for all sizes may come higher. What
lives shortly, has holes in its life, or is of a size that the peak has none of is no part of the stacks: it comes where there is room.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.placing import placed_in_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Instance, Int64s

SHORT = (2, 1, 4, 8)
"""Sections: what lives no longer is placed after the stacks."""
_DENSE = 0.9
"""Share of the time from its birth to its death in which a buffer lives at least, to keep its slot for all of it."""


def stacks_of_slots(attempt: Attempt) -> None:
    """Try each length of short lives, and two orders of what is beside the stacks, while there is work left."""
    instance = attempt.instance
    if instance.sides.any():
        return
    for short in SHORT:
        stacked = lasting(instance, short)
        offsets, top = _stacks(instance, stacked)
        if top >= attempt.height:
            continue
        for order in (orders.by_start(instance), orders.by_size(instance)):
            if attempt.good() or not attempt.afford(TREE_WORK * instance.count):
                return
            stacked_first = np.concatenate((order[stacked[order]], order[~stacked[order]]))
            placed, height = placed_in_order(instance, stacked_first, offsets, int(stacked.sum()))
            attempt.offer("slots by size", placed, height)


def dense(instance: Instance) -> NDArray[np.bool_]:
    """What lives from its birth to its death, or nearly."""
    found: NDArray[np.bool_] = instance.widths() > _DENSE * (instance.deaths() - instance.births())
    return found


def lasting(instance: Instance, short: int) -> NDArray[np.bool_]:
    """Of what is dense, that which lives longer than `short`, of a size of which some does at the peak."""
    stacked = dense(instance) & (instance.deaths() - instance.births() > short)
    at_peak = stacked & instance.lives_in(int(instance.load().argmax()))
    return stacked & np.isin(instance.sizes, instance.sizes[at_peak])


def _stacks(instance: Instance, stacked: NDArray[np.bool_]) -> tuple[Int64s, int]:
    """Offsets of some buffers, each with its slot from birth to death, the largest size lowest; and the height of all stacks."""
    from ratrain.passes.memory.allocation.sweep import LOWEST, sweep

    offsets = np.zeros(instance.count, np.int64)
    top = 0
    for size in np.unique(instance.sizes[stacked])[::-1]:
        alike = np.flatnonzero(stacked & (instance.sizes == size))
        part = instance.kept(alike)
        slots, one_kind = np.empty(part.count, np.int64), np.zeros(part.count, np.int64)
        height = sweep(part.events(), part.sizes, one_kind, np.array([LOWEST]), 0, slots)
        offsets[alike] = top + slots
        top += height
    return offsets, top
