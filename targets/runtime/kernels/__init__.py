"""Primitive kernels: `reference` in plain numpy, `fast` on BLAS and fused numba loops, one interface."""

from __future__ import annotations

from functools import cache
from typing import Literal

from targets.runtime.kernels.interface import AttentionSpec, KernelSet
from targets.runtime.kernels.scratch import Scratch

__all__ = ["AttentionSpec", "KernelSet", "Scratch", "kernel_set"]


def kernel_set(name: Literal["fast", "reference"], threads: int = 1) -> KernelSet:
    """The kernel set of that name; numba is imported only for `fast`.

    `threads` share the work of each kernel of `fast`; `reference` uses one.
    """
    return _kernel_set(name, threads if name == "fast" else 1)


@cache
def _kernel_set(name: str, threads: int) -> KernelSet:
    if name == "fast":
        from targets.runtime.kernels.fast import Fast

        return Fast(threads)
    from targets.runtime.kernels.reference import Reference

    return Reference()
