"""What the ops of a step that wait for each other have to do with each other: tensors in common, or only bytes."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import define
from numpy.typing import NDArray

from ratrain.targets.program.columns import BLOCKING, FLAGS, OPERANDS, TENSOR, ProgramColumns
from ratrain.targets.simulator.flat_program import FlatProgram, Int64s


@define(eq=False, slots=False)
class Relations:
    """By wait and by op, for the walk through idle time."""

    flat: FlatProgram
    columns: ProgramColumns

    @cached_property
    def reuse(self) -> Int64s:
        """By wait: whether the two have no tensor in common and neither is blocking, so that only bytes are waited for."""
        flat = self.flat
        waiting = np.repeat(np.arange(len(flat.ops)), flat.ops["wait_stop"] - flat.ops["wait_first"])
        awaited = flat.streams["first"][flat.waits["stream"]] + flat.waits["count"] - 1
        blocked = self._blocking[waiting] | self._blocking[awaited]
        return np.asarray(self._have_nothing_in_common(waiting, awaited) & ~blocked, np.int64)

    @cached_property
    def apart(self) -> Int64s:
        """By op: whether it needs nothing of the one before it in its stream, the last one before the first: no tensor, and it is not blocking."""
        flat = self.flat
        before = np.arange(len(flat.ops)) - 1
        before[flat.first_ops] = flat.last_ops
        apart = self._have_nothing_in_common(np.arange(len(flat.ops)), before) & ~self._blocking[before]
        return np.asarray(apart, np.int64)

    @cached_property
    def _blocking(self) -> NDArray[np.bool_]:
        """By op: whether compute waits for it."""
        return np.asarray(self.columns.instructions[:, FLAGS] & BLOCKING > 0, np.bool_)

    @cached_property
    def _operands(self) -> tuple[Int64s, Int64s]:
        """How many each op has, and their tensors, op by op."""
        columns = self.columns
        return columns.instructions[:, OPERANDS].astype(np.int64), columns.operands[:, TENSOR].astype(np.int64)

    @cached_property
    def _held(self) -> Int64s:
        """Op and tensor in one number, ascending, of all operands."""
        counts, tensors = self._operands
        return np.sort(np.repeat(np.arange(len(counts)), counts) * self._stride + tensors)

    @property
    def _stride(self) -> int:
        return int(self._operands[1].max(initial=0)) + 1

    def _have_nothing_in_common(self, ops: Int64s, others: Int64s) -> NDArray[np.bool_]:
        """By pair: whether two ops have no tensor in common."""
        counts, tensors = self._operands
        starts = np.cumsum(counts) - counts
        sizes = counts[ops]
        firsts = np.cumsum(sizes) - sizes
        places = np.arange(sizes.sum()) - np.repeat(firsts, sizes) + np.repeat(starts[ops], sizes)
        keys = np.repeat(others, sizes) * self._stride + tensors[places]
        at = np.minimum(np.searchsorted(self._held, keys), max(0, len(self._held) - 1))
        shared = self._held[at] == keys if len(keys) else np.zeros(0, np.bool_)
        numbers = np.repeat(np.arange(len(ops)), sizes)
        return np.asarray(np.bincount(numbers[shared], minlength=len(ops)) == 0, np.bool_)
