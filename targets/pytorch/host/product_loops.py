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


@exact()
def copy_rows(x: Any, order: Any, choices: Any, first: Any, last: Any, out: Any) -> None:
    """Set the first rows of out = row order[r] // choices of x for each r in [first, last), and the others to 0.

    If `order` is None, row r.
    """
    for r in range(out.shape[0]):
        line = out[r]
        if first + r >= last:
            for i in range(line.size):
                line[i] = narrow(_ZERO, line.dtype)
            continue
        source = first + r if order is None else order[first + r] // choices
        row = x[source]
        for i in range(line.size):
            line[i] = row[i]


@exact()
def add_rows(product: Any, order: Any, choices: Any, first: Any, last: Any, sums: Any, column: Any) -> None:
    """Add row r - first of a product to row order[r] // choices of sums, from a column on, for each r in [first, last).

    No two rows go to the same one.
    """
    for r in range(last - first):
        row, total = product[r], sums[order[first + r] // choices, column : column + product.shape[1]]
        for i in range(row.size):
            total[i] += load(row[i])
