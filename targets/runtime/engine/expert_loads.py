"""Counts of the rows that routers send to each expert, and their summary for a step.

A rank counts what its own tokens need, layer by layer, after each forward. Where 8 tokens of a step choose 2 of 4
experts, an expert has 4 rows on average:

    rows 4 4 4 4    busiest 1.0, idle 0        rows 8 8 0 0    busiest 2.0, idle 2

On a device nothing is counted, as the host would have to wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.ops.compute import Forward
from ratrain.ratrain_ir.ops.expert_ranks import Route

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.runtime.engine.rank import BoundRoutine, RankExecutor


@frozen
class ExpertLoad:
    """Imbalance of experts in a step: the largest of all layers and ranks."""

    busiest: float
    """rows of a layer's busiest expert, over the mean of the layer's experts"""
    idle: int
    """experts of one layer without a row"""

    @classmethod
    def largest(cls, loads: Iterable[ExpertLoad]) -> ExpertLoad | None:
        """Return the larger value of each field; None if there are none."""
        loads = list(loads)
        return cls(max(load.busiest for load in loads), max(load.idle for load in loads)) if loads else None


class ExpertLoads:
    """Counts of one process since they were last cleared."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], dict[str, NDArray[np.int64]]] = {}
        """rows of each expert by block, for each rank (stage and lane): one thread counts for it"""

    def watch(self, rank: RankExecutor, instruction: Instruction, bound: BoundRoutine) -> None:
        """Count after each call of a routine that routes in the forward. Tensor-parallel ranks all route alike."""
        # a forward groups rows with bytes that its last products read; those of its choice may be in use again
        chosen = bound.argument("route_forward", "chosen") if instruction.keyword == Route.keyword else None
        bounds = bound.argument("group_rows", "bounds") if instruction.keyword == Forward.keyword else None
        if (chosen is None and bounds is None) or rank.peer:
            return
        experts = bound.argument("route_forward", "logits").shape[1]
        of_rank = self._counts.setdefault((rank.stage_index, rank.lane), {})
        counts = of_rank.setdefault(instruction.blocks[0], np.zeros(experts, np.int64))
        bound.then(_add_rows, {"chosen": chosen, "bounds": bounds, "counts": counts})

    def clear(self) -> None:
        """Begin a step."""
        for of_rank in self._counts.values():
            for counts in of_rank.values():
                counts.fill(0)

    def summary(self) -> ExpertLoad | None:
        """Return the largest imbalance so far; None if nothing was counted."""
        return ExpertLoad.largest(
            ExpertLoad(float(counts.max() * len(counts) / counts.sum()), int((counts == 0).sum()))
            for of_rank in self._counts.values()
            for counts in of_rank.values()
            if counts.any()
        )


def _add_rows(
    chosen: NDArray[np.int32] | None, bounds: NDArray[np.int32] | None, counts: NDArray[np.int64], **_: Any
) -> None:
    """Add the rows of each expert, by the bounds of grouped rows or by the choice."""
    if bounds is not None:
        counts += np.diff(bounds)
    elif chosen is not None:
        counts += np.bincount(chosen.reshape(-1), minlength=len(counts))
