"""Sums of the rows of a matrix that belong to the same row of a table, in an order given by the keys only.

`index_add_` adds in any order on a GPU. A product with a one-hot matrix would turn every row of the table into NaN if
one gradient is infinite. So rows are sorted by key, and neighbours with the same key are added pair by pair:

    keys         3  3  3  5          distance 1: each row adds its right neighbour of the same key
    rows         a  b  c  d
    distance 1   ab bc c  d
    distance 2   abc ..              the first row of a key has the whole sum

It takes log2(rows) passes. Sums are float32; they depend neither on the place of a row in the table nor on other keys.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ratrain.targets.pytorch.device.device_common import chunk_buffers, row_chunks, shaped, stored, wide
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import I32, I64, Array
    from ratrain.targets.runtime.arena.scratch import Plan

_KEY_BITS = 32
_ROW = (1 << _KEY_BITS) - 1
"""The bits of a row in a key."""
_LAST = (1 << 63) - 1


def _padded(count: int) -> int:
    """Return the least power of two that is no smaller."""
    return 1 << (count - 1).bit_length()


def keyed_sum_plan(rows: int, width: int) -> Plan:
    """Plan the sort; two more lines of indices; two of flags; three chunks of columns."""
    line, flags = Buffer((rows,), np.int64), Buffer((rows,), np.bool_)
    return [*sort_plan(rows), line, line, flags, flags, *chunk_buffers(3, width, rows)]


def sort_plan(rows: int) -> Plan:
    """Plan the keys of `sort_by_key`, two halves of them, and a line of indices."""
    half = Buffer((max(1, _padded(rows) // 2),), np.int64)
    return [Buffer((_padded(rows),), np.int64), half, half, Buffer((rows,), np.int64)]


def sort_by_key(indices: I32 | I64, buffers: list[Array]) -> tuple[I64, I64]:
    """Sort rows by their index, equal ones in order: return the keys index << 32 | row, ascending, and the rows.

    `buffers` are planned by `sort_plan`; both results are in them.
    """
    keys, low, high, rows = buffers
    count = len(indices)
    # all keys are distinct; padding is at the end
    keys[:count].copy_(indices).mul_(1 << _KEY_BITS).add_(torch.arange(count, out=rows))
    keys[count:].fill_(_LAST)
    _sort(keys, low, high)
    torch.bitwise_and(keys[:count], _ROW, out=rows)
    return keys[:count], rows


def first_key(indices: I64) -> I64:
    """Turn each index into the least key of a row with that index, in place."""
    return indices.mul_(1 << _KEY_BITS)


def add_rows(
    indices: I32 | I64,
    source: Array,
    table: Array,
    buffers: list[Array],
    *,
    scale: float,
    accumulate: bool,
    without: int | None = None,
) -> None:
    """Set table[indices[t]] = [table[indices[t]] +] scale * source[t], summed over t and rounded once.

    Rows of the table without an index become zero unless `accumulate`. `indices` [T] are rows of the table, or negative
    for rows of other tensor-parallel ranks, which add nothing; nor does the row `without`. `source` is [T, width];
    `buffers` are planned by `keyed_sum_plan`.
    """
    *of_sort, of_table, first, differ, absent, of_rows, spare, raw = buffers
    count = len(indices)
    keys, order = sort_by_key(indices, of_sort)
    torch.bitwise_right_shift(keys, _KEY_BITS, out=of_table)
    torch.lt(of_table, 0, out=absent)
    if without is not None:
        absent.logical_or_(torch.eq(of_table, without, out=differ))
    of_table.clamp_(min=0)  # negative ones are first: zeros before the rows of key 0
    torch.searchsorted(of_table, of_table, out=first)
    if not accumulate:
        table.zero_()
    for columns in row_chunks(table.shape[1], count):
        shape = (count, columns.stop - columns.start)
        # gathered, then widened: an operation takes operands of one type
        gathered = torch.index_select(source[:, columns], 0, order, out=stored(raw, shape, source.dtype))
        sums, term = wide(of_rows, gathered), shaped(spare, shape)
        _add_neighbours(sums.masked_fill_(absent[:, None], 0), term, of_table, differ)
        torch.index_select(sums, 0, first, out=term).mul_(scale)
        held = stored(raw, shape, table.dtype)
        if accumulate:
            term.add_(wide(of_rows, torch.index_select(table[:, columns], 0, of_table, out=held)))
        # every row of a key writes the same bits
        table[:, columns].index_copy_(0, of_table, held.copy_(term))


def _add_neighbours(sums: Array, term: Array, keys: I64, differ: Array) -> None:
    """Add neighbours with one key; the first row of each key receives the sum."""
    distance = 1
    while distance < len(sums):
        # After this pass a row has the sum of up to 2 * distance rows from it on. Keys are sorted, so that equal keys
        # at this distance have only equal ones between them.
        apart = torch.ne(keys[distance:], keys[:-distance], out=differ[: len(sums) - distance])
        other = term[: len(sums) - distance].copy_(sums[distance:]).masked_fill_(apart[:, None], 0)
        sums[:-distance].add_(other)
        distance *= 2


def _sort(keys: I64, low: I64, high: I64) -> None:
    """Sort a power of two of keys in place, by Batcher's bitonic sort (1968); `low` and `high` are half as long.

    `torch.sort` cannot be given memory to work in. It takes log2(n) * (log2(n) + 1) / 2 passes.
    """
    size = 2
    while size <= len(keys):
        apart = size // 2
        while apart:
            # runs of `size` keys are sorted upwards and downwards by turns, the last and longest upwards
            runs = keys.view(-1, size // (2 * apart), 2, apart)
            shape = (len(runs), size // (2 * apart), apart)
            least = torch.minimum(runs[:, :, 0], runs[:, :, 1], out=low.view(shape))
            most = torch.maximum(runs[:, :, 0], runs[:, :, 1], out=high.view(shape))
            for first, upper, lower in ((0, least, most), (1, most, least)):
                runs[first::2, :, 0].copy_(upper[first::2])
                runs[first::2, :, 1].copy_(lower[first::2])
            apart //= 2
        size *= 2
