"""The kernels at full speed: every product by BLAS in float32, everything else by fused numba loops.

16-bit operands of a product are converted whole into scratch: with conversion by blocks, BLAS would pack the other
operand again for each. All loops and products release the interpreter's lock; the threads of the set's team share them
out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from ratrain.ratrain_ir.support.loops import is_kept
from ratrain.targets.program.kernel_options import AdamWOptions, ProductOptions, RopeOptions
from ratrain.targets.program.per_kernel import PerKernel
from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.fast import fast_flat, fast_rows
from ratrain.targets.runtime.kernels.fast.attention_loops import backward_head, forward_head
from ratrain.targets.runtime.kernels.fast.blas import share_product
from ratrain.targets.runtime.kernels.fast.fast_attention import (
    FastAttention,
    backward_plan,
    block_backward_plan,
    forward_plan,
)
from ratrain.targets.runtime.kernels.fast.fast_attention_blocks import FastAttentionBlocks, block_forward_plan
from ratrain.targets.runtime.kernels.fast.fast_experts import (
    FastExperts,
    choice_sums_plan,
    expert_gradients_plan,
    expert_rows_plan,
    expert_sums_plan,
)
from ratrain.targets.runtime.kernels.fast.fast_gpt import FastGpt, layernorm_backward_plan, position_backward_plan
from ratrain.targets.runtime.kernels.fast.fast_head import (
    FastHead,
    head_backward_from_logits_plan,
    head_backward_plan,
    head_forward_plan,
)
from ratrain.targets.runtime.kernels.fast.fast_mlp import FastMlp, gated_backward_plan
from ratrain.targets.runtime.kernels.fast.fast_nf4 import FastNf4
from ratrain.targets.runtime.kernels.fast.fast_norms import FastNorms, rmsnorm_backward_plan, summed_norm_backward_plan
from ratrain.targets.runtime.kernels.fast.fast_numba import bits, flat, multiplier
from ratrain.targets.runtime.kernels.fast.fast_quantised import (
    FastQuantised,
    dequantise_plan,
    mean_of_quantised_plan,
    quantise_plan,
)
from ratrain.targets.runtime.kernels.fast.fast_scores import (
    FastScores,
    scores_backward_plan,
    scores_forward_plan,
    softmax_forward_plan,
    values_backward_plan,
    values_forward_plan,
)
from ratrain.targets.runtime.kernels.fast.half_runs import share_half_runs
from ratrain.targets.runtime.kernels.fast.row_sums import row_groups, store_sums, sum_groups
from ratrain.targets.runtime.kernels.shared import (
    KernelSetBase,
    check_starts,
    check_tokens,
    decay_segments,
    held_keys,
    put_columns,
    token_keys,
)

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import I32, Array

BLOCK = 1 << 15
"""Elements that pass through several loops while they stay in the second-level cache."""


def gemm_plan(a: Array, b: Array, out: Array, *, threads: int = 1, **options: Any) -> Plan:
    """Plan the operands in float32, then the product; each only if it is not float32, or cannot be stored directly.

    For sums in float16 the operands are op(b) in float32, and the sums of a run of one row for each thread.
    """
    given = ProductOptions(**options)
    operands = [Buffer(x.shape) for x in (a, b) if x.dtype != np.float32]
    if given.half_run is not None:
        operands = [Buffer((b.size // out.shape[1], out.shape[1])), Buffer((threads, out.shape[1]))]
    return operands if out.dtype == np.float32 and given.is_plain else [*operands, Buffer(out.shape)]


def _column_sum_plan(a: Array, out: Array, **_: object) -> Plan:
    """Plan one sum for each group of rows, then their sum."""
    return [Buffer((row_groups(len(a)), out.size)), Buffer(out.shape)]


def _rope_plan(threads: int, x: Array | None = None, documents: Array | None = None, **options: Any) -> Plan:
    """Plan a head's turning elements for each thread, as two halves."""
    del x, documents
    return [Buffer((threads, 2, RopeOptions(**options).width // 2))]


def _embedding_backward_plan(tokens: I32, dy: Array, **_: object) -> Plan:
    return [Buffer(tokens.shape, np.int64), Buffer((dy.shape[1],))]


def _mean_plan(out: Array, *, threads: int, **_: object) -> Plan:
    return [Buffer((threads, min(out.size, BLOCK)))]


class Fast(
    FastAttention,
    FastAttentionBlocks,
    FastScores,
    FastHead,
    FastNorms,
    FastMlp,
    FastGpt,
    FastQuantised,
    FastNf4,
    FastExperts,
    KernelSetBase,
):
    """`KernelSet` on BLAS and numba."""

    name = "fast"
    threaded = True
    sums_halves = True
    plans = PerKernel(
        "scratch in 'fast'",
        {
            "gemm": gemm_plan,
            "column_sum": _column_sum_plan,
            "rope": _rope_plan,
            "rmsnorm_backward": rmsnorm_backward_plan,
            "head_norm_backward": rmsnorm_backward_plan,
            "summed_norm_backward": summed_norm_backward_plan,
            "layernorm_backward": layernorm_backward_plan,
            "attention_forward": forward_plan,
            "attention_backward": backward_plan,
            "attention_partial_forward": block_forward_plan,
            "attention_partial_backward": block_backward_plan,
            "swiglu_backward": gated_backward_plan,
            "geglu_backward": gated_backward_plan,
            "embedding_backward": _embedding_backward_plan,
            "position_backward": position_backward_plan,
            "head_forward": head_forward_plan,
            "head_backward": head_backward_plan,
            "head_backward_from_logits": head_backward_from_logits_plan,
            "attention_scores_forward": scores_forward_plan,
            "attention_softmax_forward": softmax_forward_plan,
            "attention_values_forward": values_forward_plan,
            "attention_values_backward": values_backward_plan,
            "attention_scores_backward": scores_backward_plan,
            "expert_rows": expert_rows_plan,
            "expert_sums": expert_sums_plan,
            "choice_sums": choice_sums_plan,
            "expert_gradients": expert_gradients_plan,
            "weighted_swiglu_backward": gated_backward_plan,
            "mean_of_replicas": _mean_plan,
            "quantise": quantise_plan,
            "dequantise": dequantise_plan,
            "mean_of_quantised": mean_of_quantised_plan,
        },
        never=(
            *("rmsnorm_forward", "layernorm_forward", "swiglu_forward", "gelu_forward", "gelu_backward"),
            *("row_squares", "row_products", "summed_norm_forward"),
            *("head_norm_forward", "geglu_forward", "relu2_forward", "relu2_backward", "scale"),
            *("embedding_forward", "position_forward", "attention_softmax_backward"),
            *("attention_partial_finish", "attention_delta"),
            *("zero", "cast", "group_columns", "add", "adamw", "all_finite"),
            *("route_forward", "route_backward", "group_rows", "add_rows", "sigmoid_forward", "sigmoid_backward"),
            *("weighted_swiglu_forward", "dequantise_nf4"),
        ),
    )

    def compiles_for(self, kernels: Collection[str]) -> bool:
        """Tell whether running these kernels compiles loops that are not kept on disk.

        It looks at one loop of a kernel (`_ALWAYS`); kernels that a subclass has otherwise are left out.
        """
        own = type(self)
        ours = (name for name in kernels if name in _ALWAYS and getattr(own, name) is getattr(Fast, name))
        return not all(is_kept(_ALWAYS[name]) for name in ours)

    def gemm(self, a, b, out, *, scratch, **options):
        given = ProductOptions(**options)
        buffers = scratch.take_all(gemm_plan(a, b, out, threads=self.team.threads, **options))
        if given.half_run is not None:
            right, sums = buffers.pop(0), buffers.pop(0)
            np.copyto(right, b.T if given.trans_b else b)
        else:
            left, right = (x if x.dtype == np.float32 else buffers.pop(0) for x in (a, b))
            self._cast(*((x, operand) for x, operand in ((a, left), (b, right)) if operand is not x))
        product = buffers[0] if buffers else out
        stored = bits(out)
        has_bias, has_residual = given.bias is not None, given.residual is not None
        added = bits(given.bias) if has_bias else stored[0]
        extra = bits(given.residual) if has_residual else stored

        def store(rows: slice) -> None:
            at, more = stored[rows], extra[rows]
            fast_rows.store_product(product[rows], at, added, has_bias, more, has_residual, given.accumulate)

        then = store if buffers else None
        if given.half_run is None:
            left, right = left.T if given.trans_a else left, right.T if given.trans_b else right
            share_product(self.team, left, right, product, then)
        else:
            share_half_runs(self.team, bits(a), given.trans_a, right, given.half_run, sums, product, then)

    def _cast(self, *pairs: tuple[Array, Array]) -> None:
        """Set the second array of each pair to the first, all of them in one hand-over to the threads."""
        rows = [(flat(src), flat(dst)) for src, dst in pairs]

        def part(ranges: tuple[slice | None, ...]) -> None:
            for (source, stored), elements in zip(rows, ranges, strict=True):
                if elements is not None:
                    fast_flat.cast(source[elements], stored[elements])

        self.team.run(part, list(zip_longest(*(self.team.rows(stored.shape) for _, stored in rows))))

    def column_sum(self, a, out, *, scratch, accumulate):
        sums, total = scratch.take_all(_column_sum_plan(a, out))
        stored = bits(a)
        sums.fill(0)
        sum_groups(self.team, lambda group, rows: fast_rows.column_sum(stored[rows], sums[group]), len(a))
        store_sums(sums, total, out, accumulate)

    def rope(self, x, *, documents=None, scratch, **options):
        turn = RopeOptions(**options)
        check_starts(documents, turn.seq_len, turn.first_position)
        cos, sin = self._rope_rows(*turn.table)
        rotate = fast_rows.rope_interleaved if turn.interleaved else fast_rows.rope
        rows = bits(x).reshape(-1, turn.seq_len, turn.heads * turn.head_dim)
        sign = np.float32(-1 if turn.inverse else 1)
        (lines,) = scratch.take_all(_rope_plan(threads=self.team.threads, **options))
        # shared out by positions, not by rows: each part uses its rows of the table in every sequence

        def part(numbered: tuple[int, slice]) -> None:
            thread, positions = numbered
            first = turn.first_position + positions.start
            for number, sequence in enumerate(rows):
                starts = None if documents is None else documents.reshape(-1, turn.seq_len)[number, positions]
                rotate(sequence[positions], cos, sin, sign, turn.heads, starts, first, lines[thread])

        self.team.run(part, list(enumerate(self.team.rows(rows.shape[1:]))))

    def embedding_forward(self, tokens, table, y, *, scratch, scale=1.0):
        check_tokens(tokens, table.shape[0])
        fast_rows.embedding_forward(tokens, bits(table), bits(y), multiplier(scale))

    def embedding_backward(self, tokens, dy, dtable, *, scratch, accumulate, scale=1.0, padding_token=None):
        check_tokens(tokens, dtable.shape[0])
        if not accumulate:
            dtable.fill(0)
        keys, acc = scratch.take_all(_embedding_backward_plan(tokens, dy))
        token_keys(tokens, keys)
        acc.fill(0)
        for held in held_keys(keys, padding_token):
            fast_rows.embedding_backward(held, bits(dy), bits(dtable), acc, multiplier(scale))

    def adamw(self, master, m, v, grad, *, scratch, view=None, step, grad_multiplier, lr, **options):
        given, gradient = AdamWOptions(**options), flat(grad)
        blocks = [
            (slice(first, min(first + BLOCK, stop)), decayed)
            for start, stop, decayed in decay_segments(len(master), given.decay)
            for first in range(start, stop, BLOCK)
        ]

        def part(mine: slice) -> None:
            for at, decayed in blocks[mine]:
                fast_flat.adamw(
                    master[at],
                    m[at],
                    v[at],
                    gradient[at],
                    np.float32(grad_multiplier),
                    np.float32(given.kept(lr, decayed=decayed)),
                    np.float32(given.step_size(lr, step)),
                    np.float32(given.root(step)),
                    np.float32(given.beta2),
                    np.float32(1 - given.beta1),
                    np.float32(1 - given.beta2),
                    np.float32(given.eps),
                )
                if view is not None:
                    fast_flat.cast(master[at], bits(view[at]))

        self.team.run(part, self.team.ranges(len(blocks)))

    def mean_of_replicas(self, parts, out, *, scratch, accumulate, divisor):
        (buffers,) = scratch.take_all(_mean_plan(out, threads=self.team.threads))
        stored, rows, factor = flat(out), [flat(part) for part in parts], np.float32(1 / divisor)

        def part(numbered: tuple[int, slice]) -> bool:
            number, elements = numbered
            finite = True
            for start in range(elements.start, elements.stop, BLOCK):
                at = slice(start, min(start + BLOCK, elements.stop))
                if len(rows) == 1:
                    fast_flat.store_scaled(rows[0][at], stored[at], factor, accumulate)
                else:
                    acc = buffers[number, : at.stop - start]
                    acc.fill(0)
                    for row in rows:
                        fast_flat.add_part(acc, row[at])
                    fast_flat.store_scaled(acc, stored[at], factor, accumulate)
                # an infinity or NaN in a part makes the sum not finite, so that only the result is checked
                finite &= fast_flat.all_finite(stored[at])
            return finite

        return all(self.team.run(part, list(enumerate(self.team.rows(stored.shape)))))

    def all_finite(self, a, *, scratch):
        return bool(fast_flat.all_finite(flat(a)))

    def cast(self, src, dst, *, scratch):
        self._cast((src, dst))

    def group_columns(self, src, dst, *, scratch, groups, inverse):
        put_columns(src, dst, groups, inverse=inverse)

    def zero(self, a, *, scratch):
        a.fill(0)

    def add(self, a, b, out, *, scratch, scale=1.0):
        into_a, into_b, factor = np.may_share_memory(a, out), np.may_share_memory(b, out), multiplier(scale)
        if into_a and into_b:
            fast_flat.add_itself(flat(out), factor)
        elif into_a:
            fast_flat.add_into(flat(out), None, flat(b), factor)
        elif into_b:
            fast_flat.add_into(flat(out), factor, flat(a), None)
        else:
            fast_flat.add(flat(a), flat(b), factor, flat(out))

    def scale(self, a, out, *, scratch, scale):
        source, stored, factor, into_a = flat(a), flat(out), np.float32(scale), np.may_share_memory(a, out)

        def part(elements: slice) -> None:
            if into_a:
                fast_flat.scale_itself(stored[elements], factor)
            else:
                fast_flat.scale(source[elements], stored[elements], factor)

        self.team.run(part, self.team.rows(stored.shape))


_ALWAYS: Mapping[str, Any] = {
    "column_sum": fast_rows.column_sum,
    "rmsnorm_forward": fast_rows.rmsnorm_forward,
    "rmsnorm_backward": fast_rows.rmsnorm_backward,
    "swiglu_forward": fast_rows.swiglu_forward,
    "swiglu_backward": fast_rows.swiglu_backward,
    "embedding_forward": fast_rows.embedding_forward,
    "embedding_backward": fast_rows.embedding_backward,
    "attention_forward": forward_head,
    "attention_backward": backward_head,
}
"""A loop that a kernel of a pass runs whatever its options are.

Loops that only some options need are left out: they might never be kept, and each run would expect to compile them.
"""
