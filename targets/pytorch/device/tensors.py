"""Arrays of an arena as PyTorch sees them, and products of them, always on the thread that calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ratrain.targets.runtime.arena import processor
from ratrain.targets.runtime.arena.dtypes import BFLOAT16

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import Array
    from ratrain.targets.runtime.kernels.team import Team

torch.set_num_threads(
    1
)  # kernels share out their work themselves; the pool of PyTorch would fight for the cores with theirs


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
"""PyTorch's name of every type that tensors and temporaries have."""


def tensor_of(array: Array) -> torch.Tensor:
    """A tensor over the very bytes of an array, which must be writable."""
    if array.dtype == BFLOAT16:  # numpy's bfloat16 is a type of its own, which PyTorch does not know
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def are_multiplied_here(*factors: Array) -> bool:
    """Whether PyTorch multiplies these on the host: bfloat16, where the processor does. Elsewhere its products of bfloat16 are slower than those of float32."""
    return all(factor.dtype == BFLOAT16 for factor in factors) and processor.multiplies_bf16()


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None = None) -> None:
    """Out = a @ b [+ added], accumulated in float32 and rounded once; `added` may be `out`."""
    if added is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(added, a, b, out=out)


def share_multiply(
    team: Team, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, added: torch.Tensor | None = None
) -> None:
    """`multiply` by ranges of rows, shared out to the threads of a team."""

    def part(rows: slice) -> None:
        multiply(a[rows], b, out[rows], None if added is None else added[rows])

    team.run(part, team.product_rows(len(out), b.numel()))
