"""Sort buffers for first fit. No order is best everywhere, so several are tried; ties go by start, then by index."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import Instance, Int64s


def by_size(instance: Instance) -> Int64s:
    """Sort by size, the largest first."""
    return np.lexsort((instance.births(), -instance.sizes))


def by_start(instance: Instance) -> Int64s:
    """Sort by start, the longest life first among equals."""
    return np.lexsort((-instance.widths(), instance.births()))


def by_total(instance: Instance) -> Int64s:
    """Sort by the most live bytes a buffer meets, then by area, then by length of life, all descending."""
    widths = instance.widths()
    return np.lexsort((instance.births(), -widths, -widths * instance.sizes, -_totals(instance)))


def costly_orders(instance: Instance) -> Iterator[tuple[str, Int64s]]:
    """Yield orders by what a buffer meets, with their names."""
    births, sizes, widths = instance.births(), instance.sizes, instance.widths()
    conflicts = _conflicts(instance)
    yield "conflicts", np.lexsort((births, -conflicts))
    yield "conflicts x size", np.lexsort((births, -conflicts * sizes))
    yield "total, area, width", by_total(instance)
    yield "width, area, total", np.lexsort((births, -_totals(instance), -widths * sizes, -widths))


def _conflicts(instance: Instance) -> Int64s:
    """Count the intervals that each life meets, from its first to its last section.

    Two binary searches: intervals that start before its death, less those that stop before its birth.
    """
    started = np.searchsorted(np.sort(instance.starts), instance.deaths(), "left")
    return started - np.searchsorted(np.sort(instance.stops), instance.births(), "right")


def _totals(instance: Instance) -> Int64s:
    """Find the largest load in each buffer's sections, by a table of maxima over powers of two."""
    load = instance.load()
    levels = [load]
    while 2 << (len(levels) - 1) <= len(load):
        step = 1 << (len(levels) - 1)
        levels.append(np.maximum(levels[-1][:-step], levels[-1][step:]))
    spans = instance.stops - instance.starts
    level = np.frexp(spans.astype(np.float64))[1] - 1  # floor of log2, exact for integers
    most = np.empty(len(spans), np.int64)
    for k, table in enumerate(levels):
        at = level == k
        # Two overlapping runs of 2^k sections cover each interval.
        most[at] = np.maximum(table[instance.starts[at]], table[instance.stops[at] - (1 << k)])
    return np.maximum.reduceat(most, instance.first[:-1])
