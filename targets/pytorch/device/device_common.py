"""What the kernels on tensors share: types, chunks of rows, temporaries in float32.

Only operations that write into a given tensor are used (`out=`, in place, views), and only on operands of one type: with two types
PyTorch would convert one of them into memory of its own. So every operand is first copied into scratch as float32, a chunk at a time.
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
"""float16, bfloat16 or float32, contiguous, on the device of the kernel set."""
F32: TypeAlias = torch.Tensor
F64: TypeAlias = torch.Tensor
U8: TypeAlias = torch.Tensor
I32: TypeAlias = torch.Tensor
I64: TypeAlias = torch.Tensor

CHUNK_ELEMENTS = 1 << 22
"""Elements that a kernel works on at a time: 16 MiB in float32. Fewer calls of larger tensors cost less on a GPU; scratch is some of these."""


def size(x: Any) -> int:
    """Elements of a tensor, or of an array that stands for one."""
    return math.prod(x.shape)


def chunk_rows(rows: int, columns: int) -> int:
    """Rows of a chunk of a matrix: at most `CHUNK_ELEMENTS` elements, or one row."""
    return max(1, min(rows, CHUNK_ELEMENTS // max(1, columns)))


def row_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices that cover `rows` in order, each of at most `chunk_rows` rows."""
    return row_blocks(rows, columns, CHUNK_ELEMENTS)


def row_steps(rows: int, step: int) -> Iterator[slice]:
    """Slices that cover `rows` in order, each of `step` rows, the last of the rest."""
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def chunk_buffers(count: int, rows: int, columns: int = 1) -> Plan:
    """So many float32 chunks of a matrix, flat."""
    return [Buffer((chunk_rows(rows, columns) * columns,))] * count


def flat_chunks(*tensors: Array) -> Iterator[tuple[Array, ...]]:
    """Tensors of one shape in chunks of their elements."""
    flat = [each.view(-1) for each in tensors]
    for at in row_chunks(len(flat[0]), 1):
        yield tuple(each[at] for each in flat)


def shaped(buffer: Array, shape: tuple[int, ...] | torch.Size) -> Array:
    """The beginning of a buffer, in some shape."""
    return buffer.view(-1)[: math.prod(shape)].view(shape)


def stored(buffer: Array, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Array:
    """The same of a float32 buffer, in a type that is no larger."""
    return shaped(buffer.view(-1).view(dtype), shape)


def wide(buffer: Array, source: Array) -> F32:
    """A float32 copy of a tensor, in a buffer."""
    return shaped(buffer, source.shape).copy_(source)


def add_wide(value: F32, buffer: Array, source: Array) -> None:
    """Value += source, by way of a buffer."""
    value.add_(wide(buffer, source))


def complement(x: F32, out: F32) -> F32:
    """Set out = 1 - x."""
    return torch.neg(x, out=out).add_(1)


def document_positions(documents: I32, first: int, out: I64, spare: I64) -> I64:
    """Set out = the positions in their documents of rows of a sequence, the first of which has position `first` in it."""
    count = len(documents)
    torch.arange(first, first + count, out=out[:count])
    return out[:count].sub_(spare[:count].copy_(documents))


def check_documents(documents: I32 | None, length: int, first: int = 0) -> None:
    """`check_starts` on the CPU; a GPU would have to be waited for, so there starts are not looked at."""
    if documents is not None and documents.device.type == "cpu":
        check_starts(documents.numpy(), length, first)


def store_sum(total: F32, buffer: Array, out: Array, *, accumulate: bool) -> None:
    """Set out = [out +] total, rounded once; total may change."""
    if accumulate:
        add_wide(total, buffer, out)
    out.copy_(total)
