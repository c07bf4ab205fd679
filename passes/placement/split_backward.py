"""Splitting of backwards into input and weight halves, in place; placement then moves the weight halves apart.

`backward attention.1 m0` becomes `backward_input attention.1 m0`, `backward_weight attention.1 m0`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.slice_plan import slice_plan
from ratrain.ratrain_ir.model.slots import (
    INPUT_HALF_SLOTS,
    SPLIT_KINDS,
    WEIGHT_HALF_SLOTS,
    branch_sums,
    half_slots,
    normed_gradient_slots,
    pending_slots,
    saved_slots,
)
from ratrain.ratrain_ir.ops.base import piece_fields, piece_name
from ratrain.ratrain_ir.ops.compute import Backward, BackwardInput, BackwardWeight
from ratrain.ratrain_ir.ops.kinds import piece_of
from ratrain.ratrain_ir.ops.signatures import bind
from ratrain.ratrain_ir.ops.tensor import Tensor
from ratrain.ratrain_ir.support.diagnostics import fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.ops.base import Op


def split_backwards(module: Module, stage: Stage, wanted: Callable[[Backward], bool] = lambda _: True) -> int:
    """Replace the wanted backwards of attention and mlp blocks of a stage by their two halves, in place.

    Returns the number of backwards split.
    """
    refuse_halves(module.plan)
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


def refuse_halves(plan: Plan) -> None:
    """Raise RT064 if a plan trains less than the whole model, or replicas share out experts.

    The halves of their backwards are not built.
    """
    if plan.ep > 1:
        fail(
            "RT064",
            "backwards in halves, of a model whose experts replicas share out (ep), are not built",
            help="use a strategy and a schedule with whole backwards, as ratrain and 1f1b, or ep = 1",
        )
    if plan.training:
        fail(
            "RT064",
            "backwards in halves, of a model with frozen parameters or adapters, are not built",
            help="use a strategy and a schedule with whole backwards, as ratrain and 1f1b",
        )


def _halves(module: Module, stage: Stage, op: Backward) -> tuple[BackwardInput, BackwardWeight]:
    """Return the two halves of a backward; the first leaves new pending tensors for the second."""
    block, piece = op.block, piece_of(op)
    plan = slice_plan(module.plan, op.slice)
    role = bind(op, module.model, module.plan).tensors
    pending = tuple(
        stage.add(Tensor(stage.free_name(f"d.{block}.{piece_name(piece)}.{slot.name}"), StateKind.SAVED, slot.type))
        for slot in pending_slots(module.model, plan, block)
    )
    read, kept = (
        tuple(role[name] for name in half_slots(module.model, plan, block, slots))
        for slots in (INPUT_HALF_SLOTS, WEIGHT_HALF_SLOTS)
    )
    source = () if module.model.has_pre_norm else (role["x"],)
    sums = tuple(role[slot.name] for slot in branch_sums(module.model, plan, block))
    values = tuple(role[slot.name] for slot in normed_gradient_slots(module.model, plan, block) if slot.name == "dv")
    own = {
        *sums,
        role["dy"],
        role["x"],
        role["w"],
        *(role[slot.name] for slot in saved_slots(module.model, plan, block) if slot.name in role),
    }
    of_slices = tuple(tensor for tensor in op.reads if tensor not in own)
    begun = tuple(t for t in op.writes if t.kind is StateKind.SAVED)
    added = tuple(t for t in op.updates if t.kind is StateKind.SAVED)
    first = BackwardInput(
        block=block,
        **piece_fields(piece),
        reads=(role["dy"], role["x"], *read, role["w"], *of_slices),
        writes=(role["dx"], *pending, *begun),
        updates=added,
    )
    second = BackwardWeight(
        block=block,
        **piece_fields(piece),
        reads=(role["dy"], *source, *kept, *pending, *values, *sums),
        writes=tuple(t for t in op.writes if t.kind is StateKind.GRAD),
        updates=tuple(t for t in op.updates if t.kind in (StateKind.GRAD, StateKind.SCALAR)),
    )
    return first, second
