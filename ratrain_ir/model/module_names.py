"""Names of a model's modules as the classes of `transformers` have them, for what a plan or a folder of PEFT names."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.model.adapters import is_adaptable, is_adapter, is_stack, linear_name, packed_name
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.ratrain_ir.model.parameter_names import ROUTER, head_module, packed_module

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


@cache
def layers_by_part(model: ModelConfig) -> dict[str, str]:
    """Return the layers that may have an adapter, by the names of their parts or by their own, in forward order."""
    wholes: dict[str, str] = {}
    for owner in block_chain(model):
        for each in parameters(model, owner):
            if is_adaptable(each.weight):
                name = linear_name(model, owner.kind, owner.layer, each.weight)
                wholes[name] = packed_name(model, owner.kind, owner.layer, each.weight) or name
    return wholes


@cache
def parameter_modules(model: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Return the names of the parameters of each module that has some, by its name; without adapters.

    The head's table has a module of its own with tied embeddings too. A packed layer has the parameters of its parts,
    the module of experts their stacks.
    """
    modules: dict[str, tuple[str, ...]] = {}
    for owner in block_chain(model):
        for each in parameters(model, owner):
            if is_adapter(each.weight):
                continue
            module = each.name.rpartition(".")[0]
            name = packed_module(model, module) or module
            if is_stack(each.weight):
                name = linear_name(model, owner.kind, owner.layer, each.weight).rpartition(".")[0]
            elif each.weight == ROUTER:
                name = linear_name(model, owner.kind, owner.layer, each.weight)
            elif owner.kind == "head" and each.weight == "table":
                name = head_module(model)
            modules[name] = (*modules.get(name, ()), each.name)
    return modules


@cache
def module_names(model: ModelConfig) -> tuple[str, ...]:
    """Return the names of the modules that have parameters, and of those around them."""
    names: dict[str, None] = {}
    for module in parameter_modules(model):
        parts = module.split(".")
        names |= dict.fromkeys(".".join(parts[:count]) for count in range(1, len(parts) + 1))
    return tuple(names)
