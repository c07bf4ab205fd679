"""Parameters that train: the frozen ones of a plan by name, and the adapters (LoRA) that it sets beside linear layers.

With `targets = "q_proj, v_proj"` a layer's attention has four more parameters, named as PEFT names them:

    model.layers.0.self_attn.q_proj.lora_A.weight [rank, in]     ....q_proj.lora_B.weight [out, rank]     v_proj alike

Matrices that a family's files hold packed together have one adapter there: one A, and the rows of its B lie as the
packed rows do. They share that A here too, and each has its own rows of B. With `targets = "c_attn"`:

    transformer.h.0.attn.c_attn.lora_A.weight [rank, in]   ....attn.q_proj.lora_B.weight [out of q, rank]   k, v alike

A router has one as linear layers have; a stack of experts has an A and a B for each expert, `gate_up_proj` is one,
as in the classes of `transformers` 5:

    model.layers.0.mlp.experts.gate_up_proj.lora_A.weight [experts, rank, in]
    model.layers.0.mlp.experts.gate_proj.lora_B.weight [experts, out, rank]     up_proj alike
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.training import ALL_LINEAR, split_names
from ratrain.ratrain_ir.model.parameter_names import (
    JOINT,
    experts_module,
    is_router_module,
    module_name,
    packed_module,
)
from ratrain.ratrain_ir.support.module_patterns import expression_of, is_named, matches_whole

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
        return adapter or is_saved(training, name.rpartition(".")[0])
    return not any(fnmatchcase(name, pattern) for pattern in split_names(training.freeze))


def is_saved(training: Training, module: str) -> bool:
    """Tell whether a module trains whole beside adapters."""
    return any(is_named(module, name) for name in split_names(training.modules_to_save))


def adapter_shapes(
    model: ModelConfig, kind: str, layer: int | None, training: Training, shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> Shapes:
    """Return short names and shapes of the adapters of a block's parameters `shapes`."""
    adapters: Shapes = []
    for weight, shape in shapes:
        if not is_adaptable(weight):
            continue
        alone = linear_name(model, kind, layer, weight)
        packed = packed_name(model, kind, layer, weight)
        if is_target(training, packed or alone):
            *experts, outputs, inputs = shape
            rank = training.rank_of(packed or alone)
            stem = weight.removesuffix("_proj")
            first = (f"{stem if packed is None else _JOINT_OF[stem]}{FIRST}", (*experts, rank, inputs))
            adapters += [first] * (first not in adapters)  # parts of a packed layer share it
            adapters.append((f"{stem}{SECOND}", (*experts, outputs, rank)))
    return adapters


_JOINT_OF = {part: joint for joint, parts in JOINT.items() for part in parts}


def stems_of_first(weights: Iterable[str]) -> dict[str, str]:
    """Return the stem of its A by the stem of each adapted linear layer: `q` of `q_proj`.

    That of parts of a packed layer is the joint one, `qkv`. `weights` are short names of a block's parameters.
    """
    names = frozenset(weights)
    stems = [name.removesuffix(SECOND) for name in names if name.endswith(SECOND)]
    return {stem: stem if f"{stem}{FIRST}" in names else _JOINT_OF[stem] for stem in sorted(stems)}


def is_linear(weight: str) -> bool:
    """Tell whether a parameter is the matrix of a linear layer between blocks' ends, by its short name."""
    return weight.endswith("_proj")


def is_adaptable(weight: str) -> bool:
    """Tell whether a parameter may have an adapter, by its short name: linear, or of experts."""
    return is_linear(weight) or is_stack(weight)


def is_stack(weight: str) -> bool:
    """Tell whether a parameter is a stack of the matrices of all routed experts, by its short name."""
    return weight.endswith("_experts")


def linear_name(model: ModelConfig, kind: str, layer: int | None, weight: str) -> str:
    """Return the name of the linear layer that a matrix belongs to, as if it stood alone in files.

    Of a stack of experts that is the name of PEFT's target parameter, or of its part.
    """
    if is_stack(weight):
        return f"{experts_module(model, layer)}.{weight.removesuffix('_experts')}_proj"
    return module_name(model, kind, layer, weight)


def packed_name(model: ModelConfig, kind: str, layer: int | None, weight: str) -> str | None:
    """Return the name of the layer that has an adapter for a matrix and others together; None if it has its own."""
    if is_stack(weight):
        return None if weight == "down_experts" else f"{experts_module(model, layer)}.gate_up_proj"
    return packed_module(model, linear_name(model, kind, layer, weight))


def adapter_module(model: ModelConfig, kind: str, layer: int | None, stem: str) -> str:
    """Return the name of the linear layer, or stack, that the adapter of a stem stands beside; of a part the whole."""
    weight = stem if is_stack(stem) else f"{stem}_proj"
    return packed_name(model, kind, layer, weight) or linear_name(model, kind, layer, weight)


@cache
def is_target(training: Training, module: str) -> bool:
    """Tell whether a linear layer gets an adapter; parts of a packed layer are asked for by its name.

    Stacks of experts are not linear layers, nor are routers for "all-linear" (`Training.in_family`): targets name them.
    """
    if training.targets == ALL_LINEAR:
        return not is_stack_module(module) and not is_router_module(module)
    expression = expression_of(training.targets)
    if expression is not None:
        return not is_stack_module(module) and matches_whole(expression, module)
    return any(is_named(module, target) for target in split_names(training.targets))


def is_stack_module(module: str) -> bool:
    """Tell whether the name of a layer is that of a stack of experts, or of a part of one."""
    return ".experts." in module
