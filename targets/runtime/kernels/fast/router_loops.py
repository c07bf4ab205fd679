"""Numba loops of expert blocks without products: choice of experts, order of rows, weighted SwiGLU, sigmoid."""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.runtime.kernels.fast.fast_numba import (
    SPLIT_SUMS,
    exact,
    exp32,
    inlined,
    load,
    maximum,
    narrow,
    reducing,
)
from ratrain.targets.runtime.kernels.fast.fast_rows import store_line

_ZERO, _ONE = np.float32(0), np.float32(1)
_LEAST = np.float32(-np.inf)


@inlined()
def _beats(value: Any, other: Any) -> Any:
    """Return whether a logit is chosen before one with a lower number: if it is larger, or the other is NaN."""
    return value > other or (np.isnan(other) and not np.isnan(value))


@inlined(fastmath=SPLIT_SUMS)
def _sum_exp(row: Any, peak: Any) -> Any:
    total = _ZERO
    for i in range(row.size):
        total += exp32(row[i] - peak)
    return total


@inlined()
def _peak(row: Any) -> Any:
    """Return the largest element; NaN if there is one."""
    peak = _LEAST
    for i in range(row.size):
        peak = maximum(peak, row[i])
    return peak


@inlined()
def _choose(row: Any, best: Any, values: Any, bias: Any) -> None:
    """Set `best` = the numbers of the largest logits of a row, ascending; `values` is workspace of the same length.

    With a bias they are those of the largest sums of softmax and bias.
    """
    peak = total = _ZERO
    if bias.size:
        peak = _peak(row)
        total = _sum_exp(row, peak)
    # The list of the best so far is sorted by falling logit, equal ones by number. Most logits fail at its last entry.
    for e in range(row.size):
        value, place = row[e], min(e, best.size)
        if bias.size:
            value = exp32(value - peak) / total + bias[e]
        while place > 0 and _beats(value, values[place - 1]):
            if place < best.size:
                values[place] = values[place - 1]
                best[place] = best[place - 1]
            place -= 1
        if place < best.size:
            values[place] = value
            best[place] = e
    for j in range(1, best.size):
        number, place = best[j], j
        while place > 0 and best[place - 1] > number:
            best[place] = best[place - 1]
            place -= 1
        best[place] = number


@exact()
def route_forward(logits: Any, chosen: Any, weights: Any, bias: Any, normalise: Any) -> None:
    """Choose the experts of each row, with their weights; an empty `bias` is none."""
    for t in range(logits.shape[0]):
        row, best, taken = logits[t], chosen[t], weights[t]
        _choose(row, best, taken, bias)
        for j in range(best.size):
            taken[j] = row[best[j]]
        over = taken if normalise else row
        peak = _peak(over)
        total = _sum_exp(over, peak)
        for j in range(best.size):
            taken[j] = exp32(taken[j] - peak) / total


@reducing()
def route_backward(
    logits: Any, chosen: Any, weights: Any, above: Any, bounds: Any, out: Any, normalise: Any, balance: Any, z: Any
) -> None:
    """Set out = the gradient of `route_forward`, from `above`, and of both losses.

    `balance` is the factor of an expert's number of rows, `z` that of the log-sum-exp; each has the loss scale in it.
    """
    has_losses = balance != _ZERO or z != _ZERO
    for t in range(logits.shape[0]):
        row, best, given, of_weight, line = logits[t], chosen[t], weights[t], above[t], out[t]
        mean = _ZERO
        for j in range(best.size):
            mean += given[j] * of_weight[j]
        if normalise and not has_losses:
            for i in range(line.size):
                line[i] = _ZERO
        else:
            # with p the softmax: p * (common part + balance * rows of the expert)
            peak = _peak(row)
            total = _sum_exp(row, peak)
            common = _ZERO if normalise else -mean
            if z != _ZERO:
                common += z * (peak + np.log(total))
            for i in range(line.size):
                line[i] = exp32(row[i] - peak) / total
            if balance != _ZERO:
                common -= balance * _mean_rows(line, bounds)
                _times_rows(line, bounds, common, balance)
            else:
                for i in range(line.size):
                    line[i] *= common
        for j in range(best.size):
            line[best[j]] += given[j] * (of_weight[j] - mean if normalise else of_weight[j])


@inlined(fastmath=SPLIT_SUMS)
def _mean_rows(shares: Any, bounds: Any) -> Any:
    """Return the mean number of rows of an expert, weighted by shares."""
    total = shares[0] * np.float32(bounds[1] - bounds[0])
    for i in range(1, shares.size):
        total += shares[i] * np.float32(bounds[i + 1] - bounds[i])
    return total


@inlined()
def _times_rows(line: Any, bounds: Any, common: Any, balance: Any) -> None:
    """Multiply the element of each expert by common + balance * its number of rows."""
    for i in range(line.size):
        line[i] *= common + balance * np.float32(bounds[i + 1] - bounds[i])


@exact()
def group_rows(chosen: Any, order: Any, bounds: Any) -> None:
    """Sort the rows by expert, by counting; `chosen` is flat, with valid numbers."""
    bounds[:] = 0
    ends = bounds[1:]
    for r in range(chosen.size):
        ends[chosen[r]] += 1
    begin = np.int32(0)
    for e in range(ends.size):
        count = ends[e]
        ends[e] = begin
        begin += count
    # each entry is the place of its expert's next row, and in the end the first place behind its rows
    for r in range(chosen.size):
        e = chosen[r]
        order[ends[e]] = r
        ends[e] += 1


@inlined()
def _entry(order: Any, row: Any) -> Any:
    """Return the entry of a row in the list of weights; `order` is None for the row itself (compiled separately)."""
    if order is None:
        return row
    return order[row]


@exact()
def weighted_swiglu_forward(gate: Any, up: Any, weights: Any, order: Any, first: Any, prod: Any) -> None:
    """Set rows of prod = silu(gate) * up * weight; arrays of rows begin with row `first`."""
    for r in range(prod.shape[0]):
        gates, ups, out, weight = gate[r], up[r], prod[r], weights[_entry(order, first + r)]
        for i in range(out.size):
            g = load(gates[i])
            out[i] = narrow(g / (_ONE + exp32(-g)) * load(ups[i]) * weight, out.dtype)


@inlined(fastmath=SPLIT_SUMS)
def _weight_gradient(gates: Any, sigmoids: Any, ups: Any, grads: Any) -> Any:
    total = _ZERO
    for i in range(gates.size):
        total += load(grads[i]) * (load(gates[i]) * sigmoids[i] * load(ups[i]))
    return total


@exact()
def weighted_swiglu_backward(
    gate: Any,
    up: Any,
    weights: Any,
    dprod: Any,
    dgate: Any,
    dup: Any,
    dweights: Any,
    order: Any,
    first: Any,
    gate_line: Any,
    up_line: Any,
) -> None:
    """Set rows of the gradients; an output may be the same array as an input. Arrays begin with row `first`."""
    for r in range(gate.shape[0]):
        entry = _entry(order, first + r)
        weight, of_weight = weights[entry], _ZERO
        # part by part through two lines: all inputs of a part are read before an output is written
        for start in range(0, gate.shape[1], gate_line.size):
            stop = min(start + gate_line.size, gate.shape[1])
            gates, ups, grads = gate[r, start:stop], up[r, start:stop], dprod[r, start:stop]
            sigmoids = up_line[: stop - start]
            for i in range(sigmoids.size):
                sigmoids[i] = _ONE / (_ONE + exp32(-load(gates[i])))
            of_weight += _weight_gradient(gates, sigmoids, ups, grads)
            for i in range(sigmoids.size):
                g, d, sigmoid = load(gates[i]), load(grads[i]) * weight, sigmoids[i]
                gate_line[i] = d * load(ups[i]) * sigmoid * (_ONE + g * (_ONE - sigmoid))
                up_line[i] = d * g * sigmoid
            store_line(gate_line, dgate[r, start:stop])
            store_line(up_line, dup[r, start:stop])
        dweights[entry] = of_weight


@exact()
def sigmoid_forward(x: Any, y: Any) -> None:
    """Set y = 1 / (1 + exp(-x)), for flat arrays."""
    for i in range(y.size):
        y[i] = _ONE / (_ONE + exp32(-x[i]))


@exact()
def sigmoid_backward(y: Any, dy: Any, dx: Any) -> None:
    """Set dx = dy * y * (1 - y), for flat arrays."""
    for i in range(dx.size):
        dx[i] = dy[i] * y[i] * (_ONE - y[i])
