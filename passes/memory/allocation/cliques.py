"""A bound for lives with holes: buffers each of which meets each other share no byte, though there may be no time at which they all live.

Where each buffer has one interval, all that meet each other live at one time, and the live bytes are the whole bound. A buffer that is written anew
(a view between its last use and its next gather, a workspace between two uses) has holes: what lives in one of them, and meets it before
or after, cannot take its bytes. So the bytes that live at that time, but for those that never meet it, and its own are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.problem import Instance

MOST_HOLED = 24
"""Buffers with holes, the largest ones, of which sets are made."""


def heaviest_clique(instance: Instance) -> int:
    """The most bytes found of buffers each of which meets each other, or live at one time; no placement is lower.

    To each of the largest buffers with holes those are added, one by one, that leave most: with what lives at the best time and meets all of them.
    """
    heaviest = int(instance.load().max(initial=0))
    holed = np.flatnonzero(np.diff(instance.first) > 1)
    holed = holed[np.argsort(-instance.sizes[holed], kind="stable")][:MOST_HOLED]
    meets = {buffer: _met_by(instance, buffer) for buffer in holed.tolist()}
    for seed, met in meets.items():
        weight, beside = int(instance.sizes[seed]), met
        reached = weight + _most(instance, beside)
        while True:
            heaviest = max(heaviest, reached)
            more = {other: beside & meets[other] for other in meets if beside[other]}
            if not more:
                break
            sums = {other: int(instance.sizes[other]) + _most(instance, both) for other, both in more.items()}
            best = max(sums, key=sums.__getitem__)
            if weight + sums[best] < reached:
                break
            reached = weight + sums[best]
            weight, beside = weight + int(instance.sizes[best]), more[best]
    return heaviest


def _most(instance: Instance, chosen: NDArray[np.bool_]) -> int:
    return int(instance.load_of(chosen).max(initial=0))


def _met_by(instance: Instance, buffer: int) -> NDArray[np.bool_]:
    """Which other buffers live at some time at which one does."""
    mine = slice(instance.first[buffer], instance.first[buffer + 1])
    lives = np.zeros(instance.sections + 1, np.int64)
    lives[instance.starts[mine]] += 1
    lives[instance.stops[mine]] -= 1
    until = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.cumsum(lives)[:-1])))
    shared = until[instance.stops] > until[instance.starts]
    met: NDArray[np.bool_] = np.logical_or.reduceat(shared, instance.first[:-1])
    met[buffer] = False
    return met
