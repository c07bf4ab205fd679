"""For which block tensor peers exchange something: what a block reads is gathered for it, what it gives is summed for the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.blocks import Block, previous_block
from ratrain.ratrain_ir.ops.base import Payload, Phase
from ratrain.ratrain_ir.ops.collectives import CombineLoss, GatherRows, PeerOp, ReduceSums

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


def exchanging_block(op: PeerOp, model: ModelConfig) -> tuple[Block, bool]:
    """The block that reads or has written what peers exchange, and whether it does so in the forward pass."""
    if isinstance(op, CombineLoss):
        return op.block, True
    activation = op.payload is Payload.ACTIVATION
    if isinstance(op, ReduceSums):
        return op.block, activation
    is_forward = op.phase is Phase.FORWARD if isinstance(op, GatherRows) else activation
    if isinstance(op, GatherRows) == activation:
        return op.block, is_forward
    return previous_block(op.block, model), is_forward
