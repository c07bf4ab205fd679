"""Attention of a block of queries to a block of keys, in plain numpy; what it leaves is gone on with by the next block."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionBlockSpec
    from ratrain.targets.runtime.arena.scratch import Scratch
    from ratrain.targets.runtime.kernels.interface import F32, I32, Array

_LOG2_E, _LN2 = np.float32(math.log2(math.e)), np.float32(math.log(2))


class ReferenceAttentionBlocks:
    """The kernels of `ReferenceKernels` for attention block by block."""

    @quiet
    def attention_partial_forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        acc: F32,
        peak: F32,
        total: F32,
        *,
        documents: I32 | None = None,
        scratch: Scratch,  # noqa: ARG002
        spec: AttentionBlockSpec,
        accumulate: bool,
    ) -> None:
        """See `KERNELS["attention_partial_forward"]`."""
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
                    softmax = RunningSoftmax(peak[head, rows, None], total[head, rows, None], so_far, np.exp2)
                    for keys in block.key_tiles(queries):
                        score = block.scores(q, k, head, queries, keys) * _LOG2_E
                        softmax.take(score, f32(block.of_keys(v, head // spec.group, keys)))

    @quiet
    def attention_partial_finish(
        self,
        acc: F32,
        peak: F32,
        total: F32,
        o: Array,
        lse: F32,
        *,
        scratch: Scratch,  # noqa: ARG002
        heads: int,
        head_dim: int,
    ) -> None:
        """See `KERNELS["attention_partial_finish"]`."""
        for head in range(heads):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            for rows in tiles(len(o)):
                put(o[rows, columns], acc[rows, columns] / total[head, rows, None])
            lse[head] = peak[head] * _LN2 + np.log(total[head])

    @quiet
    def attention_delta(
        self,
        o: Array,
        do: Array,
        delta: F32,
        *,
        scratch: Scratch,  # noqa: ARG002
        heads: int,  # noqa: ARG002  delta says them
        head_dim: int,  # noqa: ARG002
    ) -> None:
        """See `KERNELS["attention_delta"]`."""
        put_delta(o, do, delta)

    @quiet
    def attention_partial_backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        lse: F32,
        do: Array,
        delta: F32,
        dq: F32,
        dk: F32,
        dv: F32,
        *,
        documents: I32 | None = None,
        scratch: Scratch,  # noqa: ARG002
        spec: AttentionBlockSpec,
        accumulate: bool,
    ) -> None:
        """See `KERNELS["attention_partial_backward"]`."""
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
                    of_q += gradients.of_queries(head, queries)
            for kv_head in range(spec.kv_heads):
                for keys in tiles(spec.keys):
                    shares = gradients.of_keys(kv_head, keys)
                    for out, share in zip((dk, dv), shares, strict=True):
                        of_keys = block.of_keys(out, kv_head, keys)
                        of_keys += share
