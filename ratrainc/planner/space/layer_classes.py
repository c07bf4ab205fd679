"""Classes of layers: those that compute, train and hold alike, with a small model that has one layer of each.

Layers differ by their window and rotation, by which of their parameters train, and by whether a gradient goes back
through them. Example: of 8 layers with full attention the first 4 are frozen. The classes are layers 0 to 3, which only
go forward, layer 4, whose input needs no gradient, and layers 5 to 7; the small model has layers 0, 4 and 5, under
their own names.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.tensor_ranks import trained_model
from ratrain.ratrain_ir.model.blocks import block, has_backward, parameters, passes_gradient_on, trains
from ratrain.ratrainc.planner.space.units import KINDS

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan

Counts = NDArray[np.float64]


@frozen(eq=False)
class LayerClasses:
    """Layers of a model by class."""

    model: ModelConfig
    """one layer of each class, in order of their first occurrence"""
    of_layer: tuple[int, ...]
    """class of each layer"""
    goes_back: tuple[bool, ...]
    """by class: True if a gradient goes back through such layers"""

    def __len__(self) -> int:
        return len(self.goes_back)

    @property
    def all_go_back(self) -> bool:
        """True if every layer has a backward."""
        return all(self.goes_back)

    @property
    def passed(self) -> Counts:
        """Layers of each class among the first ones: [class, number of first layers]."""
        members = np.array(self.of_layer) == np.arange(len(self))[:, None]
        return np.concatenate([np.zeros((len(self), 1)), members.cumsum(axis=1)], axis=1)

    @property
    def least_in_a_row(self) -> Counts:
        """Fewest layers of each class among some in a row: [class, number of layers in a row]."""
        passed = self.passed
        total = passed.shape[1] - 1
        rows = [(passed[:, n:] - passed[:, : total + 1 - n]).min(axis=1) for n in range(total + 1)]
        return np.stack(rows, axis=1)


@cache
def layer_classes(model: ModelConfig, plan: Plan) -> LayerClasses:
    """Return the classes of a model's layers under what a plan trains."""
    trained = trained_model(model, plan)
    numbers: dict[object, int] = {}
    of_layer = []
    for layer in range(model.layers):
        own = [block(kind, layer) for kind in KINDS["layer"]]
        held = tuple((each.weight, each.held, each.shape) for owner in own for each in parameters(trained, owner))
        back = tuple((has_backward(model, plan, owner), passes_gradient_on(model, plan, owner)) for owner in own)
        of_layer.append(numbers.setdefault((model.layer_kind(layer), held, back), len(numbers)))
    first = tuple(of_layer.index(each) for each in range(len(numbers)))
    goes_back = tuple(has_backward(model, plan, block("mlp", layer)) for layer in first)
    return LayerClasses(model.of_layers(first), tuple(of_layer), goes_back)


def ends_train(model: ModelConfig, plan: Plan) -> bool:
    """Tell whether embedding or head has parameters that train."""
    return any(trains(model, plan, block(kind)) for kind in ("embed", "head"))
