"""Consecutive numbers for things, in the order in which they are first looked up; operands of ops as numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor

T = TypeVar("T")


class Numbers(dict[T, int], Generic[T]):
    """Mapping from things to numbers; looking up an unknown thing gives it the next number, from 0."""

    def __missing__(self, thing: T) -> int:
        number = self[thing] = len(self)
        return number


def add_operands(op: Op, number: Callable[[Tensor], int], operands: list[int], bounds: list[int]) -> None:
    """Add the numbers of an op's tensors to `operands`, and the ends of reads, updates, writes and scratch to `bounds`.

    Updates stand between reads and writes, so what an op accesses of old contents (reads + updates), and what it
    changes (updates + writes), are one run each.
    """
    operands += map(number, op.reads)
    read = len(operands)
    operands += map(number, op.updates)
    updated = len(operands)
    operands += map(number, op.writes)
    written = len(operands)
    operands += map(number, op.scratch)
    bounds += read, updated, written, len(operands)
