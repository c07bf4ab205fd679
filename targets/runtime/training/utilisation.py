"""Model-FLOPs utilisation (MFU) of a run on this machine: the model's arithmetic relative to a core's peak."""

from __future__ import annotations

import time

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

_SIZE = 768  # of square matrices: they fit a second-level cache, as the operands of a small model do
_PRODUCTS = 10


@frozen
class Utilisation:
    """Figures that utilisation is computed from."""

    flops_per_token: float
    """operations that training needs for one token, forward and backward; recomputation is not counted"""
    peak_flops: float
    """operations per second"""

    def of(self, tokens_per_second: float) -> float:
        """Return the fraction of the peak that this speed corresponds to."""
        return tokens_per_second * self.flops_per_token / self.peak_flops


def measured_peak_flops() -> float:
    """Measure the operations per second of f32 matrix products, with the present number of BLAS threads.

    The figure is the fastest of 10 products of 768 x 768, in a tenth of a second. Other work on the machine can
    make it too low.
    """
    one = np.ones((_SIZE, _SIZE), np.float32)
    product = one @ one
    fastest = min(_seconds_of(one, product) for _ in range(_PRODUCTS))
    return 2.0 * _SIZE**3 / fastest


def _seconds_of(one: NDArray[np.float32], out: NDArray[np.float32]) -> float:
    start = time.perf_counter()
    np.matmul(one, one, out=out)
    return time.perf_counter() - start
