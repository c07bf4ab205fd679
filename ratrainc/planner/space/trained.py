"""Trainings of less than the whole model that plans are searched for: in all layers alike.

Bounds know a model by its embedding, one layer and its head. So each layer must train the same parameters, one at
least; then each stage trains some too, whatever its cuts, and has a backward of each of its layers, but for the
attention of the first one where only what is above it trains. A layer counts with what the first one computes, which is
the least: below it nothing may need a gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.tensor_ranks import trained_model
from ratrain.ratrain_ir.model.blocks import Held, block, parameters, trained_parameters
from ratrain.ratrain_ir.model.checked_training import check_training
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.planner.space.units import KINDS

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def ends_train(plan: Plan, model: ModelConfig) -> bool:
    """Tell whether embedding or head has parameters that train."""
    trained = trained_model(model, plan)
    return any(trained_parameters(trained, block(kind)) for kind in ("embed", "head"))


def check_planned_training(model: ModelConfig, plan: Plan) -> None:
    """Raise RT064 where what a plan trains does not fit its model, or differs from layer to layer."""
    check_training(model, plan)
    if not plan.training:
        return
    trained = trained_model(model, plan)
    layers = [_of_layer(trained, at) for at in range(model.layers)]
    other = next((at for at, layer in enumerate(layers) if layer != layers[0]), None)
    if other is not None:
        text = f"layers 0 and {other} of {model.name} do not train alike: bounds of the search are of layers that do"
        fail("RT064", text, help="freeze the same parameters of each layer, or compile a plan of your own")
    if not any(held is Held.TRAINED for _, held in layers[0]):
        text = f"no parameter of a layer of {model.name} trains: plans are searched where some do"
        fail("RT064", text, help="use adapters, or compile a plan of your own")


def _of_layer(trained: ModelConfig, layer: int) -> list[tuple[str, Held]]:
    """Return the parameters of a layer, in both of its blocks, with the tensor that each lies in."""
    return [(each.weight, each.held) for kind in KINDS["layer"] for each in parameters(trained, block(kind, layer))]
