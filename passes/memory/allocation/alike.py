"""First fit by size with buffers that are alike moved in the order together: the same tensor of every micro-batch is better placed earlier, or later.

Buffers of one size that live as long are alike. A kind that lives where the placement is too high is moved before another one; what is no worse
stays. Moving one buffer of thousands would change one micro-batch, and each of the others would be as high as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.stacks import reached

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Instance, Int64s

_MOST_PLACED = 200_000
"""Buffers that are placed in all, over all orders: half a second."""
_PATIENCE = 6
"""Orders in a row that gain nothing, after which no more are tried."""
_AMONG_NEIGHBOURS = 0.7
"""How often a kind is moved before one that lives at the same time, not any."""
_BEFORE = 0.01
"""Of the distance between two sizes in the order, how far before another kind one is put."""


def move_alike(attempt: Attempt) -> None:
    """Move kinds of buffers while there is work left and it helps."""
    instance = attempt.instance
    kinds, ranks = _kinds(instance)
    births = instance.births()
    chance = np.random.default_rng(instance.count)
    target = attempt.target()

    def placed(ranks: NDArray[np.float64]) -> tuple[tuple[int, int], Int64s]:
        offsets = _first_fit(instance, np.lexsort((births, ranks[kinds])))
        height = int((offsets + instance.sizes).max())
        attempt.offer("first fit by size, alike moved", offsets, height)
        over = np.maximum(reached(instance, offsets) - target, 0)
        return (height, int(over.sum())), over

    orders = _MOST_PLACED // instance.count
    if not orders or not attempt.afford(TREE_WORK * instance.count):
        return
    best, over = placed(ranks)
    failed = 0
    for _ in range(orders):
        if attempt.good() or failed == _PATIENCE or not attempt.afford(TREE_WORK * instance.count):
            return
        section = chance.choice(np.flatnonzero(over)) if over.any() else 0
        there = np.unique(kinds[_live_in(instance, int(section))])
        moved = ranks.copy()
        for _ in range(1 + chance.integers(2)):
            others = there if chance.random() < _AMONG_NEIGHBOURS else np.arange(len(ranks))
            moved[chance.choice(there)] = ranks[chance.choice(others)] - _BEFORE * chance.random()
        found, over_now = placed(moved)
        failed = 0 if found < best else failed + 1
        if found <= best:
            best, over, ranks = found, over_now, moved


def _kinds(instance: Instance) -> tuple[Int64s, NDArray[np.float64]]:
    """The kind of each buffer, and the place of each kind in the order: that of its size, largest first."""
    pairs, kinds = np.unique(np.stack((instance.sizes, instance.widths())), axis=1, return_inverse=True)
    _, ranks = np.unique(-pairs[0], return_inverse=True)
    return kinds.reshape(-1), ranks.reshape(-1).astype(np.float64)


def _live_in(instance: Instance, section: int) -> Int64s:
    live = (instance.starts <= section) & (section < instance.stops)
    found: Int64s = instance.owners[live]
    return found


def _first_fit(instance: Instance, order: Int64s) -> Int64s:
    from ratrain.passes.memory.allocation.tree import first_fit

    offsets = np.empty(instance.count, np.int64)
    first_fit(
        order, instance.sizes, instance.sides, instance.first, instance.starts, instance.stops, instance.sections, 0, offsets,
    )  # fmt: skip
    return offsets
