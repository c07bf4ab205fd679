"""Norms of rows, and of heads of rows, on tensors. Sums over rows go by chunks, then over the chunks in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ratrain.targets.pytorch.device.device_common import (
    add_wide,
    chunk_buffers,
    chunk_rows,
    row_chunks,
    shaped,
    store_sum,
    sum_rows,
    wide,
)
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan


def _plan(x: Array, width: int, chunks: int, lines: int) -> Plan:
    """Plan chunks of rows; lines of a row's width; a number for each row of a chunk."""
    rows = x.shape[0] * x.shape[1] // width
    return [
        *chunk_buffers(chunks, rows, width),
        *[Buffer((width,))] * lines,
        Buffer((chunk_rows(rows, width),)),
    ]


def norm_forward_plan(x: Array, gamma: Array | None = None, **_: object) -> Plan:
    """Plan rows and their squares; gamma and beta; a mean of each row."""
    return _plan(x, x.shape[1] if gamma is None else gamma.shape[0], 2, 2)


def norm_backward_plan(x: Array, gamma: Array, **_: object) -> Plan:
    """Plan gradient, normalised rows, a product; gamma, two sums and a part of them; a mean of each row."""
    return _plan(x, gamma.shape[0], 3, 4)


def _weight(gamma: Array, buffer: F32, *, unit_offset: bool) -> F32:
    """Return the weight of a norm in float32: gamma, or 1 + gamma."""
    weight = wide(buffer, gamma)
    return weight.add_(1) if unit_offset else weight


def _row_means(x: F32, out: F32) -> F32:
    """Set out[t] = mean(x[t])."""
    return torch.sum(x, dim=1, out=out).div_(x.shape[1])


def _inverse_deviations(x: F32, squares: Array, eps: float, out: F32) -> None:
    """Set out[t] = 1 / sqrt(mean(x[t]^2) + eps)."""
    _row_means(torch.mul(x, x, out=shaped(squares, x.shape)), out).add_(eps).sqrt_().reciprocal_()


def _factors(squares: F32, width: int, eps: float, out: F32) -> F32:
    """Compute 1 / sqrt(squares / width + eps)."""
    return torch.div(squares, width, out=out[: len(squares)]).add_(eps).sqrt_().reciprocal_()


def _forward(x: Array, gamma: Array, xn: Array, rstd: F32, scratch: Scratch, eps: float, *, unit_offset: bool) -> None:
    """Compute the RMS norm of all rows of x."""
    rows_of_x, squares, of_gamma, _, _ = scratch.take_all(norm_forward_plan(x, gamma))
    weight = _weight(gamma, of_gamma, unit_offset=unit_offset)
    for rows in row_chunks(*x.shape):
        values = wide(rows_of_x, x[rows])
        _inverse_deviations(values, squares, eps, rstd[rows])
        xn[rows].copy_(values.mul_(rstd[rows, None]).mul_(weight))


def _backward(
    dxn: Array,
    x: Array,
    gamma: Array,
    rstd: F32,
    dx: Array,
    dgamma: Array,
    residual: Array | None,
    scratch: Scratch,
    *,
    accumulate: bool,
    unit_offset: bool,
) -> None:
    """Compute the gradients of `_forward`."""
    of_grad, of_normed, spare, of_gamma, total, part, _, means = scratch.take_all(norm_backward_plan(x, gamma))
    weight = _weight(gamma, of_gamma, unit_offset=unit_offset)
    total.zero_()
    for rows in row_chunks(*x.shape):
        grad, normed = wide(of_grad, dxn[rows]), wide(of_normed, x[rows]).mul_(rstd[rows, None])
        product, along = shaped(spare, grad.shape), means[: len(grad)]
        total.add_(sum_rows(torch.mul(grad, normed, out=product), part))
        _row_means(torch.mul(grad.mul_(weight), normed, out=product), along)
        # with n the normalised row and g = dxn * weight: dx = rstd * (g - n * mean(g * n))
        grad.sub_(normed.mul_(along[:, None])).mul_(rstd[rows, None])
        if residual is not None:
            add_wide(grad, spare, residual[rows])
        dx[rows].copy_(grad)
    store_sum(total, part, dgamma, accumulate=accumulate)


class DeviceNorms:
    """The norms of `TorchDevice`."""

    def rmsnorm_forward(self, x, gamma, xn, rstd, *, scratch, eps, unit_offset=False):
        _forward(x, gamma, xn, rstd, scratch, eps, unit_offset=unit_offset)

    def rmsnorm_backward(
        self, dxn, x, gamma, rstd, dx, dgamma, *, scratch, residual=None, accumulate, unit_offset=False
    ):
        _backward(dxn, x, gamma, rstd, dx, dgamma, residual, scratch, accumulate=accumulate, unit_offset=unit_offset)

    def head_norm_forward(self, x, gamma, xn, rstd, *, scratch, heads, head_dim, eps, unit_offset=False):
        _forward(x.view(-1, head_dim), gamma, xn.view(-1, head_dim), rstd, scratch, eps, unit_offset=unit_offset)

    def head_norm_backward(
        self, dxn, x, gamma, rstd, dx, dgamma, *, scratch, heads, head_dim, accumulate, unit_offset=False
    ):
        above, source, out = (each.view(-1, head_dim) for each in (dxn, x, dx))
        _backward(
            above, source, gamma, rstd, out, dgamma, None, scratch, accumulate=accumulate, unit_offset=unit_offset
        )

    def row_squares(self, x, squares, *, scratch, share):
        rows_of_x, spare, _, _, _ = scratch.take_all(norm_forward_plan(x))
        for rows in row_chunks(*x.shape):
            values = wide(rows_of_x, x[rows])
            torch.sum(torch.mul(values, values, out=shaped(spare, values.shape)), dim=1, out=squares[rows]).mul_(share)

    def row_products(self, dxn, x, gamma, products, *, scratch):
        of_grad, of_x, of_gamma, _, _ = scratch.take_all(norm_forward_plan(x, gamma))
        weight = wide(of_gamma, gamma)
        for rows in row_chunks(*x.shape):
            grad, values = wide(of_grad, dxn[rows]), wide(of_x, x[rows])
            torch.sum(grad.mul_(weight).mul_(values), dim=1, out=products[rows])

    def summed_norm_forward(self, x, gamma, squares, xn, *, scratch, width, eps):
        rows_of_x, _, of_gamma, _, factors = scratch.take_all(norm_forward_plan(x, gamma))
        weight = wide(of_gamma, gamma)
        for rows in row_chunks(*x.shape):
            values = wide(rows_of_x, x[rows])
            rstd = _factors(squares[rows], width, eps, factors)
            xn[rows].copy_(values.mul_(rstd[:, None]).mul_(weight))

    def summed_norm_backward(
        self, dxn, x, gamma, squares, products, dx, dgamma, *, scratch, width, eps, share, accumulate
    ):
        of_grad, of_normed, spare, of_gamma, total, part, _, factors = scratch.take_all(norm_backward_plan(x, gamma))
        weight = wide(of_gamma, gamma)
        total.zero_()
        for rows in row_chunks(*x.shape):
            rstd = _factors(squares[rows], width, eps, factors)
            grad, normed = wide(of_grad, dxn[rows]), wide(of_normed, x[rows]).mul_(rstd[:, None])
            product = shaped(spare, grad.shape)
            total.add_(sum_rows(torch.mul(grad, normed, out=product), part))
            # products are summed over all ranks: times rstd / width they are mean(g * n) over the whole row, of which
            # this rank's gradient takes its `share`
            normed.mul_(products[rows, None]).mul_(rstd[:, None]).mul_(share / width)
            dx[rows].copy_(grad.mul_(weight).sub_(normed).mul_(rstd[:, None]))
        store_sum(total, part, dgamma, accumulate=accumulate)

    def layernorm_forward(self, x, gamma, beta, xn, mean, rstd, *, scratch, eps):
        rows_of_x, squares, of_gamma, of_beta, _ = scratch.take_all(norm_forward_plan(x, gamma))
        weight, shift = wide(of_gamma, gamma), wide(of_beta, beta)
        for rows in row_chunks(*x.shape):
            values = wide(rows_of_x, x[rows])
            values.sub_(_row_means(values, mean[rows])[:, None])
            _inverse_deviations(values, squares, eps, rstd[rows])
            xn[rows].copy_(values.mul_(rstd[rows, None]).mul_(weight).add_(shift))

    def layernorm_backward(self, dxn, x, gamma, mean, rstd, dx, dgamma, dbeta, *, scratch, residual=None, accumulate):
        buffers = scratch.take_all(norm_backward_plan(x, gamma))
        of_grad, of_normed, spare, of_gamma, of_products, of_grads, part, means = buffers
        weight = wide(of_gamma, gamma)
        of_products.zero_()
        of_grads.zero_()
        for rows in row_chunks(*x.shape):
            grad = wide(of_grad, dxn[rows])
            normed = wide(of_normed, x[rows]).sub_(mean[rows, None]).mul_(rstd[rows, None])
            product, line = shaped(spare, grad.shape), means[: len(grad)]
            of_products.add_(sum_rows(torch.mul(grad, normed, out=product), part))
            of_grads.add_(sum_rows(product.copy_(grad), part))
            _row_means(torch.mul(grad.mul_(weight), normed, out=product), line)
            normed.mul_(line[:, None])
            # dx = rstd * (g - mean(g) - n * mean(g * n))
            grad.sub_(_row_means(grad, line)[:, None]).sub_(normed).mul_(rstd[rows, None])
            if residual is not None:
                add_wide(grad, spare, residual[rows])
            dx[rows].copy_(grad)
        store_sum(of_products, part, dgamma, accumulate=accumulate)
        store_sum(of_grads, part, dbeta, accumulate=accumulate)
