"""Numba loops of `fast_scores`: whole score matrices, for the query heads that share one key-value head.

A matrix is [heads * tokens, seq_len]. The rows of a head of one sequence are neighbours in it, so a block of queries is
a rectangle.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.runtime.kernels.fast.attention_loops import (
    dot,
    gather,
    gather_transposed,
    least_key,
    scatter,
    seen_keys,
)
from ratrain.targets.runtime.kernels.fast.blas import multiply, multiply_transposed
from ratrain.targets.runtime.kernels.fast.fast_numba import SPLIT_SUMS, exact, exp32, inlined, load, maximum, narrow

ROWS = 256
"""Most queries of a block."""

_ZERO, _ONE = np.float32(0), np.float32(1)


@exact()
def scores_forward(sgemm: Any, stored: Any, first_row: Any, kv_head: Any, group: Any, scale: Any, buffers: Any) -> None:
    """Compute the scores of the query heads. `stored` are q, k, scores.

    `buffers` are keys transposed, a block of queries, its scores.
    """
    q, k, scores = stored
    keys_t, queries, lines = buffers
    d, seq_len = keys_t.shape
    gather_transposed(k, first_row, kv_head * d, queries, keys_t)
    for head in range(kv_head * group, (kv_head + 1) * group):
        for start in range(0, seq_len, ROWS):
            row, rows = first_row + start, min(ROWS, seq_len - start)
            gather(q, row, head * d, scale, queries[:rows])
            multiply(sgemm, queries[:rows], keys_t, _ZERO, lines[:rows])
            # all scores are stored, hidden keys' too: the softmax masks them
            scatter(lines[:rows], _ONE, scores, head * q.shape[0] + row, 0)


@exact()
def values_forward(sgemm: Any, stored: Any, first_row: Any, kv_head: Any, group: Any, buffers: Any) -> None:
    """Compute the outputs of the query heads. `stored` are probs, v, o.

    `buffers` are values, a block of probabilities, its output.
    """
    probs, v, o = stored
    values, lines, outs = buffers
    seq_len, d = values.shape
    gather(v, first_row, kv_head * d, _ONE, values)
    for head in range(kv_head * group, (kv_head + 1) * group):
        for start in range(0, seq_len, ROWS):
            row, rows = first_row + start, min(ROWS, seq_len - start)
            gather(probs, head * o.shape[0] + row, 0, _ONE, lines[:rows])
            multiply(sgemm, lines[:rows], values, _ZERO, outs[:rows])
            scatter(outs[:rows], _ONE, o, row, head * d)


@exact()
def values_backward(sgemm: Any, stored: Any, first_row: Any, kv_head: Any, group: Any, buffers: Any) -> None:
    """Compute the gradients of `values_forward`. `stored` are probs, v, do, dprobs, dv.

    `buffers` are planned by `fast_scores.values_backward_plan`.
    """
    probs, v, do, dprobs, dv = stored
    values_t, dvalues, douts, lines = buffers
    seq_len, d = dvalues.shape
    gather_transposed(v, first_row, kv_head * d, douts, values_t)
    dvalues[:] = _ZERO
    for head in range(kv_head * group, (kv_head + 1) * group):
        for start in range(0, seq_len, ROWS):
            row, rows = first_row + start, min(ROWS, seq_len - start)
            place = head * do.shape[0] + row
            gather(do, row, head * d, _ONE, douts[:rows])
            multiply(sgemm, douts[:rows], values_t, _ZERO, lines[:rows])
            scatter(lines[:rows], _ONE, dprobs, place, 0)
            # `lines` is used twice: dprobs have been stored, so it can take probabilities
            gather(probs, place, 0, _ONE, lines[:rows])
            multiply_transposed(sgemm, lines[:rows], douts[:rows], _ONE, dvalues)
    # dv is the sum over all heads of the group, rounded once
    scatter(dvalues, _ONE, dv, first_row, kv_head * d)


@exact()
def scores_backward(
    sgemm: Any, stored: Any, first_row: Any, kv_head: Any, group: Any, scale: Any, buffers: Any
) -> None:
    """Compute the gradients of `scores_forward`. `stored` are q, k, dscores, dq, dk.

    `buffers` are planned by `fast_scores.scores_backward_plan`.
    """
    q, k, dscores, dq, dk = stored
    keys, dkeys, block, lines = buffers
    seq_len, d = keys.shape
    gather(k, first_row, kv_head * d, _ONE, keys)
    dkeys[:] = _ZERO
    for head in range(kv_head * group, (kv_head + 1) * group):
        for start in range(0, seq_len, ROWS):
            row, rows = first_row + start, min(ROWS, seq_len - start)
            gather(dscores, head * q.shape[0] + row, 0, _ONE, lines[:rows])
            multiply(sgemm, lines[:rows], keys, _ZERO, block[:rows])
            scatter(block[:rows], scale, dq, row, head * d)
            # dk takes scaled queries: the scale of scores belongs to both gradients
            gather(q, row, head * d, scale, block[:rows])
            multiply_transposed(sgemm, lines[:rows], block[:rows], _ONE, dkeys)
    scatter(dkeys, _ONE, dk, first_row, kv_head * d)


@inlined(fastmath=SPLIT_SUMS)
def _weights(row: Any, slope: Any, distance: Any, line: Any) -> Any:
    """Set line = exp(row + slope * (distance + column) - its maximum); return the sum."""
    peak = np.float32(-np.inf)
    for i in range(line.size):
        line[i] = load(row[i]) + slope * np.float32(np.int32(i) + np.int32(distance))
        peak = maximum(peak, line[i])
    total = _ZERO
    for i in range(line.size):
        line[i] = exp32(line[i] - peak)
        total += line[i]
    return total


@exact()
def softmax_forward(stored: Any, first: Any, last: Any, tokens: Any, mask: Any, line: Any) -> None:
    """Compute probabilities of the rows [first, last) of a matrix. `stored` are scores, probs.

    `line` is a buffer for a row, `mask` that of attention, `tokens` the rows of a head.
    """
    scores, probs = stored
    _, window, slopes, _, starts = mask
    seq_len = line.size
    for row in range(first, last):
        # a row's number is (head * sequences + sequence) * seq_len + query
        query = row % tokens % seq_len
        low, high = seen_keys(query, 0, seq_len, window, least_key(starts, row % tokens, 0))
        out, seen = probs[row], line[low:high]
        total = _weights(scores[row, low:high], slopes[row // tokens], low - query, seen)
        out[:low] = 0
        out[high:] = 0
        there = out[low:high]
        for i in range(seen.size):
            there[i] = narrow(seen[i] / total, out.dtype)


@exact()
def softmax_backward(stored: Any, first: Any, last: Any, tokens: Any, mask: Any) -> None:
    """Compute gradients of scores of the rows [first, last) of a matrix. `stored` are probs, dprobs, dscores."""
    probs, dprobs, dscores = stored
    _, window, _, _, starts = mask
    seq_len = probs.shape[1]
    for row in range(first, last):
        query = row % tokens % seq_len
        low, high = seen_keys(query, 0, seq_len, window, least_key(starts, row % tokens, 0))
        prob, dprob, out = probs[row, low:high], dprobs[row, low:high], dscores[row]
        # softmax's derivative: p * (dp - sum(p * dp))
        mean = dot(prob, dprob)
        there = out[low:high]
        for i in range(prob.size):
            there[i] = narrow(load(prob[i]) * (load(dprob[i]) - mean), out.dtype)
        out[:low] = 0
        out[high:] = 0
