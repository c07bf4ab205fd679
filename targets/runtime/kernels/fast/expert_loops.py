"""Numba loops of products of experts' rows, with BLAS inside: gather a block, multiply, scatter.

An expert's rows are cut into blocks of `ROW_BLOCK`, its matrix into panels of some columns of the product. A panel is
converted to float32 once and meets all blocks of the expert; a block is gathered and converted again for each panel,
which is little work next to a product with hundreds of columns. Three experts with 70, 0 and 20 rows, two panels:

    expert 0: panel 0 (blocks 0 1), panel 1 (blocks 0 1); expert 2: panel 0 (block 0), panel 1 (block 0)

`expert_rows` shares out this list of 6 products to the threads. In `expert_sums` a token's contributions are added in
ascending order of experts, so a thread has whole panels there, with all experts. Every product has `ROW_BLOCK` rows
(the last of an expert is filled up with zeros) and the same columns for any number of threads: no bit depends on it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.program.expert_kernels import ROW_BLOCK
from ratrain.targets.runtime.kernels.fast.blas import multiply_by, multiply_transposed
from ratrain.targets.runtime.kernels.fast.fast_numba import exact, inlined, load, narrow
from ratrain.targets.runtime.kernels.fast.fast_rows import store_line

TILE_ROWS, TILE_COLUMNS, TILE_DEPTH = 256, 1024, 256
"""Largest tile of an expert's gradient, and rows of the expert that are multiplied at a time."""

STORE_WORK = 32
"""Work of storing a tile, in rows of its expert: storing took as long as the product of 10 to 30 rows (measured)."""

_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined()
def _widen(x: Any, first_row: Any, first_column: Any, rows: Any, columns: Any, out: Any) -> None:
    """Set the upper left corner of `out` = a rectangle of x, in float32."""
    # rows are sliced here: slices of two dimensions lose the knowledge that elements of a row are neighbours
    for r in range(rows):
        row = x[first_row + r, first_column : first_column + columns]
        line = out[r, :columns]
        for i in range(line.size):
            line[i] = load(row[i])


@inlined()
def _widen_rows(x: Any, order: Any, choices: Any, start: Any, count: Any, first: Any, columns: Any, out: Any) -> None:
    """Set rows of `out` = columns of the rows of an expert from `start` on: row order[r] // choices of x for r.

    If `order` is None, row r of x.
    """
    for r in range(count):
        source = start + r if order is None else order[start + r] // choices
        row = x[source, first : first + columns]
        line = out[r, :columns]
        for i in range(line.size):
            line[i] = load(row[i])


@inlined()
def _load_panel(b: Any, expert: Any, trans_b: Any, column: Any, width: Any, inner: Any, panel: Any) -> None:
    """Convert the panel of an expert's matrix as it lies: [inner, width], or [width, inner] if `trans_b`."""
    if trans_b:
        _widen(b[expert], column, 0, width, inner, panel)
    else:
        _widen(b[expert], 0, column, inner, width, panel)


@inlined()
def _multiply_block(
    sgemm: Any,
    a: Any,
    order: Any,
    choices: Any,
    start: Any,
    count: Any,
    trans_b: Any,
    width: Any,
    block: Any,
    panel: Any,
    product: Any,
) -> None:
    """Set the first `width` columns of `product` = a block of rows from `start` on @ the panel."""
    inner = a.shape[1]
    _widen_rows(a, order, choices, start, count, 0, inner, block)
    for r in range(count, ROW_BLOCK):
        line = block[r]
        for i in range(line.size):
            line[i] = _ZERO
    right = panel[:width, :inner] if trans_b else panel[:inner, :width]
    multiply_by(sgemm, block[:, :inner], right, _ZERO, product[:, :width], trans_b)


@exact()
def expert_rows(
    sgemm: Any,
    a: Any,
    b: Any,
    order: Any,
    choices: Any,
    bounds: Any,
    out: Any,
    trans_b: Any,
    accumulate: Any,
    mine: Any,
    buffers: Any,
) -> None:
    """Compute the products of the list with numbers in `mine`, a range.

    `buffers` are a panel, a block and its product.
    """
    (first, last), (panel, block, product) = mine, buffers
    columns, most = out.shape[1], product.shape[1]
    number = 0
    for expert in range(bounds.size - 1):
        begin, end = bounds[expert], bounds[expert + 1]
        blocks = (end - begin + ROW_BLOCK - 1) // ROW_BLOCK
        for column in range(0, columns, most):
            low, high = max(first - number, 0), min(last - number, blocks)
            number += blocks
            if low >= high:
                continue
            width = min(most, columns - column)
            _load_panel(b, expert, trans_b, column, width, a.shape[1], panel)
            for index in range(low, high):
                start = begin + index * ROW_BLOCK
                count = min(ROW_BLOCK, end - start)
                _multiply_block(sgemm, a, order, choices, start, count, trans_b, width, block, panel, product)
                for r in range(count):
                    line, stored = product[r, :width], out[start + r, column : column + width]
                    if accumulate:
                        for i in range(line.size):
                            line[i] += load(stored[i])
                    for i in range(line.size):
                        stored[i] = narrow(line[i], stored.dtype)


@exact()
def expert_sums(
    sgemm: Any,
    a: Any,
    b: Any,
    order: Any,
    choices: Any,
    bounds: Any,
    sums: Any,
    trans_b: Any,
    mine: Any,
    buffers: Any,
) -> None:
    """Set the columns of `sums` of the panels in `mine`, a range; `buffers` as for `expert_rows`."""
    (first, last), (panel, block, product) = mine, buffers
    columns, most = sums.shape[1], product.shape[1]
    for column in range(first * most, min(last * most, columns), most):
        width = min(most, columns - column)
        for t in range(sums.shape[0]):
            total = sums[t, column : column + width]
            for i in range(total.size):
                total[i] = _ZERO
        for expert in range(bounds.size - 1):
            begin, end = bounds[expert], bounds[expert + 1]
            if begin < end:
                _load_panel(b, expert, trans_b, column, width, a.shape[1], panel)
            for start in range(begin, end, ROW_BLOCK):
                count = min(ROW_BLOCK, end - start)
                _multiply_block(sgemm, a, None, choices, start, count, trans_b, width, block, panel, product)
                for r in range(count):
                    line, total = product[r, :width], sums[order[start + r] // choices, column : column + width]
                    for i in range(line.size):
                        total[i] += line[i]


@exact()
def choice_sums(a: Any, out: Any, residual: Any, has_residual: Any, accumulate: Any, total: Any) -> None:
    """Set out = [out +] the sum of the rows of each token [+ residual], by way of a line `total`."""
    choices = a.shape[0] // out.shape[0]
    for t in range(out.shape[0]):
        for start in range(0, out.shape[1], total.size):
            stop = min(start + total.size, out.shape[1])
            line, stored = total[: stop - start], out[t, start:stop]
            row = a[t * choices, start:stop]
            for i in range(line.size):
                line[i] = load(row[i])
            for j in range(1, choices):
                row = a[t * choices + j, start:stop]
                for i in range(line.size):
                    line[i] += load(row[i])
            if accumulate:
                for i in range(line.size):
                    line[i] += load(stored[i])
            if has_residual:
                extra = residual[t, start:stop]
                for i in range(line.size):
                    line[i] += load(extra[i])
            store_line(line, stored)


@exact()
def expert_gradients(
    sgemm: Any,
    a: Any,
    b: Any,
    orders: Any,
    choices: Any,
    bounds: Any,
    out: Any,
    accumulate: Any,
    mine: Any,
    buffers: Any,
    tile: Any,
) -> None:
    """Compute the tiles of all experts' gradients whose work begins in `mine`, a range.

    A tile's work is the rows of its expert and `STORE_WORK`. `orders` belong to the factors, None for the factor that
    is read as it lies. `buffers` are for rows of both factors; `tile` is None if products go to `out` directly.
    """
    (order_a, order_b), (first, last), (left, right) = orders, mine, buffers
    position = 0
    for expert in range(bounds.size - 1):
        begin, end = bounds[expert], bounds[expert + 1]
        for row in range(0, a.shape[1], TILE_ROWS):
            for column in range(0, b.shape[1], TILE_COLUMNS):
                is_mine = first <= position < last
                position += end - begin + STORE_WORK
                if not is_mine:
                    continue
                height, width = min(TILE_ROWS, a.shape[1] - row), min(TILE_COLUMNS, b.shape[1] - column)
                keep = _ZERO
                for start in range(begin, end, TILE_DEPTH):
                    count = min(TILE_DEPTH, end - start)
                    _widen_rows(a, order_a, choices, start, count, row, height, left)
                    _widen_rows(b, order_b, choices, start, count, column, width, right)
                    factors = left[:count, :height], right[:count, :width]
                    if tile is None:
                        target = out[expert, row : row + height, column : column + width]
                        multiply_transposed(sgemm, factors[0], factors[1], keep, target)
                    else:
                        multiply_transposed(sgemm, factors[0], factors[1], keep, tile[:height, :width])
                    keep = _ONE
                _store_tile(tile, begin == end, accumulate, row, height, column, width, out[expert])


@inlined()
def _store_tile(
    tile: Any, empty: Any, accumulate: Any, row: Any, height: Any, column: Any, width: Any, out: Any
) -> None:
    """Set a rectangle of out = [out +] the tile, rounded; zeros for the tile if it is `empty`."""
    for r in range(height):
        stored = out[row + r, column : column + width]
        if empty:
            if not accumulate:
                for i in range(stored.size):
                    stored[i] = narrow(_ZERO, stored.dtype)
        elif tile is not None:
            line = tile[r, :width]
            if accumulate:
                for i in range(line.size):
                    line[i] += load(stored[i])
            for i in range(line.size):
                stored[i] = narrow(line[i], stored.dtype)
