"""Passes of the cross-entropy head over logits, each fused into one: the losses, and the gradient of the products.

    losses_of_rows   a program a row:                 lse and loss
    logit_gradient_of_rows    a program a tile of columns:     dlogits in place of logits
    split            a program a part of a row:         dlogits as the sum of two bfloat16, for products with bfloat16

With `normalise`, a program of `logit_gradient_of_rows` goes over all rows of its columns, since it also sums over them
for the gradient of the norms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.pytorch.device.device_common import (
    chunk_rows,
    row_chunks,
    shaped,
    store_sum,
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
from ratrain.targets.runtime.arena.dtypes import BFLOAT16
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels.shared import LARGEST_INVERSE

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, F64, Array
    from ratrain.targets.runtime.arena.scratch import Plan

_COLUMNS = 4096
"""Logits of a row that a program takes at a time to sum their exponentials."""
_TILE_ROWS, _TILE_COLUMNS = 4, 512
"""Rows and columns that a program takes at a time to turn logits into gradients."""
_MOST_SPLIT = 1 << 26
"""Most logits whose gradient is split: its parts take 256 MiB of scratch."""
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
def split(value: tl.tensor, high: tl.tensor, low: tl.tensor, columns: tl.tensor, block: tl.constexpr) -> None:
    """Set high + low = value, of some columns of a row: the value rounded, and what that leaves, rounded."""
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * block + tl.arange(0, block)
    within = column < columns
    at = row * columns + column
    whole = tl.load(value + at, mask=within, other=0.0)
    store_rounded(high + at, whole, within)
    store_rounded(low + at, whole - rounded_to_bfloat16(whole), within)


class FusedHead(HeadCall):
    """`HeadCall` with one pass for the losses of a chunk, and one for its gradients."""

    @classmethod
    def buffers_of(cls, xn: Array, table: Array, logits: F32) -> dict[str, Buffer]:
        """Return buffers by name: chunks of x, table and their gradients; lines of columns; losses; numbers.

        For bfloat16 also both parts of the gradient of the logits, as many bytes as these take, and x twice.
        """
        (vocab, width), rows = table.shape, min(xn.shape[0], logits.shape[0])
        matrix = Buffer((chunk_rows(max(rows, vocab), width) * width,))
        parts = {}
        if "bfloat16" in str(table.dtype) and xn.dtype == table.dtype and rows * vocab <= _MOST_SPLIT:
            parts = {"parts": Buffer((2 * rows * vocab,), BFLOAT16), "twice": Buffer((2 * rows * width,), BFLOAT16)}
        return {
            **dict.fromkeys(("x", "weight", "term", "total"), matrix),
            **parts,
            **dict.fromkeys(("inverse", "pull"), Buffer((vocab,))),
            "loss": Buffer((rows,), np.float64),
            "double": Buffer((1,), np.float64),
            "factor": Buffer((1,)),
        }

    @property
    def _cap(self) -> float:
        return self.given.softcap or 0.0

    def shape(self, logits: F32) -> None:
        """Turn products into logits, in place."""
        if self.given.is_plain:
            return
        count, columns = logits.numel(), logits.shape[1]
        constants: dict[str, Any] = {
            "scale": self.given.scale_of_logits,
            "cap": self._cap,
            "normalise": self.given.normalise,
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
        at_a_time = count if self.given.normalise else _TILE_ROWS
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
            normalise=self.given.normalise,
            columns=columns,
            tile=_TILE_ROWS,
            block=_TILE_COLUMNS,
        )

    def store(self, rows: slice, dlogits: F32, dxn: Array, dtable: Array | None, *, accumulate: bool) -> None:
        """Store the gradients of some rows of x, and add their part of the table's, unless `dtable` is None.

        Beside bfloat16 factors the gradient of the logits is multiplied by the matrix units, as the sum of two
        bfloat16, which keep 16 of its bits: the parts lie one below the other, and so do two copies of x.
        """
        if not self.halves or "parts" not in self.buffers:
            super().store(rows, dlogits, dxn, dtable, accumulate=accumulate)
            return
        count, width = len(dlogits), self.table.shape[1]
        parts = shaped(self.buffers["parts"], (2, count, len(self.table)))
        grid = (programs(len(self.table), BLOCK), count)
        launch(split, grid, dlogits, parts[0], parts[1], len(self.table), block=BLOCK)
        twice = shaped(self.buffers["twice"], (2, count, width))
        for part in twice:
            part.copy_(self.xn[rows])
        for some in row_chunks(count, width):
            total = shaped(self.buffers["total"], (some.stop - some.start, width))
            multiply_halves(parts[0, some], self.table, total)
            dxn[rows][some].copy_(multiply_halves(parts[1, some], self.table, total, total))
        if dtable is None:
            return
        both = parts.view(2 * count, -1).T, twice.view(2 * count, width)
        if not self.given.normalise:
            multiply_halves(*both, dtable, dtable if accumulate else None)
            return
        for columns in row_chunks(*self.table.shape):
            total = shaped(self.buffers["total"], self.table[columns].shape)
            multiply_halves(both[0][columns], both[1], total)
            total.sub_(wide(self.buffers["weight"], self.table[columns]).mul_(self.buffers["pull"][columns, None]))
            store_sum(total, self.buffers["term"], dtable[columns], accumulate=accumulate)


def fused_head_plan(xn: Array, table: Array, logits: F32, **_: object) -> Plan:
    """Plan the buffers of a call, the same for all three kernels."""
    return list(FusedHead.buffers_of(xn, table, logits).values())


class TritonHead(DeviceHead):
    """The head kernels of `TorchTriton`."""

    head_class = FusedHead
