"""Kernels of the families beyond LLaMA and GPT-2, in plain numpy: norms of heads, gated GELU, squared ReLU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.reference.reference_common import f32, norm_weight, put, quiet, row_blocks
from ratrain.targets.runtime.kernels.reference.reference_gpt import gelu

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, Array


def head_norm_backward_plan(dgamma: Array, **_: object) -> Plan:
    """Plan the sum over rows for dgamma."""
    return [Buffer(dgamma.shape)]


def _rstd_of(squares: F32, width: int, eps: float) -> F32:
    """Return 1 / sqrt(squares / width + eps) as one column, from the sums of squares of rows."""
    rstd: F32 = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(eps))
    return rstd[:, None]


class ReferenceFamilies:
    """The kernels of `ReferenceKernels` that only some families need."""

    @quiet
    def head_norm_forward(self, x, gamma, xn, rstd, *, scratch, heads, head_dim, eps, unit_offset=False):
        weight, source, out = norm_weight(gamma, unit_offset), x.reshape(-1, head_dim), xn.reshape(-1, head_dim)
        for rows in row_blocks(*source.shape):
            block = f32(source[rows])
            rstd[rows] = np.float32(1) / np.sqrt(np.square(block).mean(axis=1) + np.float32(eps))
            put(out[rows], block * rstd[rows, None] * weight)

    @quiet
    def head_norm_backward(
        self, dxn, x, gamma, rstd, dx, dgamma, *, scratch, heads, head_dim, accumulate, unit_offset=False
    ):
        (acc,) = scratch.take_all(head_norm_backward_plan(dgamma))
        acc.fill(0)
        weight = norm_weight(gamma, unit_offset)
        above, source, out = (array.reshape(-1, head_dim) for array in (dxn, x, dx))
        for rows in row_blocks(*source.shape):
            grad = f32(above[rows])
            normed = f32(source[rows]) * rstd[rows, None]
            acc += (grad * normed).sum(axis=0)
            weighted = grad * weight
            put(out[rows], rstd[rows, None] * (weighted - normed * (weighted * normed).mean(axis=1, keepdims=True)))
        put(dgamma, acc + f32(dgamma) if accumulate else acc)

    @quiet
    def row_squares(self, x, squares, *, scratch, share):
        for rows in row_blocks(*x.shape):
            squares[rows] = np.square(f32(x[rows])).sum(axis=1) * np.float32(share)

    @quiet
    def row_products(self, dxn, x, gamma, products, *, scratch):
        for rows in row_blocks(*x.shape):
            products[rows] = (f32(dxn[rows]) * f32(gamma) * f32(x[rows])).sum(axis=1)

    @quiet
    def summed_norm_forward(self, x, gamma, squares, xn, *, scratch, width, eps):
        for rows in row_blocks(*x.shape):
            put(xn[rows], f32(x[rows]) * _rstd_of(squares[rows], width, eps) * f32(gamma))

    @quiet
    def summed_norm_backward(
        self, dxn, x, gamma, squares, products, dx, dgamma, *, scratch, width, eps, share, accumulate
    ):
        (acc,) = scratch.take_all(head_norm_backward_plan(dgamma))
        acc.fill(0)
        weight = f32(gamma)
        for rows in row_blocks(*x.shape):
            grad, rstd = f32(dxn[rows]), _rstd_of(squares[rows], width, eps)
            normed = f32(x[rows]) * rstd
            acc += (grad * normed).sum(axis=0)
            along = products[rows, None] * rstd * np.float32(share / width)
            put(dx[rows], rstd * (grad * weight - normed * along))
        put(dgamma, acc + f32(dgamma) if accumulate else acc)

    @quiet
    def geglu_forward(self, gate, up, prod, *, scratch, exact=False):
        for rows in row_blocks(*gate.shape):
            put(prod[rows], gelu(f32(gate[rows]), exact=exact)[0] * f32(up[rows]))

    @quiet
    def geglu_backward(self, gate, up, dprod, dgate, dup, *, scratch, exact=False):
        for rows in row_blocks(*gate.shape):
            value, slope = gelu(f32(gate[rows]), exact=exact)
            u, d = f32(up[rows]), f32(dprod[rows])
            of_gate, of_up = d * u * slope, d * value
            put(dgate[rows], of_gate)
            put(dup[rows], of_up)

    @quiet
    def relu2_forward(self, up, act, *, scratch):
        for rows in row_blocks(*up.shape):
            put(act[rows], np.square(np.maximum(f32(up[rows]), np.float32(0))))

    @quiet
    def relu2_backward(self, up, dact, dup, *, scratch):
        for rows in row_blocks(*up.shape):
            put(dup[rows], f32(dact[rows]) * (2 * np.maximum(f32(up[rows]), np.float32(0))))
