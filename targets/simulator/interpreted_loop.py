"""The event loop as plain Python: compiling it takes seconds, a small run milliseconds.

The same functions do the same operations in the same order, so that the results are equal to the last bit.
"""

from __future__ import annotations

from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import numpy as np

from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.targets.simulator import event_loop
from ratrain.targets.simulator.flat_program import FlatProgram, Float64s, Records
from ratrain.targets.simulator.run_state import RunState

_OPS = 10_000
"""About 0.3 s of plain Python; compiling takes seconds, where the loop is not kept."""


ALLOWANCE = Allowance(_OPS)


def run(
    flat: FlatProgram, works: Records, state: RunState, steps: int, rendezvous: bool, starts: Float64s, ends: Float64s
) -> int:
    """As `event_loop.run`."""
    listed_flat, listed_state = FlatProgram(*map(_listed, flat)), RunState(*map(_listed, state))
    with np.errstate(all="ignore"):  # the compiled loop does not warn either
        events: int = unwrap(event_loop.run)(listed_flat, _listed(works), listed_state, steps, rendezvous, starts, ends)
    for array, rows in zip(state, listed_state, strict=True):
        _store(rows, array)
    return events


def _listed(array: Records) -> Any:
    """A list, quicker to read one by one; of records, namespaces. Floats stay numpy's, which may be divided by 0."""
    if array.ndim > 1:
        return array
    names = array.dtype.names
    if names is None:
        return array.tolist()
    columns = [list(array[name]) if array.dtype[name].kind == "f" else array[name].tolist() for name in names]
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _store(rows: Any, array: Records) -> None:
    """Write back what `_listed` took out."""
    names = array.dtype.names
    if names is None:
        array[...] = rows
    for name in names or ():
        array[name] = [getattr(row, name) for row in rows]
