"""Place a few hundred buffers in plain Python: first and best fit in several orders, without importing a compiler.

    order by size  D C A B         D      C      A      B       each at the lowest free
    address        | D D D D | C C C | A A | B |                offset that is large enough

Cost: for each order as many steps as there are pairs of buffers that meet. Guarantee: none; the lowest placement
counts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation import orders

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Instance, Int64s

_PROMOTIONS = 20
"""Orders that are tried when buffers too high move forward."""


def small_portfolio(attempt: Attempt) -> None:
    """Offer best fit by size and first fit in five more orders, until one is good."""
    instance = attempt.instance
    sizes, meets = instance.sizes.tolist(), neighbours(instance)

    def candidates() -> Iterator[tuple[str, Int64s, bool]]:
        yield "best fit by size", orders.by_size(instance), True
        yield "first fit by start", orders.by_start(instance), False
        for name, order in orders.costly_orders(instance):
            yield f"first fit by {name}", order, False

    for name, order, best in candidates():
        offsets = greedy(order.tolist(), sizes, meets, best=best)
        _offer_list(attempt, name, offsets, sizes)
        if attempt.good() or attempt.late():
            return


def small_promotions(attempt: Attempt) -> None:
    """Place again with buffers that stick out above the bound earlier in the order."""
    sizes, meets = attempt.instance.sizes.tolist(), neighbours(attempt.instance)
    chance = random.Random(attempt.instance.count)  # noqa: S311 - the same numbers every time are the point
    order = np.argsort(attempt.offsets, kind="stable").tolist()
    offsets = attempt.offsets.tolist()
    for _ in range(_PROMOTIONS):
        if attempt.enough() or attempt.late():
            return
        rank = {buffer: float(place) for place, buffer in enumerate(order)}
        for buffer in order:
            if offsets[buffer] + sizes[buffer] > attempt.bound:
                # A smaller rank comes earlier: chance decides how far, so that rounds differ.
                rank[buffer] *= chance.random()
        order.sort(key=rank.__getitem__)
        offsets = greedy(order, sizes, meets, best=False)
        _offer_list(attempt, "first fit with promotions", offsets, sizes)


def neighbours(instance: Instance) -> list[list[int]]:
    """Return for each buffer the indices of those it may not share bytes with."""
    starts, stops, first = instance.starts.tolist(), instance.stops.tolist(), instance.first.tolist()
    sides = instance.sides.tolist()
    masks = []
    for i in range(instance.count):
        mask = 0
        for k in range(first[i], first[i + 1]):
            # Sections as bits of one integer: two buffers meet if their masks have a common bit.
            mask |= (1 << stops[k]) - (1 << starts[k])
        masks.append(mask)
    met: list[list[int]] = [[] for _ in masks]
    for i, mask in enumerate(masks):
        for j in range(i):
            if mask & masks[j] or sides[i] * sides[j] < 0:
                met[i].append(j)
                met[j].append(i)
    return met


def greedy(order: list[int], sizes: list[int], meets: list[list[int]], *, best: bool) -> list[int]:
    """Place buffers in order, each into a gap among the placed ones it meets; return the offsets.

    The gap is the lowest that is large enough, or with `best` the tightest.
    """
    offsets = [-1] * len(sizes)
    for buffer in order:
        size = sizes[buffer]
        taken = sorted(
            (offsets[other], offsets[other] + sizes[other]) for other in meets[buffer] if offsets[other] >= 0
        )
        reached = 0
        gap, slack = -1, -1
        # Go up by address; `reached` is the end of all bytes below, since taken ranges may overlap.
        for low, high in taken:
            spare = low - reached - size
            if spare >= 0 and (gap < 0 or spare < slack):
                gap, slack = reached, spare
                if not best or spare == 0:
                    break
            reached = max(reached, high)
        offsets[buffer] = gap if gap >= 0 else reached
    return offsets


def _offer_list(attempt: Attempt, name: str, offsets: list[int], sizes: list[int]) -> None:
    height = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
    attempt.offer(name, np.array(offsets, np.int64), height)
