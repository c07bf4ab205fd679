"""Attention of a block of queries to one block of keys after another, on BLAS.

It computes as `fast_attention` does for whole sequences: with a single block both give the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.targets.runtime.kernels import openblas
from ratrain.targets.runtime.kernels.fast.attention_block_loops import backward_block, deltas, finish, forward_block
from ratrain.targets.runtime.kernels.fast.fast_attention import (
    block_backward_plan,
    block_buffers,
    by_shared_head,
    mask_of,
    stored,
)

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionBlockSpec
    from ratrain.targets.runtime.arena.scratch import Plan
    from ratrain.targets.runtime.kernels.interface import F32
    from ratrain.targets.runtime.kernels.team import Team


def block_forward_plan(spec: AttentionBlockSpec, *, threads: int, **_: object) -> Plan:
    """Plan for each thread: keys transposed, values; queries, output; scores."""
    head, transposed, some, _line, scores = block_buffers(spec)
    return [transposed, head, some, some, scores] * threads


class FastAttentionBlocks:
    """The kernels of `Fast` for attention block by block."""

    team: Team

    def attention_partial_forward(self, q, k, v, acc, peak, total, *, documents=None, scratch, spec, accumulate):
        arrays, state, mask = stored(q, k, v), stored(acc, peak, total), mask_of(spec, documents)
        block = spec.queries, spec.first_query - spec.first_key, spec.group, spec.first_key

        def shared_head(sequence: int, kv_head: int, buffers: tuple[F32, ...]) -> None:
            forward_block(openblas.SGEMM, arrays, state, sequence, kv_head, block, mask, accumulate, buffers)

        by_shared_head(self.team, spec, block_forward_plan(spec, threads=self.team.threads), scratch, shared_head)

    def attention_partial_finish(self, acc, peak, total, o, lse, *, scratch, heads, head_dim):
        state, (out,) = stored(acc, peak, total), stored(o)
        self.team.run(lambda rows: finish(state, out, lse, rows.start, rows.stop), self.team.rows(o.shape))

    def attention_delta(self, o, do, delta, *, scratch, heads, head_dim):
        out, gradient = stored(o, do)
        self.team.run(lambda rows: deltas(out, gradient, delta, rows.start, rows.stop), self.team.rows(o.shape))

    def attention_partial_backward(
        self, q, k, v, lse, do, delta, dq, dk, dv, *, documents=None, scratch, spec, accumulate
    ):
        arrays, mask = stored(q, k, v, do, dq, dk, dv), mask_of(spec, documents)
        block = spec.queries, spec.first_query - spec.first_key, spec.group, spec.first_key

        def shared_head(sequence: int, kv_head: int, buffers: tuple[F32, ...]) -> None:
            backward_block(openblas.SGEMM, arrays, lse, delta, sequence, kv_head, block, mask, accumulate, buffers)

        by_shared_head(self.team, spec, block_backward_plan(spec, threads=self.team.threads), scratch, shared_head)
