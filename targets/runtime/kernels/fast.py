"""The kernels at full speed: every product by BLAS on float32, everything else by fused numba loops.

float16 operands of a product are converted whole into scratch: converting by blocks would make BLAS pack the other
operand again for each. Nothing here starts threads; all loops and products release the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from targets.runtime.kernels import fast_flat, fast_rows
from targets.runtime.kernels.fast_attention import FastAttention, backward_plan, forward_plan
from targets.runtime.kernels.fast_head import FastHead, head_backward_plan, head_forward_plan
from targets.runtime.kernels.fast_numba import bits, flat
from targets.runtime.kernels.scratch import Buffer, Plan, Scratch
from targets.runtime.kernels.shared import KernelSetBase, check_indices, decay_segments, token_keys

if TYPE_CHECKING:
    from targets.runtime.kernels.interface import F32, I32, Array

BLOCK = 1 << 15
"""Elements that pass through several loops while they stay in the second-level cache."""


def _gemm_plan(
    a: Array,
    b: Array,
    out: Array,
    *,
    accumulate: bool = False,
    bias: Array | None = None,
    residual: Array | None = None,
    **_: object,
) -> Plan:
    """The operands in float32, then the product; each only where it is not there already."""
    operands = [Buffer(x.shape) for x in (a, b) if x.dtype != np.float32]
    direct = out.dtype == np.float32 and not accumulate and bias is None and residual is None
    return operands if direct else [*operands, Buffer(out.shape)]


def _column_sum_plan(out: Array, **_: object) -> Plan:
    return [Buffer(out.shape)]


def _rmsnorm_backward_plan(gamma: Array, **_: object) -> Plan:
    return [Buffer(gamma.shape), Buffer(gamma.shape)]


def _swiglu_backward_plan(gate: Array, **_: object) -> Plan:
    line = Buffer((min(gate.size, fast_flat.BLOCK),))
    return [line, line]


def _embedding_backward_plan(tokens: I32, dy: Array, **_: object) -> Plan:
    return [Buffer(tokens.shape, np.int64), Buffer((dy.shape[1],))]


def _mean_plan(out: Array, **_: object) -> Plan:
    return [Buffer((min(out.size, BLOCK),))]


class Fast(FastAttention, FastHead, KernelSetBase):
    """`KernelSet` on BLAS and numba."""

    name = "fast"
    plans = {  # noqa: RUF012  a ClassVar in the base
        "gemm": _gemm_plan,
        "column_sum": _column_sum_plan,
        "rmsnorm_backward": _rmsnorm_backward_plan,
        "attention_forward": forward_plan,
        "attention_backward": backward_plan,
        "swiglu_backward": _swiglu_backward_plan,
        "embedding_backward": _embedding_backward_plan,
        "head_forward": head_forward_plan,
        "head_backward": head_backward_plan,
        "mean_of_replicas": _mean_plan,
    }

    def gemm(
        self,
        a: Array,
        b: Array,
        out: Array,
        *,
        scratch: Scratch,
        trans_a: bool = False,
        trans_b: bool = False,
        accumulate: bool = False,
        bias: Array | None = None,
        residual: Array | None = None,
    ) -> None:
        """See `KernelSet.gemm`."""
        buffers = scratch.take_all(_gemm_plan(a, b, out, accumulate=accumulate, bias=bias, residual=residual))
        operands = []
        for x in (a, b):
            operand = x
            if x.dtype != np.float32:
                operand = buffers.pop(0)
                fast_flat.cast(flat(x), flat(operand))
            operands.append(operand)
        left, right = operands
        product = buffers[0] if buffers else out
        np.matmul(left.T if trans_a else left, right.T if trans_b else right, out=product)
        if buffers:
            stored = bits(out)
            fast_rows.store_product(
                product,
                stored,
                stored[0] if bias is None else bits(bias),
                bias is not None,
                stored if residual is None else bits(residual),
                residual is not None,
                accumulate,
            )

    def column_sum(self, a: Array, out: Array, *, scratch: Scratch, accumulate: bool) -> None:
        """See `KernelSet.column_sum`."""
        (acc,) = scratch.take_all(_column_sum_plan(out))
        acc.fill(0)
        fast_rows.column_sum(bits(a), acc)
        self._store_row(acc, out, accumulate)

    @staticmethod
    def _store_row(acc: F32, out: Array, accumulate: bool) -> None:
        """Set out = [out +] acc."""
        fast_flat.store_scaled(acc, bits(out), np.float32(1), accumulate)

    def rmsnorm_forward(
        self,
        x: Array,
        gamma: Array,
        xn: Array,
        rstd: F32,
        *,
        scratch: Scratch,  # noqa: ARG002
        eps: float,
    ) -> None:
        """See `KernelSet.rmsnorm_forward`."""
        fast_rows.rmsnorm_forward(bits(x), bits(gamma), bits(xn), rstd, np.float32(eps))

    def rmsnorm_backward(
        self,
        dxn: Array,
        x: Array,
        gamma: Array,
        rstd: F32,
        dx: Array,
        dgamma: Array,
        *,
        scratch: Scratch,
        residual: Array | None = None,
        accumulate: bool,
    ) -> None:
        """See `KernelSet.rmsnorm_backward`."""
        acc, line = scratch.take_all(_rmsnorm_backward_plan(gamma))
        acc.fill(0)
        stored = bits(dx)
        extra = stored if residual is None else bits(residual)
        fast_rows.rmsnorm_backward(
            bits(dxn), bits(x), bits(gamma), rstd, stored, extra, residual is not None, acc, line
        )
        self._store_row(acc, dgamma, accumulate)

    def rope(
        self,
        x: Array,
        *,
        scratch: Scratch,  # noqa: ARG002
        heads: int,
        head_dim: int,
        seq_len: int,
        theta: float,
        inverse: bool,
    ) -> None:
        """See `KernelSet.rope`."""
        cos, sin = self._rope_table(seq_len, head_dim, theta)
        fast_rows.rope(bits(x), cos, sin, np.float32(-1 if inverse else 1), heads)

    def swiglu_forward(self, gate: Array, up: Array, prod: Array, *, scratch: Scratch) -> None:  # noqa: ARG002
        """See `KernelSet.swiglu_forward`."""
        fast_rows.swiglu_forward(flat(gate), flat(up), flat(prod))

    def swiglu_backward(
        self, gate: Array, up: Array, dprod: Array, dgate: Array, dup: Array, *, scratch: Scratch
    ) -> None:
        """See `KernelSet.swiglu_backward`."""
        gate_line, up_line = scratch.take_all(_swiglu_backward_plan(gate))
        fast_rows.swiglu_backward(flat(gate), flat(up), flat(dprod), flat(dgate), flat(dup), gate_line, up_line)

    def embedding_forward(
        self,
        tokens: I32,
        table: Array,
        y: Array,
        *,
        scratch: Scratch,  # noqa: ARG002
    ) -> None:
        """See `KernelSet.embedding_forward`."""
        check_indices(tokens, table.shape[0])
        fast_rows.embedding_forward(tokens, bits(table), bits(y))

    def embedding_backward(self, tokens: I32, dy: Array, dtable: Array, *, scratch: Scratch, accumulate: bool) -> None:
        """See `KernelSet.embedding_backward`."""
        check_indices(tokens, dtable.shape[0])
        if not accumulate:
            dtable.fill(0)
        keys, acc = scratch.take_all(_embedding_backward_plan(tokens, dy))
        token_keys(tokens, keys)
        acc.fill(0)
        fast_rows.embedding_backward(keys, bits(dy), bits(dtable), acc)

    def adamw(
        self,
        master: F32,
        m: F32,
        v: F32,
        grad: Array,
        view: Array | None,
        *,
        scratch: Scratch,  # noqa: ARG002
        step: int,
        grad_multiplier: float,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decay: Sequence[tuple[int, int]],
    ) -> None:
        """See `KernelSet.adamw`."""
        gradient = flat(grad)
        for start, stop, decayed in decay_segments(len(master), decay):
            for first in range(start, stop, BLOCK):
                at = slice(first, min(first + BLOCK, stop))
                fast_flat.adamw(
                    master[at],
                    m[at],
                    v[at],
                    gradient[at],
                    np.float32(grad_multiplier),
                    np.float32(1 - lr * weight_decay) if decayed else np.float32(1),
                    np.float32(lr / (1 - beta1**step)),
                    np.float32((1 - beta2**step) ** 0.5),
                    np.float32(beta2),
                    np.float32(1 - beta1),
                    np.float32(1 - beta2),
                    np.float32(eps),
                )
                if view is not None:
                    fast_flat.cast(master[at], bits(view[at]))

    def mean_of_replicas(
        self, parts: Sequence[Array], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float
    ) -> bool:
        """See `KernelSet.mean_of_replicas`."""
        (buffer,) = scratch.take_all(_mean_plan(out))
        stored, rows = flat(out), [flat(part) for part in parts]
        finite = True
        for start in range(0, stored.size, BLOCK):
            at = slice(start, min(start + BLOCK, stored.size))
            acc = buffer[: at.stop - start]
            acc.fill(0)
            for row in rows:
                fast_flat.add_part(acc, row[at])
            fast_flat.store_scaled(acc, stored[at], np.float32(1 / divisor), accumulate)
            # a sum with an infinity or a NaN in it is not finite: the result tells about the parts too
            finite &= fast_flat.all_finite(stored[at])
        return finite

    def all_finite(self, a: Array, *, scratch: Scratch) -> bool:  # noqa: ARG002
        """See `KernelSet.all_finite`."""
        return bool(fast_flat.all_finite(flat(a)))

    def cast(self, src: Array, dst: Array, *, scratch: Scratch) -> None:  # noqa: ARG002
        """See `KernelSet.cast`."""
        fast_flat.cast(flat(src), flat(dst))

    def zero(self, a: Array, *, scratch: Scratch) -> None:  # noqa: ARG002
        """See `KernelSet.zero`."""
        a.fill(0)

    def add(self, a: Array, b: Array, out: Array, *, scratch: Scratch) -> None:  # noqa: ARG002
        """See `KernelSet.add`."""
        into_a, into_b = np.may_share_memory(a, out), np.may_share_memory(b, out)
        if into_a and into_b:
            fast_flat.double(flat(out))
        elif into_a:
            fast_flat.add_into(flat(out), flat(b))
        elif into_b:
            fast_flat.add_into(flat(out), flat(a))
        else:
            fast_flat.add(flat(a), flat(b), flat(out))
