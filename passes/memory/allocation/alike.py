"""First fit with buffers that are alike moved in the order together: the same tensor of every micro-batch is better placed earlier, or later.

Moving one buffer of thousands would change one micro-batch, and each of the others would be as high as before. A kind that lives where the
placement is too high is moved before another one; what is no worse stays. By themselves buffers of one size that live as long are alike, and begin in
the order of sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.problem import Instance, Int64s
from ratrain.passes.memory.allocation.stacks import reached

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt

_MOST_PLACED = 200_000
"""Buffers that are placed in all, over all orders: half a second."""
_PATIENCE = 6
"""Orders in a row that gain nothing, after which no more are tried."""
_AMONG_NEIGHBOURS = 0.7
"""How often a kind is moved before one that lives at the same time, not any."""
_BEFORE = 0.01
"""Of the distance between two sizes in the order, how far before another kind one is put."""


@frozen(eq=False)
class Kinds:
    """Buffers that are placed kind by kind, where others that have their offsets leave room."""

    instance: Instance
    fixed: Int64s
    """The buffers that have their offsets."""
    offsets: Int64s
    """Theirs; of the others anything."""
    moved: Int64s
    """The other buffers."""
    kinds: Int64s
    """The kind of each of these."""

    def placed(self, ranks: NDArray[np.float64]) -> tuple[Int64s, int]:
        """All offsets by first fit in the order of the kinds' ranks, ties by birth; and the height."""
        births = self.instance.births()[self.moved]
        order = self.moved[np.lexsort((births, ranks[self.kinds]))]
        return placed_in_order(self.instance, np.concatenate((self.fixed, order)), self.offsets, len(self.fixed))

    def live_in(self, section: int) -> Int64s:
        """The kinds of which a buffer lives in a section."""
        return np.unique(self.kinds[self.instance.lives_in(section)[self.moved]])


def move_alike(attempt: Attempt) -> None:
    """Move kinds of buffers while there is work left and it helps."""
    instance = attempt.instance
    kinds, ranks = _kinds(instance)
    everything = np.arange(instance.count)
    all_kinds = Kinds(instance, everything[:0], np.zeros(instance.count, np.int64), everything, kinds)
    chance = np.random.default_rng(instance.count)
    orders = _MOST_PLACED // instance.count
    move_kinds(attempt, "first fit by size, alike moved", all_kinds, ranks, chance, orders, _PATIENCE)


def move_kinds(
    attempt: Attempt,
    method: str,
    kinds: Kinds,
    ranks: NDArray[np.float64],
    chance: np.random.Generator,
    orders: int,
    patience: int,
) -> int:
    """Try at most so many orders, beginning with the given one, until a placement is good or so many in a row gained nothing; how many were tried."""
    target = attempt.target()
    best, failed, tried = None, 0, 0
    over = np.zeros(0, np.int64)
    while (
        tried < orders and failed < patience and not attempt.good() and attempt.afford(TREE_WORK * kinds.instance.count)
    ):
        moved = ranks if best is None else _moved(kinds, ranks, over, chance)
        offsets, height = kinds.placed(moved)
        attempt.offer(method, offsets, height)
        over_now = np.maximum(reached(kinds.instance, offsets) - target, 0)
        found = (int(over_now.sum()), height)
        tried += 1
        failed = 0 if best is None or found < best else failed + 1
        if best is None or found <= best:
            best, over, ranks = found, over_now, moved
    return tried


def _moved(kinds: Kinds, ranks: NDArray[np.float64], over: Int64s, chance: np.random.Generator) -> NDArray[np.float64]:
    """Ranks with one kind or two that live where it is too high put before others."""
    section = chance.choice(np.flatnonzero(over)) if over.any() else 0
    there = kinds.live_in(int(section))
    moved = ranks.copy()
    for _ in range(1 + chance.integers(2)):
        others = there if chance.random() < _AMONG_NEIGHBOURS else np.arange(len(ranks))
        moved[chance.choice(there)] = ranks[chance.choice(others)] - _BEFORE * chance.random()
    return moved


def _kinds(instance: Instance) -> tuple[Int64s, NDArray[np.float64]]:
    """The kind of each buffer, and the place of each kind in the order: that of its size, largest first."""
    pairs, kinds = np.unique(np.stack((instance.sizes, instance.widths())), axis=1, return_inverse=True)
    _, ranks = np.unique(-pairs[0], return_inverse=True)
    return kinds.reshape(-1), ranks.reshape(-1).astype(np.float64)
