"""Ranks whose compute takes much longer than that of ranks with the same work.

A rank is slow in a step if it takes over 3 times, and over 0.1 s more than, the best step of any rank of its stage.
"""

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
"""Seconds; a smaller excess is noise of a shared machine."""
_QUIET_STEPS = 10


@define(eq=False)
class Stragglers:
    """Comparison of every step's compute seconds with the best that any rank of the same stage has shown."""

    mesh: Mesh
    best: NDArray[Any] | None = None
    """best seconds by stage; None before the first step, which does not count: it loads kernels"""
    warned: dict[Rank, int] = field(factory=dict)

    def look(self, step: int, seconds: NDArray[Any]) -> Iterator[Diagnostic]:
        """Take the seconds of a step, shape [stages, ranks of a stage], into account; yield warnings of slow ranks.

        Each rank is warned of at most once in ten steps.
        """
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
