"""Numba loops around products stored in 16 bits: an element is loaded, computed with in float32, and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.program.kernels import IGNORED_LABEL
from ratrain.targets.runtime.kernels.fast.fast_numba import exact, exp32, load, narrow

_ZERO = np.float32(0)


@exact()
def add_to_product(product: Any, held: Any, bias: Any, residual: Any, out: Any) -> None:
    """Set out = product [+ held] [+ bias, one for each column] [+ residual]; None is left out, `held` may be `out`."""
    for r in range(out.shape[0]):
        row, stored = product[r], out[r]
        for i in range(row.size):
            total = load(row[i])
            if held is not None:
                total += load(held[r, i])
            if bias is not None:
                total += load(bias[i])
            if residual is not None:
                total += load(residual[r, i])
            stored[i] = narrow(total, stored.dtype)


@exact()
def widen(stored: Any, out: Any) -> None:
    """Set out = the stored elements, in float32."""
    for r in range(out.shape[0]):
        row, line = stored[r], out[r]
        for i in range(line.size):
            line[i] = load(row[i])


@exact()
def logit_gradient(logits: Any, labels: Any, lse: Any, factor: Any) -> None:
    """Turn stored logits into the gradient of factor * loss, in place; rows with an ignored label get 0."""
    for r in range(lse.size):
        row, log_total, label = logits[r], lse[r], labels[r]
        share = factor if label != IGNORED_LABEL else _ZERO
        at_label = exp32(load(row[max(label, 0)]) - log_total) * share
        for i in range(row.size):
            row[i] = narrow(exp32(load(row[i]) - log_total) * share, row.dtype)
        if label >= 0:
            row[label] = narrow(at_label - factor, row.dtype)
