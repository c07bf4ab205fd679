"""Live bytes over simulated time: from when a tensor's first write starts until its last access has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain_ir.ops import ENGINES
from ratrain_ir.types import aligned
from targets.program import Access

if TYPE_CHECKING:
    from targets.flat_program import Float64s, Int64s
    from targets.program import ProgramStage
    from targets.simulator import Timeline

_DEFINING = (Access.WRITE, Access.SCRATCH)


def live_curve(timeline: Timeline, stage: int) -> tuple[Float64s, Int64s]:
    """Times, ascending, and the live bytes of a stage from each of them on.

    A carried tensor is live from the start until its last access before it is written anew, and from its last writing to the end.
    """
    times: list[float] = []
    changes: list[int] = []
    end = float(timeline.ends.max(initial=0.0))
    for tensor, accesses in _accesses(timeline, stage).items():
        held = timeline.program.stages[stage].tensors[tensor]
        size = aligned(held.type.nbytes)
        since = until = 0.0
        live = held.carried
        for event, defines in accesses:
            if defines:
                if live:
                    times += [since, until]
                    changes += [size, -size]
                since, until, live = float(timeline.starts[event]), 0.0, True
            until = max(until, float(timeline.ends[event]))
        if live:
            times += [since, end if held.carried else until]
            changes += [size, -size]
    return _curve(times, changes)


def _accesses(timeline: Timeline, stage: int) -> dict[int, list[tuple[int, bool]]]:
    """By tensor, the events that access it and whether they define it, in an order that keeps the program's waits."""
    held = timeline.program.stages[stage]
    order = _operands_in_order(timeline, held, stage)
    found: dict[int, list[tuple[int, bool]]] = {number: [] for number in range(len(held.tensors))}
    for step in range(timeline.steps):
        for op, tensor, defines in order:
            found[tensor].append((step * timeline.ops + op, defines))
    return found


def _operands_in_order(timeline: Timeline, held: ProgramStage, stage: int) -> list[tuple[int, int, bool]]:
    firsts = {engine: timeline.ops_of(stage, engine)[0] for engine in ENGINES}
    return [
        (firsts[engine] + position, operand.tensor, operand.access in _DEFINING)
        for engine, position in held.execution_order()
        for operand in held.streams[engine][position].operands
    ]


def _curve(times: list[float], changes: list[int]) -> tuple[Float64s, Int64s]:
    """Bytes after all changes at each time; at one time bytes are freed before others are taken."""
    moments, places = np.unique(np.array(times), return_inverse=True)
    sums = np.zeros(len(moments), np.int64)
    np.add.at(sums, places, np.array(changes, np.int64))
    return moments, np.cumsum(sums)
