"""Compute time of a stage's ranks in a step; they have equal work, so a slow one stands out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Mesh, Rank


class ComputeTimes:
    """Seconds that this process's ranks spend in compute instructions, in the current step."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._begun = np.zeros((mesh.stages, mesh.lanes))
        self.seconds = np.zeros((mesh.stages, mesh.lanes))
        """shape [stages, ranks of a stage]"""

    def begin_step(self) -> None:
        """Reset all seconds to 0."""
        self.seconds[:] = 0.0

    def begin(self, rank: Rank) -> None:
        """Record that a rank begins a compute instruction."""
        self._begun[rank.stage, self._mesh.lane(rank)] = time.perf_counter()

    def complete(self, rank: Rank) -> None:
        """Record that it has ended."""
        place = rank.stage, self._mesh.lane(rank)
        self.seconds[place] += time.perf_counter() - self._begun[place]


@frozen
class StageCompute:
    """Compute seconds of a stage's ranks in a step."""

    least: float
    median: float
    most: float
    slowest: str
    """name of the rank that took most"""

    @classmethod
    def of_step(cls, mesh: Mesh, seconds: NDArray[Any]) -> tuple[StageCompute, ...]:
        """Return the summary of every stage from the seconds of all ranks, shape [stages, ranks of a stage]."""
        return tuple(
            cls(
                float(taken.min()),
                float(np.median(taken)),
                float(taken.max()),
                mesh.name(mesh.in_lane(stage, int(taken.argmax()))),
            )
            for stage, taken in enumerate(seconds)
        )
