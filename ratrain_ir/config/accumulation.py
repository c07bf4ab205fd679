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

F32_SUMS, HALF_RUNS = "f32", "f16-runs"
ACCUMULATIONS = (F32_SUMS, HALF_RUNS)
"""Values of a plan's `accumulate`."""
HALF_RUN = 512
"""Products of a run: the depth of one micro-kernel of the published kernels for this core (6 x 512 x 48: "Optimizing
GEMM on modern multi-core DSPs"; VVinstonSmith/BLAS-for-multi-core-DSP), which holds its sums in registers so long and
then adds them to C in AM. Of a micro-kernel's 6 k + 26 cycles the 26 are then below 1 %. Those kernels sum in float32
and float64; no float16 kernel is published, so its depth is assumed to be the same."""
