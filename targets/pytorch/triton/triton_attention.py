"""Calls of the fused attention kernels (`triton_attention_programs`): tiles, grids, scratch, and the set's methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from ratrain.targets.program.attention_spec import AttentionBlockSpec, AttentionSpec
from ratrain.targets.pytorch.device.device_attention import LOG2_E
from ratrain.targets.pytorch.device.device_attention_kernels import (
    DeviceAttention,
    attention_backward_plan,
    attention_forward_plan,
    partial_backward_plan,
    partial_forward_plan,
)
from ratrain.targets.pytorch.device.device_common import F32, I32, Array, check_documents
from ratrain.targets.pytorch.device.device_tiles import put_slopes
from ratrain.targets.pytorch.triton.triton_attention_programs import (
    attend,
    gradients_of_keys,
    gradients_of_queries,
    row_deltas,
)
from ratrain.targets.pytorch.triton.triton_common import interpreted, launch, power_of_two, programs
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan

WIDEST_HEAD = 512
"""Bytes of a head up to which its tiles fit a multiprocessor; wider heads are the device set's."""
_ROWS_OF_DELTA = 32


@frozen
class Tile:
    """Queries and keys of a tile, warps that work on it, and tiles that are loaded ahead."""

    rows: int
    columns: int
    warps: int
    stages: int


def tiles_of(width: int, *, halves: bool) -> tuple[Tile, Tile, Tile]:
    """Return the tiles of `attend`, `gradients_of_keys` and `gradients_of_queries` for heads of a width.

    They leave room for two programs on a multiprocessor of a data centre's GPU, and fit multiprocessors of 99 KiB.
    """
    if not halves:
        return (
            (Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
            if width <= 64
            else (Tile(32, 32, 4, 1), Tile(16, 32, 4, 1), Tile(32, 16, 4, 1))
        )
    if width <= 64:
        return Tile(128, 64, 8, 3), Tile(64, 64, 4, 3), Tile(64, 32, 4, 3)
    if width <= 128:
        return Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)
    return Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 8, 1)


@frozen
class AttentionCall:
    """A call of an attention kernel: its shape, its mask and the tensors of both."""

    spec: AttentionBlockSpec
    documents: I32 | None
    slopes: F32 | None
    halves: bool

    @classmethod
    def begin(cls, spec: AttentionBlockSpec, q: Array, documents: I32 | None, scratch: Scratch) -> AttentionCall:
        """Check starts of documents, on the CPU, and compute the slopes."""
        check_documents(documents, spec.queries, spec.first_query)
        slopes = None
        if spec.alibi:
            double, every = scratch.take_all(_slopes_plan(spec))
            put_slopes(len(every), double, every)
            slopes = every[spec.first_head or 0 :][: spec.heads]
        return cls(spec, documents, slopes, q.element_size() == 2)

    @property
    def width(self) -> int:
        """Elements of a head, to a power of two; a product has no factor narrower than 16."""
        return max(16, power_of_two(self.spec.head_dim))

    def run(
        self, kernel: Any, grid: tuple[int, ...], tile: Tile, tensors: tuple[Array, ...], **constants: bool
    ) -> None:
        """Launch a kernel with the numbers and constants that all of them have in common."""
        spec = self.spec
        scale, cap = spec.multiplier * LOG2_E, 0.0
        if spec.softcap is not None:
            scale, cap = spec.multiplier / spec.softcap, spec.softcap * LOG2_E
        numbers: list[float] = [spec.queries, spec.keys, spec.first_query, spec.first_key, spec.window or 0, scale, cap]
        if kernel is not attend:
            numbers.append(spec.multiplier)
        none = tensors[0]  # stands for a tensor that this call has not
        masks = (none if self.documents is None else self.documents, none if self.slopes is None else self.slopes)
        launch(
            kernel,
            grid,
            *tensors,
            *masks,
            *numbers,
            warps=tile.warps,
            stages=tile.stages,
            heads=spec.heads,
            group=spec.group,
            head_dim=spec.head_dim,
            width=self.width,
            capped=spec.softcap is not None,
            biased=spec.alibi,
            windowed=spec.window is not None,
            packed=self.documents is not None,
            **constants,
            whole=interpreted(),
            rows=tile.rows,
            columns=tile.columns,
        )

    def forward(
        self,
        tensors: tuple[Array, Array, Array, Array, F32, F32],
        *,
        partial: bool = False,
        accumulate: bool = False,
    ) -> None:
        """Attend with all queries to all keys: q, k, v, o, lse and total, the last of partial results only."""
        tile, _, _ = tiles_of(self.width, halves=self.halves)
        grid = (self.spec.heads, self.spec.batch, programs(self.spec.queries, tile.rows))
        self.run(attend, grid, tile, tensors, partial=partial, accumulate=accumulate)

    def backward(
        self,
        operands: tuple[Array, Array, Array, Array, F32, F32],
        gradients: tuple[Array, Array, Array],
        *,
        adds_to_queries: bool = False,
        adds_to_keys: bool = False,
    ) -> None:
        """Compute, or add, the gradients dq, dk and dv from q, k, v, do, lse and delta."""
        self.backward_of_keys(operands, gradients[1:], adds=adds_to_keys)
        self.backward_of_queries(operands, gradients[0], adds=adds_to_queries)

    def backward_of_keys(self, operands: tuple[Array, ...], gradients: tuple[Array, ...], *, adds: bool) -> None:
        """Compute, or add, the gradients dk and dv."""
        _, tile, _ = tiles_of(self.width, halves=self.halves)
        grid = (self.spec.kv_heads, self.spec.batch, programs(self.spec.keys, tile.columns))
        self.run(gradients_of_keys, grid, tile, (*operands, *gradients), adds=adds)

    def backward_of_queries(self, operands: tuple[Array, ...], gradient: Array, *, adds: bool) -> None:
        """Compute, or add, the gradient dq."""
        _, _, tile = tiles_of(self.width, halves=self.halves)
        grid = (self.spec.heads, self.spec.batch, programs(self.spec.queries, tile.rows))
        self.run(gradients_of_queries, grid, tile, (*operands, gradient), adds=adds)


def put_delta(o: Array, do: Array, delta: F32, head_dim: int) -> None:
    """Set delta[heads, T] = rowsum(do * o) of each head."""
    heads, count = delta.shape
    grid = (programs(count, _ROWS_OF_DELTA), heads)
    constants = {"heads": heads, "head_dim": head_dim, "width": power_of_two(head_dim), "rows": _ROWS_OF_DELTA}
    launch(row_deltas, grid, o, do, delta, count, **constants)


def _slopes_plan(spec: AttentionBlockSpec | AttentionSpec) -> Plan:
    heads = spec.all_heads or spec.heads
    return [Buffer((heads,), np.float64), Buffer((heads,))] if spec.alibi else []


def fused_forward_plan(spec: AttentionSpec, q: Array, **more: object) -> Plan:
    """Plan the slopes of all heads; for wide heads as the device set does."""
    return _slopes_plan(spec) if is_fused(spec, q) else attention_forward_plan(spec, **more)


def fused_backward_plan(spec: AttentionSpec, q: Array, *, halves: bool, **more: object) -> Plan:
    """Plan the slopes of all heads; for wide heads as the device set does."""
    return _slopes_plan(spec) if is_fused(spec, q) else attention_backward_plan(spec, halves=halves, **more)


def fused_partial_forward_plan(spec: AttentionBlockSpec, q: Array, **more: object) -> Plan:
    """Plan the slopes of all heads; for wide heads as the device set does."""
    return _slopes_plan(spec) if is_fused(spec, q) else partial_forward_plan(spec, **more)


def fused_partial_backward_plan(spec: AttentionBlockSpec, q: Array, *, halves: bool, **more: object) -> Plan:
    """Plan the slopes of all heads; for wide heads as the device set does."""
    return _slopes_plan(spec) if is_fused(spec, q) else partial_backward_plan(spec, halves=halves, **more)


def is_fused(spec: AttentionBlockSpec | AttentionSpec, q: Array) -> bool:
    """Return whether the heads are narrow enough for the tiles of the fused kernels."""
    return bool(spec.head_dim * q.dtype.itemsize <= WIDEST_HEAD)


class TritonAttention(DeviceAttention):
    """The attention kernels of `TorchTriton`."""

    def attention_forward(self, q, k, v, o, lse, *, documents=None, scratch, spec):
        if not is_fused(spec, q):
            super().attention_forward(q, k, v, o, lse, documents=documents, scratch=scratch, spec=spec)
            return
        AttentionCall.begin(spec.block, q, documents, scratch).forward((q, k, v, o, lse, lse))

    def attention_backward(self, q, k, v, o, lse, do, dq, dk, dv, delta, *, documents=None, scratch, spec):
        if not is_fused(spec, q):
            super().attention_backward(
                q, k, v, o, lse, do, dq, dk, dv, delta, documents=documents, scratch=scratch, spec=spec
            )
            return
        call = AttentionCall.begin(spec.block, q, documents, scratch)
        put_delta(o, do, delta, spec.head_dim)
        call.backward((q, k, v, do, lse, delta), (dq, dk, dv))

    def attention_partial_forward(self, q, k, v, acc, peak, total, *, documents=None, scratch, spec, accumulate):
        if not is_fused(spec, q):
            told = {"documents": documents, "scratch": scratch, "spec": spec}
            super().attention_partial_forward(q, k, v, acc, peak, total, **told, accumulate=accumulate)
            return
        call = AttentionCall.begin(spec, q, documents, scratch)
        call.forward((q, k, v, acc, peak, total), partial=True, accumulate=accumulate)

    def attention_delta(self, o, do, delta, *, scratch, heads, head_dim):
        put_delta(o, do, delta, head_dim)

    def attention_partial_backward(
        self, q, k, v, lse, do, delta, dq, dk, dv, *, documents=None, scratch, spec, accumulate
    ):
        if not is_fused(spec, q):
            told = {"documents": documents, "scratch": scratch, "spec": spec}
            super().attention_partial_backward(q, k, v, lse, do, delta, dq, dk, dv, **told, accumulate=accumulate)
            return
        call = AttentionCall.begin(spec, q, documents, scratch)
        call.backward((q, k, v, do, lse, delta), (dq, dk, dv), adds_to_queries=True, adds_to_keys=accumulate)
