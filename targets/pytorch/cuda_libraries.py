"""Device memory that CUDA's libraries take through PyTorch's allocator: known from PyTorch's rules, not measured."""

from __future__ import annotations

import os
import re

import torch

_KIB = 1 << 10
_HOPPER = 9
"""Least major compute capability for which PyTorch gives cuBLAS more."""


def cublas_workspace_bytes(device: torch.device) -> int:
    """Return the bytes that PyTorch gives cuBLAS for each stream with products.

    They come from `CUBLAS_WORKSPACE_CONFIG` if it is set, a list of :KiB:count. Otherwise they are 32 MiB from Hopper
    on, and 2 x 4 MiB + 8 x 16 KiB before, as in PyTorch's `CublasHandlePool.cpp`.
    """
    chosen = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if chosen:
        return sum(int(size) * int(count) for size, count in chosen) * _KIB
    major, _ = torch.cuda.get_device_capability(device)
    return (32 << 20) if major >= _HOPPER else 2 * 4096 * _KIB + 8 * 16 * _KIB
