"""Products of rows grouped by expert on tensors, block by block of one expert's rows, and weighted SwiGLU.

`bounds` are known on the device only, so every call works on the largest number of blocks that it may need, and index
operations find the expert and the rows of each. Bounds [0, 3, 3, 5] of R = 5 rows, blocks of 2, at most 4 blocks:

    block     0     1     2     3
    expert    0     0     2     2       repeated: there is no fourth block
    rows      0 1   2 2   3 4   3 4     the last row of an expert is repeated, and so is the last block

A repeated row stores the same bits again, or adds zero, so that no index is out of bounds. A repeated block stores what
it finds; all blocks are repeated if no expert has a row. Scratch is a block's rows, a chunk of one matrix and integers
for each row of all blocks: at most R + (block - 1) * experts rows. A block is some ten operations: this is the
fall-back for the fused kernels, not their equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from ratrain.targets.program.expert_kernels import ROW_BLOCK
from ratrain.targets.pytorch.device.device_activations import put_swiglu_gradients, swiglu
from ratrain.targets.pytorch.device.device_common import (
    I64,
    Array,
    add_wide,
    chunk_buffers,
    chunk_rows,
    complement,
    flat_chunks,
    row_chunks,
    shaped,
    size,
    stored,
    wide,
)
from ratrain.targets.pytorch.device.device_products import multiply, multiply_halves, operand
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, I32
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan

GRADIENT_ROWS = 256
"""Most rows of one expert that a gradient takes at a time: each time it goes over the whole gradient."""


def most_blocks(rows: int, experts: int, block: int) -> int:
    """Return the most blocks of `block` rows of one expert each: `busy` experts have a row, and the rest is shared."""
    busy = min(rows, experts)
    return busy + (rows - busy) // block


@frozen
class Blocks:
    """Blocks of rows of one expert each, as tensors on the device."""

    experts: I64
    """Expert of each block [blocks, 1]."""
    rows: I64
    """Rows of each block [blocks, size]."""
    places: I64
    """Place of each row in its block [blocks, size]: a repeated one has the place of the first."""
    tokens: I64
    """Token of each row [blocks, size]."""
    repeated: Array
    """True for repeated rows [blocks, size]; in the first column, for repeated blocks."""
    begins: Array
    """True for the first block of an expert [blocks, 1]."""
    continues: Array
    """False for the first block of an expert [blocks, 1]."""

    @staticmethod
    def plan(rows: int, bounds: I32, block: int) -> Plan:
        """Plan six lines of experts, five of blocks, two of flags; rows, thrice; their flags, numbers and places."""
        experts = bounds.shape[0] - 1
        count = most_blocks(rows, experts, block)
        line, flags, lanes = Buffer((count, 1), np.int64), Buffer((count, 1), np.bool_), (count, block)
        return [
            *[Buffer((experts,), np.int64)] * 6,
            *(*[line] * 5, flags, flags),
            *(*[Buffer(lanes, np.int64)] * 3, Buffer(lanes, np.bool_), Buffer((count * block,), np.int32)),
            Buffer((block,), np.int64),
        ]

    @classmethod
    def find(cls, sizes: tuple[int, int], order: I32 | None, bounds: I32, block: int, scratch: Scratch) -> Blocks:
        """Find the blocks of at most `block` rows; `sizes` are those of two tensors, by rows and by tokens.

        Without `order` each row is its own token.
        """
        count = max(sizes)
        buffers = scratch.take_all(cls.plan(count, bounds, block))
        last, starts, counts, behind, shifts, spare = buffers[:6]
        number, experts, first, limit, start, begins, continues = buffers[6:13]
        rows, places, tokens, repeated, numbers, lane = buffers[13:]
        last.copy_(bounds[1:])
        starts.copy_(bounds[:-1])
        # blocks of each expert, then those of all up to it
        torch.sub(last, starts, out=counts).add_(block - 1).div_(block, rounding_mode="floor")
        _add_before(behind.copy_(counts), spare)
        # block m, of all, begins with row m * block + shifts[expert]
        torch.sub(counts, behind, out=shifts).mul_(block).add_(starts)
        last.sub_(1)

        torch.arange(len(number), out=number.view(-1))
        exists = torch.lt(number, behind[-1:], out=continues)
        torch.minimum(number, spare[:1].copy_(behind[-1:]).sub_(1), out=number)
        # -1 if there is no block: repeated ones are then of expert 0
        torch.searchsorted(behind, number, right=True, out=experts)
        number.clamp_(min=0)
        for line, of_blocks in ((shifts, first), (starts, start), (last, limit)):
            torch.index_select(line, 0, experts.view(-1), out=of_blocks.view(-1))
        first.add_(number.mul_(block))
        torch.eq(first, start, out=begins).logical_and_(exists)
        begins[:1].fill_(True)
        torch.add(first, torch.arange(block, out=lane), out=rows)
        torch.le(rows, limit, out=repeated).logical_and_(exists).logical_not_()
        torch.logical_not(begins, out=continues)
        torch.minimum(rows, limit, out=rows).clamp_(min=0)
        torch.sub(rows, first, out=places).clamp_(min=0)
        tokens.copy_(rows)
        if order is not None:
            torch.index_select(order, 0, rows.view(-1), out=numbers)
            tokens.view(-1).copy_(numbers).div_(count // min(sizes), rounding_mode="floor")
        return cls(experts, rows, places, tokens, repeated, begins, continues)


def _add_before(values: I64, spare: I64) -> None:
    """Add to each value all before it; `torch.cumsum` of one line takes memory on a GPU."""
    distance = 1
    while distance < len(values):
        values[distance:].add_(spare[distance:].copy_(values[:-distance]))
        distance *= 2


def product_shape(b: Array, *, trans_b: bool) -> tuple[int, int]:
    """Return the columns and the inner dimension of an expert's product."""
    return (b.shape[1], b.shape[2]) if trans_b else (b.shape[2], b.shape[1])


def _product_buffers(b: Array, *, trans_b: bool) -> Plan:
    """Plan rows and some columns of a matrix, both also in float32; three products."""
    columns, inner = product_shape(b, trans_b=trans_b)
    some = chunk_rows(columns, inner)
    rows, matrix, product = (Buffer((count,)) for count in (ROW_BLOCK * inner, some * inner, ROW_BLOCK * some))
    return [rows, rows, matrix, matrix, product, product, product]


def expert_rows_plan(b: Array, bounds: I32, out: Array, *, trans_b: bool = False, **_: object) -> Plan:
    """Plan the blocks and their products; what is there before, also in float32."""
    buffers = _product_buffers(b, trans_b=trans_b)
    return [*Blocks.plan(out.shape[0], bounds, ROW_BLOCK), *buffers, buffers[-1], buffers[-1]]


def expert_sums_plan(a: Array, b: Array, bounds: I32, out: Array, *, trans_b: bool = False, **_: object) -> Plan:
    """Plan the blocks and their products; some rows of the sum, and what is added to them."""
    products = [*Blocks.plan(a.shape[0], bounds, ROW_BLOCK), *_product_buffers(b, trans_b=trans_b)]
    return [*products, *chunk_buffers(2, *out.shape)]


def choice_sums_plan(out: Array, **_: object) -> Plan:
    """Plan some rows of the sum, and what is added to them."""
    return chunk_buffers(2, *out.shape)


def _gradient_rows(a: Array, b: Array) -> int:
    """Return the rows of a block of `expert_gradients`: no expert has more rows than there are tokens."""
    return min(GRADIENT_ROWS, a.shape[0], b.shape[0])


def _gradient_buffers(a: Array, b: Array) -> Plan:
    """Plan rows of both factors, also in float32; some rows of a gradient, of what it is added to, and to be stored."""
    block, width, some = _gradient_rows(a, b), b.shape[1], chunk_rows(a.shape[1], b.shape[1])
    left, right, product = (Buffer((count,)) for count in (block * some, block * width, some * width))
    return [left, left, right, right, product, product, product]


def expert_gradients_plan(a: Array, b: Array, bounds: I32, **_: object) -> Plan:
    """Plan the blocks, and the buffers of a gradient."""
    rows = max(a.shape[0], b.shape[0])
    return [*Blocks.plan(rows, bounds, _gradient_rows(a, b)), *_gradient_buffers(a, b)]


def weighted_swiglu_forward_plan(gate: Array, **_: object) -> Plan:
    """Plan gate, its sigmoid, up; weights of rows."""
    return [*chunk_buffers(3, *gate.shape), Buffer((chunk_rows(*gate.shape), 1))]


def weighted_swiglu_backward_plan(gate: Array, **_: object) -> Plan:
    """Plan gate, up, the gradient; the gate's sigmoid, a product; two numbers of a row, and its index."""
    rows = chunk_rows(*gate.shape)
    return [*chunk_buffers(5, *gate.shape), Buffer((rows, 1)), Buffer((rows, 1)), Buffer((rows,), np.int64)]


def sigmoid_backward_plan(y: F32, **_: object) -> Plan:
    """Plan the slope."""
    return chunk_buffers(1, size(y))


class DeviceExperts:
    """The kernels of `TorchDevice` on rows of experts."""

    halves: bool
    """True if 16-bit factors are multiplied without conversion."""

    def expert_rows(self, a, b, bounds, out, *, order=None, scratch, trans_b=False, accumulate=False):
        blocks = Blocks.find((len(out), len(a)), order, bounds, ROW_BLOCK, scratch)
        *buffers, held = scratch.take_all(_product_buffers(b, trans_b=trans_b))
        of_before, term = scratch.take_all([Buffer(held.shape)] * 2)
        for number, columns, product in self._products(a, b, blocks, blocks.tokens, buffers, trans_b=trans_b):
            rows, before = blocks.rows[number], stored(of_before, product.shape, out.dtype)
            torch.index_select(out[:, columns], 0, rows, out=before)
            if accumulate:
                add_wide(product, term, before)
            value = stored(held, product.shape, out.dtype).copy_(product)
            torch.where(blocks.repeated[number, :1], before, value, out=value)
            out[:, columns].index_copy_(0, rows, value)

    def expert_sums(self, a, b, order, bounds, sums, out, *, residual=None, scratch, trans_b=False, accumulate=False):
        """Sum products in the order of blocks, so of experts; a block has a token at most once."""
        blocks = Blocks.find((len(a), len(out)), order, bounds, ROW_BLOCK, scratch)
        *buffers, held = scratch.take_all(_product_buffers(b, trans_b=trans_b))
        total, term = scratch.take_all(chunk_buffers(2, *out.shape))
        sums.zero_()
        for number, columns, product in self._products(a, b, blocks, blocks.rows, buffers, trans_b=trans_b):
            # a repeated row stores its sum again; a repeated block adds zero
            product.masked_fill_(blocks.repeated[number, 0], 0)
            tokens = blocks.tokens[number]
            value = torch.index_select(sums[:, columns], 0, tokens, out=shaped(held, product.shape)).add_(product)
            sums[:, columns].index_copy_(0, tokens, value)
        for rows in row_chunks(*out.shape):
            _put_sum(wide(total, sums[rows]), term, rows, out, residual, accumulate=accumulate)

    def choice_sums(self, a, out, *, residual=None, scratch, accumulate=False):
        total, term = scratch.take_all(choice_sums_plan(out))
        of_tokens = a.view(len(out), -1, a.shape[1])
        for rows in row_chunks(*out.shape):
            value = wide(total, of_tokens[rows, 0])
            for choice in range(1, of_tokens.shape[1]):
                add_wide(value, term, of_tokens[rows, choice])
            _put_sum(value, term, rows, out, residual, accumulate=accumulate)

    def _products(
        self, a: Array, b: Array, blocks: Blocks, source: I64, buffers: list[Array], *, trans_b: bool
    ) -> Iterator[tuple[int, slice, F32]]:
        """Yield each block, columns of its product, and the product of its rows `source` of `a` with these columns."""
        columns, inner = product_shape(b, trans_b=trans_b)
        of_rows, wide_rows, of_matrix, wide_matrix, of_product, spare = buffers
        halves = self._are_halves(a, b)
        rows = stored(of_rows, (ROW_BLOCK, inner), a.dtype)
        for across in row_chunks(columns, inner):
            part = b[:, across] if trans_b else b[:, :, across]
            matrix = stored(of_matrix, (1, *part.shape[1:]), b.dtype)
            shape = (ROW_BLOCK, across.stop - across.start)
            product, repeated = shaped(of_product, shape), shaped(spare, shape)
            for number, at in enumerate(source):
                right = operand(
                    wide_matrix, torch.index_select(part, 0, blocks.experts[number], out=matrix)[0], halves=halves
                )
                left = operand(wide_rows, torch.index_select(a, 0, at, out=rows), halves=halves)
                multiply(left, right.T if trans_b else right, product)
                # rows with one content may have products of other bits at other places: the first's is taken
                yield number, across, torch.index_select(product, 0, blocks.places[number], out=repeated)

    def _are_halves(self, a: Array, b: Array) -> bool:
        """Return whether factors are multiplied as they are stored, in 16 bits."""
        return bool(self.halves and a.dtype == b.dtype and a.element_size() == 2)

    def expert_gradients(self, a, b, bounds, out, *, order=None, scratch, gathers_a, accumulate):
        """Sum products in the order of blocks; each stores the sum so far, so that the last of an expert stores all."""
        blocks = Blocks.find((len(a), len(b)), order, bounds, _gradient_rows(a, b), scratch)
        of_a, wide_a, of_b, wide_b, of_total, term, held = scratch.take_all(_gradient_buffers(a, b))
        halves, (_, block) = self._are_halves(a, b), blocks.rows.shape
        of_left, of_right = (blocks.tokens, blocks.rows) if gathers_a else (blocks.rows, blocks.tokens)
        if not accumulate:
            out.zero_()  # of experts without rows
        for some in row_chunks(a.shape[1], b.shape[1]):
            factor, target = a[:, some], out[:, some]
            total = shaped(of_total, target.shape[1:])
            value = stored(held, (1, *total.shape), out.dtype)
            rows = stored(of_a, (block, factor.shape[1]), a.dtype), stored(of_b, (block, b.shape[1]), b.dtype)
            for number, expert in enumerate(blocks.experts):
                total.masked_fill_(blocks.begins[number], 0)
                if accumulate:
                    before = wide(term, torch.index_select(target, 0, expert, out=value)[0])
                    total.add_(before.masked_fill_(blocks.continues[number], 0))
                skipped = blocks.repeated[number, :, None]
                left = torch.index_select(factor, 0, of_left[number], out=rows[0]).masked_fill_(skipped, 0)
                right = torch.index_select(b, 0, of_right[number], out=rows[1]).masked_fill_(skipped, 0)
                left, right = operand(wide_a, left, halves=halves), operand(wide_b, right, halves=halves)
                _add_product(left.T, right, total)
                target.index_copy_(0, expert, value.copy_(total))

    def weighted_swiglu_forward(self, gate, up, weights, prod, *, order=None, bounds=None, scratch):
        *buffers, of_weights = scratch.take_all(weighted_swiglu_forward_plan(gate))
        for rows in row_chunks(*gate.shape):
            g, u = wide(buffers[0], gate[rows]), wide(buffers[1], up[rows])
            weight = of_weights[: len(g)]
            _weights_of(weights, rows, order, weight)
            prod[rows].copy_(swiglu(g, u, shaped(buffers[2], g.shape)).mul_(weight))

    def weighted_swiglu_backward(
        self, gate, up, weights, dprod, dgate, dup, dweights, *, order=None, bounds=None, scratch
    ):
        *buffers, of_weights, of_sums, index = scratch.take_all(weighted_swiglu_backward_plan(gate))
        gradients = dweights.view(-1)
        for rows in row_chunks(*gate.shape):
            sources = zip(buffers, (gate, up, dprod), strict=False)
            g, u, d = (wide(buffer, each[rows]) for buffer, each in sources)
            share, term = shaped(buffers[3], g.shape), shaped(buffers[4], g.shape)
            torch.sigmoid(g, out=share)
            weight, total = of_weights[: len(g)], of_sums[: len(g)]
            _weights_of(weights, rows, order, weight)
            torch.sum(torch.mul(g, share, out=term).mul_(u).mul_(d), dim=1, keepdim=True, out=total)
            put_swiglu_gradients((g, u, d.mul_(weight)), share, term, dgate[rows], dup[rows])
            if order is None:
                gradients[rows].copy_(total.view(-1))
            else:
                gradients.index_copy_(0, index[: len(g)].copy_(order[rows]), total.view(-1))

    def sigmoid_forward(self, x, y, *, scratch):
        torch.sigmoid(x, out=y)

    def sigmoid_backward(self, y, dy, dx, *, scratch):
        (buffer,) = scratch.take_all(sigmoid_backward_plan(y))
        for of_y, of_dy, of_dx in flat_chunks(y, dy, dx):
            slope = complement(of_y, shaped(buffer, of_y.shape))
            torch.mul(of_dy, slope.mul_(of_y), out=of_dx)


def _put_sum(value: F32, spare: Array, rows: slice, out: Array, residual: Array | None, *, accumulate: bool) -> None:
    """Set rows of out = [out +] value [+ residual], rounded once; value changes."""
    if accumulate:
        add_wide(value, spare, out[rows])
    if residual is not None:
        add_wide(value, spare, residual[rows])
    out[rows].copy_(value)


def _add_product(a: Array, b: Array, total: F32) -> None:
    """Set total += a @ b."""
    if a.dtype == torch.float32:
        torch.addmm(total, a, b, out=total)
    else:
        multiply_halves(a, b, total, total)


def _weights_of(weights: F32, rows: slice, order: I32 | None, out: F32) -> None:
    """Set out [rows, 1] = the weights of some rows."""
    of_rows = weights.view(-1)
    if order is None:
        out.view(-1).copy_(of_rows[rows])
    else:
        torch.index_select(of_rows, 0, order[rows], out=out.view(-1))
