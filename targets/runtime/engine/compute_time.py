"""What ranks of a stage, which have the same work, took for it in a step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Mesh, Rank


class ComputeTimes:
    """Seconds in compute instructions of the ranks that a process runs, in the step it is in."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._begun = np.zeros((mesh.stages, mesh.lanes))
        self.seconds = np.zeros((mesh.stages, mesh.lanes))
        """by stage and rank of it"""

    def begin_step(self) -> None:
        """Count from nothing."""
        self.seconds[:] = 0.0

    def begin(self, rank: Rank) -> None:
        """A rank begins a compute instruction."""
        self._begun[rank.stage, self._mesh.lane(rank)] = time.perf_counter()

    def complete(self, rank: Rank) -> None:
        """It is done."""
        place = rank.stage, self._mesh.lane(rank)
        self.seconds[place] += time.perf_counter() - self._begun[place]


@frozen
class StageCompute:
    """Compute seconds of the ranks of a stage in a step."""

    least: float
    median: float
    most: float
    slowest: str
    """the rank that took most, as messages call it"""

    @classmethod
    def of_step(cls, mesh: Mesh, seconds: NDArray[Any]) -> tuple[StageCompute, ...]:
        """Of every stage, from the seconds of all ranks, shape [stages, ranks of a stage]."""
        return tuple(
            cls(
                float(taken.min()),
                float(np.median(taken)),
                float(taken.max()),
                mesh.name(mesh.in_lane(stage, int(taken.argmax()))),
            )
            for stage, taken in enumerate(seconds)
        )
