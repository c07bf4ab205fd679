"""Numba loops over the rows of matrices: normalisation, SwiGLU, rotation, embedding, the end of a product."""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.runtime.kernels.fast.fast_numba import exact, exp32, inlined, load, narrow, reducing, times

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


@inlined()
def _weight(gamma: Any, offset: Any) -> Any:
    """What a norm multiplies an element by; loops are compiled apart for an `offset` of None."""
    if offset is None:
        return load(gamma)
    return load(gamma) + offset


@reducing()
def rmsnorm_forward(x: Any, gamma: Any, offset: Any, xn: Any, rstd: Any, eps: Any) -> None:
    """Xn = x * rstd * (gamma [+ offset])."""
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
            out[i] = narrow(load(row[i]) * scale * _weight(gamma[i], offset), out.dtype)


@reducing()
def rmsnorm_backward(
    dxn: Any,
    x: Any,
    gamma: Any,
    offset: Any,
    rstd: Any,
    dx: Any,
    residual: Any,
    has_residual: Any,
    acc: Any,
    line: Any,
) -> None:
    """dx, and acc += dgamma. A row of dx is built in `line` first, so that dx may be dxn or the residual."""
    width = np.float32(x.shape[1])
    for t in range(x.shape[0]):
        grad, row, out, scale = dxn[t], x[t], dx[t], rstd[t]
        dot = _ZERO
        for i in range(row.size):
            product = load(grad[i]) * (load(row[i]) * scale)
            acc[i] += product
            dot += product * _weight(gamma[i], offset)
        mean = dot / width
        for i in range(row.size):
            line[i] = scale * (load(grad[i]) * _weight(gamma[i], offset) - load(row[i]) * scale * mean)
        if has_residual:
            extra = residual[t]
            for i in range(row.size):
                line[i] += load(extra[i])
        for i in range(row.size):
            out[i] = narrow(line[i], out.dtype)


@reducing()
def row_squares(x: Any, squares: Any, share: Any) -> None:
    """The sum of squares of each row."""
    for t in range(x.shape[0]):
        row = x[t]
        total = _ZERO
        for i in range(row.size):
            value = load(row[i])
            total += value * value
        squares[t] = total * share


@reducing()
def row_products(dxn: Any, x: Any, gamma: Any, products: Any) -> None:
    """The sum of products of each row."""
    for t in range(x.shape[0]):
        grad, row = dxn[t], x[t]
        total = _ZERO
        for i in range(row.size):
            total += load(grad[i]) * load(gamma[i]) * load(row[i])
        products[t] = total


@reducing()
def summed_norm_forward(x: Any, gamma: Any, squares: Any, xn: Any, width: Any, eps: Any) -> None:
    """Xn = x * rstd * gamma, of a row whose squares are summed."""
    for t in range(x.shape[0]):
        row, out = x[t], xn[t]
        scale = _ONE / np.sqrt(squares[t] / width + eps)
        for i in range(row.size):
            out[i] = narrow(load(row[i]) * scale * load(gamma[i]), out.dtype)


@reducing()
def summed_norm_backward(
    dxn: Any,
    x: Any,
    gamma: Any,
    squares: Any,
    products: Any,
    dx: Any,
    width: Any,
    eps: Any,
    share: Any,
    acc: Any,
) -> None:
    """dx, and acc += dgamma."""
    for t in range(x.shape[0]):
        grad, row, out = dxn[t], x[t], dx[t]
        scale = _ONE / np.sqrt(squares[t] / width + eps)
        along = products[t] * scale * share
        for i in range(row.size):
            normed = load(row[i]) * scale
            acc[i] += load(grad[i]) * normed
            out[i] = narrow(scale * (load(grad[i]) * load(gamma[i]) - normed * along), out.dtype)


@inlined()
def _position(starts: Any, first: Any, row: Any) -> Any:
    """The position of a row; loops are compiled apart for rows of one document, where there are no starts."""
    if starts is None:
        return first + row
    return first + row - starts[row]


@exact()
def rope(x: Any, cos: Any, sin: Any, sign: Any, heads: Any, starts: Any, first: Any) -> None:
    """Rotate the two halves of what turns of each head, its first elements, against each other; row t is at first + t - starts[t]."""
    half, width = cos.shape[1], x.shape[1] // heads
    for t in range(x.shape[0]):
        row, position = x[t], _position(starts, first, t)
        c, s = cos[position], sin[position]
        for head in range(heads):
            start = head * width
            low, high = row[start : start + half], row[start + half : start + 2 * half]
            for i in range(half):
                a, b, turn = load(low[i]), load(high[i]), sign * s[i]
                low[i] = narrow(a * c[i] - b * turn, row.dtype)
                high[i] = narrow(b * c[i] + a * turn, row.dtype)


@exact()
def rope_interleaved(x: Any, cos: Any, sin: Any, sign: Any, heads: Any, starts: Any, first: Any) -> None:
    """Rotate each two neighbours among what turns of each head against each other; row t is at first + t - starts[t]."""
    half, width = cos.shape[1], x.shape[1] // heads
    for t in range(x.shape[0]):
        row, position = x[t], _position(starts, first, t)
        c, s = cos[position], sin[position]
        for head in range(heads):
            pairs = row[head * width : head * width + 2 * half]
            for i in range(half):
                a, b, turn = load(pairs[2 * i]), load(pairs[2 * i + 1]), sign * s[i]
                pairs[2 * i] = narrow(a * c[i] - b * turn, row.dtype)
                pairs[2 * i + 1] = narrow(b * c[i] + a * turn, row.dtype)


@exact()
def swiglu_forward(gate: Any, up: Any, prod: Any) -> None:
    """Prod = silu(gate) * up, of flat arrays."""
    for i in range(prod.size):
        g = load(gate[i])
        prod[i] = narrow(g / (_ONE + exp32(-g)) * load(up[i]), prod.dtype)


@inlined()
def store_line(line: Any, out: Any) -> None:
    """Out = the begin of a line, rounded."""
    for i in range(out.size):
        out[i] = narrow(line[i], out.dtype)


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
        store_line(gate_line, dgate[start:stop])
        store_line(up_line, dup[start:stop])


@exact()
def add_positions(table: Any, starts: Any, first: Any, y: Any) -> None:
    """y[t] += table[first + t - starts[t]]."""
    for t in range(y.shape[0]):
        row, out = table[first + t - starts[t]], y[t]
        for i in range(out.size):
            out[i] = narrow(load(out[i]) + load(row[i]), out.dtype)


@exact()
def embedding_forward(tokens: Any, table: Any, y: Any, scale: Any) -> None:
    """y[t] = scale * table[tokens[t]], 0 of tokens that are rows of other tables."""
    for t in range(tokens.size):
        out = y[t]
        if tokens[t] < 0:
            for i in range(out.size):
                out[i] = narrow(_ZERO, out.dtype)
            continue
        row = table[tokens[t]]
        for i in range(out.size):
            out[i] = narrow(times(load(row[i]), scale), out.dtype)


@exact()
def embedding_backward(keys: Any, dy: Any, dtable: Any, acc: Any, scale: Any) -> None:
    """Add scale times the rows of dy by `keys`, token << 32 | t, ascending."""
    for n in range(keys.size):
        token = keys[n] >> 32
        row = dy[keys[n] & 0xFFFFFFFF]
        for i in range(acc.size):
            acc[i] += load(row[i])
        if n + 1 == keys.size or keys[n + 1] >> 32 != token:
            out = dtable[token]
            for i in range(acc.size):
                out[i] = narrow(load(out[i]) + times(acc[i], scale), out.dtype)
            for i in range(acc.size):
                acc[i] = _ZERO
