"""Quantised communication: views of shards and parts of gradients that the plan sends in fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.quantised import FORMATS, packed_bytes
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.model.blocks import named_block
from ratrain.ratrain_ir.model.sharded_blocks import gathered_bits, reduced_bits
from ratrain.targets.runtime.arena.scratch import Buffer, plan_bytes
from ratrain.targets.runtime.engine.rank import shape_only

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.arena.scalars import Flags, Scalars
    from ratrain.targets.runtime.kernels import KernelSet, Scratch

_PIECE = 1 << 18
"""Elements packed at a time where nothing is sent: whole quantisation blocks, so that bits equal one call's."""


def view_bits(program: Program, name: str) -> int | None:
    """Return the bits to which the view of a block is rounded; None if it is not."""
    return gathered_bits(program.model, program.plan, named_block(name))


def gradient_bits(program: Program, name: str) -> int | None:
    """Return the bits to which the gradient of a block is rounded; None if it is not."""
    return reduced_bits(program.model, program.plan, named_block(name))


def round_view(shard: NDArray[Any], bits: int, kernels: KernelSet, scratch: Scratch) -> None:
    """Round a shard of a view in place to the values that every receiver gets: packed, then unpacked."""
    for start in range(0, len(shard), _PIECE):
        piece = shard[start : start + _PIECE]
        scratch.reset()
        packed = scratch.take(packed_bytes(len(piece), bits), np.uint8)
        with scratch.lent():
            kernels.quantise(piece, packed, scratch=scratch, bits=bits)
        kernels.dequantise(packed, piece, scratch=scratch, bits=bits)


def mean_of_packed(
    parts: Sequence[NDArray[Any]],
    out: NDArray[Any],
    flags: Flags,
    *,
    bits: int,
    kernels: KernelSet,
    scalars: Scalars,
    scratch: Scratch,
    accumulate: bool,
    divisor: float,
) -> None:
    """Compute `Scalars.mean_of_replicas` of all replicas' parts, each packed before it is added."""
    for start in range(0, len(out), _PIECE):
        piece = out[start : start + _PIECE]
        scratch.reset()
        packed = scratch.take((len(parts), packed_bytes(len(piece), bits)), np.uint8)
        for row, part in zip(packed, parts, strict=True):
            with scratch.lent():
                kernels.quantise(part[start : start + _PIECE], row, scratch=scratch, bits=bits)
        scalars.mean_of_replicas(
            list(packed),
            piece,
            flags,
            scratch=scratch,
            accumulate=accumulate,
            divisor=divisor,
            bits=bits,
        )


def quantised_scratch_bytes(plan: Plan, kernels: KernelSet, elements: int) -> int:
    """Return the scratch of these functions and of packing a whole shard at once; 0 if the plan packs nothing."""
    return max(_view_scratch(plan, kernels, elements), _gradient_scratch(plan, kernels, elements))


def _view_scratch(plan: Plan, kernels: KernelSet, elements: int) -> int:
    if plan.gather_quantised is None:
        return 0
    bits = FORMATS[plan.gather_quantised]
    view, packed = shape_only(Dtype(plan.view_dtype), (elements,)), _packed(elements, bits)
    most = max(
        kernels.scratch_bytes("quantise", a=view, packed=packed, bits=bits),
        kernels.scratch_bytes("dequantise", packed=packed, out=view, bits=bits),
    )
    return most + plan_bytes([Buffer((packed_bytes(min(elements, _PIECE), bits),), np.uint8)])


def _gradient_scratch(plan: Plan, kernels: KernelSet, elements: int) -> int:
    if plan.reduce_quantised is None:
        return 0
    bits = FORMATS[plan.reduce_quantised]
    whole, shard = (shape_only(Dtype(name), (elements,)) for name in (plan.grad_dtype, plan.grad_shard_dtype))
    packed = _packed(elements, bits)
    options: dict[str, Any] = {"accumulate": True, "divisor": float(plan.replicas), "bits": bits}
    most = max(
        kernels.scratch_bytes("quantise", a=whole, packed=packed, bits=bits),
        kernels.scratch_bytes("mean_of_quantised", parts=[packed] * plan.replicas, out=shard, **options),
    )
    return most + plan_bytes([Buffer((plan.replicas, packed_bytes(min(elements, _PIECE), bits)), np.uint8)])


def _packed(elements: int, bits: int) -> Any:
    return shape_only(Dtype.U8, (packed_bytes(elements, bits),))
