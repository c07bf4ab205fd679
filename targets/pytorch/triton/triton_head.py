"""Passes of the cross-entropy head over logits, each fused into one: the losses, and the gradient of the products.

    losses_of_rows   a program a row:                 lse and loss
    logit_gradient_of_rows    a program a tile of columns:     dlogits in place of logits
    split            a program a part of a row:   dlogits as the sum of two bfloat16, for products with bfloat16

With `normalise`, a program of `logit_gradient_of_rows` goes over all rows of its columns, since it also sums over them
for the gradient of the norms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton.language as tl

from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.pytorch.device.device_common import (
    add_wide,
    chunk_rows,
    row_chunks,
    row_steps,
    shaped,
    stored,
    wide,
)
from ratrain.targets.pytorch.device.device_head import DeviceHead, HeadCall
from ratrain.targets.pytorch.device.device_products import multiply_halves
from ratrain.targets.pytorch.triton.triton_common import (
    BLOCK,
    add_sum,
    jit,
    launch,
    power_of_two,
    programs,
    rounded_to_bfloat16,
    store_rounded,
    tanh,
)
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels.shared import LARGEST_INVERSE

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, F64, Array
    from ratrain.targets.runtime.arena.scratch import Plan

_COLUMNS = 4096
"""Logits of a row that a program takes at a time to sum their exponentials."""
_TILE_ROWS, _TILE_COLUMNS = 4, 512
"""Rows and columns that a program takes at a time to turn logits into gradients."""
_IGNORED = tl.constexpr(IGNORED_LABEL)
_LARGEST_INVERSE = tl.constexpr(float(LARGEST_INVERSE))


@jit
def shape_logits(
    logits: tl.tensor,
    inverse: tl.tensor,
    count: tl.tensor,
    scale: tl.constexpr,
    cap: tl.constexpr,
    normalise: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Turn products into logits, in place; a cap of 0 is none."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = at < count
    value = tl.load(logits + at, mask=inside, other=0.0)
    if normalise:
        value *= tl.load(inverse + at % columns, mask=inside, other=0.0)
    value *= scale
    if cap != 0:
        value = cap * tanh(tl.div_rn(value, cap * 1.0))
    tl.store(logits + at, value, mask=inside)


@jit
def losses_of_rows(
    logits: tl.tensor, labels: tl.tensor, lse: tl.tensor, losses: tl.tensor, columns: tl.constexpr, block: tl.constexpr
) -> None:
    """Compute the log-sum-exp of a row and its loss.

    Each lane keeps a running maximum and sum (Milakov and Gimelshein, 2018) of every `block`-th logit; at the end the
    lanes are combined.
    """
    row = tl.program_id(0).to(tl.int64)
    peaks = tl.full((block,), float("-inf"), tl.float32)
    totals = tl.zeros((block,), tl.float32)
    for first in range(0, columns, block):
        column = first + tl.arange(0, block)
        value = tl.load(logits + row * columns + column, mask=column < columns, other=float("-inf"))
        higher = tl.maximum(peaks, value)
        # a lane that has only seen -inf has the sum 0; exp(-inf - -inf) would be NaN
        kept = tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - higher))
        totals = totals * kept + tl.where(value == float("-inf"), 0.0, tl.exp(value - higher))
        peaks = higher
    peak = tl.max(peaks, axis=0)
    total = tl.sum(totals * tl.where(peaks == float("-inf"), 0.0, tl.exp(peaks - peak)), axis=0)
    result = tl.log(total) + peak
    tl.store(lse + row, result)
    label = tl.load(labels + row)
    counts = label >= 0  # False for ignored labels, and for rows of other ranks' tables
    at_label = tl.load(logits + row * columns + tl.where(counts, label, 0))
    # the loss in float64: the difference of two large float32 would lose bits
    tl.store(losses + row, tl.where(counts, result.to(tl.float64) - at_label.to(tl.float64), 0.0))


@jit
def logit_gradient_of_rows(
    logits: tl.tensor,
    dlogits: tl.tensor,
    lse: tl.tensor,
    labels: tl.tensor,
    factor: tl.tensor,
    inverse: tl.tensor,
    pull: tl.tensor,
    rows: tl.tensor,
    rows_of_program: tl.tensor,
    cap: tl.constexpr,
    normalise: tl.constexpr,
    columns: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Compute the gradient of the products of some rows and columns.

    With `normalise` a program takes all rows, and also sets `pull`, the factor of each table row in the gradient of its
    inverse norm.
    """
    column = tl.program_id(0) * block + tl.arange(0, block)
    within = column < columns
    scale = tl.load(factor)
    if normalise:
        inverses = tl.load(inverse + column, mask=within, other=0.0)
        pulls = tl.zeros((block,), tl.float32)
    start = tl.program_id(1).to(tl.int64) * rows_of_program
    for first in range(0, rows_of_program, tile):
        row = start + first + tl.arange(0, tile)
        there = row < rows
        inside = there[:, None] & within[None, :]
        at = row[:, None] * columns + column[None, :]
        label = tl.load(labels + row, mask=there, other=_IGNORED)[:, None]
        logit = tl.load(logits + at, mask=inside, other=0.0)
        # softmax minus 1 at the label, times the factor; rows with an ignored label get 0
        value = tl.exp(logit - tl.load(lse + row, mask=there, other=0.0)[:, None])
        value = tl.where(label == column[None, :], value - 1, value) * scale
        value = tl.where((label == _IGNORED) | ~inside, 0.0, value)
        if cap != 0:
            capped = tl.div_rn(logit, tl.full((tile, block), cap, tl.float32))
            value *= 1 - capped * capped
        if normalise:
            # a column is one program's alone, so its rows are summed in order without atomics
            pulls += tl.sum(logit * value, axis=0)
            value *= inverses[None, :]
        tl.store(dlogits + at, value, mask=inside)
    if normalise:  # of logit = inverse * (x . w) with inverse = 1 / |w|: d inverse / dw = -inverse^3 w
        pulls = tl.where(inverses >= _LARGEST_INVERSE, 0.0, pulls * inverses * inverses)
        tl.store(pull + column, pulls, mask=within)


@jit
def split(
    value: tl.tensor, high: tl.tensor, low: tl.tensor, stride: tl.tensor, columns: tl.tensor, block: tl.constexpr
) -> None:
    """Set high + low = value, of some columns of a row: the value rounded, and what that leaves, rounded."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * block + tl.arange(0, block)
    within = column < columns
    whole = tl.load(value + row * stride + column, mask=within, other=0.0)
    at = row * columns + column
    store_rounded(high + at, whole, within)
    store_rounded(low + at, whole - rounded_to_bfloat16(whole), within)


class FusedHead(HeadCall):
    """`HeadCall` with one pass for the losses of a chunk, and one for its gradients."""

    @classmethod
    def buffers_of(cls, xn: Array, table: Array, logits: F32) -> dict[str, Buffer]:
        """Return buffers by name: chunks of x, table and their gradients; lines of columns; losses; numbers."""
        (vocab, width), rows = table.shape, min(xn.shape[0], logits.shape[0])
        matrix = Buffer((chunk_rows(max(rows, vocab), width) * width,))
        return {
            **dict.fromkeys(("x", "weight", "term", "total"), matrix),
            **dict.fromkeys(("inverse", "pull"), Buffer((vocab,))),
            "loss": Buffer((rows,), np.float64),
            "double": Buffer((1,), np.float64),
            "factor": Buffer((1,)),
        }

    @property
    def _cap(self) -> float:
        return self.softcap or 0.0

    def shape(self, logits: F32) -> None:
        """Turn products into logits, in place."""
        if not self.normalise and self.scale == 1 and self.softcap is None:
            return
        count, columns = logits.numel(), logits.shape[1]
        constants: dict[str, Any] = {
            "scale": self.scale,
            "cap": self._cap,
            "normalise": self.normalise,
            "columns": columns,
        }
        grid = (programs(count, BLOCK),)
        launch(shape_logits, grid, logits, self.buffers["inverse"], count, **constants, block=BLOCK)

    def add_loss(self, rows: slice, logits: F32, lse: F32, loss: F64) -> None:
        """Set lse of some rows, and add their losses."""
        count, columns = logits.shape
        losses = self.buffers["loss"]
        lines = (self.labels[rows], lse[rows], losses)
        launch(
            losses_of_rows,
            (count,),
            logits,
            *lines,
            columns=columns,
            block=min(_COLUMNS, power_of_two(columns)),
            warps=8,
        )
        # one program adds all losses of the chunk: the order depends on their number only
        launch(add_sum, (1,), losses, loss, count, block=BLOCK)

    def logit_gradient(self, rows: slice, lse: F32, logits: F32, dlogits: F32) -> None:
        """Turn logits of some rows into the gradient of the products; both may be the same bytes."""
        count, columns = logits.shape
        at_a_time = count if self.normalise else _TILE_ROWS
        lines = [self.buffers[name] for name in ("factor", "inverse", "pull")]
        launch(
            logit_gradient_of_rows,
            (programs(columns, _TILE_COLUMNS), programs(count, at_a_time)),
            logits,
            dlogits,
            lse[rows],
            self.labels[rows],
            *lines,
            count,
            at_a_time,
            cap=self._cap,
            normalise=self.normalise,
            columns=columns,
            tile=_TILE_ROWS,
            block=_TILE_COLUMNS,
        )

    def store(self, rows: slice, dlogits: F32, dxn: Array, dtable: Array, *, accumulate: bool) -> None:
        """Store the gradients of some rows of x, and add their part of the table's.

        Beside 16-bit factors the gradient of the logits is multiplied as the sum of two bfloat16, which keep 16 of its
        bits, by the matrix units.
        """
        if not self.halves or self.table.dtype != torch.bfloat16:
            super().store(rows, dlogits, dxn, dtable, accumulate=accumulate)
            return
        width, capacity = self.table.shape[1], self.buffers["x"].numel()
        # both parts of a block of the gradient fit their buffers, and the sum of its rows fits another
        most = max(1, min(2 * capacity // chunk_rows(*self.table.shape), capacity // width))
        for some in row_steps(len(dlogits), most):
            of_x = dxn[rows][some]
            total = shaped(self.buffers["total"], of_x.shape).zero_()
            for columns in row_chunks(*self.table.shape):
                for part in self._parts(dlogits[some, columns]):
                    multiply_halves(part, self.table[columns], total, total)
            of_x.copy_(total)
        for columns in row_chunks(*self.table.shape):
            of_table = dtable[columns]
            total = shaped(self.buffers["total"], of_table.shape).zero_()
            for some in row_steps(len(dlogits), most):
                for part in self._parts(dlogits[some, columns]):
                    multiply_halves(part.T, self.xn[rows][some], total, total)
            if self.normalise:
                weight = wide(self.buffers["weight"], self.table[columns])
                total.sub_(weight.mul_(self.buffers["pull"][columns, None]))
            if accumulate:
                add_wide(total, self.buffers["term"], of_table)
            of_table.copy_(total)

    def _parts(self, gradient: F32) -> tuple[Array, Array]:
        """Return two bfloat16 matrices whose sum is a gradient to 16 bits."""
        high, low = (stored(self.buffers[name], gradient.shape, torch.bfloat16) for name in ("x", "term"))
        count, columns = gradient.shape
        grid = (programs(columns, BLOCK), count)
        launch(split, grid, gradient, high, low, gradient.stride(0), columns, block=BLOCK)
        return high, low


def fused_head_plan(xn: Array, table: Array, logits: F32, **_: object) -> Plan:
    """Plan the buffers of a call, the same for all three kernels."""
    return list(FusedHead.buffers_of(xn, table, logits).values())


class TritonHead(DeviceHead):
    """The head kernels of `TorchTriton`."""

    head_class = FusedHead
