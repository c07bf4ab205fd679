"""The event loop as plain Python, for small runs: compiling it takes seconds, such a run milliseconds.

It runs the functions of `event_loop` themselves, uncompiled and on lists, so that results are equal to the last bit.
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
"""Ops that a process may run here in all: about 0.3 s of plain Python. Compiling takes seconds if no compiled loop is
cached."""


ALLOWANCE = Allowance(_OPS)


def run(
    flat: FlatProgram, works: Records, state: RunState, steps: int, rendezvous: bool, starts: Float64s, ends: Float64s
) -> int:
    """Run `steps` steps as `event_loop.run` does."""
    listed_flat, listed_state = FlatProgram(*map(_listed, flat)), RunState(*map(_listed, state))
    with np.errstate(all="ignore"):  # the compiled loop does not warn either
        events: int = unwrap(event_loop.run)(listed_flat, _listed(works), listed_state, steps, rendezvous, starts, ends)
    for array, rows in zip(state, listed_state, strict=True):
        _store(rows, array)
    return events


def _listed(array: Records) -> Any:
    """Convert an array to a list, quicker to index; records become namespaces.

    Floats stay numpy's, which may be divided by 0. Arrays of two dimensions are returned unchanged.
    """
    if array.ndim > 1:
        return array
    names = array.dtype.names
    if names is None:
        return array.tolist()
    columns = [list(array[name]) if array.dtype[name].kind == "f" else array[name].tolist() for name in names]
    return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _store(rows: Any, array: Records) -> None:
    """Write the rows that `_listed` returned back to their array."""
    names = array.dtype.names
    if names is None:
        array[...] = rows
    for name in names or ():
        array[name] = [getattr(row, name) for row in rows]
