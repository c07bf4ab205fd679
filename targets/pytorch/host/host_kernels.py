"""The kernel set `torch` on the CPU: products of bfloat16 by PyTorch (oneDNN), everything else as in `fast`.

A processor with bfloat16 instructions multiplies bfloat16 two to sixteen times as fast as float32. Without them this
set multiplies in float32, with the bits of `fast`. Two results differ from the other sets. A product that is stored in
float32 (a gradient), has a bias or is added to products of other experts is first rounded to bfloat16, as in PyTorch
itself, so it is off by at most 2^-8 of each product more; logits and their gradients are stored in bfloat16. In float16
and float32 the bits are the same as with `fast`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.targets.program.kernel_options import LogitOptions, ProductOptions
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.program.per_kernel import PerKernel
from ratrain.targets.pytorch.device.tensors import are_multiplied_here, multiply, rows_of_parts, tensor_of
from ratrain.targets.pytorch.host import host_experts, host_head
from ratrain.targets.pytorch.host.host_experts import ExpertsOnHost
from ratrain.targets.pytorch.host.product_loops import add_to_product
from ratrain.targets.runtime.arena.dtypes import BFLOAT16
from ratrain.targets.runtime.arena.scratch import Buffer, Plan, Scratch
from ratrain.targets.runtime.kernels.fast.fast import Fast, gemm_plan
from ratrain.targets.runtime.kernels.fast.fast_numba import bits

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, F64, I32, Array


def _gemm_plan(a: Array, b: Array, out: Array, *, threads: int = 1, **options: Any) -> Plan:
    """Plan the product, unless PyTorch can store the result at once."""
    if not are_multiplied_here(a, b):
        return gemm_plan(a, b, out, threads=threads, **options)
    given = ProductOptions(**options)
    added = [out] * given.accumulate + ([] if given.residual is None else [given.residual])
    at_once = given.bias is None and len(added) < 2 and all(each.dtype == BFLOAT16 for each in (out, *added))
    return [] if at_once else [Buffer(out.shape, BFLOAT16)]


_PLANS: dict[str, Callable[..., Plan]] = {
    **Fast.plans,
    "gemm": _gemm_plan,
    "head_forward": host_head.forward_plan,
    "head_backward": host_head.backward_plan,
    "expert_rows": host_experts.rows_plan,
    "expert_sums": host_experts.sums_plan,
    "expert_gradients": host_experts.gradients_plan,
}


class TorchOnHost(ExpertsOnHost, Fast):
    """`KernelSet` of PyTorch's bfloat16 products, on top of `Fast`."""

    name = "torch"
    sums_halves = False
    plans = PerKernel("scratch in 'torch'", _PLANS, never=[name for name in KERNELS if name not in _PLANS])

    def gemm(self, a, b, out, *, scratch, **options):
        given = ProductOptions(**options)
        assert given.half_run is None, "refused where scratch is sized"
        if not are_multiplied_here(a, b):
            super().gemm(a, b, out, scratch=scratch, **options)
            return
        buffers = scratch.take_all(_gemm_plan(a, b, out, **options))
        left, right = tensor_of(a), tensor_of(b)
        if given.trans_a:
            left = left.T
        if given.trans_b:
            right = right.T
        product = tensor_of(buffers[0] if buffers else out)
        added = None
        if not buffers and given.accumulate:
            added = product
        elif not buffers and given.residual is not None:
            added = tensor_of(given.residual)
        stored = bits(out)
        extra = None if given.residual is None else bits(given.residual)
        of_columns = None if given.bias is None else bits(given.bias)

        def part(rows: slice) -> None:
            multiply(left[rows], right, product[rows], None if added is None else added[rows])
            if buffers:
                add_to_product(
                    bits(buffers[0])[rows],
                    stored[rows] if given.accumulate else None,
                    of_columns,
                    None if extra is None else extra[rows],
                    stored[rows],
                )

        self.team.run(part, rows_of_parts(self.team, out, b))

    def head_forward(self, xn, table, labels, lse, loss, logits, *, scratch, accumulate, **shaping):
        if host_head.is_direct(xn, table, LogitOptions(**shaping)):
            host_head.forward(self.team, xn, table, labels, lse, loss, logits, scratch, accumulate=accumulate)
        else:
            super().head_forward(
                xn, table, labels, lse, loss, logits, scratch=scratch, accumulate=accumulate, **shaping
            )

    def head_backward(
        self, xn, table, labels, lse, scale, logits, dxn, *, scratch, denominator, accumulate, dtable=None, **shaping
    ):
        if host_head.is_direct(xn, table, LogitOptions(**shaping)):
            factor = np.float32(float(scale[0]) / float(denominator))
            host_head.backward(
                self.team, xn, table, labels, lse, factor, logits, dxn, dtable, scratch, accumulate=accumulate
            )
        else:
            shaping |= {"denominator": denominator, "accumulate": accumulate}
            shaping |= {"dtable": dtable}
            super().head_backward(xn, table, labels, lse, scale, logits, dxn, scratch=scratch, **shaping)

    def head_in_one_pass(
        self,
        xn: Array,
        table: Array,
        labels: I32,
        lse: F32,
        scale: F32,
        logits: F32,
        dxn: Array,
        loss: F64,
        *,
        scratch: Scratch,
        denominator: float,
        accumulate: bool,
        adds_loss: bool,
        dtable: Array | None = None,
        **shaping: Any,
    ) -> None:
        if not host_head.is_direct(xn, table, LogitOptions(**shaping)):
            shaping |= {"denominator": denominator, "accumulate": accumulate, "adds_loss": adds_loss, "dtable": dtable}
            super().head_in_one_pass(xn, table, labels, lse, scale, logits, dxn, loss, scratch=scratch, **shaping)
            return
        if not adds_loss:
            loss[0] = 0
        factor = np.float32(float(scale[0]) / float(denominator))
        of_rows = xn, table, labels, lse, factor, logits, dxn, dtable, scratch
        host_head.backward(self.team, *of_rows, accumulate=accumulate, loss=loss)

    def makes_head_in_one_pass(self, xn: Array, table: Array, logits: F32, **shaping: Any) -> bool:
        is_direct = host_head.is_direct(xn, table, LogitOptions(**shaping))
        return not is_direct or host_head.sums_in_workspace(logits, self.team.threads)
