"""Blocks and conversions of the reference kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, I64, Array

BLOCK_ELEMENTS = 1 << 18
"""Elements of the largest temporary: 1 MiB of float32."""
HALF_RUN_ELEMENTS = BLOCK_ELEMENTS // 8
"""Elements of a block of `add_half_runs`, which has several temporaries in float64."""

quiet = np.errstate(all="ignore")
"""Decorator: overflow, underflow and NaNs are results here, not errors."""


def row_blocks(rows: int, columns: int, elements: int = BLOCK_ELEMENTS) -> Iterator[slice]:
    """Cut `rows` into slices in order, each of at most `elements` elements or of one row."""
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def f32(x: Array) -> F32:
    """Convert to float32; x itself if it is float32 already."""
    return x.astype(np.float32, copy=False)


def add_half_runs(left: Array, right: Array, total: F32, run: int) -> None:
    """Add left [M, K] @ right [K, N] to `total`, by runs of `run` products that are summed in float16.

    Factors hold values of float16, in any type. A fused multiply-add rounds sum + product once, and so does this:
    float64 holds sum + product exactly, unless the product is below 2^-30 of the sum and moves it in neither type, or
    both overflow.
    """
    for start in range(0, left.shape[1], run):
        held = np.zeros(total.shape, np.float16)
        for k in range(start, min(start + run, left.shape[1])):
            product = left[:, k, None].astype(np.float64) * right[k].astype(np.float64)
            held = (held + product).astype(np.float16)
        total += held


def put(out: Array, value: F32) -> None:
    """Set out = value, rounded to out's dtype; overflow gives infinity."""
    np.copyto(out, value, casting="same_kind")


def add_by_keys(keys: I64, dy: Array, table: Array, scale: np.float32) -> None:
    """Add scale times rows of dy to rows of a table. Keys are table row << 32 | row of dy, ascending.

    Each row of the table is rounded once: its rows of dy are summed in float32 first.
    """
    acc = np.zeros(dy.shape[1], np.float32)
    for n, key in enumerate(keys):
        row, t = divmod(int(key), 1 << 32)
        acc += f32(dy[t])
        if n + 1 == len(keys) or keys[n + 1] >> 32 != row:
            put(table[row], f32(table[row]) + acc * scale)
            acc.fill(0)


def norm_weight(gamma: Array, unit_offset: bool) -> F32:
    """Return the weight of a norm in float32: gamma, or 1 + gamma."""
    return f32(gamma) + np.float32(1) if unit_offset else f32(gamma)


def rotated_halves(heads: Any, width: int, *, interleaved: bool) -> tuple[Any, Any]:
    """Return the first and the second elements of the rotated pairs of heads [..., head_dim], each [..., width / 2].

    `heads` is an array or a tensor. A pair is two neighbours if `interleaved`, else elements i and i + width / 2.
    """
    if interleaved:
        return heads[..., 0:width:2], heads[..., 1:width:2]
    return heads[..., : width // 2], heads[..., width // 2 : width]


def sigmoid(x: F32) -> F32:
    """Return 1 / (1 + e^-x)."""
    result: F32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result
