"""The inner loop of `ratrain.ratrain_ir.analysis.progress`, over numbers alone: compiled for many events, plain Python for few.

It takes lists as well as arrays.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.support.native_loops import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EDGES = 300_000
"""A fifth of a second of plain Python: less than it takes to compile the loop where it is not kept."""
ALLOWANCE = Allowance(_EDGES)


def stuck_events(events: int, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """The events that never happen, where the source of each edge comes before its target: those of cycles, and what waits for them."""
    later = targets[np.argsort(sources, kind="stable")]
    ends = np.cumsum(np.bincount(sources, minlength=events))
    waiting = np.bincount(targets, minlength=events)
    first = np.flatnonzero(waiting == 0)
    ready, count = np.concatenate((first, np.zeros(events - len(first), np.int64))), len(first)
    if ALLOWANCE.take(len(targets)):
        left = waiting.tolist()
        drain(ends.tolist(), later.tolist(), left, ready.tolist(), count)
        return np.array(left, np.int64) > 0
    _compiled()(ends, later, waiting, ready, count)
    return waiting > 0


@cache
def _compiled() -> Any:
    return native(drain)


def drain(ends: Any, later: Any, waiting: Any, ready: Any, count: int) -> None:
    """Kahn's algorithm: `waiting` has afterwards how many each event still waits for. The first `count` are ready."""
    done = 0
    while done < count:
        event = ready[done]
        done += 1
        for place in range(0 if event == 0 else ends[event - 1], ends[event]):
            target = later[place]
            waiting[target] -= 1
            if waiting[target] == 0:
                ready[count] = target
                count += 1
