"""Attention on BLAS: for each head, blocks of queries against the range of keys that they see.

The scores of a block are one buffer of `QUERIES` rows, so the softmax needs no running maximum, and memory is linear
in the sequence length. A head's keys and values are converted once for all query heads that share them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from targets.runtime.kernels.fast_numba import bits, exact, exp32, load, maximum, narrow, reducing
from targets.runtime.kernels.scratch import Buffer, Plan, Scratch
from targets.runtime.kernels.shared import alibi_slopes

if TYPE_CHECKING:
    from targets.runtime.kernels.interface import F32, Array, AttentionSpec

QUERIES = 128
"""Rows of a block of queries."""

_ZERO, _ONE = np.float32(0), np.float32(1)


@exact()
def _gather(x: Any, first_row: Any, first_column: Any, scale: Any, out: Any) -> None:
    """Out = scale * a rectangle of x, in float32."""
    for r in range(out.shape[0]):
        row = x[first_row + r, first_column : first_column + out.shape[1]]
        line = out[r]
        for i in range(line.size):
            line[i] = load(row[i]) * scale


@exact()
def _scatter(block: Any, scale: Any, x: Any, first_row: Any, first_column: Any) -> None:
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


@reducing()
def _row_dot(block: Any, x: Any, first_row: Any, first_column: Any, out: Any) -> None:
    """out[r] = the product of row r of a block with its row of x."""
    for r in range(block.shape[0]):
        row = x[first_row + r, first_column : first_column + block.shape[1]]
        line = block[r]
        total = _ZERO
        for i in range(line.size):
            total += line[i] * load(row[i])
        out[r] = total


@reducing()
def _softmax(score: Any, first_query: Any, first_key: Any, window: Any, slope: Any, totals: Any, lse: Any) -> None:
    """Score = exp(score + bias - its row's maximum), 0 where not seen; the sums of the rows and their lse."""
    for r in range(score.shape[0]):
        query = first_query + r
        low = max(0, query - window + 1 - first_key)
        row = score[r]
        row[:low] = _ZERO
        row[query + 1 - first_key :] = _ZERO
        seen = row[low : query + 1 - first_key]
        if slope != _ZERO:
            distance = np.int32(first_key + low - query)
            for i in range(seen.size):
                seen[i] += slope * np.float32(np.int32(i) + distance)
        peak = seen[0]
        for i in range(seen.size):
            peak = maximum(peak, seen[i])
        total = _ZERO
        for i in range(seen.size):
            weight = exp32(seen[i] - peak)
            seen[i] = weight
            total += weight
        totals[r] = total
        lse[r] = peak + np.float32(math.log(np.float64(total)))


@exact()
def _score_gradient(
    score: Any, dprob: Any, first_query: Any, first_key: Any, window: Any, slope: Any, lse: Any, delta: Any
) -> None:
    """Score = its probabilities p, dprob = p * (dprob - delta); both 0 where not seen."""
    for r in range(score.shape[0]):
        query = first_query + r
        low, high = max(0, query - window + 1 - first_key), query + 1 - first_key
        row, grad_row = score[r], dprob[r]
        row[:low] = _ZERO
        grad_row[:low] = _ZERO
        row[high:] = _ZERO
        grad_row[high:] = _ZERO
        seen, grad = row[low:high], grad_row[low:high]
        if slope != _ZERO:
            distance = np.int32(first_key + low - query)
            for i in range(seen.size):
                seen[i] += slope * np.float32(np.int32(i) + distance)
        log_total, mean = lse[r], delta[r]
        for i in range(seen.size):
            p = exp32(seen[i] - log_total)
            seen[i] = p
            grad[i] = p * (grad[i] - mean)


@frozen
class _Block:
    """A block of queries [start, stop) and the keys [first_key, stop) that it sees, by position."""

    start: int
    stop: int
    first_key: int

    @property
    def rows(self) -> int:
        return self.stop - self.start

    @property
    def keys(self) -> slice:
        return slice(self.first_key, self.stop)

    def scores(self, buffer: F32) -> F32:
        """The block's [queries, keys] matrix in a flat buffer."""
        width = self.stop - self.first_key
        return buffer[: self.rows * width].reshape(self.rows, width)


def _blocks(spec: AttentionSpec) -> Iterator[_Block]:
    for start in range(0, spec.seq_len, QUERIES):
        yield _Block(start, min(start + QUERIES, spec.seq_len), spec.first_key(start))


def _forward_plan(spec: AttentionSpec) -> Plan:
    rows = min(QUERIES, spec.seq_len)
    keys = spec.seq_len if spec.window is None else min(spec.seq_len, spec.window + rows - 1)
    head, block = Buffer((spec.seq_len, spec.head_dim)), Buffer((rows, spec.head_dim))
    return [head, head, block, block, Buffer((rows * keys,)), Buffer((rows,))]


def forward_plan(spec: AttentionSpec, **_: object) -> Plan:
    """Keys, values, queries, output, scores, row sums."""
    return _forward_plan(spec)


def backward_plan(spec: AttentionSpec, **_: object) -> Plan:
    """Those of the forward but the row sums, then dk, dv, do, dscores, and a product with as many rows as keys."""
    head, _head, block, _block, scores, _totals = _forward_plan(spec)
    return [head, head, block, block, scores, head, head, block, scores, head]


class FastAttention:
    """The attention kernels of `Fast`."""

    def attention_forward(
        self, q: Array, k: Array, v: Array, o: Array, lse: F32, *, scratch: Scratch, spec: AttentionSpec
    ) -> None:
        """See `KernelSet.attention_forward`."""
        key, value, query_buffer, out_buffer, scores, totals = scratch.take_all(forward_plan(spec))
        q, k, v, o = bits(q), bits(k), bits(v), bits(o)
        d, scale = spec.head_dim, np.float32(1 / math.sqrt(spec.head_dim))
        window = spec.seq_len if spec.window is None else spec.window
        slopes = np.array(alibi_slopes(spec.heads) if spec.alibi else [0.0] * spec.heads, np.float32)
        for first_row in range(0, spec.batch * spec.seq_len, spec.seq_len):
            for kv_head in range(spec.kv_heads):
                _gather(k, first_row, kv_head * d, _ONE, key)
                _gather(v, first_row, kv_head * d, _ONE, value)
                for head in range(kv_head * spec.group, (kv_head + 1) * spec.group):
                    for block in _blocks(spec):
                        row = first_row + block.start
                        query, out, score = query_buffer[: block.rows], out_buffer[: block.rows], block.scores(scores)
                        _gather(q, row, head * d, scale, query)
                        np.matmul(query, key[block.keys].T, out=score)
                        _softmax(
                            score,
                            block.start,
                            block.first_key,
                            window,
                            slopes[head],
                            totals,
                            lse[head, row : row + block.rows],
                        )
                        np.matmul(score, value[block.keys], out=out)
                        _scatter_rows(out, totals, o, row, head * d)

    def attention_backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: F32,
        do: Array,
        dq: Array,
        dk: Array,
        dv: Array,
        delta: F32,
        *,
        scratch: Scratch,
        spec: AttentionSpec,
    ) -> None:
        """See `KernelSet.attention_backward`."""
        (
            key,
            value,
            query_buffer,
            dquery_buffer,
            scores,
            dkey,
            dvalue,
            dout_buffer,
            dscores,
            product_buffer,
        ) = scratch.take_all(backward_plan(spec))
        q, k, v, o, do, dq, dk, dv = (bits(x) for x in (q, k, v, o, do, dq, dk, dv))
        d, scale = spec.head_dim, np.float32(1 / math.sqrt(spec.head_dim))
        window = spec.seq_len if spec.window is None else spec.window
        slopes = np.array(alibi_slopes(spec.heads) if spec.alibi else [0.0] * spec.heads, np.float32)
        for first_row in range(0, spec.batch * spec.seq_len, spec.seq_len):
            for kv_head in range(spec.kv_heads):
                _gather(k, first_row, kv_head * d, _ONE, key)
                _gather(v, first_row, kv_head * d, _ONE, value)
                dkey.fill(0)
                dvalue.fill(0)
                for head in range(kv_head * spec.group, (kv_head + 1) * spec.group):
                    for block in _blocks(spec):
                        row = first_row + block.start
                        rows = slice(row, row + block.rows)
                        query, dquery, dout = (
                            buffer[: block.rows] for buffer in (query_buffer, dquery_buffer, dout_buffer)
                        )
                        score, dscore = block.scores(scores), block.scores(dscores)
                        product = product_buffer[: score.shape[1]]
                        _gather(q, row, head * d, scale, query)
                        _gather(do, row, head * d, _ONE, dout)
                        _row_dot(dout, o, row, head * d, delta[head, rows])
                        np.matmul(query, key[block.keys].T, out=score)
                        np.matmul(dout, value[block.keys].T, out=dscore)
                        _score_gradient(
                            score,
                            dscore,
                            block.start,
                            block.first_key,
                            window,
                            slopes[head],
                            lse[head, rows],
                            delta[head, rows],
                        )
                        np.matmul(score.T, dout, out=product)
                        dvalue[block.keys] += product
                        np.matmul(dscore.T, query, out=product)
                        dkey[block.keys] += product
                        np.matmul(dscore, key[block.keys], out=dquery)
                        _scatter(dquery, scale, dq, row, head * d)
                _scatter(dkey, _ONE, dk, first_row, kv_head * d)
                _scatter(dvalue, _ONE, dv, first_row, kv_head * d)
