"""The best placement so far, and the rest of the effort."""

from __future__ import annotations

from time import perf_counter

import numpy as np
from attrs import define, field

from ratrain.passes.memory.allocation.cliques import MOST_HOLED, heaviest_clique
from ratrain.passes.memory.allocation.effort import Effort
from ratrain.passes.memory.allocation.problem import Instance, Int64s

_SLOWEST = 4_000_000
"""Placements a second on a slow machine: nothing is begun that would run far beyond the outer limit."""
_PARTS = 1_000_000
"""Gaps are compared in integers, in parts per million, so that scaling all sizes changes nothing."""


@define(eq=False)
class Attempt:
    """One instance being placed above `base` bytes that are taken."""

    instance: Instance
    base: int
    room: int | None
    """Height that fits the capacity, if there is one; may be negative."""
    effort: Effort
    deadline: float
    bound: int
    """Height that no placement can be below."""
    offsets: Int64s
    height: int
    method: str
    all_or_nothing: bool = False
    """True where a height that does not fit is of no use."""
    work: int = field(init=False)
    nodes: int = field(init=False)

    @classmethod
    def of(
        cls,
        instance: Instance,
        base: int,
        room: int | None,
        effort: Effort,
        deadline: float,
        *,
        all_or_nothing: bool = False,
    ) -> Attempt:
        """Begin with everything on top of everything else."""
        stacked = np.cumsum(instance.sizes) - instance.sizes
        height = int(instance.sizes.sum())
        bound = instance.bound()
        return cls(instance, base, room, effort, deadline, bound, stacked, height, "stacked", all_or_nothing)

    def __attrs_post_init__(self) -> None:
        self.work, self.nodes = self.effort.work, self.effort.nodes

    def raise_bound(self) -> None:
        """Raise the bound by what holes in lives cost, if the best placement is not near enough without."""
        if not self.instance.plain and not self.good() and self.afford(MOST_HOLED**2 * self.instance.count):
            self.bound = max(self.bound, heaviest_clique(self.instance))

    def offer(self, method: str, offsets: Int64s, height: int) -> None:
        """Keep a placement if it is better than the best so far."""
        if height < self.height:
            self.offsets, self.height, self.method = offsets, height, method

    def of_use_below(self) -> int:
        """Return the height from which on another placement is useless."""
        if self.room is None or not self.all_or_nothing:
            return self.height
        return min(self.height, self.room + 1)

    def close(self, height: int, gap: float | None = None) -> bool:
        """Tell whether a height is as near the bound as a gap says, or without one as the effort asks."""
        whole = self.base + self.bound
        gap = self.effort.gap if gap is None else gap
        return (self.base + height - whole) * _PARTS <= whole * round(gap * _PARTS)

    def target(self) -> int:
        """Return the largest height that is as near the bound as the effort asks, and fits."""
        near = self.bound + (self.base + self.bound) * round(self.effort.gap * _PARTS) // _PARTS
        return near if self.room is None else min(near, self.room)

    def good(self) -> bool:
        """Tell whether the best is as near the bound as the effort asks, and fits."""
        return self.close(self.height) and self.fits()

    def fits(self) -> bool:
        """Tell whether the best fits the capacity, if there is one."""
        return self.room is None or self.height <= self.room

    def enough(self) -> bool:
        """Tell whether search may end.

        It may if the best fits (without a capacity: is near enough), or if nothing better is possible.
        """
        if self.height <= self.bound or (self.room is not None and self.room < self.bound):
            return True
        return self.good() if self.room is None else self.fits()

    def seconds(self) -> float:
        """Return the seconds left before the outer limit."""
        return max(0.0, self.deadline - perf_counter())

    def late(self) -> bool:
        """Tell whether the outer limit is reached."""
        return self.seconds() == 0

    def afford(self, work: int) -> bool:
        """Spend work if that much is left, and time for it; return whether it was spent."""
        if work > self.work or work > self.seconds() * _SLOWEST:
            return False
        self.work -= work
        return True
