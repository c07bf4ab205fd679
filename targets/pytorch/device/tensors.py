"""Arrays of an arena as PyTorch tensors, and products of them, always on the calling thread."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ratrain.targets.runtime.arena import processor
from ratrain.targets.runtime.arena.dtypes import BFLOAT16
from ratrain.targets.runtime.kernels.team import LINE_BYTES

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import Array
    from ratrain.targets.runtime.kernels.team import Team

_LINE_ROWS = LINE_BYTES // BFLOAT16.itemsize
"""Rows at whose multiples a factor that is stored transposed is cut: a part of it begins with a cache line."""

torch.set_num_threads(1)  # kernels share out their work themselves; PyTorch's pool would compete for the cores


TORCH_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.float16): torch.float16,
    BFLOAT16: torch.bfloat16,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.uint32): torch.uint32,
    np.dtype(np.bool_): torch.bool,
}
"""PyTorch's type for every numpy type that tensors and temporaries have."""


def tensor_of(array: Array) -> torch.Tensor:
    """View an array, which must be writable, as a tensor of the same bytes."""
    if array.dtype == BFLOAT16:  # numpy's bfloat16 is a type of its own, which PyTorch does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def are_multiplied_here(*factors: Array) -> bool:
    """Return whether PyTorch multiplies these on the host: bfloat16, if the processor has instructions for it.

    On other processors its bfloat16 products are slower than float32 ones.
    """
    return all(factor.dtype == BFLOAT16 for factor in factors) and processor.multiplies_bf16()


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None = None) -> None:
    """Set out = a @ b [+ added], accumulated in float32 and rounded once; `added` may be `out`."""
    if added is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(added, a, b, out=out)


def share_multiply(team: Team, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Do `multiply` by ranges of rows, shared out to the threads of a team."""

    def part(rows: slice) -> None:
        multiply(a[rows], b, out[rows])

    team.run(part, rows_of_parts(team, out, b))


def rows_of_parts(team: Team, out: Any, b: Any) -> list[slice]:
    """Cut the rows of `out`, a bfloat16 product by `b`, into the ranges that threads make; both arrays or tensors."""
    return team.product_rows(len(out), prod(b.shape), _LINE_ROWS)
