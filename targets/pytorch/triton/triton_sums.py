"""Numbers of a whole gradient in one pass over it: the sum of its squares, and whether all of it is finite.

Squares are summed in float64 by chunks of `SQUARES_CHUNK` elements, each a program's alone, then over the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from ratrain.targets.pytorch.device.device_common import size
from ratrain.targets.pytorch.device.device_scalars import ScalarKernels
from ratrain.targets.pytorch.triton.triton_common import BLOCK, add_sum, jit, launch, load_wide, own_elements, programs
from ratrain.targets.runtime.arena.kernel_memory import SQUARES_CHUNK
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, F64, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scalars import Chunks
    from ratrain.targets.runtime.arena.scratch import Plan


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


class TritonSums(ScalarKernels):
    """The kernels of `TorchTriton` that yield single numbers."""

    def add_squares(self, chunks: Chunks, total: F64, term: F64, buffer: F64) -> F64:
        """Set total = the sum of the squares of all chunks; neighbours in memory are one launch."""
        total.zero_()
        for run in _runs(chunks, len(buffer)):
            count = programs(len(run), SQUARES_CHUNK)
            launch(squares_of_chunks, (count,), run, buffer, len(run), chunk=SQUARES_CHUNK, block=BLOCK)
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
