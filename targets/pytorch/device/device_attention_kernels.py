"""The attention kernels on tensors: for whole sequences, and for a block of queries and a block of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ratrain.targets.pytorch.device.device_attention import (
    LN2,
    DeviceBlockGradients,
    DeviceRunningSoftmax,
    backward_plan,
    forward_plan,
)
from ratrain.targets.pytorch.device.device_common import chunk_buffers, chunk_rows, row_chunks, row_steps, shaped, wide
from ratrain.targets.pytorch.device.device_tiles import all_heads
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.program.attention_spec import AttentionBlockSpec, AttentionSpec
    from ratrain.targets.pytorch.device.device_common import F32, Array
    from ratrain.targets.runtime.arena.scratch import Plan


def attention_forward_plan(spec: AttentionSpec, **_: object) -> Plan:
    """Plan the whole sequences as one block."""
    return forward_plan(spec.block)


def attention_backward_plan(spec: AttentionSpec, *, halves: bool, **_: object) -> Plan:
    """Plan sums of products of rows, then the gradients of one block."""
    return [
        *_delta_plan(spec.batch * spec.seq_len, spec.heads, spec.head_dim),
        *backward_plan(spec.block, halves=halves),
    ]


def partial_forward_plan(spec: AttentionBlockSpec, **_: object) -> Plan:
    """Plan one block."""
    return forward_plan(spec)


def partial_backward_plan(spec: AttentionBlockSpec, *, halves: bool, **_: object) -> Plan:
    """Plan the gradients of one block."""
    return backward_plan(spec, halves=halves)


def partial_finish_plan(o: Array, **_: object) -> Plan:
    """Plan some rows."""
    return chunk_buffers(1, *o.shape)


def delta_plan(o: Array, *, heads: int, head_dim: int, **_: object) -> Plan:
    """Plan some rows of o and do, and their sums by heads."""
    return _delta_plan(o.shape[0], heads, head_dim)


def _delta_plan(rows: int, heads: int, head_dim: int) -> Plan:
    width = heads * head_dim
    return [*chunk_buffers(2, rows, width), Buffer((chunk_rows(rows, width) * heads,))]


def _put_delta(o: Array, do: Array, delta: F32, buffers: list[Array]) -> None:
    """Set delta[heads, T] = rowsum(do * o) of each head."""
    for rows in row_chunks(*o.shape):
        product = wide(buffers[0], do[rows]).mul_(wide(buffers[1], o[rows]))
        sums = shaped(buffers[2], (len(product), len(delta)))
        torch.sum(product.view(len(product), len(delta), -1), dim=2, out=sums)
        delta[:, rows].copy_(sums.T)


class DeviceAttention:
    """The attention kernels of `TorchDevice`."""

    halves: bool

    def attention_forward(self, q, k, v, o, lse, *, documents=None, scratch, spec):
        softmax = DeviceRunningSoftmax(spec.block, documents, scratch, halves=self.halves)
        for heads in all_heads(spec.block, softmax.shape):
            for queries in row_steps(spec.seq_len, softmax.shape.queries):
                softmax.begin(heads, q, queries)
                softmax.run(k, v)
                heads.of_queries(o, queries).copy_(softmax.acc.div_(softmax.total))
                softmax.of_rows(lse).copy_(softmax.total.log_().add_(softmax.peak.mul_(LN2)))

    def attention_backward(self, q, k, v, o, lse, do, dq, dk, dv, delta, *, documents=None, scratch, spec):
        buffers = scratch.take_all(_delta_plan(len(o), spec.heads, spec.head_dim))
        _put_delta(o, do, delta, buffers)
        DeviceBlockGradients(spec.block, (q, k, v, do, lse, delta), documents, scratch, halves=self.halves).run(
            dq, dk, dv
        )

    def attention_partial_forward(self, q, k, v, acc, peak, total, *, documents=None, scratch, spec, accumulate):
        softmax = DeviceRunningSoftmax(spec, documents, scratch, halves=self.halves)
        for heads in all_heads(spec, softmax.shape):
            for queries in row_steps(spec.queries, softmax.shape.queries):
                softmax.begin(heads, q, queries)
                so_far = (heads.of_queries(acc, queries), softmax.of_rows(peak), softmax.of_rows(total))
                of_tile = (softmax.acc, softmax.peak, softmax.total)
                # the state of the blocks of keys before this one
                if accumulate:
                    for mine, theirs in zip(of_tile, so_far, strict=True):
                        mine.copy_(theirs)
                softmax.run(k, v)
                for mine, theirs in zip(of_tile, so_far, strict=True):
                    theirs.copy_(mine)

    def attention_partial_finish(self, acc, peak, total, o, lse, *, scratch, heads, head_dim):
        (buffer,) = scratch.take_all(partial_finish_plan(o))
        for rows in row_chunks(*o.shape):
            value = wide(buffer, acc[rows]).view(-1, heads, head_dim)
            o[rows].copy_(value.div_(total[:, rows].T[..., None]).view(len(value), -1))
        torch.log(total, out=lse).add_(peak, alpha=LN2)

    def attention_delta(self, o, do, delta, *, scratch, heads, head_dim):
        _put_delta(o, do, delta, scratch.take_all(delta_plan(o, heads=heads, head_dim=head_dim)))

    def attention_partial_backward(
        self, q, k, v, lse, do, delta, dq, dk, dv, *, documents=None, scratch, spec, accumulate
    ):
        gradients = DeviceBlockGradients(spec, (q, k, v, do, lse, delta), documents, scratch, halves=self.halves)
        gradients.run(dq, dk, dv, adds_to_queries=True, adds_to_keys=accumulate)
