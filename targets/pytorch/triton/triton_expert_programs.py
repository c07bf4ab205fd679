"""Products of rows grouped by expert in fused kernels, program by program.

    find_blocks        one program:                                 expert and first row of each block of rows
    grouped_product    a program a block and a tile of columns:     rows of tokens, or of experts, times a matrix
    clear_others       a program some rows and columns:             zeros for products of rows outside the bounds
    sum_choices        a program some elements of tokens:           the sum of a token's products
    grouped_gradients  a program a tile of an expert's gradient:    sum over the expert's rows

Bounds [0, 3, 3, 5], blocks of 2 rows, at most 4 of them:

    block     0    1    2    3
    expert    0    0    2   -1       no such block: its programs end at once
    first     0    2    3    -

So the grid is as large as the worst router needs, and the router decides which programs work. A row is multiplied by
one program, in steps of fixed depth: its bits do not depend on other rows. Each result is one program's alone, which
sums in order, so nothing is added atomically.
"""

from __future__ import annotations

import triton.language as tl

from ratrain.targets.pytorch.triton.triton_attention_programs import added_product, load_factor
from ratrain.targets.pytorch.triton.triton_common import jit, load_wide, own_elements, store_rounded


@jit
def find_blocks(
    bounds: tl.tensor,
    block_experts: tl.tensor,
    block_rows: tl.tensor,
    experts: tl.tensor,
    blocks: tl.tensor,
    block: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    """Set the expert of each block, -1 if there is none, and its first row; a lane is an expert."""
    lane = tl.arange(0, lanes)
    inside = lane < experts
    start = tl.load(bounds + lane, mask=inside, other=0)
    end = tl.load(bounds + lane + 1, mask=inside, other=0)
    count = tl.where(inside, (end - start + block - 1) // block, 0)
    first = tl.cumsum(count, axis=0) - count
    for number in range(tl.max(count, axis=0)):
        tl.store(block_experts + first + number, lane, mask=number < count)
        tl.store(block_rows + first + number, start + number * block, mask=number < count)
    for unused in range(tl.sum(count, axis=0), blocks, lanes):
        tl.store(block_experts + unused + lane, -1, mask=unused + lane < blocks)


@jit
def grouped_product(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    block_experts: tl.tensor,
    block_rows: tl.tensor,
    choices: tl.tensor,
    inner: tl.constexpr,
    all_columns: tl.constexpr,
    out_columns: tl.constexpr,
    of_tokens: tl.constexpr,
    ordered: tl.constexpr,
    trans_b: tl.constexpr,
    accumulate: tl.constexpr,
    whole: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """Set a tile of out = [out +] a block of rows of one expert @ some columns of its matrix.

    If the factor is `of_tokens`, row r of the product is that of token order[r] // choices; else row r of the factor
    becomes row order[r] of the product, so that a token's rows lie together. It stays row r if rows are not `ordered`.
    `b` points to the first column that `out` [rows, out_columns] has.
    """
    expert = tl.load(block_experts + tl.program_id(0)).to(tl.int64)
    if expert >= 0:
        row = tl.load(block_rows + tl.program_id(0)) + tl.arange(0, rows)
        there = row < tl.load(bounds + expert + 1)
        source, target = row, row
        if ordered:
            choice = tl.load(order + row, mask=there, other=0)
            if of_tokens:
                source = choice // choices
            else:
                target = choice
        column = tl.program_id(1) * columns + tl.arange(0, columns)
        within = column < out_columns
        matrix = b + expert * (inner * all_columns)
        left_rows = a + source.to(tl.int64)[:, None] * inner
        total = tl.zeros((rows, columns), tl.float32)
        for first in range(0, inner, depth):
            step = first + tl.arange(0, depth)
            deep = step < inner
            left = load_factor(left_rows + step[None, :], there[:, None] & deep[None, :], whole)
            if trans_b:
                at = column.to(tl.int64)[None, :] * inner + step[:, None]
            else:
                at = step.to(tl.int64)[:, None] * all_columns + column[None, :]
            right = load_factor(matrix + at, deep[:, None] & within[None, :], whole)
            total = added_product(left, right, total)
        at = target.to(tl.int64)[:, None] * out_columns + column[None, :]
        inside = there[:, None] & within[None, :]
        if accumulate:
            total += load_wide(out + at, inside)
        store_rounded(out + at, total, inside)


@jit
def clear_others(
    products: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    count: tl.tensor,
    experts: tl.tensor,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
) -> None:
    """Set row order[r] of the products [count, width] to 0 for each row r outside the bounds; there is seldom one."""
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    outside = (row < count) & ((row < tl.load(bounds)) | (row >= tl.load(bounds + experts)))
    target = tl.load(order + row, mask=outside, other=0).to(tl.int64)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    at = target[:, None] * width + column[None, :]
    tl.store(products + at, tl.zeros((rows, columns), tl.float32), mask=outside[:, None] & (column < width)[None, :])


@jit
def sum_choices(
    products: tl.tensor,
    out: tl.tensor,
    residual: tl.tensor,
    count: tl.tensor,
    choices: tl.tensor,
    all_columns: tl.constexpr,
    width: tl.constexpr,
    from_zero: tl.constexpr,
    accumulate: tl.constexpr,
    adds_residual: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Set some columns of out = [out +] the sum of the products [tokens, choices, width] of each token [+ residual].

    `out` and `residual` point to the first of these columns. A sum `from_zero` is never -0.
    """
    at = own_elements(block)
    inside = at < count
    token, column = at // width, at % width
    first = products + token * choices * width + column
    total = load_wide(first, inside)
    if from_zero:
        total += 0.0
    # choices of a token ascend with their experts
    for choice in range(1, choices):
        total += load_wide(first + choice * width, inside)
    place = token * all_columns + column
    if accumulate:
        total += load_wide(out + place, inside)
    if adds_residual:
        total += load_wide(residual + place, inside)
    store_rounded(out + place, total, inside)


@jit
def grouped_gradients(
    a: tl.tensor,
    b: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    bounds: tl.tensor,
    choices: tl.tensor,
    height: tl.constexpr,
    width: tl.constexpr,
    ordered: tl.constexpr,
    gathers_a: tl.constexpr,
    accumulate: tl.constexpr,
    whole: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    depth: tl.constexpr,
) -> None:
    """Set a tile of out[e] = [out[e] +] a_e^T @ b_e, over the rows of expert e.

    If rows are `ordered`, one factor has those of their tokens.
    """
    expert = tl.program_id(2)
    start, end = tl.load(bounds + expert), tl.load(bounds + expert + 1)
    down, across = tl.program_id(1) * rows + tl.arange(0, rows), tl.program_id(0) * columns + tl.arange(0, columns)
    in_height, in_width = down < height, across < width
    total = tl.zeros((rows, columns), tl.float32)
    for first in range(start, end, depth):
        row = first + tl.arange(0, depth)
        there = row < end
        of_a, of_b = row.to(tl.int64), row.to(tl.int64)
        if ordered:
            token = (tl.load(order + row, mask=there, other=0) // choices).to(tl.int64)
            if gathers_a:
                of_a = token
            else:
                of_b = token
        left = load_factor(a + of_a[:, None] * height + down[None, :], there[:, None] & in_height[None, :], whole)
        right = load_factor(b + of_b[:, None] * width + across[None, :], there[:, None] & in_width[None, :], whole)
        total = added_product(tl.trans(left), right, total)
    inside = in_height[:, None] & in_width[None, :]
    place = (expert.to(tl.int64) * height + down[:, None]) * width + across[None, :]
    if accumulate:
        total += load_wide(out + place, inside)
    store_rounded(out + place, total, inside)
