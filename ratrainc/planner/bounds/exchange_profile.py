"""Profile of exchanges within passes: seconds of their engine, and what no order can hide.

Tensor-parallel, context and expert ranks exchange activations and gradients.

A pass waits for the tensors that it reads. So exchanges of activations on a micro-batch's way forward, and of gradients
on its way back, add to its compute. Inputs and keys that are gathered again for a backward are not on that way. They
also do not count for the engine if a program may keep the tensors gathered for the forward. Likewise rows of experts,
which the forward's exchange may leave for the backward: then gradients alone are dispatched. Of keys in groups of heads
one group is on the way, the first one gathered and the last one reduced: the others may travel while attention runs.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from attrs import fields, frozen

from ratrain.passes.recovery.keep_gathered import all_made_twice, with_kept
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import Block, previous_block
from ratrain.ratrain_ir.ops.base import Engine, Payload, Phase
from ratrain.ratrain_ir.ops.collectives import CombineLoss, GatherRows, ReduceRows, TensorOp
from ratrain.ratrain_ir.ops.context_ranks import GatherKeys, ReduceKeys
from ratrain.ratrain_ir.ops.expert_ranks import Dispatch
from ratrain.ratrainc.planner.space.units import Vector, by_block, unit_vector
from ratrain.targets.target import target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.planner.space.search_setting import SearchSetting
    from ratrain.ratrainc.planner.space.space import Shape


@frozen(eq=False)
class ExchangeProfile:
    """Seconds of the exchanges of one micro-batch, by unit, with those where a chunk begins and ends."""

    engine: Vector
    """seconds of the tensor engine, which does one exchange after another"""
    forward: Vector
    """seconds on the way of a micro-batch forward, added to its compute"""
    backward: Vector
    """seconds on the way of its gradients back"""
    first_forward: Vector
    """`forward` of its first slice, or of all without slices"""
    first_backward: Vector
    """`backward` of its first slice, or of all without slices"""


def no_exchanges(classes: int) -> ExchangeProfile:
    """Return the profile of a rank that computes micro-batches alone."""
    return ExchangeProfile(*(unit_vector(0, [0] * classes, 0) for _ in range(5)))


def exchange_profile(setting: SearchSetting, shape: Shape) -> ExchangeProfile:
    """Read the exchanges of a shape off a module of one stage, one layer of each class and one micro-batch."""
    classes = setting.classes
    peers: dict[str, Any] = {"dp": shape.dp, "tp": shape.tp, "cp": shape.cp, "mapping": shape.stage.mapping}
    peers |= {"context_exchange": shape.exchange, "context_groups": shape.groups, "ep": shape.ep}
    plan = setting.shaped(
        **peers, micro_batch_size=shape.micro_batch_size, slices=setting.slice_lengths(shape.slices, shape.cp)
    )
    module = lower(classes.model, plan)
    target, stage = target_of(setting.machine), module.stages[0]
    if setting.may_keep_gathered:
        stage = with_kept(stage, module, all_made_twice(stage, module, Dispatch))
    found: dict[str, dict[Block, float]] = {field.name: defaultdict(float) for field in fields(ExchangeProfile)}
    may_keep_gathered = setting.may_keep_gathered
    for op in stage.ops:
        if op.engine is not Engine.TENSOR or not isinstance(op, TensorOp):
            continue
        way = _way(op)
        # the gathered tensor may be kept from the forward, and then this exchange does not happen
        if way is None and may_keep_gathered:
            continue
        owner, seconds = _owner(op, classes.model), target.op_seconds(module, stage, op)
        found["engine"][owner] += seconds
        if way is None or (isinstance(op, GatherKeys | ReduceKeys) and op.head_group):
            continue
        found[way][owner] += seconds
        # the first slice has number 0; without slices the number is None
        if not op.slice:
            found[f"first_{way}"][owner] += seconds
    return ExchangeProfile(**{name: by_block(len(classes), owners.__getitem__) for name, owners in found.items()})


def _owner(op: TensorOp, model: ModelConfig) -> Block:
    """Return the block of an exchange: the one whose output it sums, or that reads the gathered rows."""
    # An exchange at the border of two blocks is named after the later one. Sums of activations, and gradients gathered
    # on the way back, belong to the earlier.
    of_block_before = (isinstance(op, ReduceRows) and op.payload is Payload.ACTIVATION) or (
        isinstance(op, GatherRows) and op.payload is Payload.GRADIENT
    )
    return previous_block(op.block, model) if of_block_before else op.block


def _way(op: TensorOp) -> str | None:
    """Return the way that an exchange is on, `forward` or `backward`; None for an input or keys gathered again."""
    if isinstance(op, ReduceKeys):
        return "backward"
    if not isinstance(op, CombineLoss | GatherKeys) and op.payload is Payload.GRADIENT:
        return "backward"
    return None if isinstance(op, GatherRows | GatherKeys) and op.phase is Phase.BACKWARD else "forward"
