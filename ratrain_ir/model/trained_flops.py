"""Operations that a step requires where less than the whole model trains: no gradients of what is frozen.

A product with a frozen weight is needed forward, and backward for the gradient of its input, so 4 operations a weight
and token instead of 6. Blocks below the lowest one that trains go forward only: 2. That one
makes no gradient of its own input; none of its products counts one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.model_flops import model_flops_per_token, visible_pairs_of_layers
from ratrain.ratrain_ir.config.tensor_ranks import trained_model
from ratrain.ratrain_ir.model.blocks import block_chain, has_backward, parameters, passes_gradient_on

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def trained_flops_per_token(model: ModelConfig, plan: Plan) -> float:
    """Return the operations per token of a step of a plan, forward and backward, however computed."""
    if not plan.training:
        return model_flops_per_token(model, plan.seq_len)
    total = 0.0
    visible = visible_pairs_of_layers(model, plan.seq_len)
    for owner in block_chain(model):
        if owner.kind == "attention" and owner.layer is not None:
            passes = 3 if has_backward(model, plan, owner) else 1
            total += passes * 4 * visible[owner.layer] / plan.seq_len * model.q_size
        for parameter in parameters(trained_model(model, plan), owner):
            if len(parameter.shape) > 1 and owner.kind != "embed":
                share = (model.experts_per_token or 0) / (model.experts or 1) if len(parameter.shape) == 3 else 1.0
                products = 1 + passes_gradient_on(model, plan, owner) + parameter.trains
                total += 2 * products * share * parameter.elements
    return total
