"""Products summed in float16: runs of fused multiply-adds that each round to float16, added in float32.

The processor has no such instruction on float16, so it is done in float32 and rounded twice, the first time to odd. A
sum that is rounded to an odd last bit wherever it is not exact, with at least two bits more than float16, rounds to
float16 as the exact one would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms
using rounding to odd", 2008). With 4 bits for float32 and 2 for float16:

    exact 1.0100001   nearest in 4 bits 1.010, to odd 1.011   then in 2 bits: 1.0 (a tie, wrong), 1.1 (right)

The product of two float16 is exact in float32: 22 bits, from 2^-48 to 2^32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.targets.runtime.kernels.fast.fast_numba import (
    bits_of_float,
    exact,
    float_of_bits,
    half_of,
    inlined,
    load,
)

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32
    from ratrain.targets.runtime.kernels.team import Team

_ZERO = np.float32(0)


@inlined()
def fused(total: Any, left: Any, right: Any) -> Any:
    """Return total + left * right, rounded once to float16; arguments and result are float16 values in float32."""
    product = left * right
    nearest = total + product
    # the exact error of the sum (Knuth's two-sum); NaN where the sum is not finite, and then neither branch is taken
    part = nearest - total
    error = (total - (nearest - part)) + (product - part)
    bits = bits_of_float(nearest)
    # Towards zero, then odd: one bit pattern less is one step towards zero, whatever the sign.
    if (error > _ZERO and nearest < _ZERO) or (error < _ZERO and nearest > _ZERO):
        bits -= np.int32(1)
    if error > _ZERO or error < _ZERO:
        bits |= np.int32(1)
    return load(half_of(float_of_bits(bits)))


@exact()
def sum_runs(left: Any, trans: Any, first: Any, right: Any, run: Any, sums: Any, product: Any) -> None:
    """Set product = rows of op(left) @ right from row `first` on, by runs of `run` products.

    `left` is the bits of float16, [M, K], or [K, M] with `trans`; `right` [K, N] is float32; `sums` [N] holds a run.
    """
    depth = right.shape[0]
    for r in range(product.shape[0]):
        total = product[r]
        for c in range(total.size):
            total[c] = _ZERO
        for start in range(0, depth, run):
            for c in range(sums.size):
                sums[c] = _ZERO
            for k in range(start, min(start + run, depth)):
                factor = load(left[k, first + r]) if trans else load(left[first + r, k])
                row = right[k]
                for c in range(sums.size):
                    sums[c] = fused(sums[c], factor, row[c])
            for c in range(total.size):
                total[c] += sums[c]


def share_half_runs(
    team: Team,
    left: Any,
    trans: bool,
    right: F32,
    run: int,
    sums: F32,
    product: F32,
    then: Callable[[slice], None] | None = None,
) -> None:
    """Compute `sum_runs` by ranges of rows, each followed by `then(rows)`; `sums` has a row for each thread."""

    def part(numbered: tuple[int, slice]) -> None:
        number, rows = numbered
        sum_runs(left, trans, rows.start, right, run, sums[number], product[rows])
        if then is not None:
            then(rows)

    team.run(part, list(enumerate(team.product_rows(len(product), right.size))))
