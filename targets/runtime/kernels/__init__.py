"""Primitive kernels: `reference` in plain numpy, `fast` on BLAS and fused numba loops, `tiled` by tile schedules; one interface."""

from __future__ import annotations

from functools import cache
from typing import Literal, TypeAlias

from ratrain.targets.runtime.kernels.interface import AttentionSpec, KernelSet
from ratrain.targets.runtime.kernels.scratch import Scratch

__all__ = ["AttentionSpec", "KernelName", "KernelSet", "Scratch", "kernel_set"]

KernelName: TypeAlias = Literal["fast", "reference", "tiled"]
"""The kernel sets there are."""


def kernel_set(name: KernelName, threads: int = 1) -> KernelSet:
    """The kernel set of that name; numba is not imported for `reference`.

    `threads` share the work of each kernel of `fast`; the others use one.
    """
    return _kernel_set(name, threads if name == "fast" else 1)


@cache
def _kernel_set(name: KernelName, threads: int) -> KernelSet:
    if name == "fast":
        from ratrain.targets.runtime.kernels.fast import Fast

        return Fast(threads)
    if name == "tiled":
        from ratrain.targets.mt3000.kernels.tiled import Tiled

        return Tiled()
    from ratrain.targets.runtime.kernels.reference import Reference

    return Reference()
