"""Changes of a stage's list that take bytes: decided one by one on its live-byte curve, then held against the arena."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.module import Stage


@define(eq=False)
class ChangesWithinBudget(ABC):
    """Changes of one stage in the order in which they were decided; the list is rebuilt once they are final."""

    stage: Stage
    trials: Trials
    budget: int
    """Bytes of the arena."""
    lag: float = field(init=False)
    """Seconds by which other engines may lag; changes leave the bytes for it."""
    curve: NDArray[np.int64] = field(init=False)
    """Live bytes by position in the original list, with the changes decided so far."""

    def __attrs_post_init__(self) -> None:
        occupied = self.trials.occupancy(self.stage)
        self.lag = occupied.lag_within(self.budget)
        self.curve = occupied.within(self.lag).live_bytes

    @abstractmethod
    def rebuilt(self, count: int) -> Stage:
        """Return the stage with the first `count` changes made."""

    def most_that_fit(self, count: int) -> int:
        """Return the largest number, up to `count`, of first changes with which the arena stays within the budget.

        0 if it exceeds the budget with a single change.
        """
        if not count or self._fits(count):
            return count
        # Every change takes bytes, so what fits goes on fitting with fewer changes, and bisection applies. The curve is
        # only a lower bound of the arena, so few trials fail.
        low, high = 0, count - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._fits(middle) else (low, middle - 1)
        return low

    def _fits(self, count: int) -> bool:
        return self.trials.fits(self.rebuilt(count), self.lag, self.budget)
