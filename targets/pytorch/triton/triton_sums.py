"""Sums: of rows, by groups of them; of replicas' parts; of a gradient's squares, with a look at whether it is finite.

Rows are summed by groups, each a program's alone, then over the groups in order. Squares are summed in float64 by
chunks of `SQUARES_CHUNK` elements, then over the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from ratrain.targets.pytorch.device.device_common import chunk_buffers, flat_chunks, size
from ratrain.targets.pytorch.device.device_scalars import ScalarKernels
from ratrain.targets.pytorch.triton.triton_common import (
    BLOCK,
    add_sum,
    jit,
    launch,
    load_wide,
    own_elements,
    programs,
    rounded_to_bfloat16,
    store_rounded,
)
from ratrain.targets.runtime.arena.kernel_memory import SQUARES_CHUNK
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, F64, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scalars import Chunks
    from ratrain.targets.runtime.arena.scratch import Plan


MOST_GROUPS = 256
"""Most groups of rows, one a program: enough to keep any GPU busy.

A fixed number keeps the bits of sums the same on all.
"""
_SUMMED_GROUPS, _SUMMED_COLUMNS = 32, 64
_SQUARED = 4096
"""Elements whose squares a program adds at a time: 1024 keep too few loads under way, and take twice as long."""


@jit
def sum_of_group(
    values: tl.tensor,
    parts: tl.tensor,
    rows: tl.tensor,
    rows_of_group: tl.tensor,
    width: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Set parts[group] = the sum of the rows of a group, of some columns."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    within = column < width
    group = tl.program_id(1).to(tl.int64)
    total = tl.zeros((block,), tl.float32)
    for first in range(0, rows_of_group, tile):
        row = group * rows_of_group + first + tl.arange(0, tile)
        inside = (row < rows)[:, None] & within[None, :]
        total += tl.sum(load_wide(values + row[:, None] * width + column[None, :], inside), axis=0)
    tl.store(parts + group * width + column, total, mask=within)


@jit
def sum_groups(
    parts: tl.tensor,
    out: tl.tensor,
    groups: tl.tensor,
    accumulate: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Set out = [out +] the sum of parts [groups, width], rounded once."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    within = column < width
    # a program has some columns of all groups, and adds the groups in order
    total = tl.zeros((block,), tl.float32)
    for first in range(0, groups, tile):
        group = first + tl.arange(0, tile)
        inside = (group < groups)[:, None] & within[None, :]
        total += tl.sum(tl.load(parts + group[:, None] * width + column[None, :], mask=inside, other=0.0), axis=0)
    if accumulate:
        total += load_wide(out + column, within)
    store_rounded(out + column, total, within)


@jit
def add_part(part: tl.tensor, total: tl.tensor, count: tl.tensor, first: tl.constexpr, block: tl.constexpr) -> None:
    """Set total = part if it is the `first`, else add it, in float32."""
    at = own_elements(block)
    inside = at < count
    value = load_wide(part + at, inside)
    if not first:
        value += tl.load(total + at, mask=inside, other=0.0)
    tl.store(total + at, value, mask=inside)


@jit
def store_mean(
    total: tl.tensor,
    out: tl.tensor,
    told: tl.tensor,
    count: tl.tensor,
    factor: tl.tensor,
    accumulate: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Set out = [out +] total * factor, rounded once; make `told` NaN if what is stored is not finite."""
    at = own_elements(block)
    inside = at < count
    value = load_wide(total + at, inside) * factor
    if accumulate:
        value += load_wide(out + at, inside)
    store_rounded(out + at, value, inside)
    if out.dtype.element_ty == tl.bfloat16:
        kept = rounded_to_bfloat16(value)
    else:
        kept = value.to(out.dtype.element_ty).to(tl.float32)
    tl.store(told, float("nan"), mask=tl.sum(((kept - kept) != 0).to(tl.int32), axis=0) > 0)


@jit
def squares_of_chunks(
    values: tl.tensor, sums: tl.tensor, count: tl.tensor, chunk: tl.constexpr, block: tl.constexpr
) -> None:
    """Sum the squares of a chunk, in float64: by lanes in order, then over the lanes."""
    start = tl.program_id(0).to(tl.int64) * chunk
    total = tl.zeros((block,), tl.float64)
    for first in range(0, chunk, block):
        at = start + first + tl.arange(0, block)
        value = load_wide(values + at, at < count).to(tl.float64)
        total += value * value
    tl.store(sums + tl.program_id(0), tl.sum(total, axis=0))


@jit
def notice_elements(values: tl.tensor, told: tl.tensor, count: tl.tensor, block: tl.constexpr) -> None:
    """Make `told` NaN if one of some elements is not finite."""
    at = own_elements(block)
    value = load_wide(values + at, at < count)
    # an infinity minus itself is NaN; whichever programs store, they store the same
    found = tl.sum(((value - value) != 0).to(tl.int32), axis=0) > 0
    tl.store(told, float("nan"), mask=found)


def told_plan(**_: object) -> Plan:
    """Plan the mark of finiteness."""
    return [Buffer((1,))]


def fused_column_sum_plan(a: Array, **_: object) -> Plan:
    """Plan the sums of groups of rows."""
    return [Buffer((_groups(a.shape[0])[0], a.shape[1]))]


def fused_mean_plan(parts: Sequence[Array], out: Array, **_: object) -> Plan:
    """Plan the mark of finiteness, and a chunk of the sum of several parts."""
    return [*told_plan(), *(chunk_buffers(1, size(out)) if len(parts) > 1 else [])]


def _groups(rows: int) -> tuple[int, int]:
    """Return the number of groups of rows, and the rows of each: whole tiles."""
    rows_of_group = programs(programs(rows, MOST_GROUPS), _SUMMED_GROUPS) * _SUMMED_GROUPS
    return programs(rows, rows_of_group), rows_of_group


def sum_parts(parts: F32, out: Array, *, accumulate: bool) -> None:
    """Set out = [out +] the sum of parts [groups, width], rounded once."""
    groups, width = parts.shape
    blocks = {"width": width, "tile": _SUMMED_GROUPS, "block": _SUMMED_COLUMNS}
    launch(sum_groups, (programs(width, _SUMMED_COLUMNS),), parts, out, groups, accumulate=accumulate, **blocks)


class TritonSums(ScalarKernels):
    """The kernels of `TorchTriton` that sum rows, or yield single numbers."""

    def column_sum(self, a, out, *, scratch, accumulate):
        (parts,) = scratch.take_all(fused_column_sum_plan(a))
        rows, width = a.shape
        groups, rows_of_group = _groups(rows)
        blocks = {"width": width, "tile": _SUMMED_GROUPS, "block": _SUMMED_COLUMNS}
        launch(sum_of_group, (programs(width, _SUMMED_COLUMNS), groups), a, parts, rows, rows_of_group, **blocks)
        sum_parts(parts, out, accumulate=accumulate)

    def told_mean_of_replicas(
        self, parts: Sequence[Array], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float
    ) -> F32:
        """Do `mean_of_replicas`; the answer stays on the device: in scratch, 0 if all is finite, else NaN."""
        told, *sums = scratch.take_all(fused_mean_plan(parts, out))
        told.zero_()
        # one part is its own sum, and needs no chunks
        for of_out, *of_parts in flat_chunks(out, *parts) if sums else [(out.view(-1), *parts)]:
            count, grid = len(of_out), (programs(len(of_out), BLOCK),)
            for number, part in enumerate(of_parts if sums else ()):
                launch(add_part, grid, part, *sums, count, first=number == 0, block=BLOCK)
            source = sums[0] if sums else of_parts[0]
            launch(store_mean, grid, source, of_out, told, count, 1 / divisor, accumulate=accumulate, block=BLOCK)
        return told

    def add_squares(self, chunks: Chunks, total: F64, term: F64, buffer: F64) -> F64:
        """Set total = the sum of the squares of all chunks; neighbours in memory are one launch."""
        total.zero_()
        for run in _runs(chunks, len(buffer)):
            count = programs(len(run), SQUARES_CHUNK)
            blocks = {"chunk": SQUARES_CHUNK, "block": _SQUARED}
            launch(squares_of_chunks, (count,), run, buffer, len(run), warps=8, **blocks)
            launch(add_sum, (1,), buffer, total, count, block=BLOCK)
        return total

    def told_all_finite(self, a: Array, *, scratch: Scratch) -> F32:
        """Do `all_finite`; its answer stays on the device: in scratch, 0 if all is finite, else NaN."""
        (told,) = scratch.take_all(told_plan())
        told.zero_()
        launch(notice_elements, (programs(size(a), BLOCK),), a, told, size(a), block=BLOCK)
        return told


def _runs(chunks: Chunks, most: int) -> Iterator[Array]:
    """Join whole chunks that follow each other in memory, the last perhaps not whole: at most `most` of them."""
    first: Array | None = None
    length = 0
    for chunk in chunks:
        follows = (
            first is not None
            and length % SQUARES_CHUNK == 0
            and length < most * SQUARES_CHUNK
            and chunk.dtype == first.dtype
            and chunk.data_ptr() == first.data_ptr() + length * first.element_size()
        )
        if first is not None and not follows:
            yield torch.as_strided(first, (length,), (1,))
        if not follows:
            first, length = chunk, 0
        length += len(chunk)
    if first is not None:
        yield torch.as_strided(first, (length,), (1,))
