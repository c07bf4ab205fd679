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
    clear_others,
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

_CLEARED = 128
"""Columns that a program clears of rows outside the bounds."""
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

    order: I32 | None
    bounds: I32
    found: I32
    """Experts and first rows [2, blocks]."""

    @staticmethod
    def plan(rows: int, bounds: I32) -> Plan:
        """Plan an expert and a row for each block."""
        return [Buffer((2, most_blocks(rows, bounds.shape[0] - 1, ROW_BLOCK)), np.int32)]

    @classmethod
    def find(cls, rows: int, order: I32 | None, bounds: I32, scratch: Scratch) -> ExpertBlocks:
        """Launch the program that finds them, among all `rows`; without `order` rows are multiplied as they lie."""
        (found,) = scratch.take_all(cls.plan(rows, bounds))
        experts = len(bounds) - 1
        constants = {"block": ROW_BLOCK, "lanes": power_of_two(experts)}
        launch(find_blocks, (1,), bounds, found[0], found[1], experts, found.shape[1], **constants)
        return cls(order, bounds, found)

    def multiply(
        self,
        a: Array,
        b: Array,
        out: Array,
        *,
        choices: int,
        first: int = 0,
        of_tokens: bool,
        trans_b: bool,
        accumulate: bool = False,
    ) -> None:
        """Set `out` = [out +] products of rows with the columns of matrices from `first` on."""
        tile, _ = tiles_of(a, b)
        columns, inner = product_shape(b, trans_b=trans_b)
        launch(
            grouped_product,
            (self.found.shape[1], programs(out.shape[1], tile.columns)),
            *(
                a,
                b[:, first:] if trans_b else b[:, :, first:],
                out,
                self.bounds if self.order is None else self.order,
                self.bounds,
                self.found[0],
                self.found[1],
            ),
            choices,
            inner=inner,
            all_columns=columns,
            out_columns=out.shape[1],
            of_tokens=of_tokens,
            ordered=self.order is not None,
            trans_b=trans_b,
            accumulate=accumulate,
            whole=interpreted() or a.dtype != b.dtype,
            warps=tile.warps,
            stages=tile.stages,
            **tile.constants,
        )

    def clear_others(self, products: F32) -> None:
        """Set the products of all rows that are outside the bounds to 0."""
        (rows, width), columns = products.shape, min(_CLEARED, power_of_two(products.shape[1]))
        launch(
            clear_others,
            (programs(rows, BLOCK // columns), programs(width, columns)),
            *(products, self.order, self.bounds, rows, len(self.bounds) - 1),
            width=width,
            rows=BLOCK // columns,
            columns=columns,
        )


def fused_rows_plan(bounds: I32, out: Array, **_: object) -> Plan:
    """Plan the blocks."""
    return ExpertBlocks.plan(out.shape[0], bounds)


def fused_sums_plan(a: Array, b: Array, bounds: I32, out: Array, **_: object) -> Plan:
    """Plan the blocks, and the products of a round."""
    return [*ExpertBlocks.plan(a.shape[0], bounds), Buffer((a.shape[0] * _round_columns(a, b, out),))]


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


def _launch_sums(products: Array, out: Array, residual: Array, all_columns: int, **constants: bool) -> None:
    """Launch the sums over the choices of each token, for some of all columns."""
    tokens, width = out.shape
    count, choices = tokens * width, len(products) // tokens
    launch(
        sum_choices,
        (programs(count, BLOCK),),
        *(products, out, residual, count, choices),
        all_columns=all_columns,
        width=width,
        block=BLOCK,
        **constants,
    )


class TritonExperts(DeviceExperts):
    """The kernels of `TorchTriton` on rows of experts."""

    def expert_rows(self, a, b, bounds, out, *, order=None, scratch, trans_b=False, accumulate=False):
        blocks = ExpertBlocks.find(len(out), order, bounds, scratch)
        told = {"choices": len(out) // len(a), "of_tokens": True, "trans_b": trans_b, "accumulate": accumulate}
        blocks.multiply(a, b, out, **told)

    def expert_sums(self, a, b, order, bounds, sums, out, *, residual=None, scratch, trans_b=False, accumulate=False):
        """Sum in registers: `sums` is not used."""
        blocks = ExpertBlocks.find(len(a), order, bounds, scratch)
        (tokens, columns), width = out.shape, _round_columns(a, b, out)
        (buffer,) = scratch.take_all([Buffer((len(a) * width,))])
        choices, added = len(a) // tokens, out if residual is None else residual
        for some in row_steps(columns, width):
            products = shaped(buffer, (len(a), some.stop - some.start))
            told = {"choices": choices, "first": some.start, "of_tokens": False, "trans_b": trans_b}
            blocks.multiply(a, b, products, **told)
            blocks.clear_others(products)
            constants = {"accumulate": accumulate, "adds_residual": residual is not None}
            _launch_sums(products, out[:, some], added[:, some], columns, from_zero=True, **constants)

    def choice_sums(self, a, out, *, residual=None, scratch, accumulate=False):
        constants = {"accumulate": accumulate, "adds_residual": residual is not None}
        _launch_sums(a, out, out if residual is None else residual, out.shape[1], from_zero=False, **constants)

    def expert_gradients(self, a, b, bounds, out, *, order=None, scratch, gathers_a, accumulate):
        _, tile = tiles_of(a, b)
        experts, height, width = out.shape
        launch(
            grouped_gradients,
            (programs(width, tile.columns), programs(height, tile.rows), experts),
            *(a, b, out, bounds if order is None else order, bounds, max(len(a), len(b)) // min(len(a), len(b))),
            height=height,
            width=width,
            ordered=order is not None,
            gathers_a=gathers_a,
            accumulate=accumulate,
            whole=interpreted() or a.dtype != b.dtype,
            warps=tile.warps,
            stages=tile.stages,
            **tile.constants,
        )

    def weighted_swiglu_forward(self, gate, up, weights, prod, *, order=None, bounds=None, scratch):
        _launch_weighted(weighted_forward, weights, order, gate, up, prod)

    def weighted_swiglu_backward(
        self, gate, up, weights, dprod, dgate, dup, dweights, *, order=None, bounds=None, scratch
    ):
        _launch_weighted(weighted_backward, weights, order, gate, up, dprod, dgate, dup, dweights)
