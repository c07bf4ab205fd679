"""Seconds of the kernel calls of routines, each routine alone on operands of its own, without a program.

The kernels of a routine run in their order, so that each finds its operands where the earlier ones left them. All
inputs of a routine are written again before every turn, its first operand last. Caches are then as in training: the
output of the block before is near, weights and saved tensors are far.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import Dtype, aligned
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.routine import Formal, parse_reference
from ratrain.targets.runtime.arena.dtypes import NUMPY_DTYPES
from ratrain.targets.runtime.engine.rank import BoundRoutine, bind_steps, routine_scratch_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.targets.program.routine import Routine
    from ratrain.targets.runtime.kernels import KernelSet

_MARGIN = 1.5
"""Seconds that a device waits before a turn, by those in which the host issued the turn before."""
_SEED = 0
_SPREAD = 0.02
"""Standard deviation of stand-ins for weights, activations and gradients: their products stay within every dtype."""
_POSITIVE = frozenset({"lse", "rstd", "total"})
"""Operands that are positive, or whose logarithm is taken."""
_ROWS_OF = {"tokens": ("table", "dtable"), "labels": ("table", "dtable")}
"""Operands that are row numbers of a table, and the operands that are the table."""


@frozen
class _Bound:
    """Routine on its operands: copies to make before a turn, and its kernel calls."""

    fills: tuple[tuple[Any, Any], ...]
    calls: tuple[BoundRoutine, ...]


class RoutineTimer:
    """Timer of routines, on one arena as large as the largest of them needs."""

    def __init__(self, routines: Sequence[Routine], kernels: KernelSet) -> None:
        self._memory = kernels.memory
        self._watch = self._memory.stopwatch()
        self._arena = self._memory.allocate(max(map(_operand_bytes, routines)))
        self._scratch = self._memory.scratch(max(routine_scratch_bytes(routine, kernels) for routine in routines))
        self._noise = {kind: self._staged(*kind, count) for kind, count in _noise_counts(routines).items()}
        self._bound = [self._bind(routine, kernels) for routine in routines]
        self._issued = [0.0] * len(routines)
        """Seconds in which the host issued the last turn of each routine."""

    def turn(self, number: int) -> tuple[float, ...]:
        """Run routine `number` once; return the seconds of each kernel call."""
        bound = self._bound[number]
        for target, source in bound.fills:
            self._memory.copy(target, source)
        # the device begins once the host has issued all calls, so that it never waits for the next
        self._watch.hold(_MARGIN * self._issued[number])
        with np.errstate(all="ignore"):  # the values are stand-ins
            marks, begin = [self._watch.mark()], perf_counter()
            for call in bound.calls:
                call()
                marks.append(self._watch.mark())
        self._issued[number] = perf_counter() - begin
        return tuple(self._watch.seconds(marks))

    def _bind(self, routine: Routine, kernels: KernelSet) -> _Bound:
        operands, at = {}, 0
        for formal in _operands(routine):
            nbytes = _bytes(formal)
            operands[formal.name] = self._memory.typed(self._arena[at : at + nbytes], formal.dtype, formal.shape)
            at += aligned(nbytes)
        fills = [
            (operands[formal.name], self._source(routine, formal))
            for formal in _operands(routine)
            if _read(routine, formal)
        ]
        steps = [evolve(routine, steps=(step,)) for step in routine.steps]
        calls = [bind_steps(step, operands, kernels, self._scratch) for step in steps]
        return _Bound(tuple(reversed(fills)), tuple(calls))

    def _source(self, routine: Routine, formal: Formal) -> Any:
        """Return values for an operand that a routine reads, in its shape."""
        if formal.dtype is Dtype.I32:
            return self._memory.staged(_rows(routine, formal))
        noise = self._noise[formal.dtype, _is_positive(routine, formal)]
        return noise[: prod(formal.shape)].reshape(formal.shape)

    def _staged(self, dtype: Dtype, positive: bool, count: int) -> Any:
        values = np.random.default_rng(_SEED).standard_normal(count, np.float32) * np.float32(_SPREAD)
        return self._memory.staged((np.abs(values) if positive else values).astype(NUMPY_DTYPES[dtype]))


def timer_bytes(routines: Sequence[Routine], kernels: KernelSet) -> int:
    """Return the bytes that a `RoutineTimer` takes."""
    scratch = max(routine_scratch_bytes(routine, kernels) for routine in routines)
    noise = sum(count * dtype.itemsize for (dtype, _), count in _noise_counts(routines).items())
    return max(map(_operand_bytes, routines)) + scratch + noise


def _operands(routine: Routine) -> Iterator[Formal]:
    """Yield the operands that a call binds, workspace included."""
    yield from routine.formals
    if routine.workspace_bytes:
        yield Formal("workspace", Dtype.U8, (routine.workspace_bytes,))


def _bytes(formal: Formal) -> int:
    return prod(formal.shape) * formal.dtype.itemsize


def _operand_bytes(routine: Routine) -> int:
    return sum(aligned(_bytes(formal)) for formal in _operands(routine))


def _noise_counts(routines: Sequence[Routine]) -> dict[tuple[Dtype, bool], int]:
    """Return the elements of the largest operand that is read, by (dtype, positive)."""
    counts: dict[tuple[Dtype, bool], int] = {}
    for routine in routines:
        for formal in routine.formals:
            if formal.dtype is not Dtype.I32 and _read(routine, formal):
                kind = formal.dtype, _is_positive(routine, formal)
                counts[kind] = max(counts.get(kind, 0), prod(formal.shape))
    return counts


def _uses(routine: Routine, formal: Formal) -> Iterator[tuple[str, bool]]:
    """Yield the names by which kernels take an operand, and whether they read it."""
    for step in routine.steps:
        for operand in KERNELS[step.kernel].operands:
            reference = step.operands.get(operand.name)
            if reference is not None and parse_reference(reference).base == formal.name:
                yield operand.name, operand.is_read(step.options)


def _read(routine: Routine, formal: Formal) -> bool:
    return any(read for _, read in _uses(routine, formal))


def _is_positive(routine: Routine, formal: Formal) -> bool:
    return any(name in _POSITIVE for name, _ in _uses(routine, formal))


def _rows(routine: Routine, formal: Formal) -> NDArray[np.int32]:
    """Return row numbers of a table, spread over it; for document starts, the beginning of their sequences."""
    rows = 1
    for step in routine.steps:
        for name, tables in _ROWS_OF.items():
            if step.operands.get(name) == formal.name:
                table = next(step.operands[each] for each in tables if each in step.operands)
                rows = routine.shape_of(table)[0]
    return np.random.default_rng(_SEED).integers(0, rows, formal.shape, np.int32)
