"""Check of a plan's `[train]` keys against a model: names that match nothing, and what is not built."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.tensor_ranks import norms_over_ranks, trained_model
from ratrain.ratrain_ir.config.training import ALL_LINEAR, split_names
from ratrain.ratrain_ir.model.adapters import is_adaptable, is_named, is_routed, linear_name
from ratrain.ratrain_ir.model.blocks import Block, block_chain, parameters, trained_parameters
from ratrain.ratrain_ir.model.parameter_names import packed_module
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan


def check_training(model: ModelConfig, plan: Plan) -> None:
    """Raise RT064 where frozen parameters or adapters of a plan do not fit its model, or their layout is not built."""
    if not plan.training:
        return
    if plan.training.adapts:
        _check_targets(model, plan)
    else:
        _check_frozen(model, plan)
    if plan.training.base_bits is not None:
        _check_base(model, plan)
    _check_layout(model, plan)


def _check_targets(model: ModelConfig, plan: Plan) -> None:
    layers = {
        linear_name(model, owner.kind, owner.layer, parameter.weight): parameter.weight
        for owner in block_chain(model)
        for parameter in parameters(model, owner)
    }
    names = [name for name, weight in layers.items() if is_adaptable(weight)]
    packed = {name: found for name in names if (found := packed_module(model, name)) is not None}
    modules = list(dict.fromkeys(packed.get(name, name) for name in names))
    words = '"' + ", ".join(sorted({module.rpartition(".")[2] for module in modules})) + '"'
    for target in split_names(plan.training.targets):
        _check_routed(model, target, layers, words)
        if target == ALL_LINEAR or any(is_named(module, target) for module in modules):
            continue
        if (part := next((name for name in packed if is_named(name, target)), None)) is not None:
            short, whole = (name.rpartition(".")[2] for name in (part, packed[part]))
            text = f"targets: files of {model.family} hold {short} in {whole}, which has one adapter as a whole"
            fail("RT064", text, help=f'write "{whole}" instead of {shown(target)}')
        text = f"targets: no linear layer of {model.name} is named {shown(target)}"
        all_of_them = "" if model.family in _ALL_WITH_EXPERTS else f', or "{ALL_LINEAR}"'
        fail("RT064", text, help=f"use any of {words}{all_of_them}")


_ALL_WITH_EXPERTS = frozenset({"mixtral", "qwen3_moe", "olmoe"})
"""Families in which PEFT's "all-linear" adapts routers and routed experts too (huggingface/peft 0.21.2 with
transformers 5: peft/utils/transformers_weight_conversion.py, `_resolve_string_target_modules`). In Qwen2-MoE and
GraniteMoE these are parameters there, which it does not match."""


def _check_routed(model: ModelConfig, target: str, layers: Mapping[str, str], words: str) -> None:
    """Refuse a target that names a router or routed experts; `layers` are short names by the layer's name."""
    if target == ALL_LINEAR and model.family in _ALL_WITH_EXPERTS:
        text = f'targets: "{ALL_LINEAR}" of {model.family} means its router and routed experts too, in PEFT'
        fail("RT064", f"{text}, and adapters of these are not built", help=f"name others, out of {words}")
    found = [name for name, weight in layers.items() if is_routed(weight) and is_named(name, target)]
    if found:
        text = f"targets: {shown(target)} names {found[0]}, and adapters of routers and routed experts are not built"
        others = (name for name, weight in layers.items() if is_adaptable(weight) and is_named(name, target))
        other = next(others, None)
        way_out = f"name others, out of {words}" if other is None else f'write "{".".join(other.split(".")[-2:])}"'
        fail("RT064", text, help=way_out)


def _check_frozen(model: ModelConfig, plan: Plan) -> None:
    names = [each.name for owner in block_chain(model) for each in parameters(model, owner)]
    for pattern in split_names(plan.training.freeze):
        if not any(fnmatchcase(name, pattern) for name in names):
            text = f"freeze: no parameter of {model.name} is named {shown(pattern)}"
            fail("RT064", text, help=f'names are like "{names[0]}" or "{names[1]}"; `*` stands for any characters')
    if not _any_trains(model, plan, block_chain(model)):
        fail("RT064", f"freeze: no parameter of {model.name} is left to train", help="freeze fewer of them")


def _check_base(model: ModelConfig, plan: Plan) -> None:
    """Refuse to pack frozen matrices where there is none to pack."""
    trained = trained_model(model, plan)
    if not any(each.bits for owner in block_chain(model) for each in parameters(trained, owner)):
        text = f"base = {shown(plan.training.base)} changes nothing: no matrix of a linear layer is frozen"
        fail("RT064", text, help="leave base out")


def _any_trains(model: ModelConfig, plan: Plan, owners: Iterable[Block]) -> bool:
    trained = trained_model(model, plan)
    return any(trained_parameters(trained, owner) for owner in owners)


def _check_layout(model: ModelConfig, plan: Plan) -> None:
    """Refuse norms over tensor-parallel ranks, and a stage or chunk without a parameter that trains."""
    if norms_over_ranks(model, plan):
        text = f"tp = {plan.tp}: frozen parameters or adapters of {model.name}, whose norms of queries and keys tensor-"
        fail("RT064", f"{text}parallel ranks take together, are not built", help="use tp = 1")
    chunks = plan.pp * plan.chunks
    for chunk in range(chunks) if chunks > 1 else ():
        layers = plan.chunk_layers(chunk, model)
        ends = {"embed": chunk == 0, "head": chunk == chunks - 1}
        owners = [each for each in block_chain(model) if ends.get(each.kind, each.layer in layers)]
        if not _any_trains(model, plan, owners):
            text = f"nothing trains in layers {layers.start} to {layers.stop - 1}, one stage or chunk of the pipeline"
            fail("RT064", f"{text}: a stage that only goes forward is not built", help="use pp = 1, or other cuts")
