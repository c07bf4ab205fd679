"""Attention in plain numpy, tile by tile with a running softmax (Milakov and Gimelshein, 2018; Dao et al., 2022)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ratrain.targets.runtime.kernels.reference_common import f32, put, quiet
from ratrain.targets.runtime.kernels.shared import alibi_slopes

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionSpec
    from ratrain.targets.runtime.kernels.interface import F32, Array
    from ratrain.targets.runtime.kernels.scratch import Scratch

TILE = 64
"""Queries, and keys, of one tile."""


def _tiles(spec: AttentionSpec) -> Iterator[slice]:
    for start in range(0, spec.seq_len, TILE):
        yield slice(start, min(start + TILE, spec.seq_len))


def _key_tiles(spec: AttentionSpec, queries: slice) -> Iterator[slice]:
    """The tiles with a key that one of `queries` sees, ascending."""
    first = spec.first_key(queries.start)
    return (keys for keys in _tiles(spec) if keys.stop > first and keys.start < queries.stop)


class _Heads:
    """Float32 tiles of the heads of one sequence."""

    def __init__(self, spec: AttentionSpec, sequence: int) -> None:
        self.spec = spec
        self.first_row = sequence * spec.seq_len
        self.slopes = alibi_slopes(spec.heads) if spec.alibi else [0.0] * spec.heads
        self.scale = np.float32(1 / math.sqrt(spec.head_dim))

    def rows(self, positions: slice) -> slice:
        return slice(self.first_row + positions.start, self.first_row + positions.stop)

    def view(self, x: Array, head: int, positions: slice) -> Array:
        """Rows of one head of x[T, n * head_dim]."""
        return x[self.rows(positions), head * self.spec.head_dim : (head + 1) * self.spec.head_dim]

    def scores(self, q: Array, k: Array, head: int, queries: slice, keys: slice) -> F32:
        """Scaled, biased and masked scores of a tile; a key that is not seen has minus infinity."""
        spec = self.spec
        query, key = f32(self.view(q, head, queries)), f32(self.view(k, head // spec.group, keys))
        score: F32 = np.matmul(query * self.scale, key.T)
        i = np.arange(queries.start, queries.stop, dtype=np.int32)[:, None]
        j = np.arange(keys.start, keys.stop, dtype=np.int32)[None, :]
        if spec.alibi:
            score += np.float32(self.slopes[head]) * (j - i).astype(np.float32)
        seen = j <= i
        if spec.window is not None:
            seen &= j > i - spec.window
        score[~seen] = -np.inf
        return score


class ReferenceAttention:
    """The attention kernels of `Reference`. Temporaries are tiles of `TILE` rows."""

    @quiet
    def attention_forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        o: Array,
        lse: F32,
        *,
        scratch: Scratch,  # noqa: ARG002
        spec: AttentionSpec,
    ) -> None:
        """See `KERNELS["attention_forward"]`."""
        for sequence in range(spec.batch):
            heads = _Heads(spec, sequence)
            for head in range(spec.heads):
                for queries in _tiles(spec):
                    rows = queries.stop - queries.start
                    peak = np.full((rows, 1), -np.inf, np.float32)
                    total = np.zeros((rows, 1), np.float32)
                    acc = np.zeros((rows, spec.head_dim), np.float32)
                    for keys in _key_tiles(spec, queries):
                        score = heads.scores(q, k, head, queries, keys)
                        new_peak = np.maximum(peak, score.max(axis=1, keepdims=True))
                        # a row that has seen no key yet has no peak: 0 keeps its weights at exp(-inf) = 0
                        base = np.where(np.isneginf(new_peak), np.float32(0), new_peak)
                        weight = np.exp(score - base)
                        shrink = np.exp(peak - base)
                        total = total * shrink + weight.sum(axis=1, keepdims=True)
                        acc *= shrink
                        acc += weight @ f32(heads.view(v, head // spec.group, keys))
                        peak = new_peak
                    acc /= total
                    put(heads.view(o, head, queries), acc)
                    lse[head, heads.rows(queries)] = (peak + np.log(total))[:, 0]

    @quiet
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
        scratch: Scratch,  # noqa: ARG002
        spec: AttentionSpec,
    ) -> None:
        """See `KERNELS["attention_backward"]`."""
        for sequence in range(spec.batch):
            heads = _Heads(spec, sequence)

            def tile(head: int, queries: slice, keys: slice, heads: _Heads = heads) -> tuple[F32, F32]:
                """The probabilities of a tile, and the gradient of its scores."""
                rows = heads.rows(queries)
                prob = np.exp(heads.scores(q, k, head, queries, keys) - lse[head, rows, None])
                dprob = f32(heads.view(do, head, queries)) @ f32(heads.view(v, head // spec.group, keys)).T
                return prob, prob * (dprob - delta[head, rows, None])

            for head in range(spec.heads):
                for queries in _tiles(spec):
                    product = f32(heads.view(do, head, queries)) * f32(heads.view(o, head, queries))
                    delta[head, heads.rows(queries)] = product.sum(axis=1)
                    acc = np.zeros((queries.stop - queries.start, spec.head_dim), np.float32)
                    for keys in _key_tiles(spec, queries):
                        acc += tile(head, queries, keys)[1] @ f32(heads.view(k, head // spec.group, keys))
                    put(heads.view(dq, head, queries), acc * heads.scale)

            for kv_head in range(spec.kv_heads):
                for keys in _tiles(spec):
                    acc_k = np.zeros((keys.stop - keys.start, spec.head_dim), np.float32)
                    acc_v = np.zeros_like(acc_k)
                    for head in range(kv_head * spec.group, (kv_head + 1) * spec.group):
                        for queries in _tiles(spec):
                            if keys.stop > spec.first_key(queries.start) and keys.start < queries.stop:
                                prob, dscore = tile(head, queries, keys)
                                acc_v += prob.T @ f32(heads.view(do, head, queries))
                                acc_k += dscore.T @ (f32(heads.view(q, head, queries)) * heads.scale)
                    put(heads.view(dk, kv_head, keys), acc_k)
                    put(heads.view(dv, kv_head, keys), acc_v)
