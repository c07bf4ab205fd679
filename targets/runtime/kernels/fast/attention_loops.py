"""Numba loops of `fast_attention`: attention of the query heads that share one key-value head.

A block of queries goes over tiles of the keys that it sees, with a running softmax (Milakov and Gimelshein, 2018). Rows
above a tile's first key are left out; the other keys that a row does not see get the weight 0:

    queries 256 - 511, keys ->   0              384        512
        rows 256 - 383           [ first tile    ]
        rows 384 - 511           [               ][ second ]

Exponentials are powers of two: queries are multiplied by log2(e) once, so scores, caps, maxima and slopes are in units
of ln 2. Products take 4 * head_dim operations a score forward, 10 * head_dim backward.

The loops are compiled separately for scores without a cap (`softcap` is None) and sequences of one document (`starts`
is None). `starts` has, by row of the queries, the position at which its document starts; `base` is the position of the
first key given.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ratrain.targets.runtime.kernels.fast.blas import multiply, multiply_transposed
from ratrain.targets.runtime.kernels.fast.fast_numba import (
    SPLIT_SUMS,
    called,
    exact,
    inlined,
    larger,
    load,
    matrix,
    maximum,
    narrow,
    power_of_two,
    smaller,
    soft_cap_slope,
    soft_capped,
    span,
)

QUERIES, KEYS = 256, 384
"""Largest tile of scores, rows and columns: BLAS is near its full speed, and two tiles take 0.75 MiB."""

DIAGONAL = 128
"""Columns of a tile that only some rows see; in each row about half of them are computed for nothing."""

_LINE = 16
"""Elements of a cache line; tiles begin at multiples of it."""

_ZERO, _ONE = np.float32(0), np.float32(1)
NONE_SEEN = np.float32(-np.inf)
LOG2_E, LN2 = math.log2(math.e), math.log(2)


@called()
def gather(x: Any, first_row: Any, first_column: Any, scale: Any, out: Any) -> None:
    """Set out = scale * a rectangle of x, in float32; the rectangle has the shape of `out`."""
    for r in range(out.shape[0]):
        line = out[r]
        row = span(x[first_row + r], first_column, first_column + line.size)
        for i in range(line.size):
            line[i] = load(row[i]) * scale


@called()
def transpose(x: Any, out: Any, first: Any) -> None:
    """Set the columns of `out` from `first` on to x^T."""
    # a cache line of `out` at a time: each line is written whole before the next is begun
    for start in range(0, x.shape[0], _LINE):
        stop = smaller(start + _LINE, x.shape[0])
        block = span(x, start, stop)
        for i in range(x.shape[1]):
            line = span(out[i], first + start, first + stop)
            for r in range(line.size):
                line[r] = block[r, i]


@called()
def gather_transposed(x: Any, first_row: Any, first_column: Any, rows: Any, out: Any) -> None:
    """Set out = a rectangle of x, transposed, in float32; `rows` is a buffer for some rows of it."""
    for start in range(0, out.shape[1], rows.shape[0]):
        part = span(rows, 0, smaller(rows.shape[0], out.shape[1] - start))
        gather(x, first_row + start, first_column, _ONE, part)
        transpose(part, out, start)


@called()
def clear(x: Any) -> None:
    """Set a matrix to 0."""
    for r in range(x.shape[0]):
        line = x[r]
        for i in range(line.size):
            line[i] = _ZERO


@called()
def scatter(block: Any, scale: Any, x: Any, first_row: Any, first_column: Any) -> None:
    """Set a rectangle of x = scale * block, rounded."""
    for r in range(block.shape[0]):
        line = block[r]
        row = span(x[first_row + r], first_column, first_column + line.size)
        for i in range(line.size):
            row[i] = narrow(line[i] * scale, row.dtype)


@called()
def _scatter_rows(block: Any, totals: Any, x: Any, first_row: Any, first_column: Any) -> None:
    """Set a rectangle of x = block, each row divided by its total, rounded."""
    for r in range(block.shape[0]):
        line, total = block[r], totals[r]
        row = span(x[first_row + r], first_column, first_column + line.size)
        for i in range(line.size):
            row[i] = narrow(line[i] / total, row.dtype)


@inlined(fastmath=SPLIT_SUMS)
def dot(row: Any, other: Any) -> Any:
    """Return the dot product of two stored rows, in float32."""
    total = _ZERO
    for i in range(row.size):
        total += load(row[i]) * load(other[i])
    return total


@inlined()
def _row_dot(block: Any, x: Any, first_row: Any, first_column: Any, out: Any) -> None:
    """Set out[r] = the dot product of row r of a block and its row of x."""
    for r in range(block.shape[0]):
        out[r] = dot(block[r], span(x[first_row + r], first_column, first_column + block.shape[1]))


@inlined()
def least_key(starts: Any, row: Any, base: Any) -> Any:
    """Return the first key of a query's document, counted from the one at `base`; 0 without documents.

    It may be negative: the document may start before the first key given.
    """
    if starts is None:
        return 0
    return np.int64(starts[row]) - base


@inlined()
def seen_keys(query: Any, first_key: Any, keys: Any, window: Any, least: Any) -> Any:
    """Return the range [low, high) of a tile's keys that a query sees, perhaps empty; no key before `least`.

    `query`, `first_key` and `least` are counted from the first key given.
    """
    low = smaller(keys, larger(0, larger(query - window + 1, least) - first_key))
    return low, larger(low, smaller(keys, query + 1 - first_key))


@inlined()
def _hide(row: Any, low: Any, high: Any) -> None:
    """Set the columns of a row outside low to high to 0."""
    # 0 and not -inf: after the softmax these are weights, and the product with values takes whole rows
    for i in range(low):
        row[i] = _ZERO
    after = span(row, high, row.size)
    for i in range(after.size):
        after[i] = _ZERO


@inlined()
def _add_bias(seen: Any, slope: Any, distance: Any) -> None:
    """Add slope * (distance + column) to the columns of a row."""
    if slope != _ZERO:
        for i in range(seen.size):
            # 32-bit integers convert to float32 in vectors; distances are exact below 2^24
            seen[i] += slope * np.float32(np.int32(i) + np.int32(distance))


@inlined()
def _cap(row: Any, softcap: Any) -> None:
    """Cap the scores of a row, in place."""
    for i in range(row.size):
        row[i] = soft_capped(row[i], softcap)


@inlined()
def _cap_with_gradient(row: Any, grad: Any, mean: Any, softcap: Any) -> None:
    """Cap the scores of a row, in place; set grad = (grad - mean) * the derivative of the cap."""
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
    running: Any,
) -> None:
    """Turn a tile of scores into weights 2^(score + bias - the row's maximum so far), 0 for hidden keys.

    The `running` maxima and totals, and the rows of the output, follow the maximum. `documents` are starts, base and
    the row of the first query.
    """
    starts, base, first_row = documents
    peaks, totals, out = running
    for r in range(score.shape[0]):
        query = first_query + r
        low, high = seen_keys(query, first_key, score.shape[1], window, least_key(starts, first_row + r, base))
        row = score[r]
        seen = span(row, low, high)
        if softcap is not None:
            _cap(seen, softcap)
        _hide(row, low, high)
        _add_bias(seen, slope, first_key - query + low)
        if low == high:
            continue
        # The maximum is taken before any weight: weights are at most 1, whatever came in earlier tiles.
        peak = peaks[r]
        for i in range(seen.size):
            peak = maximum(peak, seen[i])
        total = _ZERO
        for i in range(seen.size):
            weight = power_of_two(seen[i] - peak)
            seen[i] = weight
            total += weight
        # A row that has seen no key yet has the maximum -inf, so `keep` is 0. Its line of `out` may be uninitialised
        # then: the product that follows replaces it.
        if peak != peaks[r]:
            keep = power_of_two(peaks[r] - peak)
            totals[r] *= keep
            peaks[r] = peak
            line = out[r]
            for i in range(line.size):
                line[i] *= keep
        totals[r] += total


@called()
def log_totals(peaks: Any, totals: Any, lse: Any) -> None:
    """Set lse = the natural log-sum-exp of each row; `peaks` are in units of ln 2."""
    for r in range(lse.size):
        # in float64: the sum of a large maximum and a small logarithm is rounded once
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
    of_rows: Any,
) -> None:
    """Turn scores into probabilities p, and dprob into p * (dprob - delta) [* the cap's derivative].

    Both are 0 for hidden keys. The second is the gradient of the scores in natural units, as softmax has it. `of_rows`
    are lse and delta = rowsum(do * o) (Dao et al., 2022).
    """
    starts, base, first_row = documents
    lse, delta = of_rows
    for r in range(score.shape[0]):
        query = first_query + r
        low, high = seen_keys(query, first_key, score.shape[1], window, least_key(starts, first_row + r, base))
        log_total, mean = np.float32(np.float64(lse[r]) * LOG2_E), delta[r]
        row, gradients = score[r], dprob[r]
        seen, grad = span(row, low, high), span(gradients, low, high)
        _hide(row, low, high)
        _hide(gradients, low, high)
        if softcap is not None:
            # The cap's derivative is taken before the bias is added, which is not capped. `mean` is subtracted there.
            _cap_with_gradient(seen, grad, mean, softcap)
            mean = _ZERO
        _add_bias(seen, slope, first_key - query + low)
        for i in range(seen.size):
            p = power_of_two(seen[i] - log_total)
            seen[i] = p
            grad[i] = p * (grad[i] - mean)


@inlined()
def rows_of_block(seq_len: Any) -> Any:
    """Return the queries of a block: at most `QUERIES`, blocks as equal as multiples of `DIAGONAL` allow."""
    blocks = -(-seq_len // QUERIES)
    return -(-seq_len // (blocks * DIAGONAL)) * DIAGONAL


@inlined()
def _least_key_of_block(starts: Any, first_row: Any, rows: Any, base: Any) -> Any:
    """Return the least `least_key` of a block of queries."""
    if starts is None:
        return 0
    least = np.int64(starts[first_row])
    for row in range(first_row + 1, first_row + rows):
        least = smaller(least, np.int64(starts[row]))
    return least - base


@inlined()
def _first_key(start: Any, window: Any, least: Any) -> Any:
    """Return the key at which the first tile of a block of queries begins, a multiple of `_LINE`.

    Its queries see no key before `least`.
    """
    return larger(0, larger(start - window + 1, least)) // _LINE * _LINE


@inlined()
def _tile_end(low: Any, first_key: Any, start: Any, stop: Any) -> Any:
    """Return the exclusive end of the tile that begins at key `low`, for a block of queries [start, stop).

    Keys before the first `DIAGONAL` of the block's own, and these, are cut evenly into tiles of at most `KEYS`. The
    keys after them come in tiles of `DIAGONAL`, since ever fewer rows see them.
    """
    edge = smaller(start + DIAGONAL, stop)
    if low >= edge:
        return smaller(low + DIAGONAL, stop)
    tiles = -(-(edge - first_key) // KEYS)
    return smaller(low + -(-(edge - first_key) // (tiles * _LINE)) * _LINE, edge)


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

    `first_query` is the position of the first query relative to the first key. `documents` are starts, base and the row
    of the first query. `state` are output, maxima and totals. With `keep` = 0 the first tile's product replaces the
    output, which is not read; with 1 it is added.
    """
    out, peak, total = state
    starts, base, row = documents
    rows = query.shape[0]
    stop = smaller(first_query + rows, values.shape[0])
    low = first = _first_key(first_query, window, _least_key_of_block(starts, row, rows, base))
    while low < stop:
        high = _tile_end(low, first, first_query, stop)
        # rows above `top` are before the tile's first key, so they see none of it
        top = larger(0, low - first_query)
        score, output = matrix(scores, rows - top, high - low), span(out, top, rows)
        multiply(sgemm, span(query, top, rows), keys_t[:, low:high], _ZERO, score)
        running = (span(peak, top, rows), span(total, top, rows), output)
        _softmax(score, first_query + top, low, window, (starts, base, row + top), slope, softcap, running)
        multiply(sgemm, score, span(values, low, high), keep, output)
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
    """Add the gradients of a block of queries and the keys that it sees to `sums`.

    `rows_of` are queries, do, lse and delta of the block, `keys_of` keys, keys transposed and values transposed, `sums`
    the gradients of queries, keys and values, `tiles` two buffers for scores. The other arguments are as in `attend`.
    """
    query, dout, log_total, mean = rows_of
    keys, keys_t, values_t = keys_of
    dquery, dkeys, dvalues = sums
    scores, dscores = tiles
    starts, base, row = documents
    rows = query.shape[0]
    stop = smaller(first_query + rows, keys.shape[0])
    low = first = _first_key(first_query, window, _least_key_of_block(starts, row, rows, base))
    while low < stop:
        high = _tile_end(low, first, first_query, stop)
        top = larger(0, low - first_query)
        score, dscore = matrix(scores, rows - top, high - low), matrix(dscores, rows - top, high - low)
        queries, douts = span(query, top, rows), span(dout, top, rows)
        multiply(sgemm, queries, keys_t[:, low:high], _ZERO, score)
        multiply(sgemm, douts, values_t[:, low:high], _ZERO, dscore)
        of_rows, first_row = (starts, base, row + top), first_query + top
        normed = (span(log_total, top, rows), span(mean, top, rows))
        _score_gradient(score, dscore, first_row, low, window, of_rows, slope, softcap, normed)
        # p^T do for values; ds^T q for keys, still with q's factor log2(e); ds k for queries
        multiply_transposed(sgemm, score, douts, _ONE, span(dvalues, low, high))
        multiply_transposed(sgemm, dscore, queries, _ONE, span(dkeys, low, high))
        multiply(sgemm, dscore, span(keys, low, high), keep, span(dquery, top, rows))
        keep = _ONE
        low = high


@exact()
def forward_head(
    sgemm: Any, stored: Any, lse: Any, first_row: Any, kv_head: Any, group: Any, mask: Any, buffers: Any
) -> None:
    """Compute the attention of the `group` query heads of one sequence that share a key-value head.

    `stored` are q, k, v, o. `mask` are the scale, the window, ALiBi's slope of each head (0: none), log2(e) times the
    cap of scores or None, and the starts of documents or None. `buffers` are planned by
    `fast_attention.forward_plan`, for one thread.
    """
    q, k, v, o = stored
    scale, window, slopes, softcap, starts = mask
    keys_t, values, queries, outs, peaks, totals, scores = buffers
    seq_len, d = values.shape
    gather_transposed(k, first_row, kv_head * d, queries, keys_t)
    gather(v, first_row, kv_head * d, _ONE, values)
    # keys and values are converted once, for all query heads of the group and all their blocks
    step = rows_of_block(seq_len)
    for head in range(kv_head * group, (kv_head + 1) * group):
        slope = np.float32(slopes[head] * LOG2_E)
        for start in range(0, seq_len, step):
            stop = smaller(start + step, seq_len)
            row, rows = first_row + start, stop - start
            query, out = span(queries, 0, rows), span(outs, 0, rows)
            peak, total = span(peaks, 0, rows), span(totals, 0, rows)
            gather(q, row, head * d, np.float32(scale * LOG2_E), query)
            for r in range(rows):
                peak[r] = NONE_SEEN
                total[r] = _ZERO
            state, documents = (out, peak, total), (starts, 0, row)
            attend(sgemm, query, keys_t, values, start, window, documents, slope, softcap, _ZERO, state, scores)
            log_totals(peak, total, span(lse[head], row, row + rows))
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
    """Compute the gradients of `forward_head`. `stored` are q, k, v, o, do, dq, dk, dv.

    `buffers` are planned by `fast_attention.backward_plan`, for one thread; `delta` receives rowsum(do * o).
    """
    q, k, v, o, do, dq, dk, dv = stored
    scale, window, slopes, softcap, starts = mask
    keys_t, keys, values_t, dkeys, dvalues, queries, douts, dqueries, scores, dscores = buffers
    seq_len, d = keys.shape
    gather(k, first_row, kv_head * d, _ONE, keys)
    transpose(keys, keys_t, 0)
    gather_transposed(v, first_row, kv_head * d, queries, values_t)
    clear(dkeys)
    clear(dvalues)
    step = rows_of_block(seq_len)
    for head in range(kv_head * group, (kv_head + 1) * group):
        slope = np.float32(slopes[head] * LOG2_E)
        for start in range(0, seq_len, step):
            stop = smaller(start + step, seq_len)
            row, rows = first_row + start, stop - start
            query, dout, dquery = span(queries, 0, rows), span(douts, 0, rows), span(dqueries, 0, rows)
            log_total, mean = span(lse[head], row, row + rows), span(delta[head], row, row + rows)
            gather(q, row, head * d, np.float32(scale * LOG2_E), query)
            gather(do, row, head * d, _ONE, dout)
            _row_dot(dout, o, row, head * d, mean)
            rows_of, keys_of = (query, dout, log_total, mean), (keys, keys_t, values_t)
            sums, tiles, documents = (dquery, dkeys, dvalues), (scores, dscores), (starts, 0, row)
            attend_backward(sgemm, rows_of, keys_of, start, window, documents, slope, softcap, _ZERO, sums, tiles)
            scatter(dquery, scale, dq, row, head * d)
    scatter(dkeys, np.float32(LN2), dk, first_row, kv_head * d)  # queries have the factor log2(e)
    scatter(dvalues, _ONE, dv, first_row, kv_head * d)
