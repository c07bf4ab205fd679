"""Attention with a whole score matrix, on tensors: some rows of the matrices of some heads at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ratrain.targets.pytorch.device import device_common
from ratrain.targets.pytorch.device.device_common import check_documents, row_steps, shaped, wide
from ratrain.targets.pytorch.device.device_products import factor, multiply
from ratrain.targets.pytorch.device.device_tiles import Heads, Mask, TileShape, all_heads, mask_plan

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionSpec
    from ratrain.targets.pytorch.device.device_common import F32, Array
    from ratrain.targets.runtime.arena.scratch import Plan


def _shape(spec: AttentionSpec) -> TileShape:
    """Return tiles of all keys, with as many queries as make a chunk of scores."""
    rows = max(1, device_common.CHUNK_ELEMENTS // (spec.group * spec.seq_len))
    return TileShape.of(spec.block, rows, spec.seq_len)


def _matrix(x: Array, heads: Heads, rows: slice) -> Array:
    """Return the part [heads, rows, keys] of a score matrix."""
    spec = heads.spec
    return x.view(spec.heads, spec.batch, spec.queries, spec.keys)[heads.own, heads.sequence, rows]


def _tiles(spec: AttentionSpec) -> Iterator[tuple[Heads, slice]]:
    """Yield some heads and some of their rows, in order."""
    shape = _shape(spec)
    for heads in all_heads(spec.block, shape):
        for rows in row_steps(spec.seq_len, shape.queries):
            yield heads, rows


def product_plan(spec: AttentionSpec, **_: object) -> Plan:
    """Plan queries, keys, scores."""
    shape, block = _shape(spec), spec.block
    return [shape.of_queries(block), shape.of_keys(block), shape.scores(block)]


def gradients_plan(spec: AttentionSpec, **_: object) -> Plan:
    """Plan queries, keys, scores; a product as large as queries, one as large as keys, and the sum of the latter."""
    shape, block = _shape(spec), spec.block
    return [*product_plan(spec), shape.of_queries(block), shape.of_keys(block), shape.of_keys(block)]


def softmax_forward_plan(spec: AttentionSpec, **_: object) -> Plan:
    """Plan the mask, scores, a number for each row."""
    shape, block = _shape(spec), spec.block
    return [*mask_plan(block, shape), shape.scores(block), shape.line(block)]


def softmax_backward_plan(spec: AttentionSpec, **_: object) -> Plan:
    """Plan the mask, probabilities, their gradient, products of both, a number for each row."""
    shape, block = _shape(spec), spec.block
    return [*mask_plan(block, shape), *[shape.scores(block)] * 3, shape.line(block)]


class DeviceScores:
    """The kernels of `TorchDevice` for whole score matrices."""

    halves: bool

    def attention_scores_forward(self, q, k, scores, *, scratch, spec):
        of_q, of_k, of_scores = scratch.take_all(product_plan(spec))
        every = slice(0, spec.seq_len)
        for heads, rows in _tiles(spec):
            key = factor(of_k, heads.of_keys(k, every), halves=self.halves)
            query = factor(of_q, heads.of_queries(q, rows), halves=self.halves)
            score = shaped(of_scores, (heads.count, query.shape[1], spec.seq_len))
            multiply(heads.by_shared(query), key.mT, heads.by_shared(score))
            _matrix(scores, heads, rows).copy_(score.mul_(spec.multiplier))

    def attention_softmax_forward(self, scores, probs, *, documents=None, scratch, spec):
        *of_mask, of_scores, of_lines = scratch.take_all(softmax_forward_plan(spec))
        check_documents(documents, spec.seq_len)
        mask, every = Mask(spec.block, of_mask, documents), slice(0, spec.seq_len)
        for heads, rows in _tiles(spec):
            score = wide(of_scores, _matrix(scores, heads, rows))
            mask.apply(score, heads, rows, every)
            line = shaped(of_lines, (*score.shape[:2], 1))
            score.sub_(torch.amax(score, dim=2, keepdim=True, out=line)).exp_()
            score.div_(torch.sum(score, dim=2, keepdim=True, out=line))
            _matrix(probs, heads, rows).copy_(score)

    def attention_values_forward(self, probs, v, o, *, scratch, spec):
        of_o, of_v, of_probs = scratch.take_all(product_plan(spec))
        every = slice(0, spec.seq_len)
        for heads, rows in _tiles(spec):
            value = factor(of_v, heads.of_keys(v, every), halves=self.halves)
            prob = factor(of_probs, _matrix(probs, heads, rows), halves=self.halves)
            out = heads.of_queries(o, rows)
            product = shaped(of_o, out.shape)
            multiply(heads.by_shared(prob), value, heads.by_shared(product))
            out.copy_(product)

    def attention_values_backward(self, probs, v, do, dprobs, dv, *, scratch, spec):
        of_do, of_v, of_probs, _, of_term, of_sum = scratch.take_all(gradients_plan(spec))
        every = slice(0, spec.seq_len)
        for heads, rows in _tiles(spec):
            above = factor(of_do, heads.of_queries(do, rows), halves=self.halves)
            value = factor(of_v, heads.of_keys(v, every), halves=self.halves)
            shape = (heads.count, above.shape[1], spec.seq_len)
            dprob = shaped(of_probs, shape)
            multiply(heads.by_shared(above), value.mT, heads.by_shared(dprob))
            _matrix(dprobs, heads, rows).copy_(dprob)
            prob = factor(of_probs, _matrix(probs, heads, rows), halves=self.halves)
            term = shaped(of_term, value.shape)
            multiply(heads.by_shared(prob).mT, heads.by_shared(above), term)
            _sum_over_rows(term, of_sum, heads.of_keys(dv, every), rows)

    def attention_softmax_backward(self, probs, dprobs, dscores, *, documents=None, scratch, spec):
        *of_mask, of_probs, of_dprobs, of_products, of_lines = scratch.take_all(softmax_backward_plan(spec))
        check_documents(documents, spec.seq_len)
        mask, every = Mask(spec.block, of_mask, documents), slice(0, spec.seq_len)
        for heads, rows in _tiles(spec):
            hides = mask.hidden(heads.sequence, rows, every)
            prob, dprob = (wide(b, _matrix(x, heads, rows)) for b, x in ((of_probs, probs), (of_dprobs, dprobs)))
            if hides is not None:
                prob.masked_fill_(hides, 0)
                dprob.masked_fill_(hides, 0)
            product = torch.mul(prob, dprob, out=shaped(of_products, prob.shape))
            mean = torch.sum(product, dim=2, keepdim=True, out=shaped(of_lines, (*prob.shape[:2], 1)))
            gradient = dprob.sub_(mean).mul_(prob)
            if hides is not None:  # a NaN of its row is none of a key that is not seen
                gradient.masked_fill_(hides, 0)
            _matrix(dscores, heads, rows).copy_(gradient)

    def attention_scores_backward(self, q, k, dscores, dq, dk, *, scratch, spec):
        of_q, of_k, of_scores, of_dq, of_term, of_sum = scratch.take_all(gradients_plan(spec))
        every = slice(0, spec.seq_len)
        for heads, rows in _tiles(spec):
            query = factor(of_q, heads.of_queries(q, rows), halves=self.halves)
            key = factor(of_k, heads.of_keys(k, every), halves=self.halves)
            dscore = heads.by_shared(factor(of_scores, _matrix(dscores, heads, rows), halves=self.halves))
            gradient = shaped(of_dq, query.shape)
            multiply(dscore, key, heads.by_shared(gradient))
            heads.of_queries(dq, rows).copy_(gradient.mul_(spec.multiplier))
            term = shaped(of_term, key.shape)
            multiply(dscore.mT, heads.by_shared(query), term).mul_(spec.multiplier)
            _sum_over_rows(term, of_sum, heads.of_keys(dk, every), rows)


def _sum_over_rows(term: F32, buffer: Array, out: Array, rows: slice) -> None:
    """Add the part of some rows to a sum; after the last rows store it in `out` [heads, keys, head_dim]."""
    total = shaped(buffer, term.shape)
    # `_tiles` goes over all rows of some heads before the next heads, so one buffer serves all
    if rows.start == 0:
        total.copy_(term)
    else:
        total.add_(term)
    if rows.stop == out.shape[1]:
        out.copy_(total)
