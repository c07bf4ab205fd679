"""What the planner knows of the exchanges of tensor peers: seconds of their engine, and how many of those no order of the program can hide.

A pass waits for what it reads, so what is exchanged of the activations of one micro-batch on its way forward, and of its gradients on
their way back, comes beside its compute. Inputs that are gathered anew for a backward are no part of that way; nor of what no order
can do without, where what was gathered for the forward may be kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.rank_mapping import RankMapping
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.blocks import previous_block
from ratrain.ratrain_ir.ops.base import Engine, Payload, Phase
from ratrain.ratrain_ir.ops.collectives import CombineLoss, GatherRows, PeerOp, ReduceRows
from ratrain.targets.target import target_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.planner.space.setting import Setting
    from ratrain.ratrainc.planner.space.space import Shape

Vector = NDArray[np.float64]

_UNITS = {"embed": 0, "attention": 1, "mlp": 1, "head": 2}


@frozen(eq=False)
class ExchangeProfile:
    """Seconds that tensor peers exchange for one micro-batch, by unit [embed, layer, head]; a unit is where its chunk begins and ends."""

    engine: Vector
    """of the tensor engine, which does one after another"""
    forward: Vector
    """on the way of a micro-batch forward, beside its compute"""
    backward: Vector
    """on the way of its gradients back"""
    first_forward: Vector
    """the same of its first slice, or of all where there are none"""
    first_backward: Vector


NO_EXCHANGES = ExchangeProfile(*(np.zeros(3) for _ in range(5)))
"""of one tensor peer"""


def exchange_profile(setting: Setting, shape: Shape) -> ExchangeProfile:
    """The exchanges of a shape with tensor peers, read off a module of one stage, layer and micro-batch."""
    small = setting.model.with_one_layer()
    tiles = tuple(evolve(tile, stages=1) for tile in shape.tiles)
    fields: dict[str, Any] = {
        "pp": 1,
        "dp": shape.dp,
        "tp": shape.tp,
        "cuts": (),
        "micro_batches": 1,
        "micro_batch_size": shape.micro_batch_size,
        "zero": 0,
        "reduce": "last",
        "slices": setting.slice_lengths(shape.slices),
        "mapping": RankMapping(tiles) if tiles else None,
    }
    module = lower(small, setting.shaped(**fields))
    target, stage = target_of(setting.machine), module.stages[0]
    found = {name: np.zeros(3) for name in ("engine", "forward", "backward", "first_forward", "first_backward")}
    for op in stage.ops:
        if op.engine is not Engine.TENSOR or not isinstance(op, PeerOp):
            continue
        way = _way(op)
        if way is None and setting.may_keep_gathered:
            continue
        unit, seconds = _unit(op, small), target.op_seconds(module, stage, op)
        found["engine"][unit] += seconds
        if way is None:
            continue
        found[way][unit] += seconds
        if not op.slice:
            found[f"first_{way}"][unit] += seconds
    return ExchangeProfile(**found)


def _unit(op: PeerOp, model: ModelConfig) -> int:
    """The unit in whose pass an exchange stands: that of the block whose output it sums, or that reads what it gathers."""
    of_block_before = (isinstance(op, ReduceRows) and op.payload is Payload.ACTIVATION) or (
        isinstance(op, GatherRows) and op.payload is Payload.GRADIENT
    )
    return _UNITS[(previous_block(op.block, model) if of_block_before else op.block).kind]


def _way(op: PeerOp) -> str | None:
    """Which way an exchange is part of; None where it is of neither."""
    if isinstance(op, CombineLoss):
        return "forward"
    if op.payload is Payload.GRADIENT:
        return "backward"
    return None if isinstance(op, GatherRows) and op.phase is Phase.BACKWARD else "forward"
