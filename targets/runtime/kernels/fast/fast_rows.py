"""Numba loops over the rows of matrices: normalisation, SwiGLU, rotation, embedding, the end of a product.

Sums within a row may be split over vector lanes (`reducing`): the result depends on the row's length, not on its place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.runtime.kernels.fast.fast_numba import (
    exact,
    exp32,
    inlined,
    load,
    narrow,
    reducing,
    smaller,
    span,
    times,
)

_ZERO, _ONE = np.float32(0), np.float32(1)


@exact()
def store_product(
    product: Any, out: Any, bias: Any, has_bias: Any, residual: Any, has_residual: Any, accumulate: Any
) -> None:
    """Set out = product [+ out] [+ bias] [+ residual]; `product` is overwritten, an absent operand is never read."""
    for r in range(out.shape[0]):
        # One loop an operand: a branch inside a loop would keep it from vectorising.
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
    """Add the rows of a to acc, in order."""
    for r in range(a.shape[0]):
        row = a[r]
        for i in range(acc.size):
            acc[i] += load(row[i])


@inlined()
def _weight(gamma: Any, offset: Any) -> Any:
    """Return the weight of a norm for one element; loops are compiled separately for an `offset` of None."""
    if offset is None:
        return load(gamma)
    return load(gamma) + offset


@reducing()
def rmsnorm_forward(x: Any, gamma: Any, offset: Any, xn: Any, rstd: Any, eps: Any) -> None:
    """Set xn = x * rstd * (gamma [+ offset]) and rstd = 1 / sqrt(mean(x^2) + eps)."""
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
    """Set dx [+ residual], and add the rows' part of dgamma to acc.

    A row of dx is built in `line` first, so that dx may be the same array as dxn or the residual.
    """
    width = np.float32(x.shape[1])
    for t in range(x.shape[0]):
        grad, row, out, scale = dxn[t], x[t], dx[t], rstd[t]
        # with n = x * rstd and w = gamma [+ offset]: dx = rstd * (dxn * w - n * mean(dxn * w * n)), dgamma = sum of dxn
        # * n
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
    """Set squares[t] = share * the sum of squares of row t."""
    for t in range(x.shape[0]):
        row = x[t]
        total = _ZERO
        for i in range(row.size):
            value = load(row[i])
            total += value * value
        squares[t] = total * share


@reducing()
def row_products(dxn: Any, x: Any, gamma: Any, products: Any) -> None:
    """Set products[t] = the sum of dxn * gamma * x over row t."""
    for t in range(x.shape[0]):
        grad, row = dxn[t], x[t]
        total = _ZERO
        for i in range(row.size):
            total += load(grad[i]) * load(gamma[i]) * load(row[i])
        products[t] = total


@reducing()
def summed_norm_forward(x: Any, gamma: Any, squares: Any, xn: Any, width: Any, eps: Any) -> None:
    """Set xn = x * rstd * gamma, where rstd comes from each row's sum of squares over all tensor-parallel ranks."""
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
    """Set dx, and add the rows' part of dgamma to acc; squares and products are sums over all tensor-parallel ranks.

    `share` is that of the kernel, divided by the width.
    """
    for t in range(x.shape[0]):
        grad, row, out = dxn[t], x[t], dx[t]
        scale = _ONE / np.sqrt(squares[t] / width + eps)
        # products are sums of dxn * gamma * x over all ranks; times rstd / width they are the mean of dxn * gamma * n
        along = products[t] * scale * share
        for i in range(row.size):
            normed = load(row[i]) * scale
            acc[i] += load(grad[i]) * normed
            out[i] = narrow(scale * (load(grad[i]) * load(gamma[i]) - normed * along), out.dtype)


@inlined()
def _position(starts: Any, first: Any, row: Any) -> Any:
    """Return the position of a row in its document; `starts` is None for one document (compiled separately)."""
    if starts is None:
        return first + row
    return first + row - starts[row]


@exact()
def rope(x: Any, cos: Any, sin: Any, sign: Any, heads: Any, starts: Any, first: Any, lines: Any) -> None:
    """Rotate elements i and i + half of each head against each other, in place; only its first 2 * half elements turn.

    Row t has position first + t - starts[t]. `lines` are two of `half` elements.
    """
    half, width, a, b = cos.shape[1], x.shape[1] // heads, lines[0], lines[1]
    for t in range(x.shape[0]):
        row, position = x[t], _position(starts, first, t)
        c, s = cos[position], sin[position]
        for head in range(heads):
            start = head * width
            low, high = span(row, start, start + half), span(row, start + half, start + 2 * half)
            # one output a loop, of inputs elsewhere: others are vectorised badly, if at all
            for i in range(half):
                a[i] = load(low[i])
            for i in range(half):
                b[i] = load(high[i])
            for i in range(half):
                low[i] = narrow(a[i] * c[i] - b[i] * (sign * s[i]), row.dtype)
            for i in range(half):
                high[i] = narrow(b[i] * c[i] + a[i] * (sign * s[i]), row.dtype)


@exact()
def rope_interleaved(x: Any, cos: Any, sin: Any, sign: Any, heads: Any, starts: Any, first: Any, lines: Any) -> None:
    """Rotate elements 2 i and 2 i + 1 of each head against each other, as `rope` does.

    Row t has position first + t - starts[t].
    """
    half, width, a, b = cos.shape[1], x.shape[1] // heads, lines[0], lines[1]
    for t in range(x.shape[0]):
        row, position = x[t], _position(starts, first, t)
        c, s = cos[position], sin[position]
        for head in range(heads):
            pairs = row[head * width : head * width + 2 * half]
            for i in range(half):
                a[i] = load(pairs[2 * i])
            for i in range(half):
                b[i] = load(pairs[2 * i + 1])
            for i in range(half):
                pairs[2 * i] = narrow(a[i] * c[i] - b[i] * (sign * s[i]), row.dtype)
            for i in range(half):
                pairs[2 * i + 1] = narrow(b[i] * c[i] + a[i] * (sign * s[i]), row.dtype)


@exact()
def swiglu_forward(gate: Any, up: Any, prod: Any) -> None:
    """Set prod = silu(gate) * up, for flat arrays."""
    for i in range(prod.size):
        g = load(gate[i])
        prod[i] = narrow(g / (_ONE + exp32(-g)) * load(up[i]), prod.dtype)


@inlined()
def store_line(line: Any, out: Any) -> None:
    """Set out = the beginning of a line, rounded."""
    for i in range(out.size):
        out[i] = narrow(line[i], out.dtype)


@exact()
def swiglu_backward(gate: Any, up: Any, dprod: Any, dgate: Any, dup: Any, gate_line: Any, up_line: Any) -> None:
    """Set both gradients, for flat arrays; an output may be the same array as an input."""
    # Block by block through two lines: all inputs of a block are read before an output is written.
    for start in range(0, gate.size, gate_line.size):
        stop = smaller(start + gate_line.size, gate.size)
        gates, ups, grads = span(gate, start, stop), span(up, start, stop), span(dprod, start, stop)
        for i in range(stop - start):
            g, d = load(gates[i]), load(grads[i])
            sigmoid = _ONE / (_ONE + exp32(-g))
            gate_line[i] = d * load(ups[i]) * sigmoid * (_ONE + g * (_ONE - sigmoid))
            up_line[i] = d * g * sigmoid
        store_line(gate_line, span(dgate, start, stop))
        store_line(up_line, span(dup, start, stop))


@exact()
def add_positions(table: Any, starts: Any, first: Any, y: Any) -> None:
    """Set y[t] += table[first + t - starts[t]]."""
    for t in range(y.shape[0]):
        row, out = table[first + t - starts[t]], y[t]
        for i in range(out.size):
            out[i] = narrow(load(out[i]) + load(row[i]), out.dtype)


@exact()
def embedding_forward(tokens: Any, table: Any, y: Any, scale: Any) -> None:
    """Set y[t] = scale * table[tokens[t]]; 0 for tokens that are rows of other tensor-parallel ranks' tables."""
    for t in range(tokens.size):
        out = y[t]
        # a row of another rank's table: the sum over ranks adds it
        if tokens[t] < 0:
            for i in range(out.size):
                out[i] = narrow(_ZERO, out.dtype)
            continue
        row = table[tokens[t]]
        for i in range(out.size):
            out[i] = narrow(times(load(row[i]), scale), out.dtype)


@exact()
def embedding_backward(keys: Any, dy: Any, dtable: Any, acc: Any, scale: Any) -> None:
    """Add scale * rows of dy to rows of dtable; `keys` are token << 32 | t, ascending.

    `acc` must be 0, and is left so.
    """
    for n in range(keys.size):
        # Rows of one token are summed in float32 in `acc`, and added to its table row when the last of them is in: the
        # table is rounded once for each token.
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
