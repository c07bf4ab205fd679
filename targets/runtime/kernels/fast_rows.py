"""Numba loops over the rows of matrices: normalisation, SwiGLU, rotation, embedding, the end of a product."""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.runtime.kernels.fast_numba import exact, exp32, load, narrow, reducing

_ZERO, _ONE = np.float32(0), np.float32(1)


@exact()
def store_product(
    product: Any, out: Any, bias: Any, has_bias: Any, residual: Any, has_residual: Any, accumulate: Any
) -> None:
    """Out = product [+ out] [+ bias] [+ residual]; `product` is overwritten, an absent operand is never read."""
    for r in range(out.shape[0]):
        row, stored = product[r], out[r]
        if accumulate:
            for i in range(row.size):
                row[i] += load(stored[i])
        if has_bias:
            for i in range(row.size):
                row[i] += load(bias[i])
        if has_residual:
            extra = residual[r]
            for i in range(row.size):
                row[i] += load(extra[i])
        for i in range(row.size):
            stored[i] = narrow(row[i], stored.dtype)


@exact()
def column_sum(a: Any, acc: Any) -> None:
    """Acc += the rows of a, in order."""
    for r in range(a.shape[0]):
        row = a[r]
        for i in range(acc.size):
            acc[i] += load(row[i])


@reducing()
def rmsnorm_forward(x: Any, gamma: Any, xn: Any, rstd: Any, eps: Any) -> None:
    """Xn = x * rstd * gamma."""
    width = np.float32(x.shape[1])
    for t in range(x.shape[0]):
        row, out = x[t], xn[t]
        total = _ZERO
        for i in range(row.size):
            value = load(row[i])
            total += value * value
        scale = _ONE / np.sqrt(total / width + eps)
        rstd[t] = scale
        for i in range(row.size):
            out[i] = narrow(load(row[i]) * scale * load(gamma[i]), out.dtype)


@reducing()
def rmsnorm_backward(
    dxn: Any, x: Any, gamma: Any, rstd: Any, dx: Any, residual: Any, has_residual: Any, acc: Any, line: Any
) -> None:
    """dx, and acc += dgamma. A row of dx is built in `line` first, so that dx may be dxn or the residual."""
    width = np.float32(x.shape[1])
    for t in range(x.shape[0]):
        grad, row, out, scale = dxn[t], x[t], dx[t], rstd[t]
        dot = _ZERO
        for i in range(row.size):
            product = load(grad[i]) * (load(row[i]) * scale)
            acc[i] += product
            dot += product * load(gamma[i])
        mean = dot / width
        for i in range(row.size):
            line[i] = scale * (load(grad[i]) * load(gamma[i]) - load(row[i]) * scale * mean)
        if has_residual:
            extra = residual[t]
            for i in range(row.size):
                line[i] += load(extra[i])
        for i in range(row.size):
            out[i] = narrow(line[i], out.dtype)


@exact()
def rope(x: Any, cos: Any, sin: Any, sign: Any, heads: Any) -> None:
    """Rotate the two halves of each head against each other."""
    half = cos.shape[1]
    for t in range(x.shape[0]):
        row, position = x[t], t % cos.shape[0]
        c, s = cos[position], sin[position]
        for head in range(heads):
            start = head * 2 * half
            low, high = row[start : start + half], row[start + half : start + 2 * half]
            for i in range(half):
                a, b, turn = load(low[i]), load(high[i]), sign * s[i]
                low[i] = narrow(a * c[i] - b * turn, row.dtype)
                high[i] = narrow(b * c[i] + a * turn, row.dtype)


@exact()
def swiglu_forward(gate: Any, up: Any, prod: Any) -> None:
    """Prod = silu(gate) * up, of flat arrays."""
    for i in range(prod.size):
        g = load(gate[i])
        prod[i] = narrow(g / (_ONE + exp32(-g)) * load(up[i]), prod.dtype)


@exact()
def swiglu_backward(gate: Any, up: Any, dprod: Any, dgate: Any, dup: Any, gate_line: Any, up_line: Any) -> None:
    """Both gradients, of flat arrays, block by block through two lines, so that outputs may be inputs."""
    for start in range(0, gate.size, gate_line.size):
        stop = min(start + gate_line.size, gate.size)
        gates, ups, grads = gate[start:stop], up[start:stop], dprod[start:stop]
        for i in range(stop - start):
            g, d = load(gates[i]), load(grads[i])
            sigmoid = _ONE / (_ONE + exp32(-g))
            gate_line[i] = d * load(ups[i]) * sigmoid * (_ONE + g * (_ONE - sigmoid))
            up_line[i] = d * g * sigmoid
        gate_out, up_out = dgate[start:stop], dup[start:stop]
        for i in range(stop - start):
            gate_out[i] = narrow(gate_line[i], gate_out.dtype)
        for i in range(stop - start):
            up_out[i] = narrow(up_line[i], up_out.dtype)


@exact()
def embedding_forward(tokens: Any, table: Any, y: Any) -> None:
    """y[t] = table[tokens[t]]."""
    for t in range(tokens.size):
        row, out = table[tokens[t]], y[t]
        for i in range(out.size):
            out[i] = narrow(load(row[i]), out.dtype)


@exact()
def embedding_backward(keys: Any, dy: Any, dtable: Any, acc: Any) -> None:
    """Add the rows of dy by `keys`, token << 32 | t, ascending."""
    for n in range(keys.size):
        token = keys[n] >> 32
        row = dy[keys[n] & 0xFFFFFFFF]
        for i in range(acc.size):
            acc[i] += load(row[i])
        if n + 1 == keys.size or keys[n + 1] >> 32 != token:
            out = dtable[token]
            for i in range(acc.size):
                out[i] = narrow(load(out[i]) + acc[i], out.dtype)
            for i in range(acc.size):
                acc[i] = _ZERO
