"""Splits the backwards of a stage into input and weight halves, where they stand; placement then moves the weight halves apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.blocks import INPUT_HALF_SLOTS, SPLIT_KINDS, WEIGHT_HALF_SLOTS, half_slots, pending_slots
from ratrain.ratrain_ir.ops import Backward, BackwardInput, BackwardWeight, Tensor
from ratrain.ratrain_ir.signatures import bind
from ratrain.ratrain_ir.types import StateKind

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops import Op


def split_backwards(module: Module, stage: Stage, wanted: Callable[[Backward], bool] = lambda _: True) -> int:
    """Replace the wanted backwards of attention and mlp blocks by their two halves, in place; the number of backwards split."""
    ops: list[Op] = []
    count = 0
    for op in stage.ops:
        if type(op) is Backward and op.block.kind in SPLIT_KINDS and wanted(op):
            ops.extend(_halves(module, stage, op))
            count += 1
        else:
            ops.append(op)
    stage.ops = ops
    return count


def _halves(module: Module, stage: Stage, op: Backward) -> tuple[BackwardInput, BackwardWeight]:
    block, m = op.block, op.micro_batch
    role = bind(op, module.model, module.plan).tensors
    pending = tuple(
        stage.add(Tensor(stage.free_name(f"d.{block}.m{m}.{slot.name}"), StateKind.SAVED, slot.type))
        for slot in pending_slots(module.model, module.plan, block)
    )
    read, kept = (
        tuple(role[name] for name in half_slots(module.model, module.plan, block, slots))
        for slots in (INPUT_HALF_SLOTS, WEIGHT_HALF_SLOTS)
    )
    inputs = (role["dy"], role["x"], *read, role["w"])
    gradient = tuple(t for t in op.writes if t.kind is StateKind.GRAD)
    first = BackwardInput(block=block, micro_batch=m, reads=inputs, writes=(role["dx"], *pending))
    second = BackwardWeight(
        block=block, micro_batch=m, reads=(role["dy"], *kept, *pending), writes=gradient, updates=op.updates
    )
    return first, second
