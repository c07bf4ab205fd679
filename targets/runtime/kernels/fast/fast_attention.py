"""Attention on BLAS: for each head, blocks of queries against tiles of the keys that they see.

The scores of a tile stay in the second-level cache. The softmax runs from tile to tile with a running maximum (Milakov
and Gimelshein, "Online normalizer calculation for softmax", 2018), so memory is linear in the sequence length. The keys
and values of a head are converted once for all query heads that share them; threads share out the key-value heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.targets.runtime.arena.scratch import Buffer, Plan, Scratch
from ratrain.targets.runtime.kernels import openblas
from ratrain.targets.runtime.kernels.fast.attention_loops import KEYS, LOG2_E, QUERIES, backward_head, forward_head
from ratrain.targets.runtime.kernels.fast.fast_numba import bits
from ratrain.targets.runtime.kernels.shared import check_starts

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionBlockSpec, AttentionSpec
    from ratrain.targets.runtime.kernels.interface import F32, I32, Array
    from ratrain.targets.runtime.kernels.team import Team


def mask_of(
    spec: AttentionBlockSpec, documents: I32 | None = None
) -> tuple[np.float32, int, F32, np.float32 | None, I32 | None]:
    """Return the `mask` of the loops: scale, window, ALiBi's slopes, cap, starts of documents.

    The cap is multiplied by log2(e), or None. Without a window, one that hides nothing is given. Raises IndexError if a
    document does not start within its sequence, at its rows or before.
    """
    check_starts(documents, spec.queries, spec.first_query)
    slopes = np.array(spec.slopes, np.float32)
    window = spec.first_query + spec.queries if spec.window is None else spec.window
    softcap = None if spec.softcap is None else np.float32(spec.softcap * LOG2_E)
    return np.float32(spec.multiplier), window, slopes, softcap, documents


def block_buffers(spec: AttentionBlockSpec) -> tuple[Buffer, Buffer, Buffer, Buffer, Buffer]:
    """Return buffers for a head's keys, the same transposed, some queries, a number for each, a tile of scores."""
    rows = min(QUERIES, spec.queries)
    return (
        Buffer((spec.keys, spec.head_dim)),
        Buffer((spec.head_dim, spec.keys)),
        Buffer((rows, spec.head_dim)),
        Buffer((rows,)),
        Buffer((rows * min(KEYS, spec.keys),)),
    )


def forward_plan(spec: AttentionSpec, *, threads: int, **_: object) -> Plan:
    """Plan for each thread: keys transposed, values; queries, output; maxima, totals; scores."""
    head, transposed, some, line, scores = block_buffers(spec.block)
    return [transposed, head, some, some, line, line, scores] * threads


def backward_plan(spec: AttentionSpec, *, threads: int, **_: object) -> Plan:
    """Plan the gradients of whole sequences, which are one block."""
    return block_backward_plan(spec.block, threads=threads)


def block_backward_plan(spec: AttentionBlockSpec, *, threads: int, **_: object) -> Plan:
    """Plan for each thread: keys transposed, keys, values transposed, dk, dv; queries, do, dq; scores, dscores."""
    head, transposed, some, _line, scores = block_buffers(spec)
    return [transposed, head, transposed, head, head, some, some, some, scores, scores] * threads


def by_shared_head(
    team: Team,
    spec: AttentionSpec | AttentionBlockSpec,
    plan: Plan,
    scratch: Scratch,
    work: Callable[[int, int, tuple[F32, ...]], None],
) -> None:
    """Do `work(sequence, key-value head, buffers)` for all of them; each thread has its own buffers of the plan."""
    buffers = scratch.take_all(plan)
    each = len(buffers) // team.threads

    def part(numbered: tuple[int, slice]) -> None:
        number, indices = numbered
        mine = tuple(buffers[number * each : (number + 1) * each])
        for index in range(indices.start, indices.stop):
            work(*divmod(index, spec.kv_heads), mine)

    team.run(part, list(enumerate(team.ranges(spec.batch * spec.kv_heads))))


class FastAttention:
    """The attention kernels of `Fast`."""

    team: Team

    def attention_forward(self, q, k, v, o, lse, *, documents=None, scratch, spec):
        arrays, mask = stored(q, k, v, o), mask_of(spec.block, documents)

        def shared_head(sequence: int, kv_head: int, buffers: tuple[F32, ...]) -> None:
            forward_head(openblas.SGEMM, arrays, lse, sequence * spec.seq_len, kv_head, spec.group, mask, buffers)

        by_shared_head(self.team, spec, forward_plan(spec, threads=self.team.threads), scratch, shared_head)

    def attention_backward(self, q, k, v, o, lse, do, dq, dk, dv, delta, *, documents=None, scratch, spec):
        arrays, mask = stored(q, k, v, o, do, dq, dk, dv), mask_of(spec.block, documents)

        def shared_head(sequence: int, kv_head: int, buffers: tuple[F32, ...]) -> None:
            backward_head(
                openblas.SGEMM, arrays, lse, delta, sequence * spec.seq_len, kv_head, spec.group, mask, buffers
            )

        by_shared_head(self.team, spec, backward_plan(spec, threads=self.team.threads), scratch, shared_head)


def stored(*arrays: Array) -> tuple[Any, ...]:
    """View arrays as the loops take them."""
    return tuple(bits(array) for array in arrays)
