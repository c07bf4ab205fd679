"""Place thousands of buffers by the cheapest methods: compiled sweeps in time, and first fit by size.

Where every buffer has one life, a *sweep* walks through time with a list of free bytes, and gives each buffer the
lowest hole that is large enough. Its *two-ended* form puts the shorter half of the lives at the top instead, so that
they leave no holes among the longer ones:

    bound  |  ss s  sss ss   s s ss      short lives, from the bound downwards
           |
           |  LLLLLLL LLLLLLLLLLLLL      long lives, from the ground upwards
           +--------------------------- time

Where a sweep is too high for short times only, these are placed again (`peaks.py`). First fit by size, the largest
first, serves lives with holes too, and is within a thousandth of the bound for most schedules.

Cost: near-linear. Guarantee: none; the lowest placement counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.placing import placed_in_order

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Int64s

COMPILED_FROM = 1024
"""Number of buffers from which on compiled loops are worth importing the compiler."""


def large_portfolio(attempt: Attempt) -> None:
    """Offer sweeps, a sweep with its peaks placed again, and first fit by size, until one is good."""
    instance = attempt.instance
    if instance.plain:
        from ratrain.passes.memory.allocation.peaks import lower_peaks

        in_time = _sweeps(attempt)
        if not attempt.good():
            lower_peaks(attempt, "time-order first fit", in_time)
    if not attempt.good() and attempt.afford(TREE_WORK * instance.count):
        offsets, height = placed_in_order(instance, orders.by_size(instance), limit=attempt.of_use_below())
        attempt.offer("first fit by size", offsets, height)


def _sweeps(attempt: Attempt) -> Int64s:
    """Offer first fit in the order of time, and the two-ended sweep; return the offsets of the former."""
    from ratrain.passes.memory.allocation.sweep import HIGHEST, LOWEST, sweep

    instance = attempt.instance
    events, widths = instance.events(), instance.widths()
    first = attempt.offsets
    for name, short in (
        ("time-order first fit", np.zeros(instance.count, np.bool_)),
        ("two-ended sweep", widths <= np.median(widths)),
    ):
        if attempt.good() or not attempt.afford(instance.count):
            break
        offsets = np.empty(instance.count, np.int64)
        # Class 0 are long lives, from the bottom; class 1 short ones, from the bound downwards.
        policy = np.array([LOWEST, HIGHEST])
        height = sweep(events, instance.sizes, short.astype(np.int64), policy, attempt.bound, offsets)
        attempt.offer(name, offsets, height)
        if not short.any():
            first = offsets
    return first
