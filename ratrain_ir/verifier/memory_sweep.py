"""The inner loop of `ratrain.ratrain_ir.verifier.memory`, over numbers alone: compiled for many accesses, plain Python for few.

It takes lists as well as arrays. Memories lie behind one another in one space of addresses.
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
"""A fifth of a second of plain Python: less than it takes to compile the loop where it is not kept."""
ALLOWANCE = Allowance(_ACCESSES)

Conflict = tuple[int, int, int]
"""A tensor that enters where another one is, the other one, and the position of the op."""


def conflicts(bounds: Any, operands: Any, starts: Any, stops: Any, ranks: Any, most: int) -> list[Conflict]:
    """Pairs of tensors that are live together and share a byte, the last op's first, at most so many.

    Ops are given as in `SweptOps`, in lists or arrays; behind them stands one more that reads what is carried.
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
    """Fill what enters, what is there, and where; the number of these. `held` has what is live in the order of addresses.

    Of what is held no two have the same range and rank: the sweep ends at the first conflict, or ranks differ.
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
        for group in range(5):  # what is updated after what is written, as ops list their operands; then what ends here
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
                is_read = False
                if leaves:
                    for other_place in range(first, reads):
                        if operands[other_place] == tensor:
                            is_read = True
                if is_read:
                    continue
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
