"""What tensor peers do of a layer that one rank does not: what they sum, and of what."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.tensor_peers import adds_branches_apart
from ratrain.ratrain_ir.model.blocks import SPLIT_KINDS, next_block, previous_block

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block


def stands_beside(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Whether a block is an mlp that each tensor peer computes of the input of its attention, and adds to what that gives.

    What a layer adds is then summed over peers once, and so is the gradient of its input, which attention adds to that of its mlp.
    """
    return plan.tp > 1 and model.parallel_residual and block.kind == "mlp"


def source_block(model: ModelConfig, plan: Plan, owner: Block) -> Block:
    """The block whose input a block is computed of: itself, or the attention that it stands beside."""
    return previous_block(owner, model) if stands_beside(model, plan, owner) else owner


def sum_block(model: ModelConfig, plan: Plan, owner: Block) -> Block:
    """The block whose input is the sum that a block adds to: the one after it, or after the mlp that stands beside it."""
    after = next_block(model, owner)
    return next_block(model, after) if stands_beside(model, plan, after) else after


def adds_branch_apart(model: ModelConfig, plan: Plan, owner: Block) -> bool:
    """Whether what tensor peers compute of a block is summed alone, and added to the stream by an op of its own, behind a norm."""
    return owner.kind in SPLIT_KINDS and adds_branches_apart(model, plan)
