"""Inner loop of `ratrain.ratrain_ir.analysis.lifetime` over plain numbers: compiled for many ops, Python for few.

The same function runs on lists (plain Python) and on arrays (compiled).
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ratrain.ratrain_ir.support.native_loops import native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ratrain.ratrain_ir.analysis.op_rows import OpRows

_UNTOUCHED, _SCRATCH = -2, -1
"""In place of the start of a life: no op has touched the tensor yet; the tensor is only scratch."""


class SweptLives(NamedTuple):
    """Intervals in the order in which they end; those that last to the end of the list come last."""

    tensors: NDArray[np.int64]
    """numbers of `OpRows`"""
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    completed: NDArray[np.float64]
    """time at which the last accessor has completed; 0 if the tensor lives on in the next step"""


def swept_lives(rows: OpRows, places: Sequence[int], ends: Any, *, arrays: bool) -> SweptLives:
    """Find the intervals of all tensors of a list of ops.

    `places` are the ops' rows, `ends` the time at which each op ends; `arrays`: use the compiled loop.
    """
    numbers = rows.numbers(arrays=arrays)
    tensors = len(numbers.carried)
    ends_of_rows = np.asarray(numbers.bounds, np.int64)
    # at most one interval for each write and scratch, and the last life of each tensor
    most = int((ends_of_rows[3::4] - ends_of_rows[1::4])[places].sum()) + tensors
    loop: Any = _compiled() if arrays else sweep
    at = np.array(places, np.int64) if arrays else places
    state = np.full(tensors, _UNTOUCHED), np.zeros(tensors, np.int64), np.zeros(tensors)
    found = np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most, np.int64), np.zeros(most)
    given: list[Any] = [each if arrays else each.tolist() for each in (*state, *found)]
    count = loop(at, np.asarray(ends) if arrays else ends, *numbers, *given)
    made: list[Any] = [np.asarray(each[:count], whole.dtype) for each, whole in zip(given[3:], found, strict=True)]
    return SweptLives(*made)


@cache
def _compiled() -> Any:
    return native(sweep)


def sweep(
    rows: Any, ends: Any, released: Any, bounds: Any, operands: Any, carried: Any,
    starts: Any, lasts: Any, completed: Any,
    found_tensors: Any, found_starts: Any, found_stops: Any, found_completed: Any,
) -> int:  # fmt: skip
    """Fill the `found_*` columns; return the number of intervals.

    `starts`, `lasts` and `completed` hold the current life of each tensor: its start, last access and completion.
    """
    found = 0
    for position in range(len(rows)):
        row = rows[position]
        if released[row]:
            continue
        end = ends[position]
        first = 0 if row == 0 else bounds[4 * row - 1]
        updated, written, scratch = bounds[4 * row + 1], bounds[4 * row + 2], bounds[4 * row + 3]
        for place in range(written, scratch):
            tensor = operands[place]
            if starts[tensor] == _UNTOUCHED:
                starts[tensor], lasts[tensor] = _SCRATCH, position
            found_tensors[found], found_starts[found], found_stops[found] = tensor, position, position + 1
            found_completed[found] = end
            found += 1
        for place in range(first, updated):
            tensor = operands[place]
            # the first access is no write: a carried tensor lives since the start of the step
            if starts[tensor] == _UNTOUCHED:
                starts[tensor] = 0 if carried[tensor] else position
            lasts[tensor] = position
            if end > completed[tensor]:  # noqa: PLR1730 - in plain Python the innermost loop makes no calls
                completed[tensor] = end
        for place in range(updated, written):
            tensor = operands[place]
            # a write ends the life before and begins a new one
            if starts[tensor] >= 0:
                found_tensors[found], found_starts[found], found_stops[found] = (
                    tensor,
                    starts[tensor],
                    lasts[tensor] + 1,
                )
                found_completed[found] = completed[tensor]
                found += 1
            starts[tensor] = lasts[tensor] = position
            completed[tensor] = end
    for tensor in range(len(carried)):
        if starts[tensor] >= 0:
            found_tensors[found], found_starts[found] = tensor, starts[tensor]
            found_stops[found] = len(rows) if carried[tensor] else lasts[tensor] + 1
            found_completed[found] = 0.0 if carried[tensor] else completed[tensor]
            found += 1
    return found
