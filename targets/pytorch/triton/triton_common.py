"""Shared parts of the fused kernels: loads that widen to float32, stores that round once, and launches.

Loops that go over memory once are written in Triton (Tillet, Kung and Cox, 2019). It compiles them for a GPU at their
first launch, or interprets them on the CPU if TRITON_INTERPRET=1 is set before it is imported. bfloat16 is widened and
rounded as bits: on a GPU the compiler makes one instruction or a few of that, and the interpreter's own conversions do
not round to nearest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Elements of a program that works element by element."""
_MOST_WARPS = 32


def interpreted() -> bool:
    """Return whether Triton interprets kernels on the CPU instead of compiling them."""
    return bool(triton.knobs.runtime.interpret)


def jit(function: Callable[..., Any]) -> Any:
    """Make a kernel, or a function that kernels call; it is compiled at the first launch."""
    return triton.jit(function)


def programs(count: int, block: int) -> int:
    """Return the number of programs that cover `count` elements."""
    return -(-count // block)


def power_of_two(count: int) -> int:
    """Return the least power of two that is at least `count`, as the length of a block must be."""
    return 1 << max(0, count - 1).bit_length()


def warps_for(elements: int) -> int:
    """Return the warps of a program with `elements` elements of each operand: one for 512, from 4 to 32."""
    return min(_MOST_WARPS, max(4, power_of_two(elements) // 512))


@contextmanager
def _quiet_interpreter() -> Iterator[None]:
    """Compute infinities and NaNs without a warning, as a GPU does; maxima of NaNs warn in a way of their own."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int = 4, stages: int = 3, **constants: float | str
) -> None:
    """Run a kernel by a grid of programs, on the device and the current stream of its first argument, a tensor.

    Products are never fused with sums: bits would depend on which ones the compiler fuses. Loops that multiply matrices
    have loads of `stages` turns under way.
    """
    if not all(grid):
        return
    first: torch.Tensor = arguments[0]
    with torch.cuda.device(first.device) if first.is_cuda else _quiet_interpreter():
        kernel[grid](*arguments, **constants, num_warps=warps, num_stages=stages, enable_fp_fusion=False)


@jit
def load_wide(pointer: tl.tensor, inside: tl.tensor) -> tl.tensor:
    """Load stored elements as float32; 0 where `inside` is False."""
    if pointer.dtype.element_ty == tl.bfloat16:
        # a bfloat16 is the upper half of a float32
        bits = tl.load(pointer.to(tl.pointer_type(tl.uint16), bitcast=True), mask=inside, other=0).to(tl.uint32)
        return (bits << 16).to(tl.float32, bitcast=True)
    return tl.load(pointer, mask=inside, other=0.0).to(tl.float32)


@jit
def store_rounded(pointer: tl.tensor, value: tl.tensor, inside: tl.tensor) -> None:
    """Store float32 rounded once, to the nearest, ties to even, where `inside` is True."""
    if pointer.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.uint32, bitcast=True)
        # Adding 0x7FFF, and 1 more if the kept half is odd, carries into the kept half exactly when it must round up.
        # NaNs are apart: the carry could make an infinity of one.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(value != value, (bits >> 16) | 0x40, rounded)  # noqa: PLR0124  a NaN stays one
        tl.store(pointer.to(tl.pointer_type(tl.uint16), bitcast=True), rounded.to(tl.uint16), mask=inside)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=inside)


@jit
def rounded_to_bfloat16(value: tl.tensor) -> tl.tensor:
    """Round float32 to the nearest bfloat16, ties to even, as a float32."""
    bits = value.to(tl.uint32, bitcast=True)
    upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return tl.where(value != value, value, upper.to(tl.float32, bitcast=True))  # noqa: PLR0124  a NaN stays one


@jit
def own_elements(block: tl.constexpr) -> tl.tensor:
    """Return the indices of a program's elements, in 64 bits: a tensor may have more than 2^31 elements."""
    return tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)


@jit
def add_sum(terms: tl.tensor, total: tl.tensor, count: tl.tensor, block: tl.constexpr) -> None:
    """Add the sum of float64 terms to `total`, by one program: by lanes in order, then over the lanes."""
    sums = tl.zeros((block,), tl.float64)
    for first in range(0, count, block):
        at = first + tl.arange(0, block)
        sums += tl.load(terms + at, mask=at < count, other=0.0)
    tl.store(total, tl.load(total) + tl.sum(sums, axis=0))


@jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Compute tanh by the exponential; where that would cancel, by the series."""
    square = x * x
    # x - x^3/3 + 2 x^5/15 - 17 x^7/315 + 62 x^9/2835: below 0.3 the rest is less than a unit of float32
    series = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, series, 2 * tl.sigmoid(2 * x) - 1)
