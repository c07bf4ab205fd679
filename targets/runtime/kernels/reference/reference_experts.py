"""Kernels of expert blocks in plain numpy: choice of experts, products of their rows, weighted SwiGLU.

Expert by expert, in ascending order, in blocks of `ROW_BLOCK` rows: the last block is filled up with zeros, so that a
product always has the same shape and a row the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.targets.program.expert_kernels import ROW_BLOCK
from ratrain.targets.program.kernel_options import RouterOptions
from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.reference.reference_common import f32, put, quiet, row_blocks, sigmoid
from ratrain.targets.runtime.kernels.shared import counted_rows, expert_runs, group_by_expert, rows_of_experts

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, I32, Array


def expert_product_plan(a: Array, b: Array, out: Array, **_: object) -> Plan:
    """Plan a block of rows, one expert's matrix and their product, in float32."""
    return [Buffer((ROW_BLOCK, a.shape[1])), Buffer(b.shape[1:]), Buffer((ROW_BLOCK, out.shape[1]))]


def expert_gradients_plan(a: Array, b: Array, out: Array, **_: object) -> Plan:
    """Plan the rows of one expert of both factors, at most one for each token, and their product, in float32."""
    tokens = min(len(a), len(b))
    return [Buffer((tokens, a.shape[1])), Buffer((tokens, b.shape[1])), Buffer(out.shape[1:])]


class ReferenceExperts:
    """The kernels of `ReferenceKernels` for blocks of experts."""

    @quiet
    def route_forward(self, logits, chosen, weights, *, bias=None, scratch, normalise):
        count = chosen.shape[1]
        for rows in row_blocks(*logits.shape):
            block = logits[rows]
            scores = block if bias is None else np.exp(block - _log_sums(block)) + bias
            # stable sort of descending values: of equal logits the lower number comes first, a NaN last
            best = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :count], axis=1)
            chosen[rows] = best
            taken = np.take_along_axis(block, best, axis=1)
            weights[rows] = np.exp(taken - _log_sums(taken if normalise else block))

    @quiet
    def route_backward(self, logits, chosen, weights, dweights, bounds, dlogits, *, scratch, **options):
        given = RouterOptions(**options)
        tokens, experts = logits.shape
        step = np.float32(1 if given.scale is None else given.scale[0])
        pull = np.diff(bounds) * np.float32(given.pull(tokens, experts, chosen.shape[1])) * step
        for rows in row_blocks(*logits.shape):
            sums = _log_sums(logits[rows])
            shares = np.exp(logits[rows] - sums)
            mean = (weights[rows] * dweights[rows]).sum(axis=1, keepdims=True)
            if given.normalise:
                value = np.zeros_like(shares)
                np.put_along_axis(value, chosen[rows], weights[rows] * (dweights[rows] - mean), axis=1)
            else:
                value = -shares * mean
                here = np.take_along_axis(value, chosen[rows], axis=1) + weights[rows] * dweights[rows]
                np.put_along_axis(value, chosen[rows], here, axis=1)
            if given.balance:
                value += shares * (pull - shares @ pull[:, None])
            if given.z:
                value += np.float32(given.push(tokens)) * step * sums * shares
            dlogits[rows] = value

    def group_rows(self, chosen, order, bounds, *, scratch):
        group_by_expert(chosen, order, bounds)

    def add_rows(self, bounds, counts, *, scratch):
        counts += bounds[1:]
        counts -= bounds[:-1]

    @quiet
    def expert_rows(self, a, b, bounds, out, *, order=None, scratch, trans_b=False, accumulate=False):
        source = None if order is None else order // (len(out) // len(a))
        for rows, product in self._expert_products(a, b, bounds, out, scratch, trans_b, source):
            put(out[rows], product + f32(out[rows]) if accumulate else product)

    @quiet
    def expert_sums(self, a, b, order, bounds, sums, out, *, residual=None, scratch, trans_b=False, accumulate=False):
        choices = len(a) // len(out)
        sums.fill(0)
        for rows, product in self._expert_products(a, b, bounds, out, scratch, trans_b):
            sums[order[rows] // choices] += product  # an expert has each token at most once
        for rows in row_blocks(*out.shape):
            _put_sum(sums[rows], rows, out, residual, accumulate)

    @quiet
    def choice_sums(self, a, out, *, residual=None, scratch, accumulate=False):
        of_tokens = a.reshape(len(out), -1, a.shape[1])
        for rows in row_blocks(*out.shape):
            first, *others = of_tokens[rows].swapaxes(0, 1)
            _put_sum(sum(map(f32, others), start=f32(first)), rows, out, residual, accumulate)

    def _expert_products(
        self, a: Array, b: Array, bounds: I32, out: Array, scratch: Any, trans_b: bool, source: I32 | None = None
    ) -> Iterator[tuple[slice, F32]]:
        """Yield the rows of each block, and their product; row r of the first factor is a[source[r]], else a[r]."""
        block, matrix, product = scratch.take_all(expert_product_plan(a, b, out))
        current = -1
        for expert, rows in expert_runs(bounds, ROW_BLOCK):
            if expert != current:
                np.copyto(matrix, b[expert])
                current = expert
            count = rows.stop - rows.start
            block[:count] = a[rows if source is None else source[rows]]
            block[count:] = 0
            np.matmul(block, matrix.T if trans_b else matrix, out=product)
            yield rows, product[:count]

    @quiet
    def expert_gradients(self, a, b, bounds, out, *, order=None, scratch, gathers_a, accumulate):
        left, right, product = scratch.take_all(expert_gradients_plan(a, b, out))
        choices = max(len(a), len(b)) // min(len(a), len(b))
        for expert, own in enumerate(rows_of_experts(bounds)):
            count = own.stop - own.start
            tokens = own if order is None else order[own] // choices
            left[:count] = a[tokens if gathers_a else own]
            right[:count] = b[own if gathers_a else tokens]
            np.matmul(left[:count].T, right[:count], out=product)
            if accumulate:
                product += f32(out[expert])
            put(out[expert], product)

    @quiet
    def weighted_swiglu_forward(self, gate, up, weights, prod, *, order=None, bounds=None, scratch):
        of_row = weights.reshape(-1)
        for rows in _counted_blocks(gate, bounds):
            g = f32(gate[rows])
            weight = of_row[rows if order is None else order[rows], None]
            put(prod[rows], g * sigmoid(g) * f32(up[rows]) * weight)

    @quiet
    def weighted_swiglu_backward(
        self, gate, up, weights, dprod, dgate, dup, dweights, *, order=None, bounds=None, scratch
    ):
        of_row, gradients = weights.reshape(-1), dweights.reshape(-1)
        for rows in _counted_blocks(gate, bounds):
            at = rows if order is None else order[rows]
            g, u, above = f32(gate[rows]), f32(up[rows]), f32(dprod[rows])
            d = above * of_row[at, None]
            s = sigmoid(g)
            gradients[at] = (above * (g * s * u)).sum(axis=1)
            gate_gradient = d * u * s * (1 + g * (1 - s))
            up_gradient = d * g * s
            put(dgate[rows], gate_gradient)
            put(dup[rows], up_gradient)

    @quiet
    def sigmoid_forward(self, x, y, *, scratch):
        put(y, sigmoid(x))

    @quiet
    def sigmoid_backward(self, y, dy, dx, *, scratch):
        put(dx, dy * y * (1 - y))


def _counted_blocks(rows: Array, bounds: I32 | None) -> Iterator[slice]:
    """Cut the rows that count into blocks: all, or those within the bounds of experts."""
    first, count = counted_rows(len(rows), bounds)
    for own in row_blocks(count, rows.shape[1]):
        yield slice(first + own.start, first + own.stop)


def _put_sum(value: F32, rows: slice, out: Array, residual: Array | None, accumulate: bool) -> None:
    """Set rows of out = [out +] value [+ residual], rounded."""
    if accumulate:
        value = value + f32(out[rows])
    if residual is not None:
        value = value + f32(residual[rows])
    put(out[rows], value)


def _log_sums(logits: F32) -> F32:
    """Return the log-sum-exp of each row as one column."""
    peak = logits.max(axis=1, keepdims=True)
    sums: F32 = peak + np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
    return sums
