"""Ops as rows of numbers, for sweeps over lists of ops. An op has one row, however many lists it is in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple, cast

import numpy as np
from attrs import define, field

from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.ops.base import Op
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.numbering import operands_of
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.support.loops import Allowance

_OPS = 15_000
"""Ops swept in plain Python: half a second, less than compiling the loop takes if it is not cached."""
ALLOWANCE = Allowance(_OPS)
"""Ops of lists that a process sweeps before it compiles the loop."""


def pays(ops: int) -> bool:
    """Tell whether the compiled loop pays for one more sweep over a number of ops.

    Counts these ops against the allowance of plain Python if not.
    """
    return not ALLOWANCE.take(ops)


class RowNumbers(NamedTuple):
    """Rows of ops: lists for plain Python, arrays for compiled loops."""

    released: Any
    """by row, whether it is a release, which is no work"""
    bounds: Any
    """four exclusive ends in `operands` by row: of its reads, updates, writes and scratch"""
    operands: Any
    """tensors by number"""
    carried: Any
    """by tensor, whether it lives on in the next step"""


@define(eq=False)
class OpRows:
    """Rows of ops, and numbers of the tensors that they touch; both grow as ops are asked for."""

    tensors: TensorNumbers = field(init=False)
    _rows: dict[Op, int] = field(factory=dict, init=False)
    _numbers: RowNumbers = field(init=False)
    _arrays: list[GrownArray] = field(init=False)
    _sizes: GrownArray = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tensors = TensorNumbers()
        self._numbers = RowNumbers([], [], [], self.tensors.carried)
        self._arrays = [GrownArray(np.int64(0)) for _ in self._numbers]
        self._sizes = GrownArray(np.int64(0))

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, ops: Sequence[Op]) -> list[int]:
        """Return the rows of a list of ops; new ops get the next numbers."""
        found = list(map(self._rows.get, ops))  # a map of a method of `dict` makes no Python calls
        if None in found:
            self._add([op for op, row in zip(ops, found, strict=True) if row is None])
            found = list(map(self._rows.get, ops))
        return cast("list[int]", found)

    def numbers(self, *, arrays: bool) -> RowNumbers:
        """Return all rows so far."""
        if not arrays:
            return self._numbers
        return RowNumbers(*(array.of(values) for array, values in zip(self._arrays, self._numbers, strict=True)))

    def sizes_of(self, tensors: list[Tensor], numbers: Any) -> Any:
        """Return the aligned bytes of tensors as an array; `numbers` are theirs, -1 for those that no op touches."""
        known = self._sizes.of(self.tensors.nbytes)
        sizes = known[numbers] if len(known) else np.zeros(len(tensors), np.int64)
        # index -1 read the last tensor's size: put the right one in its place
        for place in np.flatnonzero(numbers < 0).tolist():
            sizes[place] = aligned(tensors[place].type.nbytes)
        return sizes

    def _add(self, ops: list[Op]) -> None:
        new = list(dict.fromkeys(ops))
        released, bounds, operands, _ = self._numbers
        self._rows.update(zip(new, count(len(released))))
        released += [type(op) is Release for op in new]
        # accesses of old contents (reads, updates) stand before new contents (writes, scratch)
        tensors, ends = operands_of(new)
        begin = len(operands)
        bounds += [begin + end for end in ends]
        operands += self.tensors.of(tensors)


@define(eq=False)
class TensorNumbers:
    """Numbers of tensors, in the order in which they are asked for, with facts by number."""

    numbers: dict[Tensor, int] = field(factory=dict, init=False)
    carried: list[bool] = field(factory=list, init=False)
    nbytes: list[int] = field(factory=list, init=False)
    """aligned"""

    def of(self, tensors: list[Tensor]) -> list[int]:
        """Return the numbers of tensors; new ones get the next."""
        new = [tensor for tensor in dict.fromkeys(tensors) if tensor not in self.numbers]
        self.numbers.update(zip(new, count(len(self.numbers))))
        self.carried += [tensor.carried for tensor in new]
        self.nbytes += [aligned(tensor.type.nbytes) for tensor in new]
        return list(map(self.numbers.__getitem__, tensors))


@define(eq=False)
class GrownArray:
    """Array view of a list that only grows: converted elements are not converted again."""

    _zero: Any
    _array: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._array = np.zeros(0, type(self._zero))

    def of(self, values: list[Any]) -> Any:
        """Return the list as an array; it must begin with the elements of the last call."""
        have = len(self._array)  # earlier elements never change
        if have < len(values):
            self._array = np.concatenate((self._array, np.array(values[have:], self._array.dtype)))
        return self._array
