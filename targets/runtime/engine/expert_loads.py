"""Counts of the rows that routers send to each expert, and their summary for a step.

A rank counts what its own tokens need, layer by layer, after each forward. Where 8 tokens of a step choose 2 of 4
experts, an expert has 4 rows on average:

    rows 4 4 4 4    busiest 1.0, idle 0        rows 8 8 0 0    busiest 2.0, idle 2

Where expert ranks send an expert no more rows than its capacity, the rows above it are counted too, for each
micro-batch: with capacity 5, of rows 8 8 0 0 six of sixteen are dropped.

On a device nothing is counted, as the host would have to wait for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.model.expert_ranks import capacity_of
from ratrain.ratrain_ir.ops.compute import Forward
from ratrain.ratrain_ir.ops.expert_ranks import Route

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.runtime.engine.rank import BoundRoutine, RankExecutor


@frozen
class ExpertLoad:
    """Imbalance of experts in a step, the largest of all layers and ranks; and dropped rows of all."""

    busiest: float
    """rows of a layer's busiest expert, over the mean of the layer's experts"""
    idle: int
    """experts of one layer without a row"""
    dropped: int = 0
    """rows that no expert computes, of all layers"""
    rows: int = 0
    """rows of all layers, if any may be dropped; else 0"""

    @classmethod
    def of_all(cls, loads: Iterable[ExpertLoad]) -> ExpertLoad | None:
        """Return the larger imbalance and the sums of rows; None if there are none."""
        loads = list(loads)
        if not loads:
            return None
        sums = sum(load.dropped for load in loads), sum(load.rows for load in loads)
        return cls(max(load.busiest for load in loads), max(load.idle for load in loads), *sums)

    @property
    def dropped_share(self) -> float | None:
        """Part of all rows that is dropped; None if none may be."""
        return self.dropped / self.rows if self.rows else None


class ExpertLoads:
    """Counts of one process since they were last cleared."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], dict[str, NDArray[np.int64]]] = {}
        """rows of each expert by block, for each rank (stage and lane): one thread counts for it. Behind them is the
        number of dropped rows."""
        self._capacity: int | None = None
        """most rows of an expert that a rank sends; None: all"""

    def watch(self, rank: RankExecutor, instruction: Instruction, bound: BoundRoutine) -> None:
        """Count after each call of a routine that routes in the forward. Tensor-parallel ranks all route alike."""
        # a forward groups rows with bytes that its last products read; those of its choice may be in use again
        chosen = bound.argument("route_forward", "chosen") if instruction.keyword == Route.keyword else None
        bounds = bound.argument("group_rows", "bounds") if instruction.keyword == Forward.keyword else None
        if (chosen is None and bounds is None) or rank.peer:
            return
        experts = bound.argument("route_forward", "logits").shape[1]
        of_rank = self._counts.setdefault((rank.stage_index, rank.lane), {})
        counts = of_rank.setdefault(instruction.blocks[0], np.zeros(experts + 1, np.int64))
        self._capacity = capacity_of(rank.program.model, rank.program.plan)
        bound.then(_add_rows, {"chosen": chosen, "bounds": bounds, "counts": counts, "capacity": self._capacity})

    def clear(self) -> None:
        """Begin a step."""
        for of_rank in self._counts.values():
            for counts in of_rank.values():
                counts.fill(0)

    def summary(self) -> ExpertLoad | None:
        """Return the largest imbalance so far; None if nothing was counted."""
        counted = [counts for of_rank in self._counts.values() for counts in of_rank.values() if counts.any()]
        return ExpertLoad.of_all(self._load(counts[:-1], int(counts[-1])) for counts in counted)

    def _load(self, rows: NDArray[np.int64], dropped: int) -> ExpertLoad:
        """Return the load of a layer of a rank."""
        total = int(rows.sum())
        busiest, idle = float(rows.max() * len(rows) / total), int((rows == 0).sum())
        return ExpertLoad(busiest, idle, dropped, 0 if self._capacity is None else total)


def _add_rows(
    chosen: NDArray[np.int32] | None,
    bounds: NDArray[np.int32] | None,
    counts: NDArray[np.int64],
    capacity: int | None,
    **_: Any,
) -> None:
    """Add the rows of each expert, by the bounds of grouped rows or by the choice; and those above a capacity."""
    if bounds is not None:
        counts[:-1] += np.diff(bounds)
    elif chosen is not None:
        rows = np.bincount(chosen.reshape(-1), minlength=len(counts) - 1)
        counts[:-1] += rows
        if capacity is not None:
            counts[-1] += np.maximum(rows - capacity, 0).sum()
