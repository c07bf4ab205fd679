"""Consecutive numbers for things, in the order in which they are first looked up; operands of ops as numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, chain
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, TypeVar

from ratrain.ratrain_ir.ops.compute import Release

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.base import Op
    from ratrain.ratrain_ir.ops.tensor import Tensor, Tensors

T = TypeVar("T")


class Numbers(dict[T, int], Generic[T]):
    """Mapping from things to numbers; looking up an unknown thing gives it the next number, from 0."""

    def __missing__(self, thing: T) -> int:
        number = self[thing] = len(self)
        return number


def operands_of(ops: Iterable[Op]) -> tuple[list[Tensor], list[int]]:
    """Return the operands of ops, one op after the other, and four exclusive ends in that list for each op.

    They are the ends of its reads, updates, writes and scratch, counted from 0. So what an op accesses of old contents
    (reads + updates), and what it changes (updates + writes), are one run each. A release has no operands here: its
    mark accesses no bytes.
    """
    # Loops over operands are chains and maps, which make no Python calls: a large stage has a hundred thousand.
    groups = [_NO_GROUPS if type(op) is Release else _GROUPS(op) for op in ops]
    ends = list(accumulate(map(len, chain.from_iterable(groups))))
    return list(chain.from_iterable(chain.from_iterable(groups))), ends


_GROUPS: Callable[[Op], tuple[Tensors, ...]] = attrgetter("reads", "updates", "writes", "scratch")
_NO_GROUPS: tuple[Tensors, ...] = ((), (), (), ())
