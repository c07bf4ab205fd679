"""Ranks whose compute takes much longer than that of ranks with the same work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ratrain.ratrain_ir.support.diagnostics import Diagnostic, Severity
from ratrain.ratrain_ir.topology import Mesh, Rank

_FACTOR = 3.0
_LEAST_EXCESS = 0.1
"""Seconds: less is noise of a shared machine."""
_QUIET_STEPS = 10


@define(eq=False)
class Stragglers:
    """Compares every step's compute seconds, shape [stages, ranks of a stage], with the best that any rank of the stage has shown."""

    mesh: Mesh
    best: NDArray[Any] | None = None
    """by stage, without the first step, in which kernels are loaded"""
    warned: dict[Rank, int] = field(factory=dict)

    def look(self, step: int, seconds: NDArray[Any]) -> Iterator[Diagnostic]:
        """Take a step into account; warnings of ranks that are slow, of each at most once in ten steps."""
        if self.best is None:
            self.best = np.full(len(seconds), np.inf)
            return
        self.best = np.minimum(self.best, seconds.min(axis=1))
        slow = (seconds > _FACTOR * self.best[:, None]) & (seconds > self.best[:, None] + _LEAST_EXCESS)
        for stage, lane in np.argwhere(slow).tolist():
            rank = self.mesh.in_lane(stage, lane)
            if step - self.warned.get(rank, -_QUIET_STEPS) < _QUIET_STEPS:
                continue
            self.warned[rank] = step
            took, best = seconds[stage, lane], self.best[stage]
            text = (
                f"straggler: {self.mesh.name(rank)} computed for {took:.2f} s in step {step}; "
                f"the same work has taken {best:.2f} s"
            )
            yield Diagnostic("RT093", text, severity=Severity.WARNING)
