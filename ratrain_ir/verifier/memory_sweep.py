"""Inner loop of `ratrain.ratrain_ir.verifier.memory`, over numbers alone: compiled for many accesses, else Python.

It takes lists as well as arrays. All memories lie one after the other in one address space.

    ops, backwards       occupied ranges afterwards
    (end of the step)    carried tensors
    %c = ... (%a, %b)    + a + b, each compared with its neighbours; c leaves, as it does not exist before

While no conflict is found, the occupied ranges are disjoint, so that a new range overlaps any of them only if it
overlaps a neighbour. An access costs a binary search, and a shift of the sorted array if it enters or leaves.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.support.native_loops import native

if TYPE_CHECKING:
    from collections.abc import Sequence

_ACCESSES = 50_000
"""Operands that plain Python handles in a fifth of a second: less than compiling the loop takes if it is not cached."""
ALLOWANCE = Allowance(_ACCESSES)

Conflict = tuple[int, int, int]
"""A tensor that enters, another one whose bytes it shares, and the position of the op."""


def conflicts(bounds: Any, operands: Any, starts: Any, stops: Any, ranks: Any, most: int) -> list[Conflict]:
    """List at most `most` pairs of tensors that are live together and share a byte, the last ops' pairs first.

    Ops are given as in `SweptOps`, in lists or arrays, followed by one more op that reads the carried tensors. `ranks`
    orders tensors that have the same range.
    """
    tensors = len(starts)
    given = bounds, operands, starts, stops, ranks
    sizes = tensors, tensors, most, most, most
    found: Sequence[Any]
    if ALLOWANCE.take(len(operands)):
        made = [[0] * size for size in sizes]
        count = sweep(*(each.tolist() if isinstance(each, np.ndarray) else each for each in given), *made)
        found = made[2:]
    else:
        arrays = [np.zeros(size, np.int64) for size in sizes]
        count = _compiled()(*(np.array(each, np.int64) for each in given), *arrays)
        found = [array.tolist() for array in arrays[2:]]
    return list(zip(*(each[:count] for each in found), strict=True))


@cache
def _compiled() -> Any:
    return native(sweep)


def sweep(
    bounds: Any, operands: Any, starts: Any, stops: Any, ranks: Any,
    live: Any, held: Any, entering: Any, there: Any, positions: Any,
) -> int:  # fmt: skip
    """Write the conflicts into `entering`, `there` and `positions`; return their number.

    `held` is the list of live tensors in the order of addresses. No two of them have the same range and rank: either
    the loop ends at the first conflict, or all ranks differ.
    """
    found = holds = 0
    for position in range(len(bounds) // 4 - 1, -1, -1):
        first = 0 if position == 0 else bounds[4 * position - 1]
        reads, updates, writes, end = (
            bounds[4 * position],
            bounds[4 * position + 1],
            bounds[4 * position + 2],
            bounds[4 * position + 3],
        )
        # All operands of the op become live, in the order of `Op.operands` (reads, writes, updates, scratch). Then, as
        # group 4, written and scratch tensors leave, because they do not exist before the op.
        for group in range(5):
            leaves = group == 4
            if group == 0:
                begin, stop = first, reads
            elif group == 1:
                begin, stop = updates, writes
            elif group == 2:
                begin, stop = reads, updates
            elif group == 3:
                begin, stop = writes, end
            else:
                begin, stop = updates, end
            for place in range(begin, stop):
                tensor = operands[place]
                if live[tensor] != leaves:
                    continue
                # A tensor that is written and also read must exist before the op.
                is_read = False
                if leaves:
                    for other_place in range(first, reads):
                        if operands[other_place] == tensor:
                            is_read = True
                if is_read:
                    continue
                # Binary search for the place in the order (start, stop, rank).
                low, high = 0, holds
                while low < high:
                    middle = (low + high) // 2
                    other = held[middle]
                    if starts[other] < starts[tensor] or (
                        starts[other] == starts[tensor]
                        and (
                            stops[other] < stops[tensor]
                            or (stops[other] == stops[tensor] and ranks[other] < ranks[tensor])
                        )
                    ):
                        low = middle + 1
                    else:
                        high = middle
                if leaves:
                    holds -= 1
                    for index in range(low, holds):
                        held[index] = held[index + 1]
                    live[tensor] = 0
                    continue
                # Compare with the ranges just below and just above.
                for near in range(low - 1, low + 1):
                    if near < 0 or near >= holds:
                        continue
                    other = held[near]
                    if starts[other] < stops[tensor] and starts[tensor] < stops[other]:
                        entering[found], there[found], positions[found] = tensor, other, position
                        found += 1
                        if found == len(entering):
                            return found
                for index in range(holds, low, -1):
                    held[index] = held[index - 1]
                held[low] = tensor
                holds += 1
                live[tensor] = 1
    return found
