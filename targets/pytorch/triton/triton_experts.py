"""Calls of the fused kernels for rows of experts (`triton_expert_programs`): tiles, grids, scratch, weighted SwiGLU.

Sums over the experts of a token go through float32 products of all rows, since two experts must not add to a token at
one time. These would be R * N numbers, 268 MB for 4096 tokens, 8 experts each and 2048 columns. So columns go in rounds
whose products fit `MOST_PRODUCTS`; a round reads its columns of the matrices alone, and the rows once more.

Tiles are chosen by analogy with those of attention, which were timed: two programs to a multiprocessor, and no more
shared memory than 99 KiB. These have not been timed on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from attrs import frozen

from ratrain.targets.program.expert_kernels import ROW_BLOCK
from ratrain.targets.pytorch.device.device_common import I32, row_steps, shaped
from ratrain.targets.pytorch.device.device_experts import DeviceExperts, most_blocks, product_shape
from ratrain.targets.pytorch.triton.triton_activations import share_of, slope_of, value_of
from ratrain.targets.pytorch.triton.triton_common import (
    BLOCK,
    interpreted,
    jit,
    launch,
    load_wide,
    power_of_two,
    programs,
    store_rounded,
)
from ratrain.targets.pytorch.triton.triton_expert_programs import (
    find_blocks,
    grouped_gradients,
    grouped_product,
    sum_choices,
)
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan

MOST_PRODUCTS = 1 << 24
"""Most products of a round of `expert_sums`, 64 MiB; one tile of columns if that has more."""


@frozen
class ProductTile:
    """Rows and columns of a tile of a product, terms of a step, warps that work on it, and steps loaded ahead."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """The sizes, as the programs call them."""
        return {"rows": self.rows, "columns": self.columns, "depth": self.depth}


def tiles_of(a: Array, b: Array) -> tuple[ProductTile, ProductTile]:
    """Return the tiles of `grouped_product` and `grouped_gradients` for two factors."""
    if _are_halves(a, b):
        return ProductTile(ROW_BLOCK, 128, 64, 4, 3), ProductTile(128, 128, 32, 8, 3)
    return ProductTile(ROW_BLOCK, 64, 32, 4, 2), ProductTile(64, 64, 32, 4, 2)


def _are_halves(a: Array, b: Array) -> bool:
    """Return whether the matrix units multiply both factors as they are stored."""
    return bool(a.dtype == b.dtype and a.dtype.itemsize == 2)


@frozen
class ExpertBlocks:
    """Blocks of rows of one expert each, found on the device."""

    order: I32
    ends: I32
    found: I32
    """Experts and first rows [2, blocks]."""

    @staticmethod
    def plan(order: I32, ends: I32) -> Plan:
        """Plan an expert and a row for each block."""
        return [Buffer((2, most_blocks(order.shape[0], ends.shape[0], ROW_BLOCK)), np.int32)]

    @classmethod
    def find(cls, order: I32, ends: I32, scratch: Scratch) -> ExpertBlocks:
        """Launch the program that finds them."""
        (found,) = scratch.take_all(cls.plan(order, ends))
        constants = {"block": ROW_BLOCK, "lanes": power_of_two(len(ends))}
        launch(find_blocks, (1,), ends, found[0], found[1], len(ends), found.shape[1], **constants)
        return cls(order, ends, found)

    def multiply(
        self, a: Array, b: Array, out: Array, *, choices: int, first: int = 0, of_tokens: bool, trans_b: bool
    ) -> None:
        """Set `out` = products of rows with the columns of matrices from `first` on."""
        tile, _ = tiles_of(a, b)
        columns, inner = product_shape(b, trans_b=trans_b)
        launch(
            grouped_product,
            (self.found.shape[1], programs(out.shape[1], tile.columns)),
            *(
                a,
                b[:, first:] if trans_b else b[:, :, first:],
                out,
                self.order,
                self.ends,
                self.found[0],
                self.found[1],
            ),
            choices,
            inner=inner,
            all_columns=columns,
            out_columns=out.shape[1],
            of_tokens=of_tokens,
            trans_b=trans_b,
            whole=interpreted() or a.dtype != b.dtype,
            warps=tile.warps,
            stages=tile.stages,
            **tile.constants,
        )


def fused_rows_plan(order: I32, ends: I32, **_: object) -> Plan:
    """Plan the blocks."""
    return ExpertBlocks.plan(order, ends)


def fused_sums_plan(a: Array, b: Array, order: I32, ends: I32, out: Array, **_: object) -> Plan:
    """Plan the blocks, and the products of a round."""
    return [*ExpertBlocks.plan(order, ends), Buffer((a.shape[0] * _round_columns(a, b, out),))]


def _round_columns(a: Array, b: Array, out: Array) -> int:
    """Return the columns of a round of `expert_sums`: all, or whole tiles."""
    tile, _ = tiles_of(a, b)
    return min(out.shape[1], max(1, MOST_PRODUCTS // a.shape[0] // tile.columns) * tile.columns)


@jit
def weighted_forward(
    gate: tl.tensor,
    up: tl.tensor,
    weights: tl.tensor,
    order: tl.tensor,
    prod: tl.tensor,
    count: tl.tensor,
    width: tl.constexpr,
    ordered: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Set some rows of prod = silu(gate) * up * weight."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = row < count
    choice = row
    if ordered:
        choice = tl.load(order + row, mask=there, other=0).to(tl.int64)
    weight = tl.load(weights + choice, mask=there, other=0.0)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        at, inside = row[:, None] * width + column[None, :], there[:, None] & (column < width)[None, :]
        g, u = load_wide(gate + at, inside), load_wide(up + at, inside)
        store_rounded(prod + at, value_of(g, share_of(g, "silu"), "silu") * u * weight[:, None], inside)


@jit
def weighted_backward(
    gate: tl.tensor,
    up: tl.tensor,
    weights: tl.tensor,
    order: tl.tensor,
    dprod: tl.tensor,
    dgate: tl.tensor,
    dup: tl.tensor,
    dweights: tl.tensor,
    count: tl.tensor,
    width: tl.constexpr,
    ordered: tl.constexpr,
    rows: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Set the gradients of `weighted_forward` for some rows; a weight's is summed by lanes in order, then over them."""
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    there = row < count
    choice = row
    if ordered:
        choice = tl.load(order + row, mask=there, other=0).to(tl.int64)
    weight = tl.load(weights + choice, mask=there, other=0.0)
    total = tl.zeros((rows, block), tl.float32)
    for first in range(0, width, block):
        column = first + tl.arange(0, block)
        at, inside = row[:, None] * width + column[None, :], there[:, None] & (column < width)[None, :]
        g, u, d = load_wide(gate + at, inside), load_wide(up + at, inside), load_wide(dprod + at, inside)
        # all inputs are loaded: outputs may be the same bytes
        share = share_of(g, "silu")
        value = value_of(g, share, "silu")
        total += d * (value * u)
        d *= weight[:, None]
        store_rounded(dup + at, d * value, inside)
        store_rounded(dgate + at, d * u * slope_of(g, share, "silu"), inside)
    tl.store(dweights + choice, tl.sum(total, axis=1), mask=there)


def _launch_weighted(kernel: Any, weights: F32, order: I32 | None, *tensors: Array) -> None:
    """Launch a kernel of weighted rows: on gate, up, weights, order, and all others.

    A program takes as many elements as it has threads to load them, or more. Otherwise two threads would have one
    element, and one might load what the other has stored, where a result replaces an operand.
    """
    gate, up, *others = tensors
    rows, width = gate.shape
    block = min(BLOCK, power_of_two(width))
    some = BLOCK // block
    launch(
        kernel,
        (programs(rows, some),),
        *(gate, up, weights, weights if order is None else order, *others, rows),
        width=width,
        ordered=order is not None,
        rows=some,
        block=block,
    )


class TritonExperts(DeviceExperts):
    """The kernels of `TorchTriton` on rows of experts."""

    def expert_rows(self, a, b, order, ends, out, *, scratch, trans_b=False):
        blocks = ExpertBlocks.find(order, ends, scratch)
        blocks.multiply(a, b, out, choices=len(out) // len(a), of_tokens=True, trans_b=trans_b)

    def expert_sums(self, a, b, order, ends, sums, out, *, residual=None, scratch, trans_b=False, accumulate=False):
        """Sum in registers: `sums` is not used."""
        blocks = ExpertBlocks.find(order, ends, scratch)
        (tokens, columns), width = out.shape, _round_columns(a, b, out)
        (buffer,) = scratch.take_all([Buffer((len(a) * width,))])
        choices = len(a) // tokens
        for some in row_steps(columns, width):
            products = shaped(buffer, (len(a), some.stop - some.start))
            told = {"choices": choices, "first": some.start, "of_tokens": False, "trans_b": trans_b}
            blocks.multiply(a, b, products, **told)
            count = tokens * products.shape[1]
            launch(
                sum_choices,
                (programs(count, BLOCK),),
                *(products, out[:, some], (out if residual is None else residual)[:, some], count, choices),
                all_columns=columns,
                width=products.shape[1],
                accumulate=accumulate,
                adds_residual=residual is not None,
                block=BLOCK,
            )

    def expert_gradients(self, a, b, order, ends, out, *, scratch, gathers_a, accumulate):
        _, tile = tiles_of(a, b)
        experts, height, width = out.shape
        launch(
            grouped_gradients,
            (programs(width, tile.columns), programs(height, tile.rows), experts),
            *(a, b, out, order, ends, len(order) // min(len(a), len(b))),
            height=height,
            width=width,
            gathers_a=gathers_a,
            accumulate=accumulate,
            whole=interpreted() or a.dtype != b.dtype,
            warps=tile.warps,
            stages=tile.stages,
            **tile.constants,
        )

    def weighted_swiglu_forward(self, gate, up, weights, prod, *, order=None, scratch):
        _launch_weighted(weighted_forward, weights, order, gate, up, prod)

    def weighted_swiglu_backward(self, gate, up, weights, dprod, dgate, dup, dweights, *, order=None, scratch):
        _launch_weighted(weighted_backward, weights, order, gate, up, dprod, dgate, dup, dweights)
