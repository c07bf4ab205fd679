"""Attention on tensors, tile by tile with a running softmax (Milakov and Gimelshein, 2018; Dao et al., 2022).

It serves whole sequences and blocks of them. Scores stay in scratch, whose size does not depend on the number of
queries times keys:

    for some heads:  for each tile of queries:  for each tile of keys that one of them sees:
        scores = q k^T;  new peak, weights 2^(score - peak);  total and acc shrink to the new peak and grow

Gradients compute the probabilities again from lse; for some heads, all keys and values and their gradients are in
scratch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from ratrain.targets.pytorch.device.device_common import check_documents, complement, row_steps, shaped, wide
from ratrain.targets.pytorch.device.device_products import factor, multiply
from ratrain.targets.pytorch.device.device_tiles import MASK_BUFFERS, Heads, Mask, TileShape, all_heads, mask_plan
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionBlockSpec
    from ratrain.targets.pytorch.device.device_common import F32, I32, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan

LOG2_E, LN2 = math.log2(math.e), math.log(2)


def forward_plan(spec: AttentionBlockSpec) -> Plan:
    """Plan the mask; queries, output, keys, values, scores; five numbers for each query, and a flag."""
    shape = TileShape.of(spec)
    query, key, line = shape.of_queries(spec), shape.of_keys(spec), shape.line(spec)
    seen = Buffer(line.shape, np.bool_)
    return [*mask_plan(spec, shape), query, query, key, key, shape.scores(spec), *[line] * 5, seen]


class DeviceRunningSoftmax:
    """State of a tile of queries after some keys: largest score (units of ln 2), total weight, weighted values."""

    def __init__(self, spec: AttentionBlockSpec, documents: I32 | None, scratch: Scratch, *, halves: bool) -> None:
        check_documents(documents, spec.queries, spec.first_query)
        buffers = scratch.take_all(forward_plan(spec))
        self.mask = Mask(spec, buffers[:MASK_BUFFERS], documents)
        self.spec, self.shape, self.halves = spec, TileShape.of(spec), halves
        self.of_q, self.of_acc, self.of_k, self.of_v, self.of_scores, *self.lines, self.flags = buffers[MASK_BUFFERS:]

    def begin(self, heads: Heads, q: Array, queries: slice) -> None:
        """Start with a tile of queries and no keys."""
        self.heads, self.queries = heads, queries
        self.q = factor(self.of_q, heads.of_queries(q, queries), halves=self.halves)
        count, rows, _ = self.q.shape
        self.acc = shaped(self.of_acc, self.q.shape).zero_()
        lines = (shaped(line, (count, rows, 1)) for line in self.lines)
        self.peak, self.total, self.base, self.shrink, self.sum = lines
        self.peak.fill_(float("-inf"))
        self.total.zero_()

    def take(self, k: Array, v: Array, keys: slice) -> None:
        """Take in a tile of keys."""
        heads = self.heads
        key = factor(self.of_k, heads.of_keys(k, keys), halves=self.halves)
        values = wide(self.of_v, heads.of_keys(v, keys))
        score = shaped(self.of_scores, (heads.count, self.q.shape[1], key.shape[1]))
        multiply(heads.by_shared(self.q), key.mT, heads.by_shared(score))
        # scores in units of ln 2, so that weights are powers of two
        if self.spec.softcap is None:
            score.mul_(self.spec.multiplier * LOG2_E)
        else:
            score.mul_(self.spec.multiplier / self.spec.softcap).tanh_().mul_(self.spec.softcap * LOG2_E)
        self.mask.apply(score, heads, self.queries, keys, LOG2_E)
        self._add(score, values)

    def _add(self, score: F32, values: F32) -> None:
        base = torch.amax(score, dim=2, keepdim=True, out=self.base)
        torch.maximum(self.peak, base, out=base)
        torch.sub(self.peak, base, out=self.shrink)
        # `base` is the new peak, `shrink` the old one minus the new: the factor of everything summed so far
        self.peak.copy_(base)
        # a row that has seen no key yet has no peak: 0 keeps its weights at 2^-inf = 0
        unseen = torch.eq(base, float("-inf"), out=shaped(self.flags, base.shape))
        base.masked_fill_(unseen, 0)
        self.shrink.masked_fill_(unseen, float("-inf")).exp2_()
        torch.sum(score.sub_(base).exp2_(), dim=2, keepdim=True, out=self.sum)
        self.total.mul_(self.shrink).add_(self.sum)
        acc = self.heads.by_shared(self.acc.mul_(self.shrink))
        torch.baddbmm(acc, self.heads.by_shared(score), values, out=acc)

    def of_rows(self, x: F32) -> F32:
        """Return the part of x[heads, batch * queries] that belongs to this tile's queries."""
        return self.heads.line(x, self.queries)

    def run(self, k: Array, v: Array) -> None:
        """Take in all keys that one of the queries sees."""
        for keys in self.mask.key_tiles(self.queries, self.shape.keys):
            self.take(k, v, keys)


def backward_plan(spec: AttentionBlockSpec, *, halves: bool) -> Plan:
    """Plan the mask; queries (3), all keys (4), scores, their gradient and slope; lines (2); 16-bit factors."""
    shape = TileShape.of(spec)
    query, line, scores = shape.of_queries(spec), shape.line(spec), shape.scores(spec)
    every = Buffer((shape.shared_heads * spec.keys * spec.head_dim,))
    slope = scores if spec.softcap is not None else Buffer((0,))
    factors = [query, query, shape.of_keys(spec), shape.of_keys(spec)] if halves else []
    return [*mask_plan(spec, shape), *[query] * 3, *[every] * 4, scores, scores, slope, line, line, *factors]


class DeviceBlockGradients:
    """Gradients of the attention of a block, from probabilities that are computed again."""

    def __init__(
        self,
        spec: AttentionBlockSpec,
        operands: tuple[Array, Array, Array, Array, F32, F32],
        documents: I32 | None,
        scratch: Scratch,
        *,
        halves: bool,
    ) -> None:
        check_documents(documents, spec.queries, spec.first_query)
        buffers = scratch.take_all(backward_plan(spec, halves=halves))
        self.mask, self.spec, self.shape = Mask(spec, buffers[:MASK_BUFFERS], documents), spec, TileShape.of(spec)
        self.q, self.k, self.v, self.do, self.lse, self.delta = operands
        self.halves = halves and self.q.dtype != torch.float32
        of_tiles = buffers[MASK_BUFFERS:]
        self.of_q, self.of_dq, self.of_do, self.of_k, self.of_v, self.of_dk, self.of_dv = of_tiles[:7]
        self.of_scores, self.of_dscores, self.of_slope, self.of_lse, self.of_delta, *self.factors = of_tiles[7:]

    def _keys(self, buffer: Array, heads: Heads, keys: slice) -> F32:
        """Return a tile of keys out of a buffer of all keys, which lie in it tile after tile, each contiguous."""
        each = heads.count // self.spec.group * self.spec.head_dim
        tile = buffer[keys.start * each : keys.stop * each]
        return tile.view(-1, keys.stop - keys.start, self.spec.head_dim)

    def _factor(self, number: int, wide_one: F32, source: Array) -> Array:
        """Return a factor of a product of stored operands: its float32 copy, or a 16-bit one if halves multiply."""
        return factor(self.factors[number], source, halves=True) if self.halves else wide_one

    def begin(self, heads: Heads) -> None:
        """Load all keys and values of some heads; clear their gradients."""
        for keys in row_steps(self.spec.keys, self.shape.keys):
            self._keys(self.of_k, heads, keys).copy_(heads.of_keys(self.k, keys))
            self._keys(self.of_v, heads, keys).copy_(heads.of_keys(self.v, keys))
            self._keys(self.of_dk, heads, keys).zero_()
            self._keys(self.of_dv, heads, keys).zero_()

    def of_queries(self, heads: Heads, queries: slice) -> F32:
        """Return the gradient [heads, queries, head_dim] of a tile of queries; add its part to keys' and values'."""
        q, do = (wide(b, heads.of_queries(x, queries)) for b, x in ((self.of_q, self.q), (self.of_do, self.do)))
        q_factor = self._factor(0, q, heads.of_queries(self.q, queries))
        do_factor = self._factor(1, do, heads.of_queries(self.do, queries))
        lse, delta = (
            wide(b, heads.line(x, queries)) for b, x in ((self.of_lse, self.lse), (self.of_delta, self.delta))
        )
        dq = shaped(self.of_dq, q.shape).zero_()
        for keys in self.mask.key_tiles(queries, self.shape.keys):
            tiles = (self._keys(b, heads, keys) for b in (self.of_k, self.of_v, self.of_dk, self.of_dv))
            key, value, dk, dv = tiles
            shape = (heads.count, q.shape[1], key.shape[1])
            score, dscore = shaped(self.of_scores, shape), shaped(self.of_dscores, shape)
            multiply(
                heads.by_shared(q_factor), self._factor(2, key, heads.of_keys(self.k, keys)).mT, heads.by_shared(score)
            )
            self._probabilities(score, lse, heads, queries, keys)
            prob = heads.by_shared(score)
            # dv += p^T do
            torch.baddbmm(dv, prob.mT, heads.by_shared(do), out=dv)
            multiply(
                heads.by_shared(do_factor),
                self._factor(3, value, heads.of_keys(self.v, keys)).mT,
                heads.by_shared(dscore),
            )
            # softmax's derivative: ds = p * (dp - delta) with delta = rowsum(do * o), then the cap's
            dscore.sub_(delta).mul_(score)
            if self.spec.softcap is not None:
                dscore.mul_(shaped(self.of_slope, shape))
            gradient = heads.by_shared(dscore)
            # dk += ds^T q and dq += ds k; the scale of scores is multiplied in at the end of each
            torch.baddbmm(dk, gradient.mT, heads.by_shared(q), out=dk)
            of_q = heads.by_shared(dq)
            torch.baddbmm(of_q, gradient, key, out=of_q)
        return dq.mul_(self.spec.multiplier)

    def _probabilities(self, score: F32, lse: F32, heads: Heads, queries: slice, keys: slice) -> None:
        """Turn products of queries and keys into probabilities, in place; `of_slope` receives a cap's derivative."""
        spec = self.spec
        if spec.softcap is None:
            score.mul_(spec.multiplier)
        else:
            score.mul_(spec.multiplier / spec.softcap).tanh_()
            share = shaped(self.of_slope, score.shape).copy_(score).square_()
            complement(share, share)
            score.mul_(spec.softcap)
        # the cap's derivative 1 - tanh^2 is taken before bias and mask
        self.mask.apply(score, heads, queries, keys)
        score.sub_(lse).exp_()

    def of_keys(self, heads: Heads, keys: slice) -> tuple[F32, F32]:
        """Return the gradients of a tile of keys and of values, from all queries given to `of_queries` so far."""
        return self._keys(self.of_dk, heads, keys).mul_(self.spec.multiplier), self._keys(self.of_dv, heads, keys)

    def run(
        self, dq: Array, dk: Array, dv: Array, *, adds_to_queries: bool = False, adds_to_keys: bool = False
    ) -> None:
        """Store the gradients of all queries and keys, or add them."""
        for heads in all_heads(self.spec, self.shape):
            self.begin(heads)
            for queries in row_steps(self.spec.queries, self.shape.queries):
                _store(heads.of_queries(dq, queries), self.of_queries(heads, queries), adds=adds_to_queries)
            for keys in row_steps(self.spec.keys, self.shape.keys):
                of_k, of_v = self.of_keys(heads, keys)
                _store(heads.of_keys(dk, keys), of_k, adds=adds_to_keys)
                _store(heads.of_keys(dv, keys), of_v, adds=adds_to_keys)


def _store(out: Array, value: F32, *, adds: bool) -> None:
    if adds:
        out.add_(value)
    else:
        out.copy_(value)
