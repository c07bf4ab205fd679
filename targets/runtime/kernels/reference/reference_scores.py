"""Attention with a whole score matrix, in plain numpy: head after head of a sequence, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.targets.program.attention_spec import AttentionSpec
from ratrain.targets.runtime.kernels.reference.reference_common import f32, put, quiet, row_blocks
from ratrain.targets.runtime.kernels.shared import check_starts

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, I32, Array


@frozen
class _Head:
    """Place of one query head of one sequence in the operands."""

    spec: AttentionSpec
    sequence: int
    index: int

    def rows(self, some: slice | None = None) -> slice:
        """Return its rows of [tokens, heads * head_dim], all or some."""
        first, part = self.sequence * self.spec.seq_len, some or slice(0, self.spec.seq_len)
        return slice(first + part.start, first + part.stop)

    def of_queries(self, x: Array, some: slice | None = None) -> Array:
        """Return its part [queries, head_dim] of q, o or their gradients."""
        d = self.spec.head_dim
        return x[self.rows(some), self.index * d : (self.index + 1) * d]

    def of_keys(self, x: Array) -> Array:
        """Return the part [keys, head_dim] of its key-value head, of k, v or their gradients."""
        d, kv_head = self.spec.head_dim, self.index // self.spec.group
        return x[self.rows(), kv_head * d : (kv_head + 1) * d]

    def scores(self, matrix: Array, some: slice) -> Array:
        """Return its part [queries, keys] of a score matrix."""
        tokens = self.spec.batch * self.spec.seq_len
        part = self.rows(some)
        return matrix[self.index * tokens + part.start : self.index * tokens + part.stop]

    def seen(self, some: slice, documents: I32 | None) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Return a mask [queries, keys]: True where the query sees the key."""
        i, j = np.arange(some.start, some.stop)[:, None], np.arange(self.spec.seq_len)[None, :]
        seen = (j <= i) & (j > i - (self.spec.window or self.spec.seq_len))
        return seen if documents is None else seen & (j >= documents[self.rows(some), None])


def _heads(spec: AttentionSpec, kv_head: int | None = None) -> Iterator[_Head]:
    """Return all query heads of all sequences, or only those that share key-value head `kv_head`."""
    shared = range(spec.heads) if kv_head is None else range(kv_head * spec.group, (kv_head + 1) * spec.group)
    return (_Head(spec, sequence, index) for sequence in range(spec.batch) for index in shared)


def _by_shared_head(spec: AttentionSpec) -> Iterator[list[_Head]]:
    """Group the query heads of each sequence by the key-value head that they share."""
    for kv_head in range(spec.kv_heads):
        heads = list(_heads(spec, kv_head))
        for first in range(0, len(heads), spec.group):
            yield heads[first : first + spec.group]


def _blocks(spec: AttentionSpec) -> Iterator[slice]:
    return row_blocks(spec.seq_len, spec.seq_len)


class ReferenceScores:
    """The kernels of `ReferenceKernels` for whole score matrices."""

    @quiet
    def attention_scores_forward(self, q, k, scores, *, scratch, spec):
        scale = np.float32(spec.multiplier)
        for head in _heads(spec):
            for some in _blocks(spec):
                score: F32 = np.matmul(f32(head.of_queries(q, some)) * scale, f32(head.of_keys(k)).T)
                put(head.scores(scores, some), score)

    @quiet
    def attention_softmax_forward(self, scores, probs, *, documents=None, scratch, spec):
        check_starts(documents, spec.seq_len)
        slopes = spec.slopes
        for head in _heads(spec):
            for some in _blocks(spec):
                score: F32 = f32(head.scores(scores, some)).copy()
                i, j = np.arange(some.start, some.stop)[:, None], np.arange(spec.seq_len)[None, :]
                score += np.float32(slopes[head.index]) * (j - i).astype(np.float32)
                score[~head.seen(some, documents)] = -np.inf
                weight: F32 = np.exp(score - score.max(axis=1, keepdims=True))
                weight /= weight.sum(axis=1, keepdims=True)
                put(head.scores(probs, some), weight)

    @quiet
    def attention_values_forward(self, probs, v, o, *, scratch, spec):
        for head in _heads(spec):
            for some in _blocks(spec):
                put(head.of_queries(o, some), f32(head.scores(probs, some)) @ f32(head.of_keys(v)))

    @quiet
    def attention_values_backward(self, probs, v, do, dprobs, dv, *, scratch, spec):
        for heads in _by_shared_head(spec):
            total = np.zeros((spec.seq_len, spec.head_dim), np.float32)
            for head in heads:
                for some in _blocks(spec):
                    dout = f32(head.of_queries(do, some))
                    put(head.scores(dprobs, some), dout @ f32(head.of_keys(v)).T)
                    total += f32(head.scores(probs, some)).T @ dout
            put(heads[0].of_keys(dv), total)

    @quiet
    def attention_softmax_backward(self, probs, dprobs, dscores, *, documents=None, scratch, spec):
        check_starts(documents, spec.seq_len)
        for head in _heads(spec):
            for some in _blocks(spec):
                prob, seen = f32(head.scores(probs, some)), head.seen(some, documents)
                dprob = np.where(seen, f32(head.scores(dprobs, some)), np.float32(0))
                mean = (prob * dprob).sum(axis=1, keepdims=True)
                put(head.scores(dscores, some), np.where(seen, prob * (dprob - mean), np.float32(0)))

    @quiet
    def attention_scores_backward(self, q, k, dscores, dq, dk, *, scratch, spec):
        scale = np.float32(spec.multiplier)
        for heads in _by_shared_head(spec):
            total = np.zeros((spec.seq_len, spec.head_dim), np.float32)
            for head in heads:
                for some in _blocks(spec):
                    dscore = f32(head.scores(dscores, some))
                    put(head.of_queries(dq, some), (dscore @ f32(head.of_keys(k))) * scale)
                    total += dscore.T @ (f32(head.of_queries(q, some)) * scale)
            put(heads[0].of_keys(dk), total)
