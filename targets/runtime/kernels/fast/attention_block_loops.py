"""Numba loops of `fast_attention_blocks`: attention of a block of queries to a block of keys.

They use the tiles of `attention_loops`; the running softmax is loaded before a block of keys and stored after it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ratrain.targets.runtime.kernels.fast.attention_loops import (
    LN2,
    LOG2_E,
    NONE_SEEN,
    attend,
    attend_backward,
    dot,
    gather,
    gather_transposed,
    log_totals,
    rows_of_block,
    scatter,
    transpose,
)
from ratrain.targets.runtime.kernels.fast.fast_numba import exact, inlined, narrow

_ZERO, _ONE = np.float32(0), np.float32(1)


@inlined()
def _add(block: Any, scale: Any, x: Any, first_row: Any, first_column: Any) -> None:
    """Add scale * block to a rectangle of x, both float32."""
    for r in range(block.shape[0]):
        row = x[first_row + r, first_column : first_column + block.shape[1]]
        line = block[r]
        for i in range(line.size):
            row[i] += line[i] * scale


@exact()
def forward_block(
    sgemm: Any,
    stored: Any,
    state: Any,
    sequence: Any,
    kv_head: Any,
    block: Any,
    mask: Any,
    goes_on: Any,
    buffers: Any,
) -> None:
    """Take a block of keys into the running softmax of the query heads of one sequence that share a key-value head.

    `stored` are q, k, v, `state` acc, peak, total, read if it `goes_on` from an earlier block. `block` are the queries
    of a sequence, the position of the first query relative to the first key, the query heads that share keys, and the
    first key's position. `mask` is as in `attention_loops.forward_head`, `buffers` are planned by
    `fast_attention_blocks.block_forward_plan` for one thread.
    """
    q, k, v = stored
    acc, peaks, totals = state
    scale, window, slopes, softcap, starts = mask
    keys_t, values, some_queries, outs, scores = buffers
    keys, d = values.shape
    queries, offset, group, base = block
    gather_transposed(k, sequence * keys, kv_head * d, some_queries, keys_t)
    gather(v, sequence * keys, kv_head * d, _ONE, values)
    step = rows_of_block(queries)
    for head in range(kv_head * group, (kv_head + 1) * group):
        slope = np.float32(slopes[head] * LOG2_E)
        for start in range(0, queries, step):
            row, rows = sequence * queries + start, min(step, queries - start)
            query, out = some_queries[:rows], outs[:rows]
            peak, total = peaks[head, row : row + rows], totals[head, row : row + rows]
            gather(q, row, head * d, np.float32(scale * LOG2_E), query)
            if goes_on:
                # acc's rows of a head are strided; the product needs them together
                gather(acc, row, head * d, _ONE, out)
            else:
                out[:] = _ZERO
                peak[:] = NONE_SEEN
                total[:] = _ZERO
            # peak and total are updated in place; only the output goes through a buffer
            so_far, documents, first_query = (out, peak, total), (starts, base, row), offset + start
            # keep = 1: a row that sees no key of this block must keep its output
            attend(sgemm, query, keys_t, values, first_query, window, documents, slope, softcap, _ONE, so_far, scores)
            scatter(out, _ONE, acc, row, head * d)


@exact()
def finish(state: Any, o: Any, lse: Any, first: Any, last: Any) -> None:
    """Set outputs = acc / total and log-sum-exps of the rows [first, last); `state` are acc, peak, total."""
    acc, peaks, totals = state
    d = acc.shape[1] // lse.shape[0]
    for head in range(lse.shape[0]):
        log_totals(peaks[head, first:last], totals[head, first:last], lse[head, first:last])
        for row in range(first, last):
            line, out = acc[row, head * d : (head + 1) * d], o[row, head * d : (head + 1) * d]
            total = totals[head, row]
            for i in range(line.size):
                out[i] = narrow(line[i] / total, out.dtype)


@exact()
def deltas(o: Any, do: Any, delta: Any, first: Any, last: Any) -> None:
    """Set delta[head, t] = rowsum(do * o) of each head, for the rows [first, last)."""
    d = o.shape[1] // delta.shape[0]
    for head in range(delta.shape[0]):
        for row in range(first, last):
            delta[head, row] = dot(do[row, head * d : (head + 1) * d], o[row, head * d : (head + 1) * d])


@exact()
def backward_block(
    sgemm: Any,
    stored: Any,
    lse: Any,
    delta: Any,
    sequence: Any,
    kv_head: Any,
    block: Any,
    mask: Any,
    goes_on: Any,
    buffers: Any,
) -> None:
    """Add the gradients of `forward_block` to dq and, if it `goes_on`, to dk and dv; else set these two.

    `stored` are q, k, v, do, dq, dk, dv; `buffers` are planned by `fast_attention.block_backward_plan`.
    """
    q, k, v, do, dq, dk, dv = stored
    scale, window, slopes, softcap, starts = mask
    keys_t, keys, values_t, dkeys, dvalues, some_queries, douts, dqueries, scores, dscores = buffers
    count, d = keys.shape
    queries, offset, group, base = block
    gather(k, sequence * count, kv_head * d, _ONE, keys)
    transpose(keys, keys_t, 0)
    gather_transposed(v, sequence * count, kv_head * d, some_queries, values_t)
    dkeys[:] = _ZERO
    dvalues[:] = _ZERO
    step = rows_of_block(queries)
    for head in range(kv_head * group, (kv_head + 1) * group):
        slope = np.float32(slopes[head] * LOG2_E)
        for start in range(0, queries, step):
            row, rows = sequence * queries + start, min(step, queries - start)
            query, dout, dquery = some_queries[:rows], douts[:rows], dqueries[:rows]
            gather(q, row, head * d, np.float32(scale * LOG2_E), query)
            gather(do, row, head * d, _ONE, dout)
            # as in the forward: rows that see no key of this block add nothing
            dquery[:] = _ZERO
            rows_of = (query, dout, lse[head, row : row + rows], delta[head, row : row + rows])
            sums, tiles = (dquery, dkeys, dvalues), (scores, dscores)
            keys_of, first_query, documents = (keys, keys_t, values_t), offset + start, (starts, base, row)
            attend_backward(sgemm, rows_of, keys_of, first_query, window, documents, slope, softcap, _ONE, sums, tiles)
            _add(dquery, scale, dq, row, head * d)
    if goes_on:
        _add(dkeys, np.float32(LN2), dk, sequence * count, kv_head * d)  # queries have the factor log2(e)
        _add(dvalues, _ONE, dv, sequence * count, kv_head * d)
    else:
        # the first block of queries that these keys meet: dk and dv have nothing yet
        scatter(dkeys, np.float32(LN2), dk, sequence * count, kv_head * d)
        scatter(dvalues, _ONE, dv, sequence * count, kv_head * d)
