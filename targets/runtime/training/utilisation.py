"""Model-flops utilisation of a run on this machine: the arithmetic the model needs, against what a core can do."""

from __future__ import annotations

import time

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

_SIZE = 768  # of the square matrices: they fit a second-level cache as the operands of a small model do
_PRODUCTS = 20


@frozen
class Utilisation:
    """What utilisation is counted with."""

    flops_per_token: float
    """operations that training needs for one token, forward and backward; recomputation is not counted"""
    peak_flops: float
    """operations a second"""

    def of(self, tokens_per_second: float) -> float:
        """The share of the peak that a speed needs."""
        return tokens_per_second * self.flops_per_token / self.peak_flops


def measured_peak_flops() -> float:
    """Operations a second of f32 matrix products, which is what blocks compute with, under the BLAS threads as they are.

    The fastest of some products of 768 x 768, in a few tenths of a second. Other work on the machine can make it too low.
    """
    one = np.ones((_SIZE, _SIZE), np.float32)
    product = one @ one
    fastest = min(_seconds_of(one, product) for _ in range(_PRODUCTS))
    return 2.0 * _SIZE**3 / fastest


def _seconds_of(one: NDArray[np.float32], out: NDArray[np.float32]) -> float:
    start = time.perf_counter()
    np.matmul(one, one, out=out)
    return time.perf_counter() - start
