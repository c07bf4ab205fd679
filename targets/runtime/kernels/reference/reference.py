"""The kernels in plain numpy: short, and close to the formulas; `fast` is compared with them.

Work goes by blocks of rows, so that each temporary of numpy has at most `BLOCK_ELEMENTS` elements (or one row). Whole
matrices in float32 come from scratch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.targets.program.kernel_options import AdamWOptions, ProductOptions, RopeOptions
from ratrain.targets.program.per_kernel import PerKernel
from ratrain.targets.runtime.arena.scratch import Buffer, Plan
from ratrain.targets.runtime.kernels.reference.reference_attention import ReferenceAttention
from ratrain.targets.runtime.kernels.reference.reference_attention_blocks import ReferenceAttentionBlocks
from ratrain.targets.runtime.kernels.reference.reference_common import (
    HALF_RUN_ELEMENTS,
    add_by_keys,
    add_half_runs,
    f32,
    norm_weight,
    put,
    quiet,
    rotated_halves,
    row_blocks,
    sigmoid,
)
from ratrain.targets.runtime.kernels.reference.reference_experts import (
    ReferenceExperts,
    expert_gradients_plan,
    expert_product_plan,
)
from ratrain.targets.runtime.kernels.reference.reference_families import ReferenceFamilies, head_norm_backward_plan
from ratrain.targets.runtime.kernels.reference.reference_gpt import (
    ReferenceGpt,
    layernorm_backward_plan,
    position_backward_plan,
)
from ratrain.targets.runtime.kernels.reference.reference_head import (
    ReferenceHead,
    head_backward_from_logits_plan,
    head_backward_plan,
    head_forward_plan,
)
from ratrain.targets.runtime.kernels.reference.reference_nf4 import ReferenceNf4
from ratrain.targets.runtime.kernels.reference.reference_quantised import ReferenceQuantised
from ratrain.targets.runtime.kernels.reference.reference_scores import ReferenceScores
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


def _gemm_plan(a: Array, b: Array, out: Array, **_: object) -> Plan:
    operands = [Buffer(x.shape) for x in (a, b) if x.dtype != np.float32]
    return [Buffer(out.shape), *operands]


def _column_sum_plan(out: Array, **_: object) -> Plan:
    return [Buffer(out.shape)]


def _rmsnorm_backward_plan(dgamma: Array, **_: object) -> Plan:
    return [Buffer(dgamma.shape)]


def _embedding_backward_plan(tokens: I32, **_: object) -> Plan:
    return [Buffer(tokens.shape, np.int64)]


class ReferenceKernels(
    ReferenceAttention,
    ReferenceAttentionBlocks,
    ReferenceScores,
    ReferenceHead,
    ReferenceGpt,
    ReferenceFamilies,
    ReferenceExperts,
    ReferenceQuantised,
    ReferenceNf4,
    KernelSetBase,
):
    """`KernelSet` in plain numpy."""

    name = "reference"
    sums_halves = True
    plans = PerKernel(
        "scratch in 'reference'",
        {
            "gemm": _gemm_plan,
            "column_sum": _column_sum_plan,
            "rmsnorm_backward": _rmsnorm_backward_plan,
            "layernorm_backward": layernorm_backward_plan,
            "head_norm_backward": head_norm_backward_plan,
            "summed_norm_backward": head_norm_backward_plan,
            "embedding_backward": _embedding_backward_plan,
            "position_backward": position_backward_plan,
            "head_forward": head_forward_plan,
            "head_backward": head_backward_plan,
            "head_backward_from_logits": head_backward_from_logits_plan,
            **dict.fromkeys(("expert_rows", "expert_sums"), expert_product_plan),
            "expert_gradients": expert_gradients_plan,
        },
        never=(
            *(
                "rmsnorm_forward",
                "rope",
                "attention_forward",
                "attention_backward",
                "swiglu_forward",
                "swiglu_backward",
            ),
            *("row_squares", "row_products", "summed_norm_forward"),
            *("head_norm_forward", "geglu_forward", "geglu_backward", "relu2_forward", "relu2_backward", "scale"),
            *("layernorm_forward", "gelu_forward", "gelu_backward", "position_forward"),
            *("attention_scores_forward", "attention_softmax_forward", "attention_values_forward"),
            *("attention_values_backward", "attention_softmax_backward", "attention_scores_backward"),
            *("attention_partial_forward", "attention_partial_finish", "attention_delta", "attention_partial_backward"),
            *("embedding_forward", "zero", "cast", "group_columns", "add", "adamw", "mean_of_replicas", "all_finite"),
            *("quantise", "dequantise", "dequantise_nf4", "mean_of_quantised"),
            *("route_forward", "route_backward", "group_rows", "add_rows", "sigmoid_forward", "sigmoid_backward"),
            *("choice_sums", "weighted_swiglu_forward", "weighted_swiglu_backward"),
        ),
    )

    @quiet
    def gemm(self, a, b, out, *, scratch, **options):
        given = ProductOptions(**options)
        product, *buffers = scratch.take_all(_gemm_plan(a, b, out))
        left, right = a, b
        if a.dtype != np.float32:
            left = buffers.pop(0)
            np.copyto(left, a)
        if b.dtype != np.float32:
            right = buffers.pop(0)
            np.copyto(right, b)
        left, right = left.T if given.trans_a else left, right.T if given.trans_b else right
        if given.half_run is None:
            np.matmul(left, right, out=product)
        else:
            product.fill(0)
            for rows in row_blocks(len(out), out.shape[1], HALF_RUN_ELEMENTS):
                add_half_runs(left[rows], right, product[rows], given.half_run)
        for rows in row_blocks(*out.shape):
            value = product[rows]
            if given.accumulate:
                value += f32(out[rows])
            if given.bias is not None:
                value += f32(given.bias)
            if given.residual is not None:
                value += f32(given.residual[rows])
            put(out[rows], value)

    @quiet
    def column_sum(self, a, out, *, scratch, accumulate):
        (acc,) = scratch.take_all(_column_sum_plan(out))
        acc.fill(0)
        for rows in row_blocks(*a.shape):
            acc += f32(a[rows]).sum(axis=0)
        put(out, acc + f32(out) if accumulate else acc)

    @quiet
    def rmsnorm_forward(self, x, gamma, xn, rstd, *, scratch, eps, unit_offset=False):
        weight = norm_weight(gamma, unit_offset)
        for rows in row_blocks(*x.shape):
            block = f32(x[rows])
            rstd[rows] = np.float32(1) / np.sqrt(np.square(block).mean(axis=1) + np.float32(eps))
            put(xn[rows], block * rstd[rows, None] * weight)

    @quiet
    def rmsnorm_backward(
        self, dxn, x, gamma, rstd, dx, dgamma, *, scratch, residual=None, accumulate, unit_offset=False
    ):
        weight = norm_weight(gamma, unit_offset)
        (acc,) = scratch.take_all(_rmsnorm_backward_plan(dgamma))
        acc.fill(0)
        for rows in row_blocks(*x.shape):
            grad = f32(dxn[rows])
            normed = f32(x[rows]) * rstd[rows, None]
            acc += (grad * normed).sum(axis=0)
            weighted = grad * weight
            value = rstd[rows, None] * (weighted - normed * (weighted * normed).mean(axis=1, keepdims=True))
            put(dx[rows], value if residual is None else value + f32(residual[rows]))
        put(dgamma, acc + f32(dgamma) if accumulate else acc)

    @quiet
    def rope(self, x, *, documents=None, scratch, **options):
        turn = RopeOptions(**options)
        check_starts(documents, turn.seq_len, turn.first_position)
        cos, sin = self._rope_rows(*turn.table)
        sign = np.float32(-1 if turn.inverse else 1)
        for number, sequence in enumerate(x.reshape(-1, turn.seq_len, turn.heads, turn.head_dim)):
            halves = rotated_halves(sequence, turn.width, interleaved=turn.interleaved)
            for rows in row_blocks(turn.seq_len, turn.heads * turn.head_dim):
                low, high = (f32(half[rows]) for half in halves)
                position = np.arange(turn.first_position + rows.start, turn.first_position + rows.stop)
                if documents is not None:
                    position -= documents.reshape(-1, turn.seq_len)[number, rows]
                c, s = cos[position, None], sign * sin[position, None]
                rotated = low * c - high * s, high * c + low * s
                for half, value in zip(halves, rotated, strict=True):
                    put(half[rows], value)

    @quiet
    def swiglu_forward(self, gate, up, prod, *, scratch):
        for rows in row_blocks(*gate.shape):
            g = f32(gate[rows])
            put(prod[rows], g * sigmoid(g) * f32(up[rows]))

    @quiet
    def swiglu_backward(self, gate, up, dprod, dgate, dup, *, scratch):
        for rows in row_blocks(*gate.shape):
            g, u, d = f32(gate[rows]), f32(up[rows]), f32(dprod[rows])
            s = sigmoid(g)
            gate_gradient = d * u * s * (1 + g * (1 - s))
            up_gradient = d * g * s
            put(dgate[rows], gate_gradient)
            put(dup[rows], up_gradient)

    @quiet
    def embedding_forward(self, tokens, table, y, *, scratch, scale=1.0):
        check_tokens(tokens, table.shape[0])
        for rows in row_blocks(*y.shape):
            held = (tokens[rows] >= 0)[:, None]
            # a word of another rank is negative: any row of the table will do in its place
            found = f32(table[np.maximum(tokens[rows], 0)])
            put(y[rows], np.where(held, found * np.float32(scale), np.float32(0)))

    @quiet
    def embedding_backward(self, tokens, dy, dtable, *, scratch, accumulate, scale=1.0, padding_token=None):
        check_tokens(tokens, dtable.shape[0])
        if not accumulate:
            dtable.fill(0)
        (keys,) = scratch.take_all(_embedding_backward_plan(tokens))
        token_keys(tokens, keys)
        for held in held_keys(keys, padding_token):
            add_by_keys(held, dy, dtable, np.float32(scale))

    @quiet
    def adamw(self, master, m, v, grad, *, scratch, view=None, step, grad_multiplier, lr, **options):
        given = AdamWOptions(**options)
        step_size, root = np.float32(given.step_size(lr, step)), np.float32(given.root(step))
        beta2, eps = np.float32(given.beta2), np.float32(given.eps)
        for start, stop, decayed in decay_segments(len(master), given.decay):
            keep = np.float32(given.kept(lr, decayed=decayed))
            for part in row_blocks(stop - start, 1):
                at = slice(start + part.start, start + part.stop)
                g = f32(grad[at]) * np.float32(grad_multiplier)
                # AdamW (Loshchilov and Hutter, 2019): decay is apart from the gradient; both bias corrections are in
                # `step_size`, `root`
                m[at] += (g - m[at]) * np.float32(1 - given.beta1)
                v[at] = v[at] * beta2 + g * g * np.float32(1 - given.beta2)
                master[at] = master[at] * keep - step_size * (m[at] / (np.sqrt(v[at]) / root + eps))
        if view is not None:
            put(view, master)

    @quiet
    def mean_of_replicas(self, parts, out, *, scratch, accumulate, divisor):
        flat, flat_parts = out.reshape(-1), [part.reshape(-1) for part in parts]
        finite = True
        for at in row_blocks(out.size, 1):
            total = np.zeros(at.stop - at.start, np.float32)
            for part in flat_parts:
                finite = finite and bool(np.isfinite(part[at]).all())
                total += f32(part[at])
            total *= np.float32(1 / divisor)
            put(flat[at], total + f32(flat[at]) if accumulate else total)
            finite = finite and bool(np.isfinite(flat[at]).all())
        return finite

    @quiet  # a comparison of a signalling NaN that `ml_dtypes` makes
    def all_finite(self, a, *, scratch):
        flat = a.reshape(-1)
        return all(bool(np.isfinite(flat[at]).all()) for at in row_blocks(a.size, 1))

    @quiet
    def cast(self, src, dst, *, scratch):
        put(dst, src)

    def group_columns(self, src, dst, *, scratch, groups, inverse):
        put_columns(src, dst, groups, inverse=inverse)

    def zero(self, a, *, scratch):
        a.fill(0)

    @quiet
    def add(self, a, b, out, *, scratch, scale=1.0):
        left, right, flat = a.reshape(-1), b.reshape(-1), out.reshape(-1)
        for at in row_blocks(out.size, 1):
            put(flat[at], f32(left[at]) + np.float32(scale) * f32(right[at]))

    @quiet
    def scale(self, a, out, *, scratch, scale):
        source, flat = a.reshape(-1), out.reshape(-1)
        for at in row_blocks(out.size, 1):
            put(flat[at], np.float32(scale) * f32(source[at]))
