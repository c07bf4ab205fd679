"""Types, chunks of rows and float32 temporaries of the kernels on tensors.

Kernels use only operations that write into a given tensor (`out=`, in place, views), and only on operands of one type:
with two types PyTorch would convert one of them into memory of its own. So every operand is first copied into scratch
as float32, a chunk at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels.reference.reference_common import row_blocks
from ratrain.targets.runtime.kernels.shared import check_starts

if TYPE_CHECKING:
    from ratrain.targets.runtime.arena.scratch import Plan

Array: TypeAlias = torch.Tensor
"""A tensor of float16, bfloat16 or float32, contiguous, on the device of the kernel set."""
F32: TypeAlias = torch.Tensor
F64: TypeAlias = torch.Tensor
U8: TypeAlias = torch.Tensor
I32: TypeAlias = torch.Tensor
I64: TypeAlias = torch.Tensor

CHUNK_ELEMENTS = 1 << 22
"""Elements that a kernel works on at a time, 16 MiB in float32. Scratch is a few chunks.

Fewer calls on larger tensors cost less on a GPU.
"""


def size(x: Any) -> int:
    """Return the number of elements of a tensor, or of an array that stands for one."""
    return math.prod(x.shape)


def chunk_rows(rows: int, columns: int) -> int:
    """Return the rows of a chunk of a matrix: at most `CHUNK_ELEMENTS` elements, or one row."""
    return max(1, min(rows, CHUNK_ELEMENTS // max(1, columns)))


def fits_chunk(elements: int) -> bool:
    """Return whether a chunk has as many elements."""
    return elements <= CHUNK_ELEMENTS


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Cut `rows` into slices in order, each of at most `chunk_rows` rows."""
    return row_blocks(rows, columns, CHUNK_ELEMENTS)


def row_steps(rows: int, step: int) -> Iterator[slice]:
    """Cut `rows` into slices in order, each of `step` rows, the last of the rest."""
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def chunk_buffers(count: int, rows: int, columns: int = 1) -> Plan:
    """Plan `count` flat float32 chunks of a matrix."""
    return [Buffer((chunk_rows(rows, columns) * columns,))] * count


def flat_chunks(*tensors: Array) -> Iterator[tuple[Array, ...]]:
    """Yield chunks of the elements of tensors with one shape."""
    flat = [each.view(-1) for each in tensors]
    for at in row_chunks(len(flat[0]), 1):
        yield tuple(each[at] for each in flat)


def shaped(buffer: Array, shape: tuple[int, ...] | torch.Size) -> Array:
    """View the beginning of a buffer in a shape."""
    return buffer.view(-1)[: math.prod(shape)].view(shape)


def stored(buffer: Array, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Array:
    """View the beginning of a float32 buffer in a shape and a type that is no larger."""
    return shaped(buffer.view(-1).view(dtype), shape)


def wide(buffer: Array, source: Array) -> F32:
    """Copy a tensor as float32 into the beginning of a buffer."""
    return shaped(buffer, source.shape).copy_(source)


def add_wide(value: F32, buffer: Array, source: Array) -> None:
    """Add source to value, by way of a buffer."""
    value.add_(wide(buffer, source))


def complement(x: F32, out: F32) -> F32:
    """Set out = 1 - x."""
    return torch.neg(x, out=out).add_(1)


def document_positions(documents: I32, first: int, out: I64, spare: I64) -> I64:
    """Set out = positions of rows in their documents; the first row has position `first` in its sequence."""
    count = len(documents)
    torch.arange(first, first + count, out=out[:count])
    return out[:count].sub_(spare[:count].copy_(documents))


def check_documents(documents: I32 | None, length: int, first: int = 0) -> None:
    """Do `check_starts` on the CPU; on a GPU starts are not checked, since the host would have to wait for it."""
    if documents is not None and documents.device.type == "cpu":
        check_starts(documents.numpy(), length, first)


def sum_rows(values: F32, out: F32) -> F32:
    """Set out = the sum of the rows of a matrix, which changes: its halves are added until one row is left.

    For `torch.sum` over rows a GPU takes memory that nobody was asked for: 14 MB for 2048 rows of 4864.
    """
    count = len(values)
    while count > 1:
        half = (count + 1) // 2
        values[: count - half].add_(values[half:count])
        count = half
    return out.copy_(values[0])


def store_sum(total: F32, buffer: Array, out: Array, *, accumulate: bool) -> None:
    """Set out = [out +] total, rounded once; total may change."""
    if accumulate:
        add_wide(total, buffer, out)
    out.copy_(total)
