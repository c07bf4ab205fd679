"""Attention of a block of queries to one block of keys after another, in plain numpy.

The state between two blocks is the running softmax: `acc`, `peak` (in units of ln 2: weights are powers of two) and
`total`.
"""

from __future__ import annotations

import math

import numpy as np

from ratrain.targets.runtime.kernels.reference.reference_attention import (
    BlockGradients,
    QueryKeyTiles,
    RunningSoftmax,
    put_delta,
    tiles,
)
from ratrain.targets.runtime.kernels.reference.reference_common import f32, put, quiet
from ratrain.targets.runtime.kernels.shared import check_starts

_LOG2_E, _LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2))


class ReferenceAttentionBlocks:
    """The kernels of `ReferenceKernels` for attention block by block."""

    @quiet
    def attention_partial_forward(self, q, k, v, acc, peak, total, *, documents=None, scratch, spec, accumulate):
        check_starts(documents, spec.queries, spec.first_query)
        if not accumulate:
            acc.fill(0)
            peak.fill(-np.inf)
            total.fill(0)
        for sequence in range(spec.batch):
            block = QueryKeyTiles(spec, sequence, documents)
            for head in range(spec.heads):
                for queries in tiles(spec.queries):
                    rows = block.rows(queries)
                    so_far = block.of_queries(acc, head, queries)
                    # views of acc, peak and total: `take` updates them in place, and the next block goes on from there
                    softmax = RunningSoftmax(peak[head, rows, None], total[head, rows, None], so_far, np.exp2)
                    for keys in block.key_tiles(queries):
                        score = block.scores(q, k, head, queries, keys) * _LOG2_E
                        softmax.take(score, f32(block.of_keys(v, head // spec.group, keys)))

    @quiet
    def attention_partial_finish(self, acc, peak, total, o, lse, *, scratch, heads, head_dim):
        for head in range(heads):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            for rows in tiles(len(o)):
                put(o[rows, columns], acc[rows, columns] / total[head, rows, None])
            lse[head] = peak[head] * _LN2 + np.log(total[head])

    @quiet
    def attention_delta(self, o, do, delta, *, scratch, heads, head_dim):
        put_delta(o, do, delta)

    @quiet
    def attention_partial_backward(
        self, q, k, v, lse, do, delta, dq, dk, dv, *, documents=None, scratch, spec, accumulate
    ):
        check_starts(documents, spec.queries, spec.first_query)
        if not accumulate:
            dk.fill(0)
            dv.fill(0)
        for sequence in range(spec.batch):
            block = QueryKeyTiles(spec, sequence, documents)
            gradients = BlockGradients(block, q, k, v, lse, do, delta)
            for head in range(spec.heads):
                for queries in tiles(spec.queries):
                    of_q = block.of_queries(dq, head, queries)
                    # dq is a sum over blocks of keys, so it is always added to
                    of_q += gradients.of_queries(head, queries)
            for kv_head in range(spec.kv_heads):
                for keys in tiles(spec.keys):
                    shares = gradients.of_keys(kv_head, keys)
                    for out, share in zip((dk, dv), shares, strict=True):
                        of_keys = block.of_keys(out, kv_head, keys)
                        of_keys += share
