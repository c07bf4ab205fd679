"""Bound the height where lives have holes: buffers that meet pairwise share no byte, even if never all live at once.

Where each buffer has one interval, buffers that meet pairwise live at one time, and the live bytes are the whole bound.
A buffer that is written anew (a view between its last use and its next gather, a workspace between two uses) has holes.
A buffer that lives in a hole, and meets the first one before or after it, cannot take its bytes:

    H  ===      ===      H = 3 bytes, with a hole
    x     ========       x = 5 bytes, lives in the hole and meets H after it
       at most 5 live    yet both need 8

So the buffer's own bytes are needed in addition to all live ones that meet it.

Cost: for each of at most 24 buffers with holes, as many sums of live bytes. Guarantee: no placement is lower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.problem import Instance

MOST_HOLED = 24
"""Most buffers with holes to make sets of, the largest first."""


def heaviest_clique(instance: Instance) -> int:
    """Return the most bytes found in a set of buffers that meet pairwise; no placement is lower.

    A set begins with one of the largest buffers with holes, and grows greedily: the next buffer is the one that leaves
    most bytes, counting the largest live sum of buffers that meet all of the set.
    """
    heaviest = int(instance.load().max(initial=0))
    holed = np.flatnonzero(np.diff(instance.first) > 1)
    holed = holed[np.argsort(-instance.sizes[holed], kind="stable")][:MOST_HOLED]
    meets = {buffer: _met_by(instance, buffer) for buffer in holed.tolist()}
    for seed, met in meets.items():
        # `weight`: bytes of the set. `common`: the buffers that meet all of it; their live bytes at one time come on
        # top.
        weight, common = int(instance.sizes[seed]), met
        reached = weight + _most(instance, common)
        while True:
            heaviest = max(heaviest, reached)
            more = {other: common & meets[other] for other in meets if common[other]}
            if not more:
                break
            sums = {other: int(instance.sizes[other]) + _most(instance, both) for other, both in more.items()}
            best = max(sums, key=sums.__getitem__)
            if weight + sums[best] < reached:
                break
            reached = weight + sums[best]
            weight, common = weight + int(instance.sizes[best]), more[best]
    return heaviest


def _most(instance: Instance, chosen: NDArray[np.bool_]) -> int:
    return int(instance.load_of(chosen).max(initial=0))


def _met_by(instance: Instance, buffer: int) -> NDArray[np.bool_]:
    """Return which other buffers live at some time at which one does."""
    mine = slice(instance.first[buffer], instance.first[buffer + 1])
    lives = np.zeros(instance.sections + 1, np.int64)
    lives[instance.starts[mine]] += 1
    lives[instance.stops[mine]] -= 1
    # Prefix sums of the sections in which `buffer` lives: an interval meets it if its sum grows from start to stop.
    until = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.cumsum(lives)[:-1])))
    shared = until[instance.stops] > until[instance.starts]
    met: NDArray[np.bool_] = np.logical_or.reduceat(shared, instance.first[:-1])
    met[buffer] = False
    return met
