"""The time of a search: when it is over, how long an evaluation is expected to take, and how long it may take."""

from __future__ import annotations

import time
from math import inf, log2
from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation

_PATIENCE = 3
"""Factor on the time of the search while nothing fits."""
_SECONDS_A_UNIT = 0.02
"""Guess for the first evaluation; then measured times count."""
_FIRST_UNITS = 200.0
"""Units of work that the first guess counts for."""
_LEAST_SECONDS = 20.0
"""Time that any evaluation may take while there is no answer without it."""
_LAST_SECONDS = 2.0
"""Time that one may take near the end of the search, once a plan fits."""
_CHEAP = 0.1
"""Share of the time; evaluations that take no longer are ordered by their promise alone."""
_DEARER = 0.03
"""Extra cost of a plan for each doubling of its evaluation time over a cheap one."""


@define
class TimeBudget:
    """The time of one search."""

    seconds: float
    """time of the search; infinite for one that goes on until nothing is left"""
    _begin: float = 0.0
    _taken: float = _SECONDS_A_UNIT * _FIRST_UNITS
    _units: float = _FIRST_UNITS
    _stops: int = 0

    def begin(self) -> None:
        """Start the clock."""
        self._begin = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    def is_over(self, left: float = 0.0) -> bool:
        """Return True if the time is over, up to half of it being reserved for `left` units of work at the end."""
        # work that takes longer is not done at the end either (`is_affordable`), so nothing is reserved for it
        reserved = self.expected(left)
        return self.elapsed + (reserved if reserved <= self.seconds / 2 else 0.0) >= self.seconds

    @property
    def is_over_without_a_plan(self) -> bool:
        """True if the time is over while nothing fits."""
        return self.elapsed >= _PATIENCE * self.seconds

    def learn(self, units: float, evaluation: PlanEvaluation) -> None:
        """Take the time of an evaluation into account."""
        self._taken += evaluation.taken
        self._units += units
        self._stops += evaluation.stopped

    def expected(self, units: float) -> float:
        """Return the expected seconds of an evaluation of `units` units of work."""
        return units * self._taken / self._units

    def is_affordable(self, units: float) -> bool:
        """Return True if an evaluation is expected to end in time, or to take no time to speak of."""
        return self.expected(units) <= max(self.seconds - self.elapsed, _LAST_SECONDS)

    def allowed(self, *, fits: bool, last: bool = False) -> float | None:
        """Return the time limit of an evaluation; while nothing fits, it doubles each time one was stopped.

        The `last` of a search may take a while longer than its time.
        """
        if self.seconds == inf:
            return None
        if fits:
            return max(self.seconds - self.elapsed, self._shortest if last else _LAST_SECONDS)
        return self._shortest * 2.0**self._stops

    @property
    def _shortest(self) -> float:
        return max(self.seconds / 2, _LEAST_SECONDS)

    def dearness(self, units: float) -> float:
        """Return the factor on a plan's order for the time of its evaluation."""
        if self.seconds == inf:
            return 1.0
        # below this the time of an evaluation does not matter to the order
        cheap = max(_CHEAP * self.seconds, _LEAST_SECONDS / 10)
        return 1 + _DEARER * max(0.0, log2(self.expected(units) / cheap))
