"""Scaled and capped logits in fused numba loops: from products of rows and table to logits, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import frozen

from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.runtime.kernels.fast.fast_numba import (
    exact,
    exp32,
    inlined,
    multiplier,
    soft_cap_slope,
    soft_capped,
    times,
)

if TYPE_CHECKING:
    from ratrain.targets.program.kernel_options import LogitOptions
    from ratrain.targets.runtime.kernels.interface import F32, I32

_ZERO, _ONE = np.float32(0), np.float32(1)


@exact()
def _shape(logits: Any, first: Any, last: Any, scale: Any, softcap: Any) -> None:
    """Turn products into logits, in the columns [first, last)."""
    for r in range(logits.shape[0]):
        row = logits[r, first:last]
        for i in range(row.size):
            row[i] = times(row[i], scale)
        if softcap is not None:
            for i in range(row.size):
                row[i] = soft_capped(row[i], softcap)


@inlined()
def _slope(logit: Any, scale: Any, softcap: Any) -> Any:
    """Return the derivative of a logit by its product."""
    slope = _ONE
    if softcap is not None:
        slope = soft_cap_slope(logit, softcap)
    return times(slope, scale)


@exact()
def _gradient(logits: Any, first: Any, last: Any, labels: Any, lse: Any, factor: Any, scale: Any, softcap: Any) -> None:
    """Turn logits of the columns [first, last) into the gradient of the products; 0 in rows without a label."""
    for r in range(lse.size):
        row = logits[r, first:last]
        log_total, label = lse[r], labels[r] - first
        share = factor if labels[r] != IGNORED_LABEL else _ZERO
        # the label's derivative is taken before the loop overwrites its logit
        of_label = _ZERO
        if 0 <= label < row.size:
            of_label = factor * _slope(row[label], scale, softcap)
        for i in range(row.size):
            row[i] = exp32(row[i] - log_total) * share * _slope(row[i], scale, softcap)
        if 0 <= label < row.size:
            row[label] -= of_label


@frozen
class LogitShape:
    """Factor and cap of logits."""

    scale: np.float32 | None
    softcap: np.float32 | None

    @classmethod
    def of(cls, given: LogitOptions) -> Self | None:
        """Make it from the options of a kernel; None if the products are the logits."""
        shape = cls(multiplier(given.scale_of_logits), None if given.softcap is None else np.float32(given.softcap))
        return None if shape == cls(None, None) else shape

    def apply(self, logits: F32, columns: slice) -> None:
        """Turn products into logits in some columns, in place."""
        _shape(logits, columns.start, columns.stop, self.scale, self.softcap)

    def gradient(self, logits: F32, columns: slice, labels: I32, lse: F32, factor: np.float32) -> None:
        """Turn logits of some columns into the gradient of the products, in place."""
        _gradient(logits, columns.start, columns.stop, labels, lse, factor, self.scale, self.softcap)
