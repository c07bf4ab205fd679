"""Ends of a model that train beside its layers, or do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.tensor_ranks import trained_model
from ratrain.ratrain_ir.model.blocks import block, trained_parameters

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def ends_train(plan: Plan, model: ModelConfig) -> bool:
    """Tell whether embedding or head has parameters that train."""
    trained = trained_model(model, plan)
    return any(trained_parameters(trained, block(kind)) for kind in ("embed", "head"))
