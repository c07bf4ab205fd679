"""How long a search goes on, what an evaluation is expected to take of that, and how long it may take."""

from __future__ import annotations

import time
from math import inf, log2
from typing import TYPE_CHECKING

from attrs import define

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.evaluation import Evaluation

_PATIENCE = 3
"""How many times the time for the search is used while nothing fits."""
_SECONDS_A_UNIT = 0.02
"""Of the first evaluation; from then on, what was seen counts."""
_FIRST_UNITS = 200.0
"""As many units of evaluations as that first guess counts for."""
_LEAST_SECONDS = 20.0
"""An evaluation may take so long whatever the time: without it there is no answer."""
_CHEAP = 0.1
"""of the time for the search: an evaluation that takes no longer is taken in the order of what it may find alone"""
_DEARER = 0.03
"""How much dearer a plan counts for each time that its evaluation is twice as long as a cheap one."""


@define
class EffortModel:
    """The time of one search."""

    seconds: float
    """for the search; infinite where it goes on until nothing is left"""
    _begin: float = 0.0
    _taken: float = _SECONDS_A_UNIT * _FIRST_UNITS
    _units: float = _FIRST_UNITS
    _stops: int = 0

    def begin(self) -> None:
        """Time runs from now on."""
        self._begin = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._begin

    def is_over(self, left: float = 0.0) -> bool:
        """Whether the time is over, so many units being left to evaluate at the end; of the time these may take half."""
        return self.elapsed + min(self.expected(left), self.seconds / 2) >= self.seconds

    @property
    def is_over_without_a_plan(self) -> bool:
        """The same while nothing fits."""
        return self.elapsed >= _PATIENCE * self.seconds

    def learn(self, units: float, evaluation: Evaluation) -> None:
        """Take into account how long an evaluation took."""
        self._taken += evaluation.taken
        self._units += units
        self._stops += evaluation.stopped

    def expected(self, units: float) -> float:
        """Seconds that an evaluation of so many units may take."""
        return units * self._taken / self._units

    def is_affordable(self, units: float) -> bool:
        """Whether it is expected to end in time."""
        return self.expected(units) <= max(self.seconds - self.elapsed, self._shortest)

    def allowed(self, *, fits: bool) -> float | None:
        """Seconds after which an evaluation that begins now is stopped; while nothing fits, longer each time one was."""
        if self.seconds == inf:
            return None
        if fits:
            return max(self.seconds - self.elapsed, self._shortest)
        return self._shortest * 2.0**self._stops

    @property
    def _shortest(self) -> float:
        return max(self.seconds / 2, _LEAST_SECONDS)

    def dearness(self, units: float) -> float:
        """By how much a plan counts as dearer for what its evaluation takes."""
        if self.seconds == inf:
            return 1.0
        cheap = max(_CHEAP * self.seconds, _LEAST_SECONDS / 10)
        return 1 + _DEARER * max(0.0, log2(self.expected(units) / cheap))
