"""First and best fit in plain Python, for problems too small to be worth a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import Instance


def neighbours(instance: Instance) -> list[list[int]]:
    """For each buffer, those it may not share bytes with, by index."""
    starts, stops, first = instance.starts.tolist(), instance.stops.tolist(), instance.first.tolist()
    sides = instance.sides.tolist()
    masks = []
    for i in range(instance.count):
        mask = 0
        for k in range(first[i], first[i + 1]):
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
    """Place buffers in order, each into the lowest gap among those it meets that were placed, or the tightest; the offsets."""
    offsets = [-1] * len(sizes)
    for buffer in order:
        size = sizes[buffer]
        taken = sorted(
            (offsets[other], offsets[other] + sizes[other]) for other in meets[buffer] if offsets[other] >= 0
        )
        reached = 0
        gap, slack = -1, -1
        for low, high in taken:
            spare = low - reached - size
            if spare >= 0 and (gap < 0 or spare < slack):
                gap, slack = reached, spare
                if not best or spare == 0:
                    break
            reached = max(reached, high)
        offsets[buffer] = gap if gap >= 0 else reached
    return offsets
