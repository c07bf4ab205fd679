"""The numba loops of `fast_attention`: the work for the query heads that share one head of keys and values.

Exponentials are powers of two: queries are multiplied with log2(e), once, and with them scores, their caps, maxima and slopes. The loops
are compiled apart for scores without a cap, where `softcap` is None, and for sequences of one document, where `starts` is None.

`starts` are, by row of the queries, the positions at which documents start; `base` is the position of the first key that loops have.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ratrain.targets.runtime.kernels.fast.blas import multiply, multiply_transposed
from ratrain.targets.runtime.kernels.fast.fast_numba import (
    SPLIT_SUMS,
    exact,
    inlined,
    load,
    maximum,
    narrow,
    power_of_two,
    soft_cap_slope,
    soft_capped,
)

QUERIES, KEYS = 256, 384
"""Rows and columns of a tile of scores at most: BLAS is near its speed, and two tiles are 0.75 MiB."""

DIAGONAL = 128
"""Columns of a tile that not all its rows see; about half of that many are computed for nothing in each row."""

_LINE = 16
"""Elements of a cache line; tiles begin at multiples of it."""

_ZERO, _ONE = np.float32(0), np.float32(1)
NONE_SEEN = np.float32(-np.inf)
LOG2_E, LN2 = math.log2(math.e), math.log(2)


@exact()
def gather(x: Any, first_row: Any, first_column: Any, scale: Any, out: Any) -> None:
    """Out = scale * a rectangle of x, in float32."""
    for r in range(out.shape[0]):
        row = x[first_row + r, first_column : first_column + out.shape[1]]
        line = out[r]
        for i in range(line.size):
            line[i] = load(row[i]) * scale


@exact()
def transpose(x: Any, out: Any) -> None:
    """Out = x^T."""
    for start in range(0, x.shape[0], _LINE):
        block = x[start : min(start + _LINE, x.shape[0])]
        for i in range(x.shape[1]):
            line = out[i, start : start + block.shape[0]]
            for r in range(line.size):
                line[r] = block[r, i]


@exact()
def gather_transposed(x: Any, first_row: Any, first_column: Any, rows: Any, out: Any) -> None:
    """Out = a rectangle of x, transposed, in float32; it goes through `rows`, some at a time."""
    for start in range(0, out.shape[1], rows.shape[0]):
        stop = min(start + rows.shape[0], out.shape[1])
        part = rows[: stop - start]
        gather(x, first_row + start, first_column, _ONE, part)
        transpose(part, out[:, start:stop])


@exact()
def scatter(block: Any, scale: Any, x: Any, first_row: Any, first_column: Any) -> None:
    """A rectangle of x = scale * block, rounded."""
    for r in range(block.shape[0]):
        row = x[first_row + r, first_column : first_column + block.shape[1]]
        line = block[r]
        for i in range(line.size):
            row[i] = narrow(line[i] * scale, row.dtype)


@exact()
def _scatter_rows(block: Any, totals: Any, x: Any, first_row: Any, first_column: Any) -> None:
    """A rectangle of x = block, each row divided by its total, rounded."""
    for r in range(block.shape[0]):
        row = x[first_row + r, first_column : first_column + block.shape[1]]
        line, total = block[r], totals[r]
        for i in range(line.size):
            row[i] = narrow(line[i] / total, row.dtype)


@inlined(fastmath=SPLIT_SUMS)
def dot(row: Any, other: Any) -> Any:
    """The product of two stored rows."""
    total = _ZERO
    for i in range(row.size):
        total += load(row[i]) * load(other[i])
    return total


@inlined()
def _row_dot(block: Any, x: Any, first_row: Any, first_column: Any, out: Any) -> None:
    """out[r] = the product of row r of a block with its row of x."""
    for r in range(block.shape[0]):
        out[r] = dot(block[r], x[first_row + r, first_column : first_column + block.shape[1]])


@inlined()
def least_key(starts: Any, row: Any, base: Any) -> Any:
    """The first key, counted from the one at `base`, that belongs to the document of a query, or an earlier one where there are none."""
    if starts is None:
        return 0
    return np.int64(starts[row]) - base


@inlined()
def seen_keys(query: Any, first_key: Any, keys: Any, window: Any, least: Any) -> Any:
    """The range of a tile's keys that a query sees, perhaps empty; none before the key `least`."""
    low = min(keys, max(0, max(query - window + 1, least) - first_key))
    return low, max(low, min(keys, query + 1 - first_key))


@inlined()
def _seen(row: Any, low: Any, high: Any, slope: Any, distance: Any) -> Any:
    """Columns low to high of a row plus slope * (distance + column); the others become 0."""
    row[:low] = _ZERO
    row[high:] = _ZERO
    seen = row[low:high]
    if slope != _ZERO:
        for i in range(seen.size):
            seen[i] += slope * np.float32(np.int32(i) + np.int32(distance + low))
    return seen


@inlined()
def _cap(row: Any, softcap: Any) -> None:
    """Cap the scores of a row."""
    for i in range(row.size):
        row[i] = soft_capped(row[i], softcap)


@inlined()
def _cap_with_gradient(row: Any, grad: Any, mean: Any, softcap: Any) -> None:
    """Cap the scores of a row; grad = (grad - mean) * what each changes by with its score."""
    for i in range(row.size):
        capped = soft_capped(row[i], softcap)
        row[i] = capped
        grad[i] = (grad[i] - mean) * soft_cap_slope(capped, softcap)


@inlined(fastmath=SPLIT_SUMS)
def _softmax(
    score: Any,
    first_query: Any,
    first_key: Any,
    window: Any,
    documents: Any,
    slope: Any,
    softcap: Any,
    peaks: Any,
    totals: Any,
    out: Any,
) -> None:
    """Score = 2^([capped] score + bias - its row's maximum so far), 0 where not seen; totals and out follow the maximum."""
    starts, base, first_row = documents
    for r in range(score.shape[0]):
        query = first_query + r
        low, high = seen_keys(query, first_key, score.shape[1], window, least_key(starts, first_row + r, base))
        if softcap is not None:
            _cap(score[r, low:high], softcap)
        seen = _seen(score[r], low, high, slope, first_key - query)
        if low == high:
            continue
        peak = peaks[r]
        for i in range(seen.size):
            peak = maximum(peak, seen[i])
        total = _ZERO
        for i in range(seen.size):
            weight = power_of_two(seen[i] - peak)
            seen[i] = weight
            total += weight
        if peak != peaks[r]:
            keep = power_of_two(peaks[r] - peak)
            totals[r] *= keep
            peaks[r] = peak
            line = out[r]
            for i in range(line.size):
                line[i] *= keep
        totals[r] += total


@exact()
def log_totals(peaks: Any, totals: Any, lse: Any) -> None:
    """The natural log-sum-exp of each row."""
    for r in range(lse.size):
        lse[r] = np.float32(np.float64(peaks[r]) * LN2 + math.log(np.float64(totals[r])))


@inlined()
def _score_gradient(
    score: Any,
    dprob: Any,
    first_query: Any,
    first_key: Any,
    window: Any,
    documents: Any,
    slope: Any,
    softcap: Any,
    lse: Any,
    delta: Any,
) -> None:
    """Score = its probabilities p, dprob = p * (dprob - delta) [* the slope of the cap]; both 0 where not seen."""
    starts, base, first_row = documents
    for r in range(score.shape[0]):
        query = first_query + r
        low, high = seen_keys(query, first_key, score.shape[1], window, least_key(starts, first_row + r, base))
        log_total, mean = np.float32(np.float64(lse[r]) * LOG2_E), delta[r]
        if softcap is not None:
            _cap_with_gradient(score[r, low:high], dprob[r, low:high], mean, softcap)
            mean = _ZERO
        seen = _seen(score[r], low, high, slope, first_key - query)
        grad = _seen(dprob[r], low, high, _ZERO, 0)
        for i in range(seen.size):
            p = power_of_two(seen[i] - log_total)
            seen[i] = p
            grad[i] = p * (grad[i] - mean)


@inlined()
def rows_of_block(seq_len: Any) -> Any:
    """Queries of a block: at most `QUERIES`, blocks as equal as multiples of `DIAGONAL` allow."""
    blocks = -(-seq_len // QUERIES)
    return -(-seq_len // (blocks * DIAGONAL)) * DIAGONAL


@inlined()
def _least_key_of_block(starts: Any, first_row: Any, rows: Any, base: Any) -> Any:
    """The least `least_key` of a block of queries."""
    if starts is None:
        return 0
    return np.int64(starts[first_row : first_row + rows].min()) - base


@inlined()
def _first_key(start: Any, window: Any, least: Any) -> Any:
    """Where the first tile of a block of queries begins that see no key before `least`."""
    return max(0, start - window + 1, least) // _LINE * _LINE


@inlined()
def _tile_end(low: Any, first_key: Any, start: Any, stop: Any) -> Any:
    """Where a tile of a block of queries [start, stop) ends that begins at key `low`.

    Keys up to the first `DIAGONAL` of the block's own are cut evenly. The rest are seen by ever fewer rows.
    """
    edge = min(start + DIAGONAL, stop)
    if low >= edge:
        return min(low + DIAGONAL, stop)
    tiles = -(-(edge - first_key) // KEYS)
    return min(low + -(-(edge - first_key) // (tiles * _LINE)) * _LINE, edge)


@inlined()
def _tile(buffer: Any, rows: Any, keys: Any) -> Any:
    """A matrix of scores in a flat buffer."""
    return buffer[: rows * keys].reshape(rows, keys)


@inlined()
def attend(
    sgemm: Any,
    query: Any,
    keys_t: Any,
    values: Any,
    first_query: Any,
    window: Any,
    documents: Any,
    slope: Any,
    softcap: Any,
    keep: Any,
    state: Any,
    scores: Any,
) -> None:
    """Take the keys that a block of queries sees into its running softmax.

    The first query is `first_query` keys after the first key. `documents` are starts, base and the row of the first query. `state` are output, maxima and totals; where `keep` is 0, the first
    tile's product is the first of the output, for all its rows.
    """
    out, peak, total = state
    starts, base, row = documents
    rows = query.shape[0]
    stop = min(first_query + rows, values.shape[0])
    low = first = _first_key(first_query, window, _least_key_of_block(starts, row, rows, base))
    while low < stop:
        high = _tile_end(low, first, first_query, stop)
        top = max(0, low - first_query)
        score = _tile(scores, rows - top, high - low)
        multiply(sgemm, query[top:], keys_t[:, low:high], _ZERO, score)
        of_rows = (starts, base, row + top)
        _softmax(score, first_query + top, low, window, of_rows, slope, softcap, peak[top:], total[top:], out[top:])
        multiply(sgemm, score, values[low:high], keep, out[top:])
        keep = _ONE
        low = high


@inlined()
def attend_backward(
    sgemm: Any,
    rows_of: Any,
    keys_of: Any,
    first_query: Any,
    window: Any,
    documents: Any,
    slope: Any,
    softcap: Any,
    keep: Any,
    sums: Any,
    tiles: Any,
) -> None:
    """Add what a block of queries and the keys that it sees have in gradients to their sums.

    `rows_of` are queries, do, lse and delta of the block, `keys_of` keys, keys transposed and values transposed, `sums` those for
    queries, keys and values, `tiles` two buffers for scores; the rest is that of `attend`.
    """
    query, dout, log_total, mean = rows_of
    keys, keys_t, values_t = keys_of
    dquery, dkeys, dvalues = sums
    scores, dscores = tiles
    starts, base, row = documents
    rows = query.shape[0]
    stop = min(first_query + rows, keys.shape[0])
    low = first = _first_key(first_query, window, _least_key_of_block(starts, row, rows, base))
    while low < stop:
        high = _tile_end(low, first, first_query, stop)
        top = max(0, low - first_query)
        score, dscore = _tile(scores, rows - top, high - low), _tile(dscores, rows - top, high - low)
        multiply(sgemm, query[top:], keys_t[:, low:high], _ZERO, score)
        multiply(sgemm, dout[top:], values_t[:, low:high], _ZERO, dscore)
        of_rows, first_row = (starts, base, row + top), first_query + top
        _score_gradient(score, dscore, first_row, low, window, of_rows, slope, softcap, log_total[top:], mean[top:])
        multiply_transposed(sgemm, score, dout[top:], _ONE, dvalues[low:high])
        multiply_transposed(sgemm, dscore, query[top:], _ONE, dkeys[low:high])
        multiply(sgemm, dscore, keys[low:high], keep, dquery[top:])
        keep = _ONE
        low = high


@exact()
def forward_head(
    sgemm: Any, stored: Any, lse: Any, first_row: Any, kv_head: Any, group: Any, mask: Any, buffers: Any
) -> None:
    """Attention of the `group` query heads of one sequence that share a head of keys and values.

    `stored` are q, k, v, o; `mask` the scale, the window, ALiBi's slopes (0: none) by head, log2(e) times the cap of scores or None, and
    the starts of documents or None;
    `buffers` those of `fast_attention.forward_plan` for one thread.
    """
    q, k, v, o = stored
    scale, window, slopes, softcap, starts = mask
    keys_t, values, queries, outs, peaks, totals, scores = buffers
    seq_len, d = values.shape
    gather_transposed(k, first_row, kv_head * d, queries, keys_t)
    gather(v, first_row, kv_head * d, _ONE, values)
    step = rows_of_block(seq_len)
    for head in range(kv_head * group, (kv_head + 1) * group):
        slope = np.float32(slopes[head] * LOG2_E)
        for start in range(0, seq_len, step):
            stop = min(start + step, seq_len)
            row, rows = first_row + start, stop - start
            query, out, peak, total = queries[:rows], outs[:rows], peaks[:rows], totals[:rows]
            gather(q, row, head * d, np.float32(scale * LOG2_E), query)
            peak[:] = NONE_SEEN
            total[:] = _ZERO
            state, documents = (out, peak, total), (starts, 0, row)
            attend(sgemm, query, keys_t, values, start, window, documents, slope, softcap, _ZERO, state, scores)
            log_totals(peak, total, lse[head, row : row + rows])
            _scatter_rows(out, total, o, row, head * d)


@exact()
def backward_head(
    sgemm: Any,
    stored: Any,
    lse: Any,
    delta: Any,
    first_row: Any,
    kv_head: Any,
    group: Any,
    mask: Any,
    buffers: Any,
) -> None:
    """Gradients of `forward_head`; `stored` are q, k, v, o, do, dq, dk, dv, `buffers` those of `backward_plan`."""
    q, k, v, o, do, dq, dk, dv = stored
    scale, window, slopes, softcap, starts = mask
    keys_t, keys, values_t, dkeys, dvalues, queries, douts, dqueries, scores, dscores = buffers
    seq_len, d = keys.shape
    gather(k, first_row, kv_head * d, _ONE, keys)
    transpose(keys, keys_t)
    gather_transposed(v, first_row, kv_head * d, queries, values_t)
    dkeys[:] = _ZERO
    dvalues[:] = _ZERO
    step = rows_of_block(seq_len)
    for head in range(kv_head * group, (kv_head + 1) * group):
        slope = np.float32(slopes[head] * LOG2_E)
        for start in range(0, seq_len, step):
            stop = min(start + step, seq_len)
            row, rows = first_row + start, stop - start
            query, dout, dquery = queries[:rows], douts[:rows], dqueries[:rows]
            log_total, mean = lse[head, row : row + rows], delta[head, row : row + rows]
            gather(q, row, head * d, np.float32(scale * LOG2_E), query)
            gather(do, row, head * d, _ONE, dout)
            _row_dot(dout, o, row, head * d, mean)
            rows_of, keys_of = (query, dout, log_total, mean), (keys, keys_t, values_t)
            sums, tiles, documents = (dquery, dkeys, dvalues), (scores, dscores), (starts, 0, row)
            attend_backward(sgemm, rows_of, keys_of, start, window, documents, slope, softcap, _ZERO, sums, tiles)
            scatter(dquery, scale, dq, row, head * d)
    scatter(dkeys, np.float32(LN2), dk, first_row, kv_head * d)  # queries came with log2(e) in them
    scatter(dvalues, _ONE, dv, first_row, kv_head * d)
