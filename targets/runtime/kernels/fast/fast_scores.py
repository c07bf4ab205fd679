"""Attention with a whole score matrix, on BLAS: products by key-value heads, softmax by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels import openblas
from ratrain.targets.runtime.kernels.fast import score_loops
from ratrain.targets.runtime.kernels.fast.fast_attention import by_shared_head, mask_of, stored

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionSpec
    from ratrain.targets.runtime.kernels.interface import F32, Array
    from ratrain.targets.runtime.kernels.team import Team


def _buffers(spec: AttentionSpec) -> tuple[Buffer, Buffer, Buffer, Buffer]:
    """Return buffers for a head's keys, the same transposed, a block of queries, its scores."""
    rows = min(score_loops.ROWS, spec.seq_len)
    return (
        Buffer((spec.seq_len, spec.head_dim)),
        Buffer((spec.head_dim, spec.seq_len)),
        Buffer((rows, spec.head_dim)),
        Buffer((rows, spec.seq_len)),
    )


def scores_forward_plan(spec: AttentionSpec, *, threads: int, **_: object) -> Plan:
    """Plan for each thread: keys transposed, queries, scores."""
    _head, transposed, block, lines = _buffers(spec)
    return [transposed, block, lines] * threads


def softmax_forward_plan(spec: AttentionSpec, *, threads: int, **_: object) -> Plan:
    """Plan a row for each thread."""
    return [Buffer((threads, spec.seq_len))]


def values_forward_plan(spec: AttentionSpec, *, threads: int, **_: object) -> Plan:
    """Plan for each thread: values, probabilities, output."""
    head, _transposed, block, lines = _buffers(spec)
    return [head, lines, block] * threads


def values_backward_plan(spec: AttentionSpec, *, threads: int, **_: object) -> Plan:
    """Plan for each thread: values transposed, dv, do, probabilities or their gradient."""
    head, transposed, block, lines = _buffers(spec)
    return [transposed, head, block, lines] * threads


def scores_backward_plan(spec: AttentionSpec, *, threads: int, **_: object) -> Plan:
    """Plan for each thread: keys, dk, queries or their gradient, the gradient of scores."""
    head, _transposed, block, lines = _buffers(spec)
    return [head, head, block, lines] * threads


class FastScores:
    """The kernels of `Fast` for whole score matrices."""

    team: Team

    def attention_scores_forward(self, q, k, scores, *, scratch, spec):
        arrays, (scale, *_) = stored(q, k, scores), mask_of(spec.block)

        def shared_head(sequence: int, kv_head: int, buffers: tuple[F32, ...]) -> None:
            score_loops.scores_forward(
                openblas.SGEMM, arrays, sequence * spec.seq_len, kv_head, spec.group, scale, buffers
            )

        by_shared_head(self.team, spec, scores_forward_plan(spec, threads=self.team.threads), scratch, shared_head)

    def _by_rows(self, matrix: Array, work: Callable[[int, slice], None]) -> None:
        """Do `work(thread, rows)` for all rows of a matrix."""

        def part(numbered: tuple[int, slice]) -> None:
            work(*numbered)

        self.team.run(part, list(enumerate(self.team.rows(matrix.shape))))

    def attention_softmax_forward(self, scores, probs, *, documents=None, scratch, spec):
        (lines,) = scratch.take_all(softmax_forward_plan(spec, threads=self.team.threads))
        arrays, mask, tokens = stored(scores, probs), mask_of(spec.block, documents), spec.batch * spec.seq_len

        def rows_of(thread: int, rows: slice) -> None:
            score_loops.softmax_forward(arrays, rows.start, rows.stop, tokens, mask, lines[thread])

        self._by_rows(scores, rows_of)

    def attention_values_forward(self, probs, v, o, *, scratch, spec):
        arrays = stored(probs, v, o)

        def shared_head(sequence: int, kv_head: int, buffers: tuple[F32, ...]) -> None:
            score_loops.values_forward(openblas.SGEMM, arrays, sequence * spec.seq_len, kv_head, spec.group, buffers)

        by_shared_head(self.team, spec, values_forward_plan(spec, threads=self.team.threads), scratch, shared_head)

    def attention_values_backward(self, probs, v, do, dprobs, dv, *, scratch, spec):
        arrays = stored(probs, v, do, dprobs, dv)

        def shared_head(sequence: int, kv_head: int, buffers: tuple[F32, ...]) -> None:
            score_loops.values_backward(openblas.SGEMM, arrays, sequence * spec.seq_len, kv_head, spec.group, buffers)

        by_shared_head(self.team, spec, values_backward_plan(spec, threads=self.team.threads), scratch, shared_head)

    def attention_softmax_backward(self, probs, dprobs, dscores, *, documents=None, scratch, spec):
        arrays, tokens = stored(probs, dprobs, dscores), spec.batch * spec.seq_len
        mask = mask_of(spec.block, documents)

        def rows_of(_thread: int, rows: slice) -> None:
            score_loops.softmax_backward(arrays, rows.start, rows.stop, tokens, mask)

        self._by_rows(probs, rows_of)

    def attention_scores_backward(self, q, k, dscores, dq, dk, *, scratch, spec):
        arrays, (scale, *_) = stored(q, k, dscores, dq, dk), mask_of(spec.block)

        def shared_head(sequence: int, kv_head: int, buffers: tuple[F32, ...]) -> None:
            score_loops.scores_backward(
                openblas.SGEMM, arrays, sequence * spec.seq_len, kv_head, spec.group, scale, buffers
            )

        by_shared_head(self.team, spec, scores_backward_plan(spec, threads=self.team.threads), scratch, shared_head)
