"""Primitive kernels: `reference` in plain numpy, `fast` on BLAS and fused numba loops, one interface."""

from __future__ import annotations

from functools import cache
from typing import Literal

from targets.runtime.kernels.interface import AttentionSpec, KernelSet
from targets.runtime.kernels.scratch import Scratch

__all__ = ["AttentionSpec", "KernelSet", "Scratch", "kernel_set"]


@cache
def kernel_set(name: Literal["fast", "reference"]) -> KernelSet:
    """The kernel set of that name; numba is imported only for `fast`."""
    if name == "fast":
        from targets.runtime.kernels.fast import Fast

        return Fast()
    from targets.runtime.kernels.reference import Reference

    return Reference()
