"""Sums of matrix products: in float32, or in float16 over short runs that are then added in float32.

A DSP core of an MT-3000 multiplies and adds 64 halves into halves with one instruction, but only 32 halves into floats
(inferred from public headers of the core). Sums in float16 then take half the time. They lose bits with every product,
so a kernel keeps them in registers for one run of products only, and adds each run to a float32 sum in memory. Six
products in runs of four:

    run 0 = a0 b0 + a1 b1 + a2 b2 + a3 b3     each + rounded to float16 once (fused multiply-add), in this order
    run 1 = a4 b4 + a5 b5
    sum   = run 0 + run 1                     in float32, in this order; rounded to storage as any other product

Inside a run the first product is added to zero. That the instruction rounds once, not twice, is assumed.
"""

from __future__ import annotations

from math import ceil

F32_SUMS, HALF_RUNS = "f32", "f16-runs"
ACCUMULATIONS = (F32_SUMS, HALF_RUNS)
"""Values of a plan's `accumulate`."""
HALF_RUN = 512
"""Products of a run: the depth of one micro-kernel of the published kernels for this core (6 x 512 x 48: "Optimizing
GEMM on modern multi-core DSPs"; VVinstonSmith/BLAS-for-multi-core-DSP), which holds its sums in registers so long and
then adds them to C in AM. Of a micro-kernel's 6 k + 26 cycles the 26 are then below 1 %. Those kernels sum in float32
and float64; no float16 kernel is published, so its depth is assumed to be the same."""

_HALF_UNIT, _SINGLE_UNIT = 2.0**-11, 2.0**-24
"""Largest relative error of one rounding to float16 and to float32."""
_HALF_UNDERFLOW = 2.0**-25
"""Largest absolute error of one rounding to a subnormal float16."""


def half_run_error(depth: int, run: int) -> tuple[float, float]:
    """Bound the error of a sum of `depth` products by runs of `run`, where no sum of a run overflows float16.

    Returns (relative, absolute): the error is at most relative * (sum of the products' magnitudes) + absolute. A
    product meets at most min(depth, run) roundings to float16 and one to float32 for each run (Higham, "Accuracy and
    Stability of Numerical Algorithms", section 3.1); underflow adds `_HALF_UNDERFLOW` for each product.
    """
    growth = (1 + _HALF_UNIT) ** min(depth, run) * (1 + _SINGLE_UNIT) ** ceil(depth / run)
    return growth - 1, depth * _HALF_UNDERFLOW * growth
