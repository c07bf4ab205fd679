"""How long a run will still take."""

from __future__ import annotations

import time
from collections.abc import Callable

from attrs import define, field


@define
class RemainingTime:
    """Judged by the steps after the first one, in which kernels are loaded or compiled."""

    total_steps: int
    clock: Callable[[], float] = time.monotonic
    """seconds"""
    _done: int = field(init=False, default=0)
    _first_end: float = field(init=False, default=0.0)
    _last_end: float = field(init=False, default=0.0)

    def step_done(self) -> None:
        """Note that a step has ended just now."""
        self._done += 1
        self._last_end = self.clock()
        if self._done == 1:
            self._first_end = self._last_end

    @property
    def seconds(self) -> float | None:
        """Seconds from the last step's end to the end of the run; None before the second step has ended."""
        if self._done < 2:
            return None
        return (self._last_end - self._first_end) / (self._done - 1) * (self.total_steps - self._done)
