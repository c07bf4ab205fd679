"""Inner loop of `ProgramColumns.execution_order`, over numbers alone: compiled for many instructions, else Python.

The loop takes lists as well as arrays.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.support.native_loops import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

_INSTRUCTIONS = 50_000
"""Instructions that a process may sort in plain Python: about 0.05 s, less than compiling the loop takes if it is not
cached."""
ALLOWANCE = Allowance(_INSTRUCTIONS)


def ready_places(
    begins: NDArray[np.int64],
    lengths: NDArray[np.int64],
    wait_ends: NDArray[np.int64],
    engines: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Return the places of instructions, each behind all that it waits for, engine by engine as far as each gets.

    `begins` and `lengths` are of the stream of each engine. `wait_ends` is by instruction the exclusive end of its
    waits, given as `engines` and `counts`. Returns fewer places than instructions where engines wait for each other.
    """
    total = len(wait_ends)
    if ALLOWANCE.take(total):
        places: list[int] = [0] * total
        given = [each.tolist() for each in (begins, lengths, wait_ends, engines, counts)]
        loop: Any = sweep_ready
        return np.array(places[: loop(*given, [0] * len(lengths), places)], np.int64)
    order = np.empty(total, np.int64)
    return order[: _compiled()(begins, lengths, wait_ends, engines, counts, np.zeros(len(lengths), np.int64), order)]


@cache
def _compiled() -> Any:
    return native(sweep_ready)


def sweep_ready(begins: Any, lengths: Any, wait_ends: Any, engines: Any, counts: Any, done: Any, order: Any) -> int:
    """Fill `order` with places and return their number; `done` counts the sorted instructions of each engine.

    Sweeps over the engines until a sweep finds nothing new: O(waits) for each engine that another one has to be visited
    for.
    """
    found, before = 0, -1
    while before < found:
        before = found
        for engine in range(len(lengths)):
            while done[engine] < lengths[engine]:
                place = begins[engine] + done[engine]
                met = True
                for wait in range(0 if place == 0 else wait_ends[place - 1], wait_ends[place]):
                    if done[engines[wait]] < counts[wait]:
                        met = False
                        break
                if not met:
                    break
                order[found] = place
                found += 1
                done[engine] += 1
    return found
