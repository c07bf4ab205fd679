"""Bounds of results that are rounded to bfloat16 once more than declared."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16
ROUNDING = 2.0**-8
"""Relative, at most, of rounding to bfloat16."""


def within(actual: np.ndarray, expected: np.ndarray, bound: np.ndarray) -> None:
    """Compare a stored result: `bound` before it is rounded to its type."""
    stored = float(ml_dtypes.finfo(actual.dtype).eps) / 2 * (np.abs(expected) + bound) + 1e-38
    error = np.abs(actual.astype(np.float64) - expected)
    assert (error <= bound + stored).all(), f"{np.max(error / (bound + stored)):.3g} of the bound"
