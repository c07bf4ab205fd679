"""Ranks whose compute takes much longer than that of ranks with the same work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ratrain.ratrain_ir.diagnostics import Diagnostic, Severity

_FACTOR = 3.0
_LEAST_EXCESS = 0.1
"""Seconds: less is noise of a shared machine."""
_QUIET_STEPS = 10


@define(eq=False)
class Stragglers:
    """Compares every step's compute seconds, shape [stages, replicas], with the best that any replica of the stage has shown."""

    best: NDArray[Any] | None = None
    """by stage, without the first step, in which kernels are loaded"""
    warned: dict[tuple[int, int], int] = field(factory=dict)

    def look(self, step: int, seconds: NDArray[Any]) -> Iterator[Diagnostic]:
        """Take a step into account; warnings of ranks that are slow, of each at most once in ten steps."""
        if self.best is None:
            self.best = np.full(len(seconds), np.inf)
            return
        self.best = np.minimum(self.best, seconds.min(axis=1))
        slow = (seconds > _FACTOR * self.best[:, None]) & (seconds > self.best[:, None] + _LEAST_EXCESS)
        for stage, replica in np.argwhere(slow).tolist():
            if step - self.warned.get((stage, replica), -_QUIET_STEPS) < _QUIET_STEPS:
                continue
            self.warned[stage, replica] = step
            took, best = seconds[stage, replica], self.best[stage]
            text = (
                f"straggler: stage @{stage} replica {replica} computed for {took:.2f} s in step {step}; "
                f"the same work has taken {best:.2f} s"
            )
            yield Diagnostic("RT093", text, severity=Severity.WARNING)
