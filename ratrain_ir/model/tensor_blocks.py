"""Differences of a layer under tensor parallelism: sums over its ranks, and the block whose input they compute from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.tensor_ranks import adds_branches_apart
from ratrain.ratrain_ir.model.blocks import next_block, previous_block
from ratrain.ratrain_ir.model.slots import SPLIT_KINDS

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.model.blocks import Block


def is_parallel_mlp(model: ModelConfig, plan: Plan, block: Block) -> bool:
    """Tell whether a block is a parallel mlp that each tensor-parallel rank computes from the input of its attention.

    The mlp adds to attention's partial output, so the layer's output is summed over ranks once. Likewise attention's
    backward adds to the mlp's partial gradient of their common input.
    """
    return plan.tp > 1 and model.parallel_residual and block.kind == "mlp"


def source_block(model: ModelConfig, plan: Plan, owner: Block) -> Block:
    """Return the block whose input a block computes from: itself, or for a parallel mlp its attention."""
    return previous_block(owner, model) if is_parallel_mlp(model, plan, owner) else owner


def sum_block(model: ModelConfig, plan: Plan, owner: Block) -> Block:
    """Return the block whose input is the sum that a block adds to: the next one, or the one after a parallel mlp."""
    after = next_block(model, owner)
    return next_block(model, after) if is_parallel_mlp(model, plan, after) else after


def adds_branch_apart(model: ModelConfig, plan: Plan, owner: Block) -> bool:
    """Tell whether tensor-parallel ranks sum a block's output alone.

    A separate op then norms it and adds it to the stream.
    """
    return owner.kind in SPLIT_KINDS and adds_branches_apart(model, plan)
