"""Start and end of each op of a stage, simulated for one stage on its own.

Each engine runs its ops in list order; an op starts when its engine is free, its operands are written, and compute has
reached its place in the list. Messages from other stages are taken to arrive in time.

    list      recv m0 | forward m0 | send m0 | forward m1
    recv      [==]
    compute       [== m0 ==][== m1 ==]
    send                    [==]

A blocking collective occupies the compute engine too. Cost: O(operands) per step. The loop is compiled for many ops and
runs in plain Python for few.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.op_rows import GrownArray, OpRows
from ratrain.ratrain_ir.ops.base import Engine, Op
from ratrain.ratrain_ir.ops.collectives import is_blocking
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.support.native_loops import native

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Stage

_ENGINES = {engine: number for number, engine in enumerate(Engine)}
_COMPUTE = _ENGINES[Engine.COMPUTE]

OpSeconds = Callable[["Stage", Op], float]
"""Seconds that an op of a stage takes on its engine when it runs alone."""


@frozen(eq=False)
class ListTimes:
    """Start and end of each op of a stage, in seconds from the step's start; arrays by position in the list."""

    issued: NDArray[np.float64]
    """Time at which the compute engine reaches the op's place in the list; ascending."""
    starts: NDArray[np.float64]
    """Infinite for releases, which do no work."""
    ends: NDArray[np.float64]


@define(eq=False)
class TimedRows:
    """Rows of ops with their engines and seconds, which are asked for once per op."""

    rows: OpRows = field(factory=OpRows, init=False)
    _timed: tuple[list[Any], ...] = field(init=False)
    """By row: the number of the engine, whether compute waits for the op, seconds."""
    _arrays: tuple[GrownArray, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._timed = [], [], []
        self._arrays = GrownArray(np.int64(0)), GrownArray(np.bool_(0)), GrownArray(np.float64(0))

    def of(self, stage: Stage, op_seconds: OpSeconds) -> list[int]:
        """Return the row numbers of a stage's ops, in list order; rows are added for ops not met before."""
        places = self.rows.of(stage.ops)
        engines, waited, seconds = self._timed
        have = len(engines)
        if have < len(self.rows):
            for place, op in zip(places, stage.ops, strict=True):
                if place == len(engines):  # rows are numbered in the order in which ops are first met
                    engine = op.engine
                    engines.append(_ENGINES[engine])
                    waited.append(engine is Engine.COMPUTE or is_blocking(op))
                    seconds.append(0.0 if type(op) is Release else op_seconds(stage, op))
        return places

    def times(self, places: list[int], steps: int, *, arrays: bool) -> list[ListTimes]:
        """Simulate `steps` steps of a list of ops, given by row numbers; return the times of each step.

        The first step starts with all engines free; each later one continues from the one before, and all times count
        from the start of the first. `arrays`: use the compiled loop.
        """
        numbers = self.rows.numbers(arrays=arrays)
        timed = (
            [array.of(each) for array, each in zip(self._arrays, self._timed, strict=True)] if arrays else self._timed
        )
        sizes = len(_ENGINES), len(numbers.carried), 1  # when each engine is free, when a tensor is written, now
        state: list[Any] = [np.zeros(size) if arrays else [0.0] * size for size in sizes]
        at = np.array(places, np.int64) if arrays else places
        found = []
        for _ in range(steps):
            times: list[Any] = [np.zeros(len(places)) if arrays else [0.0] * len(places) for _ in range(3)]
            loop: Any = _compiled() if arrays else walk
            loop(at, numbers.released, numbers.bounds, numbers.operands, *timed, _COMPUTE, inf, *state, *times)
            found.append(ListTimes(*map(np.array, times)))
        return found


@cache
def _compiled() -> Any:
    return native(walk)


def walk(
    rows: Any, released: Any, bounds: Any, operands: Any, engines: Any, waited: Any, seconds: Any,
    compute: int, never: float, free: Any, written: Any, clock: Any, issued: Any, starts: Any, ends: Any,
) -> None:  # fmt: skip
    """Simulate one step; continue from `free`, `written` and `clock`, and leave them for the next step.

    `free`: by engine, seconds when it is free. `written`: by tensor, seconds when its last write ends. `clock[0]`:
    seconds when compute reaches the place in the list. `issued`, `starts` and `ends` receive the times by position.
    """
    now, computes = clock[0], free[compute]
    for position in range(len(rows)):
        row = rows[position]
        if released[row]:
            issued[position], starts[position], ends[position] = now, never, now
            continue
        engine = engines[row]
        start = free[engine]
        if now > start:  # noqa: PLR1730 - in plain Python the innermost loop makes no calls
            start = now
        if waited[row] and computes > start:
            start = computes
        # Operands of a row are its reads, updates, writes and scratch, and `bounds` has the four ends. It waits for the
        # writers of what it reads or updates; its own end counts for what it updates or writes.
        first = 0 if row == 0 else bounds[4 * row - 1]
        updated, changed = bounds[4 * row], bounds[4 * row + 2]
        for place in range(first, bounds[4 * row + 1]):
            ready = written[operands[place]]
            if ready > start:  # noqa: PLR1730
                start = ready
        end = start + seconds[row]
        free[engine] = end
        for place in range(updated, changed):
            written[operands[place]] = end
        if waited[row]:
            free[compute] = computes = end
            now = start
        issued[position], starts[position], ends[position] = now, start, end
    clock[0] = now
