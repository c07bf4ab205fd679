"""Gradients of an embedding's table: each row is the sum over the tokens that looked it up, in their order.

    tokens    7  3  7  5       program 0 sums rows 0 and 2 for token 7; program 2 sees that an earlier one does

A program compares its token with all others, so that nothing is sorted and nothing is added atomically.
"""

from __future__ import annotations

import triton.language as tl

from ratrain.targets.pytorch.device.device_tables import DeviceTables, check_tokens
from ratrain.targets.pytorch.triton.triton_common import (
    jit,
    launch,
    load_wide,
    power_of_two,
    programs,
    store_rounded,
)

_SCANNED, _ROWS, _COLUMNS = 1024, 8, 1024
"""Tokens that a program compares at a time with its own, rows that it adds at a time, and its columns."""


@jit
def add_rows_of_token(
    dtable: tl.tensor,
    dy: tl.tensor,
    tokens: tl.tensor,
    count: tl.tensor,
    left_out: tl.tensor,
    scale: tl.tensor,
    width: tl.constexpr,
    accumulate: tl.constexpr,
    scanned: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Set some columns of a token's row of the table; the token's first place does, all others do nothing.

    Negative tokens are rows of other tensor-parallel ranks. They add nothing, nor does the token `left_out`.
    """
    mine = tl.program_id(0)
    token = tl.load(tokens + mine)
    if (token >= 0) & (token != left_out):
        before = 0
        for first in range(0, mine, scanned):
            at = first + tl.arange(0, scanned)
            same = tl.load(tokens + at, mask=at < mine, other=-1) == token
            before += tl.sum(same.to(tl.int32), axis=0)
        if before == 0:
            column = tl.program_id(1) * columns + tl.arange(0, columns)
            within = column < width
            total = tl.zeros((columns,), tl.float32)
            for begin in range(mine, count, scanned):
                at = begin + tl.arange(0, scanned)
                same = tl.load(tokens + at, mask=at < count, other=-1) == token
                if tl.sum(same.to(tl.int32), axis=0) > 0:
                    for first in range(begin, begin + scanned, rows):
                        row = first + tl.arange(0, rows)
                        same_row = tl.load(tokens + row, mask=row < count, other=-1) == token
                        if tl.sum(same_row.to(tl.int32), axis=0) > 0:
                            place = row.to(tl.int64)[:, None] * width + column[None, :]
                            total += tl.sum(load_wide(dy + place, same_row[:, None] & within[None, :]), axis=0)
            total *= scale
            place = token.to(tl.int64) * width + column
            if accumulate:
                total += load_wide(dtable + place, within)
            store_rounded(dtable + place, total, within)


class TritonTables(DeviceTables):
    """The kernel of `TorchTriton` that adds to a table."""

    def embedding_backward(self, tokens, dy, dtable, *, scratch, accumulate, scale=1.0, padding_token=None):
        """Add gradients to the table, by tokens in their order; tokens are checked on the CPU only."""
        check_tokens(tokens, len(dtable))
        if not accumulate:
            dtable.zero_()
        count, width = dy.shape
        columns = min(_COLUMNS, power_of_two(width))
        left_out = -1 if padding_token is None else padding_token
        constants = {"width": width, "accumulate": accumulate, "scanned": _SCANNED, "rows": _ROWS, "columns": columns}
        grid = (count, programs(width, columns))
        launch(add_rows_of_token, grid, dtable, dy, tokens, count, left_out, float(scale), **constants)
