"""Relations between ops of a step of which one waits for the other: do they share a tensor, or only bytes of memory."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import define
from numpy.typing import NDArray

from ratrain.targets.program.columns import BLOCKING, FLAGS, OPERANDS, TENSOR, ProgramColumns
from ratrain.targets.simulator.flat_program import FlatProgram, Int64s


@define(eq=False, slots=False)
class Relations:
    """Relations by wait and by op, which the walk through idle time asks for."""

    flat: FlatProgram
    columns: ProgramColumns

    @cached_property
    def reuse(self) -> Int64s:
        """Mask of waits, 1 if only bytes are waited for: the two ops share no tensor and neither is blocking."""
        flat = self.flat
        waiting = np.repeat(np.arange(len(flat.ops)), flat.ops["wait_stop"] - flat.ops["wait_first"])
        awaited = flat.streams["first"][flat.waits["stream"]] + flat.waits["count"] - 1
        blocked = self._blocking[waiting] | self._blocking[awaited]
        return np.asarray(self._have_nothing_in_common(waiting, awaited) & ~blocked, np.int64)

    @cached_property
    def apart(self) -> Int64s:
        """Mask of ops, 1 if an op needs nothing of its predecessor in its stream.

        They share no tensor and the predecessor is not blocking. The predecessor of a stream's first op is its last op,
        of the step before.
        """
        flat = self.flat
        before = np.arange(len(flat.ops)) - 1
        before[flat.first_ops] = flat.last_ops
        apart = self._have_nothing_in_common(np.arange(len(flat.ops)), before) & ~self._blocking[before]
        return np.asarray(apart, np.int64)

    @cached_property
    def _blocking(self) -> NDArray[np.bool_]:
        """Mask of ops that compute waits for."""
        return np.asarray(self.columns.instructions[:, FLAGS] & BLOCKING > 0, np.bool_)

    @cached_property
    def _operands(self) -> tuple[Int64s, Int64s]:
        """Number of operands by op, and the tensors of all operands, op by op."""
        columns = self.columns
        return columns.instructions[:, OPERANDS].astype(np.int64), columns.operands[:, TENSOR].astype(np.int64)

    @cached_property
    def _held(self) -> Int64s:
        """Pairs of op and tensor as one number each (op * stride + tensor), ascending, over all operands."""
        counts, tensors = self._operands
        return np.sort(np.repeat(np.arange(len(counts)), counts) * self._stride + tensors)

    @property
    def _stride(self) -> int:
        return int(self._operands[1].max(initial=0)) + 1

    def _have_nothing_in_common(self, ops: Int64s, others: Int64s) -> NDArray[np.bool_]:
        """Return by pair whether two ops have no tensor in common.

        Looks up each operand of `ops` among the operands of `others` by binary search in `_held`.
        """
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
