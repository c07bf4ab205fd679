"""Attention in plain numpy, tile by tile with a running softmax (Milakov and Gimelshein, 2018; Dao et al., 2022).

A tile of queries goes over tiles of keys. For each query it keeps the largest score m, the total weight l and the
weighted sum a:

    new m = max(m, scores of the tile)
    l = l * e^(m - new m) + sum(e^(score - new m))
    a = a * e^(m - new m) + sum(e^(score - new m) * value)          output = a / l, lse = m + log(l)

Memory is linear in the sequence length. The gradients compute the probabilities e^(score - lse) again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Self

import numpy as np
from attrs import frozen

from ratrain.targets.runtime.kernels.interface import F32, I32, Array
from ratrain.targets.runtime.kernels.reference.reference_common import f32, put, quiet, row_blocks
from ratrain.targets.runtime.kernels.shared import check_starts

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionBlockSpec

TILE = 64
"""Queries of a tile, and its keys."""


def tiles(rows: int) -> Iterator[slice]:
    """Cut `rows` into slices of at most `TILE`, in order."""
    for start in range(0, rows, TILE):
        yield slice(start, min(start + TILE, rows))


class QueryKeyTiles:
    """Float32 tiles of the heads of one sequence.

    A tile is given by its rows of a block of queries and a block of keys.
    """

    def __init__(self, spec: AttentionBlockSpec, sequence: int, documents: I32 | None) -> None:
        self.spec, self.sequence, self.documents = spec, sequence, documents
        self.slopes = spec.slopes
        self.scale = np.float32(spec.multiplier)

    def rows(self, queries: slice) -> slice:
        """Return the rows of a tile of queries among the rows of all sequences."""
        first = self.sequence * self.spec.queries
        return slice(first + queries.start, first + queries.stop)

    def of_queries(self, x: Array, head: int, queries: slice) -> Array:
        """Return a tile of one head of x[batch * queries, heads * head_dim]."""
        return x[self.rows(queries), head * self.spec.head_dim : (head + 1) * self.spec.head_dim]

    def of_keys(self, x: Array, kv_head: int, keys: slice) -> Array:
        """Return a tile of one head of x[batch * keys, kv_heads * head_dim]."""
        first = self.sequence * self.spec.keys
        columns = slice(kv_head * self.spec.head_dim, (kv_head + 1) * self.spec.head_dim)
        return x[first + keys.start : first + keys.stop, columns]

    def sees(self, queries: slice, keys: slice) -> bool:
        """Return whether any of the queries sees any of the keys."""
        first, last = self.spec.first_query + queries.start, self.spec.first_query + queries.stop
        start, stop = self.spec.first_key + keys.start, self.spec.first_key + keys.stop
        least = self.spec.first_seen(first)
        if self.documents is not None:
            # the earliest start of a document among the queries: one of them may see keys from there on
            least = max(least, int(self.documents[self.rows(queries)].min()))
        return bool(start < last and stop > least)

    def key_tiles(self, queries: slice) -> Iterator[slice]:
        """Return the tiles with a key that one of `queries` sees, ascending."""
        return (keys for keys in tiles(self.spec.keys) if self.sees(queries, keys))

    def capped(self, q: Array, k: Array, head: int, queries: slice, keys: slice) -> F32:
        """Return scaled and capped scores of a tile, without the mask."""
        spec = self.spec
        query, key = f32(self.of_queries(q, head, queries)), f32(self.of_keys(k, head // spec.group, keys))
        score: F32 = np.matmul(query * self.scale, key.T)
        if spec.softcap is not None:
            score = np.float32(spec.softcap) * np.tanh(score / np.float32(spec.softcap))
        return score

    def scores(self, q: Array, k: Array, head: int, queries: slice, keys: slice) -> F32:
        """Return scaled, capped, biased and masked scores of a tile; a hidden key has minus infinity."""
        spec, score = self.spec, self.capped(q, k, head, queries, keys)
        i = np.arange(queries.start, queries.stop, dtype=np.int32)[:, None] + np.int32(spec.first_query)
        j = np.arange(keys.start, keys.stop, dtype=np.int32)[None, :] + np.int32(spec.first_key)
        if spec.alibi:
            score += np.float32(self.slopes[head]) * (j - i).astype(np.float32)
        seen = j <= i
        if spec.window is not None:
            seen &= j > i - spec.window
        if self.documents is not None:
            seen &= j >= self.documents[self.rows(queries), None]
        score[~seen] = -np.inf
        return score


@frozen
class RunningSoftmax:
    """State of a tile of queries after some keys: largest score, total weight, weighted sum of values.

    A weight is power(score - peak); `power` is 2^x or e^x, as the scores are scaled.
    """

    peak: F32
    total: F32
    acc: F32
    power: np.ufunc

    @classmethod
    def begin(cls, rows: int, head_dim: int, power: np.ufunc) -> Self:
        """Make the state before any key."""
        peak, total = np.full((rows, 1), -np.inf, np.float32), np.zeros((rows, 1), np.float32)
        return cls(peak, total, np.zeros((rows, head_dim), np.float32), power)

    def take(self, score: F32, values: F32) -> None:
        """Add the keys of a tile: scores [queries, keys], values [keys, head_dim]."""
        new_peak = np.maximum(self.peak, score.max(axis=1, keepdims=True))
        # a row that has seen no key yet has no peak: 0 keeps its weights at power(-inf) = 0
        base = np.where(np.isneginf(new_peak), np.float32(0), new_peak)
        # weights so far are relative to the old peak: one factor brings them to the new one
        weight = self.power(score - base)
        shrink = self.power(self.peak - base)
        self.total[:] = self.total * shrink + weight.sum(axis=1, keepdims=True)
        self.acc[:] *= shrink
        self.acc[:] += weight @ values
        self.peak[:] = new_peak


@frozen
class BlockGradients:
    """Gradients of the attention of a block, from probabilities that are computed again."""

    block: QueryKeyTiles
    q: Array
    k: Array
    v: Array
    lse: F32
    do: Array
    delta: F32

    def _tile(self, head: int, queries: slice, keys: slice) -> tuple[F32, F32]:
        """Return the probabilities of a tile and the gradient of its scores."""
        block, rows = self.block, self.block.rows(queries)
        score = block.scores(self.q, self.k, head, queries, keys)
        prob = np.exp(score - self.lse[head, rows, None])
        values = f32(block.of_keys(self.v, head // block.spec.group, keys))
        dprob = f32(block.of_queries(self.do, head, queries)) @ values.T
        # softmax's derivative: dscore = p * (dp - sum(p * dp)), and delta = rowsum(do * o) is that sum (Dao et al.,
        # 2022)
        dscore = prob * (dprob - self.delta[head, rows, None])
        if block.spec.softcap is not None:
            share = block.capped(self.q, self.k, head, queries, keys) / np.float32(block.spec.softcap)
            dscore *= np.float32(1) - np.square(share)
        return prob, dscore

    def of_queries(self, head: int, queries: slice) -> F32:
        """Return the gradient of a tile of queries [queries, head_dim]."""
        block = self.block
        acc = np.zeros((queries.stop - queries.start, block.spec.head_dim), np.float32)
        for keys in block.key_tiles(queries):
            acc += self._tile(head, queries, keys)[1] @ f32(block.of_keys(self.k, head // block.spec.group, keys))
        return acc * block.scale

    def of_keys(self, kv_head: int, keys: slice) -> tuple[F32, F32]:
        """Return the gradients of a tile of keys and of values, summed over the query heads that share them."""
        block, group = self.block, self.block.spec.group
        acc_k = np.zeros((keys.stop - keys.start, block.spec.head_dim), np.float32)
        acc_v = np.zeros_like(acc_k)
        for head in range(kv_head * group, (kv_head + 1) * group):
            for queries in tiles(block.spec.queries):
                if block.sees(queries, keys):
                    prob, dscore = self._tile(head, queries, keys)
                    acc_v += prob.T @ f32(block.of_queries(self.do, head, queries))
                    # queries are scaled here as in the forward, so dk needs no scale at the end
                    acc_k += dscore.T @ (f32(block.of_queries(self.q, head, queries)) * block.scale)
        return acc_k, acc_v


def put_delta(o: Array, do: Array, delta: F32) -> None:
    """Set delta[heads, T] = rowsum(do * o) of each head."""
    heads = len(delta)
    for rows in row_blocks(*o.shape):
        product = f32(do[rows]) * f32(o[rows])
        delta[:, rows] = product.reshape(len(product), heads, -1).sum(axis=2).T


class ReferenceAttention:
    """The attention kernels of `ReferenceKernels`. Temporaries are tiles of `TILE` rows."""

    @quiet
    def attention_forward(self, q, k, v, o, lse, *, documents=None, scratch, spec):
        check_starts(documents, spec.seq_len)
        for sequence in range(spec.batch):
            block = QueryKeyTiles(spec.block, sequence, documents)
            for head in range(spec.heads):
                for queries in tiles(spec.seq_len):
                    softmax = RunningSoftmax.begin(queries.stop - queries.start, spec.head_dim, np.exp)
                    for keys in block.key_tiles(queries):
                        values = f32(block.of_keys(v, head // spec.group, keys))
                        softmax.take(block.scores(q, k, head, queries, keys), values)
                    put(block.of_queries(o, head, queries), softmax.acc / softmax.total)
                    lse[head, block.rows(queries)] = (softmax.peak + np.log(softmax.total))[:, 0]

    @quiet
    def attention_backward(self, q, k, v, o, lse, do, dq, dk, dv, delta, *, documents=None, scratch, spec):
        check_starts(documents, spec.seq_len)
        put_delta(o, do, delta)
        for sequence in range(spec.batch):
            block = QueryKeyTiles(spec.block, sequence, documents)
            gradients = BlockGradients(block, q, k, v, lse, do, delta)
            for head in range(spec.heads):
                for queries in tiles(spec.seq_len):
                    put(block.of_queries(dq, head, queries), gradients.of_queries(head, queries))
            for kv_head in range(spec.kv_heads):
                for keys in tiles(spec.seq_len):
                    of_k, of_v = gradients.of_keys(kv_head, keys)
                    put(block.of_keys(dk, kv_head, keys), of_k)
                    put(block.of_keys(dv, kv_head, keys), of_v)
