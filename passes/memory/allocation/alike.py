"""Move kinds of buffers in the order of first fit: the same tensor of every micro-batch moves together.

Moving one buffer of thousands would change one micro-batch, and every other one would stay as high as before. So a
*kind* that lives where the placement is too high is put before another kind, and everything is placed again. A result
that is no worse stays:

    order   A A A B B B C C C      too high where a C lives
    moved   A A A C C C B B B      place again: keep it unless it is worse

Cost: one first fit for each order tried. Guarantee: the first order tried is the given one, and the lowest placement
counts.
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

_AMONG_NEIGHBOURS = 0.7
"""Share of moves that put a kind before one that lives at the same time, not before any."""
_BEFORE = 0.01
"""Largest distance in rank at which a kind is put before another; neighbours are 1 apart."""


@frozen(eq=False)
class BufferKinds:
    """Buffers to place kind by kind around others that have their offsets."""

    instance: Instance
    fixed: Int64s
    """The buffers that have their offsets."""
    offsets: Int64s
    """Offsets of all buffers; only `fixed` buffers' offsets count."""
    moved: Int64s
    """The other buffers."""
    kinds: Int64s
    """The kind of each buffer in `moved`."""

    def placed(self, ranks: NDArray[np.float64]) -> tuple[Int64s, int]:
        """Place by first fit in the order of the kinds' ranks, ties by birth; return offsets and height."""
        births = self.instance.births()[self.moved]
        order = self.moved[np.lexsort((births, ranks[self.kinds]))]
        return placed_in_order(self.instance, np.concatenate((self.fixed, order)), self.offsets, len(self.fixed))

    def live_in(self, section: int) -> Int64s:
        """List the kinds of which a buffer lives in a section."""
        return np.unique(self.kinds[self.instance.lives_in(section)[self.moved]])


def move_kinds(
    attempt: Attempt,
    method: str,
    kinds: BufferKinds,
    ranks: NDArray[np.float64],
    chance: np.random.Generator,
    orders: int,
    patience: int,
) -> int:
    """Try at most `orders` orders, starting with the given one; return the number tried.

    It ends early when a placement is good, when `patience` orders in a row gained nothing, or when no work is left.
    """
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
        # Compare the excess over the target summed over time, then the height: less excess counts even at the same
        # height.
        found = (int(over_now.sum()), height)
        tried += 1
        failed = 0 if best is None or found < best else failed + 1
        # An equal result replaces the order too, so the search can cross plateaus.
        if best is None or found <= best:
            best, over, ranks = found, over_now, moved
    return tried


def _moved(
    kinds: BufferKinds, ranks: NDArray[np.float64], over: Int64s, chance: np.random.Generator
) -> NDArray[np.float64]:
    """Return ranks in which one or two kinds that live where it is too high stand before others."""
    section = chance.choice(np.flatnonzero(over)) if over.any() else 0
    there = kinds.live_in(int(section))
    moved = ranks.copy()
    for _ in range(1 + chance.integers(2)):
        others = there if chance.random() < _AMONG_NEIGHBOURS else np.arange(len(ranks))
        moved[chance.choice(there)] = ranks[chance.choice(others)] - _BEFORE * chance.random()
    return moved
