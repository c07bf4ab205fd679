"""Operations that a step requires of each block: no gradients of what is frozen.

A product with a frozen weight is needed forward, and backward for the gradient of its input, so 4 operations a weight
and token instead of 6. Blocks below the lowest one that trains go forward only: 2. That one
makes no gradient of its own input; none of its products counts one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.config.model_flops import model_flops_per_token, visible_pairs_of_layers
from ratrain.ratrain_ir.model.blocks import Block, block_chain, parameters, trained_blocks

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.config.training import Training


def trained_flops_per_token(model: ModelConfig, plan: Plan) -> float:
    """Return the operations per token of a step of a plan, forward and backward, however computed."""
    if not plan.training:
        return model_flops_per_token(model, plan.seq_len)
    return sum(block_flops(model, plan.seq_len, plan.training).values()) / plan.seq_len


def block_flops(model: ModelConfig, seq_len: int, training: Training) -> dict[Block, int]:
    """Return the operations of each block in a step over one sequence, forward and backward, however computed."""
    trained = evolve(model, training=training.in_family(model.family))
    visible = visible_pairs_of_layers(model, seq_len)
    lowest = next(iter(trained_blocks(trained)), None)
    flops: dict[Block, int] = {}
    has_backward = passes_on = False
    for owner in block_chain(model):
        has_backward = has_backward or owner is lowest
        flops[owner] = 0
        if owner.kind == "attention" and owner.layer is not None:
            flops[owner] += (3 if has_backward else 1) * 4 * visible[owner.layer] * model.q_size
        for parameter in parameters(trained, owner):
            if len(parameter.shape) > 1 and owner.kind != "embed":
                used = parameter.elements
                if len(parameter.shape) == 3:  # of all experts; a token meets some
                    used = used * (model.experts_per_token or 0) // (model.experts or 1)
                flops[owner] += 2 * seq_len * (1 + passes_on + parameter.trains) * used
        passes_on = has_backward
    return flops
