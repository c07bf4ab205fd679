"""Temporary space of kernels on tensors: the bump allocator of `Scratch`, over one byte tensor on a device."""

from __future__ import annotations

import math

import torch

from ratrain.targets.pytorch.device.tensors import TORCH_DTYPES
from ratrain.targets.runtime.arena.scratch import ALIGNMENT, Buffer, BumpAllocator


class TensorScratch(BumpAllocator[torch.Tensor]):
    """Temporaries that are tensors on `device`. Dtypes are given as numpy's; all memory is allocated at creation."""

    __slots__ = ("_bytes",)

    def __init__(self, capacity: int, device: str | torch.device = "cpu") -> None:
        super().__init__(capacity)
        raw = torch.empty(capacity + ALIGNMENT, dtype=torch.uint8, device=device)
        start = -raw.data_ptr() % ALIGNMENT
        self._bytes = raw[start : start + capacity]

    def at(self, start: int, buffer: Buffer) -> torch.Tensor:
        """View the bytes from `start` on as the tensor that `buffer` describes."""
        stop = start + math.prod(buffer.shape) * buffer.dtype.itemsize
        return self._bytes[start:stop].view(TORCH_DTYPES[buffer.dtype]).view(buffer.shape)
