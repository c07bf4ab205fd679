"""Blocks and conversions of the reference kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, I64, Array

BLOCK_ELEMENTS = 1 << 18
"""Largest temporary, in elements: 1 MiB of float32."""

quiet = np.errstate(all="ignore")
"""Decorator: overflow, underflow and NaNs are results here, not errors."""


def row_blocks(rows: int, columns: int, elements: int = BLOCK_ELEMENTS) -> Iterator[slice]:
    """Slices that cover `rows` in order, each of at most so many elements (or one row)."""
    step = max(1, elements // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def f32(x: Array) -> F32:
    """A float32 copy; x itself where it is float32 already."""
    return x.astype(np.float32, copy=False)


def put(out: Array, value: F32) -> None:
    """Set out = value, rounded to out's dtype; overflow gives infinity."""
    np.copyto(out, value, casting="same_kind")


def add_by_keys(keys: I64, dy: Array, table: Array, scale: np.float32) -> None:
    """Add scale times the rows of dy by `keys`, row of the table << 32 | row of dy, ascending; each row of the table is rounded once."""
    acc = np.zeros(dy.shape[1], np.float32)
    for n, key in enumerate(keys):
        row, t = divmod(int(key), 1 << 32)
        acc += f32(dy[t])
        if n + 1 == len(keys) or keys[n + 1] >> 32 != row:
            put(table[row], f32(table[row]) + acc * scale)
            acc.fill(0)


def norm_weight(gamma: Array, unit_offset: bool) -> F32:
    """What a norm multiplies by."""
    return f32(gamma) + np.float32(1) if unit_offset else f32(gamma)


def rotated_halves(heads: Any, width: int, *, interleaved: bool) -> tuple[Any, Any]:
    """Of heads [..., head_dim], an array or a tensor, the two elements of each rotated pair, [..., width / 2] each."""
    if interleaved:
        return heads[..., 0:width:2], heads[..., 1:width:2]
    return heads[..., : width // 2], heads[..., width // 2 : width]


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x)."""
    result: F32 = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result
