"""GPT-2's counterparts of RMSNorm, SwiGLU and rotation, in plain numpy: layer norm, GELU, learned positions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.reference.reference_common import add_by_keys, f32, put, quiet, row_blocks, sigmoid
from ratrain.targets.runtime.kernels.shared import check_starts, document_positions, token_keys

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, I32, Array

_SLOPE, _CUBE = np.float32(math.sqrt(8 / math.pi)), np.float32(0.044715)
"""Constants of GELU: (1 + tanh(z)) / 2 is the sigmoid of 2 z = _SLOPE * (up + _CUBE * up^3)."""


def position_backward_plan(documents: I32 | None = None, **_: object) -> Plan:
    """Plan sorted keys of rows by their position in the document; nothing if all sequences have the same positions."""
    return [] if documents is None else [Buffer(documents.shape, np.int64)]


def layernorm_backward_plan(dgamma: Array, **_: object) -> Plan:
    """Plan the sums over rows for dgamma and dbeta."""
    return [Buffer(dgamma.shape), Buffer(dgamma.shape)]


_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def gelu(u: F32, *, exact: bool) -> tuple[F32, F32]:
    """Return the value and the derivative of GELU, by the error function (`exact`) or its tanh approximation."""
    if exact:
        share = _erfc(-u.astype(np.float64) / math.sqrt(2)) / 2  # (1 + erf) / 2 without its cancellation
        density = np.exp(-np.square(u.astype(np.float64)) / 2) / math.sqrt(2 * math.pi)
        return (u * share).astype(np.float32), (share + u * density).astype(np.float32)
    s = sigmoid(_SLOPE * (u + _CUBE * u * u * u))
    slope = _SLOPE * (1 + 3 * _CUBE * u * u)
    return u * s, s + u * s * (1 - s) * slope


class ReferenceGpt:
    """The kernels of `ReferenceKernels` that only GPT-2 needs."""

    @quiet
    def layernorm_forward(self, x, gamma, beta, xn, mean, rstd, *, scratch, eps):
        for rows in row_blocks(*x.shape):
            block = f32(x[rows])
            mean[rows] = block.mean(axis=1)
            centred = block - mean[rows, None]
            rstd[rows] = np.float32(1) / np.sqrt(np.square(centred).mean(axis=1) + np.float32(eps))
            put(xn[rows], centred * rstd[rows, None] * f32(gamma) + f32(beta))

    @quiet
    def layernorm_backward(self, dxn, x, gamma, mean, rstd, dx, dgamma, dbeta, *, scratch, residual=None, accumulate):
        sums = scratch.take_all(layernorm_backward_plan(dgamma))
        for acc in sums:
            acc.fill(0)
        for rows in row_blocks(*x.shape):
            grad = f32(dxn[rows])
            normed = (f32(x[rows]) - mean[rows, None]) * rstd[rows, None]
            sums[0] += (grad * normed).sum(axis=0)
            sums[1] += grad.sum(axis=0)
            weighted = grad * f32(gamma)
            along = (weighted * normed).mean(axis=1, keepdims=True)
            value = rstd[rows, None] * (weighted - weighted.mean(axis=1, keepdims=True) - normed * along)
            put(dx[rows], value if residual is None else value + f32(residual[rows]))
        for acc, out in zip(sums, (dgamma, dbeta), strict=True):
            put(out, acc + f32(out) if accumulate else acc)

    @quiet
    def gelu_forward(self, up, act, *, scratch, exact=False):
        for rows in row_blocks(*up.shape):
            put(act[rows], gelu(f32(up[rows]), exact=exact)[0])

    @quiet
    def gelu_backward(self, up, dact, dup, *, scratch, exact=False):
        for rows in row_blocks(*up.shape):
            put(dup[rows], f32(dact[rows]) * gelu(f32(up[rows]), exact=exact)[1])

    @quiet
    def position_forward(self, positions, y, *, documents=None, scratch, seq_len, first_position=0):
        check_starts(documents, seq_len, first_position)
        for number, sequence in enumerate(y.reshape(-1, seq_len, y.shape[1])):
            for rows in row_blocks(*sequence.shape):
                position = np.arange(first_position + rows.start, first_position + rows.stop)
                if documents is not None:
                    position -= documents.reshape(-1, seq_len)[number, rows]
                put(sequence[rows], f32(sequence[rows]) + f32(positions[position]))

    @quiet
    def position_backward(self, dy, dpositions, *, documents=None, scratch, seq_len, accumulate, first_position=0):
        if documents is not None:
            if not accumulate:
                dpositions.fill(0)
            (keys,) = scratch.take_all(position_backward_plan(documents))
            document_positions(documents, seq_len, first_position, keys)
            token_keys(keys, keys)
            add_by_keys(keys, dy, dpositions, np.float32(1))
            return
        table = dpositions[first_position:]
        sequences = dy.reshape(-1, seq_len, dy.shape[1])
        for rows in row_blocks(seq_len, dy.shape[1]):
            total = np.zeros((rows.stop - rows.start, dy.shape[1]), np.float32)
            for sequence in sequences:
                total += f32(sequence[rows])
            put(table[rows], total + f32(table[rows]) if accumulate else total)
        if not accumulate:
            dpositions[:first_position] = 0
            table[seq_len:] = 0
