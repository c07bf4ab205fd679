"""Parameters that train: the frozen ones of a plan by name, and the adapters (LoRA) that it sets beside linear layers.

With `targets = "q_proj, v_proj"` a layer's attention has four more parameters, named as PEFT names them:

    model.layers.0.self_attn.q_proj.lora_A.weight [rank, in]     ....q_proj.lora_B.weight [out, rank]     v_proj alike

Matrices that a family's files hold packed together have one adapter there, whose A they share. Such adapters are not
built.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.training import ALL_LINEAR, split_names
from ratrain.ratrain_ir.model.parameter_names import packing, parameter_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.training import Training

Shapes = list[tuple[str, tuple[int, ...]]]
"""(short name, shape) of parameters"""

FIRST, SECOND = "_lora_a", "_lora_b"
"""Ends of the short names of an adapter's two matrices."""


def is_adapter(weight: str) -> bool:
    """Tell whether a parameter is one of an adapter's matrices, by its short name."""
    return weight.endswith((FIRST, SECOND))


@cache
def trains_parameter(training: Training, name: str, *, adapter: bool) -> bool:
    """Tell whether a parameter trains, by its name in the checkpoint."""
    if training.adapts:
        return adapter
    return not any(fnmatchcase(name, pattern) for pattern in split_names(training.freeze))


def adapter_shapes(
    model: ModelConfig, kind: str, layer: int | None, training: Training, shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> Shapes:
    """Return short names and shapes of the adapters of a block's parameters `shapes`."""
    adapters: Shapes = []
    for weight, shape in shapes:
        if is_linear(weight) and is_target(training, module_name(model, kind, layer, weight)):
            outputs, inputs = shape
            stem = weight.removesuffix("_proj")
            adapters += [(f"{stem}{FIRST}", (training.rank, inputs)), (f"{stem}{SECOND}", (outputs, training.rank))]
    return adapters


def is_linear(weight: str) -> bool:
    """Tell whether a parameter is the matrix of a linear layer between blocks' ends, by its short name."""
    return weight.endswith("_proj")


def module_name(model: ModelConfig, kind: str, layer: int | None, weight: str) -> str:
    """Return the name in the checkpoint of the layer that a matrix belongs to."""
    return parameter_name(model, kind, layer, weight).removesuffix(".weight")


@cache
def is_target(training: Training, module: str) -> bool:
    """Tell whether a linear layer gets an adapter: it has a target's name, or ends in it after a dot, as in PEFT."""
    if training.targets == ALL_LINEAR:
        return True
    return any(module == name or module.endswith(f".{name}") for name in split_names(training.targets))


def packed_in(model: ModelConfig, module: str) -> str | None:
    """Return the matrix of a family's files that holds a layer together with others; None if it stands alone."""
    found = packing(model, module)
    return None if found is None else found[1].rpartition(".")[2]
