"""Attention on BLAS: for each head, blocks of queries against blocks of the keys that they see.

The scores of a block stay in the second-level cache. The softmax goes on from block to block with a running maximum
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), so memory is linear in the sequence length.
A head's keys and values are converted once for all query heads that share them, and threads share out those heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from targets.runtime.kernels.fast_numba import bits, exact, exp32, inlined, load, maximum, narrow, reducing
from targets.runtime.kernels.scratch import Buffer, Plan, Scratch
from targets.runtime.kernels.shared import alibi_slopes

if TYPE_CHECKING:
    from targets.runtime.kernels.interface import F32, Array, AttentionSpec
    from targets.runtime.kernels.team import Team

QUERIES, KEYS = 256, 512
"""Rows and columns of a block of scores: BLAS is at its speed, and two blocks are 1 MiB."""

DIAGONAL = 128
"""The same where only the keys up to the query's own are seen: half of such a block is computed for nothing."""

_ZERO, _ONE = np.float32(0), np.float32(1)
_NONE_SEEN = np.float32(-np.inf)


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


@exact()
def _add_rows(out: Any, product: Any) -> None:
    """Out += the first rows of product."""
    for r in range(out.shape[0]):
        row, line = out[r], product[r]
        for i in range(line.size):
            row[i] += line[i]


@inlined()
def _bounds(query: Any, first_key: Any, keys: Any, window: Any) -> Any:
    """The range of a block's keys that a query sees, perhaps empty."""
    low = min(keys, max(0, query - window + 1 - first_key))
    return low, max(low, min(keys, query + 1 - first_key))


@reducing()
def _softmax(
    score: Any, first_query: Any, first_key: Any, window: Any, slope: Any, peaks: Any, totals: Any, out: Any
) -> None:
    """Score = exp(score + bias - its row's maximum so far), 0 where not seen; totals and out follow the maximum."""
    for r in range(score.shape[0]):
        query = first_query + r
        low, high = _bounds(query, first_key, score.shape[1], window)
        row = score[r]
        row[:low] = _ZERO
        row[high:] = _ZERO
        if low == high:
            continue
        seen = row[low:high]
        if slope != _ZERO:
            distance = np.int32(first_key + low - query)
            for i in range(seen.size):
                seen[i] += slope * np.float32(np.int32(i) + distance)
        peak = peaks[r]
        for i in range(seen.size):
            peak = maximum(peak, seen[i])
        total = _ZERO
        for i in range(seen.size):
            weight = exp32(seen[i] - peak)
            seen[i] = weight
            total += weight
        keep = exp32(peaks[r] - peak)
        totals[r] = totals[r] * keep + total
        peaks[r] = peak
        line = out[r]
        for i in range(line.size):
            line[i] *= keep


@exact()
def _log_totals(peaks: Any, totals: Any, lse: Any) -> None:
    """The log-sum-exp of each row."""
    for r in range(lse.size):
        lse[r] = peaks[r] + np.float32(math.log(np.float64(totals[r])))


@exact()
def _score_gradient(
    score: Any, dprob: Any, first_query: Any, first_key: Any, window: Any, slope: Any, lse: Any, delta: Any
) -> None:
    """Score = its probabilities p, dprob = p * (dprob - delta); both 0 where not seen."""
    for r in range(score.shape[0]):
        query = first_query + r
        low, high = _bounds(query, first_key, score.shape[1], window)
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
class _Tile:
    """A block of scores: some rows of a block of queries, counted in it, and the positions of some keys."""

    rows: slice
    keys: slice

    def scores(self, buffer: F32) -> F32:
        """The tile's matrix in a flat buffer."""
        rows, keys = self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
        return buffer[: rows * keys].reshape(rows, keys)


@frozen
class _Block:
    """A block of queries [start, stop), by position, and the tiles of scores that they see."""

    start: int
    stop: int
    tiles: tuple[_Tile, ...]


@lru_cache(maxsize=64)
def _blocks(spec: AttentionSpec) -> tuple[_Block, ...]:
    bounds = [(start, min(start + QUERIES, spec.seq_len)) for start in range(0, spec.seq_len, QUERIES)]
    return tuple(_Block(start, stop, tuple(_tiles(spec, start, stop))) for start, stop in bounds)


def _tiles(spec: AttentionSpec, start: int, stop: int) -> Iterator[_Tile]:
    for low in range(spec.first_key(start), start, KEYS):
        yield _Tile(slice(0, stop - start), slice(low, min(low + KEYS, start)))
    for low in range(start, stop, DIAGONAL):
        high = min(low + DIAGONAL, stop)
        yield _Tile(slice(low - start, high - start), slice(start, high))


@frozen
class _Mask:
    """What scores are multiplied with, and what is added to them or hidden."""

    scale: np.float32
    window: int
    slopes: NDArray[np.float32]
    """of ALiBi, by head; 0: none"""

    @classmethod
    def of(cls, spec: AttentionSpec) -> _Mask:
        slopes = np.array(alibi_slopes(spec.heads) if spec.alibi else [0.0] * spec.heads, np.float32)
        window = spec.seq_len if spec.window is None else spec.window
        return cls(np.float32(1 / math.sqrt(spec.head_dim)), window, slopes)


def _block_buffers(spec: AttentionSpec) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """A head's keys, a block of queries, a row sum for each, a block of scores."""
    rows = min(QUERIES, spec.seq_len)
    return (
        Buffer((spec.seq_len, spec.head_dim)),
        Buffer((rows, spec.head_dim)),
        Buffer((rows,)),
        Buffer((rows * min(max(KEYS, QUERIES), spec.seq_len),)),
    )


def forward_plan(spec: AttentionSpec, *, threads: int, **_: object) -> Plan:
    """For each thread: keys, values; queries, output, its product; maxima, row sums; scores."""
    head, block, line, scores = _block_buffers(spec)
    return [head, head, block, block, block, line, line, scores] * threads


def backward_plan(spec: AttentionSpec, *, threads: int, **_: object) -> Plan:
    """For each thread: keys, values, dk, dv; queries, do, dq; a product of queries or keys; scores, dscores."""
    head, block, _line, scores = _block_buffers(spec)
    product = Buffer((max(min(KEYS, spec.seq_len), block.shape[0]), spec.head_dim))
    return [head, head, head, head, block, block, block, product, scores, scores] * threads


class FastAttention:
    """The attention kernels of `Fast`."""

    team: Team

    def _by_head(self, spec: AttentionSpec, plan: Plan, scratch: Scratch, work: Callable[..., None]) -> None:
        """Do `work(buffers, first row, key-value head)` for all of them; each thread has its buffers of the plan."""
        buffers = scratch.take_all(plan)
        each = len(buffers) // self.team.threads

        def part(numbered: tuple[int, slice]) -> None:
            number, indices = numbered
            mine = buffers[number * each : (number + 1) * each]
            for index in range(indices.start, indices.stop):
                sequence, kv_head = divmod(index, spec.kv_heads)
                work(mine, sequence * spec.seq_len, kv_head)

        self.team.run(part, list(enumerate(self.team.ranges(spec.batch * spec.kv_heads))))

    def attention_forward(
        self, q: Array, k: Array, v: Array, o: Array, lse: F32, *, scratch: Scratch, spec: AttentionSpec
    ) -> None:
        """See `KernelSet.attention_forward`."""
        q, k, v, o = bits(q), bits(k), bits(v), bits(o)
        d, mask = spec.head_dim, _Mask.of(spec)

        def shared_head(buffers: list[F32], first_row: int, kv_head: int) -> None:
            key, value, queries, outs, product, peaks, totals, scores = buffers
            _gather(k, first_row, kv_head * d, _ONE, key)
            _gather(v, first_row, kv_head * d, _ONE, value)
            for head in range(kv_head * spec.group, (kv_head + 1) * spec.group):
                for block in _blocks(spec):
                    row, rows = first_row + block.start, block.stop - block.start
                    query, out = queries[:rows], outs[:rows]
                    _gather(q, row, head * d, mask.scale, query)
                    peaks.fill(_NONE_SEEN)
                    totals.fill(0)
                    out.fill(0)
                    for tile in block.tiles:
                        part, score = out[tile.rows], tile.scores(scores)
                        np.matmul(query[tile.rows], key[tile.keys].T, out=score)
                        _softmax(
                            score,
                            block.start + tile.rows.start,
                            tile.keys.start,
                            mask.window,
                            mask.slopes[head],
                            peaks[tile.rows],
                            totals[tile.rows],
                            part,
                        )
                        np.matmul(score, value[tile.keys], out=product[: len(part)])
                        _add_rows(part, product)
                    _log_totals(peaks, totals, lse[head, row : row + rows])
                    _scatter_rows(out, totals, o, row, head * d)

        self._by_head(spec, forward_plan(spec, threads=self.team.threads), scratch, shared_head)

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
        q, k, v, o, do, dq, dk, dv = (bits(x) for x in (q, k, v, o, do, dq, dk, dv))
        d, mask = spec.head_dim, _Mask.of(spec)

        def shared_head(buffers: list[F32], first_row: int, kv_head: int) -> None:
            key, value, dkey, dvalue, queries, douts, dqueries, product, scores, dscores = buffers
            _gather(k, first_row, kv_head * d, _ONE, key)
            _gather(v, first_row, kv_head * d, _ONE, value)
            dkey.fill(0)
            dvalue.fill(0)
            for head in range(kv_head * spec.group, (kv_head + 1) * spec.group):
                for block in _blocks(spec):
                    row, rows = first_row + block.start, block.stop - block.start
                    at = slice(row, row + rows)
                    query, dout, dquery = queries[:rows], douts[:rows], dqueries[:rows]
                    _gather(q, row, head * d, mask.scale, query)
                    _gather(do, row, head * d, _ONE, dout)
                    _row_dot(dout, o, row, head * d, delta[head, at])
                    dquery.fill(0)
                    for tile in block.tiles:
                        score, dscore = tile.scores(scores), tile.scores(dscores)
                        keys, of_keys = tile.keys, product[: score.shape[1]]
                        np.matmul(query[tile.rows], key[keys].T, out=score)
                        np.matmul(dout[tile.rows], value[keys].T, out=dscore)
                        _score_gradient(
                            score,
                            dscore,
                            block.start + tile.rows.start,
                            keys.start,
                            mask.window,
                            mask.slopes[head],
                            lse[head, at][tile.rows],
                            delta[head, at][tile.rows],
                        )
                        np.matmul(score.T, dout[tile.rows], out=of_keys)
                        _add_rows(dvalue[keys], of_keys)
                        np.matmul(dscore.T, query[tile.rows], out=of_keys)
                        _add_rows(dkey[keys], of_keys)
                        of_rows = product[: score.shape[0]]
                        np.matmul(dscore, key[keys], out=of_rows)
                        _add_rows(dquery[tile.rows], of_rows)
                    _scatter(dquery, mask.scale, dq, row, head * d)
            _scatter(dkey, _ONE, dk, first_row, kv_head * d)
            _scatter(dvalue, _ONE, dv, first_row, kv_head * d)

        self._by_head(spec, backward_plan(spec, threads=self.team.threads), scratch, shared_head)
