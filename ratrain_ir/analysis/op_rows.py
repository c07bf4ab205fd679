"""Ops as rows of numbers, which sweeps over lists of ops run on. An op has one row, in however many lists it stands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from attrs import define, field

from ratrain.ratrain_ir.config.types import aligned
from ratrain.ratrain_ir.ops.base import Op
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.support.loops import Allowance

_OPS = 15_000
"""Half a second of plain Python: less than it takes to compile the loop where it is not kept."""
ALLOWANCE = Allowance(_OPS)
"""Ops of lists that a process sweeps without the compiler."""


def pays(ops: int) -> bool:
    """Whether compiled loops pay for one more sweep over so many ops."""
    return not ALLOWANCE.take(ops)


class Numbers(NamedTuple):
    """Rows of ops as sequences: lists for plain Python, arrays for compiled loops."""

    released: Any
    """by row, whether it is a release, which is no work"""
    bounds: Any
    """by row four ends, in `operands`: of what it reads, of what it updates, of what it writes, of what it works in"""
    operands: Any
    """tensors by number"""
    carried: Any
    """by tensor"""


@define(eq=False)
class OpRows:
    """Rows of ops, and numbers of the tensors that they touch; both grow as ops are asked for."""

    tensors: TensorNumbers = field(init=False)
    _rows: dict[Op, int] = field(factory=dict, init=False)
    _numbers: Numbers = field(init=False)
    _arrays: list[GrownArray] = field(init=False)
    _sizes: GrownArray = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.tensors = TensorNumbers()
        self._numbers = Numbers([], [], [], self.tensors.carried)
        self._arrays = [GrownArray(np.int64(0)) for _ in self._numbers]
        self._sizes = GrownArray(np.int64(0))

    def __len__(self) -> int:
        return len(self._rows)

    def of(self, ops: Iterable[Op]) -> list[int]:
        """The rows of a list of ops, numbered in the order in which they are first met."""
        rows, add = self._rows, self._add
        found = []
        for op in ops:
            row = rows.get(op)
            found.append(add(op) if row is None else row)
        return found

    def numbers(self, *, arrays: bool) -> Numbers:
        """All rows there are so far."""
        if not arrays:
            return self._numbers
        return Numbers(*(array.of(values) for array, values in zip(self._arrays, self._numbers, strict=True)))

    def sizes_of(self, tensors: list[Tensor], numbers: Any) -> Any:
        """Aligned bytes of tensors, given with their numbers: -1 of those that no op touches."""
        sizes = self._sizes.of(self.tensors.nbytes)[numbers] if self.tensors else np.zeros(len(tensors), np.int64)
        for place in np.flatnonzero(numbers < 0).tolist():
            sizes[place] = aligned(tensors[place].type.nbytes)
        return sizes

    def _add(self, op: Op) -> int:
        released, bounds, operands, _ = self._numbers
        row = self._rows[op] = len(released)
        if type(op) is Release:
            released.append(True)
            bounds += (len(operands),) * 4
            return row
        released.append(False)
        number = self.tensors.__getitem__
        operands += map(number, op.reads)
        read = len(operands)
        operands += map(number, op.updates)
        updated = len(operands)
        operands += map(number, op.writes)
        written = len(operands)
        operands += map(number, op.scratch)
        bounds += read, updated, written, len(operands)
        return row


class TensorNumbers(dict[Tensor, int]):
    """Tensors by number, in the order in which they are asked for, and by number what is told of them."""

    def __init__(self) -> None:
        super().__init__()
        self.carried: list[bool] = []
        self.nbytes: list[int] = []

    def __missing__(self, tensor: Tensor) -> int:
        number = self[tensor] = len(self)
        self.carried.append(tensor.carried)
        self.nbytes.append(aligned(tensor.type.nbytes))
        return number


@define(eq=False)
class GrownArray:
    """A list that only grows, as an array of the type of a number: what was converted is not converted again."""

    _zero: Any
    _array: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._array = np.zeros(0, type(self._zero))

    def of(self, values: list[Any]) -> Any:
        """The list as an array."""
        have = len(self._array)
        if have < len(values):
            self._array = np.concatenate((self._array, np.array(values[have:], self._array.dtype)))
        return self._array
