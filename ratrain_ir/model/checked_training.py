"""Check of a plan's `[train]` keys against a model: names that match nothing, and what is not built."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.tensor_ranks import norms_over_ranks, trained_model
from ratrain.ratrain_ir.config.training import ALL_LINEAR, split_names
from ratrain.ratrain_ir.model.adapters import is_saved, is_stack_module, is_target
from ratrain.ratrain_ir.model.blocks import block_chain, parameters, trained_blocks
from ratrain.ratrain_ir.model.module_names import layers_by_part, module_names, parameter_modules
from ratrain.ratrain_ir.model.parameter_names import head_module, is_router_module
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.module_patterns import expression_of, is_named, matches_end, matches_whole, number_text
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.config.training import Training
    from ratrain.ratrain_ir.support.module_patterns import ModuleNumbers


def check_training(model: ModelConfig, plan: Plan) -> None:
    """Raise RT064 where frozen parameters or adapters of a plan do not fit its model, or their layout is not built.

    Some layers of a model (`ModelConfig.of_layers`) are taken as they are: names may mean the others.
    """
    if not plan.training or model.layer_numbers:
        return
    if plan.training.adapts:
        _check_targets(model, plan)
    else:
        _check_frozen(model, plan)
    if plan.training.base_format is not None:
        _check_base(model, plan)
    _check_layout(model, plan)


def _check_targets(model: ModelConfig, plan: Plan) -> None:
    wholes = layers_by_part(model)
    modules = list(dict.fromkeys(wholes.values()))
    words = '"' + ", ".join(sorted({_short(module) for module in modules})) + '"'
    expression = expression_of(plan.training.targets)
    if expression is not None:
        _check_expression(model, expression, modules, words)
    else:
        for target in split_names(plan.training.targets):
            _check_target(model, target, wholes, words)
    training = trained_model(model, plan).training
    adapted = [module for module in modules if is_target(training, module)]
    for key in ("rank_pattern", "alpha_pattern"):
        _check_numbers(key, getattr(plan.training, key), adapted)
    _check_saved(model, plan.training, adapted)


def _check_saved(model: ModelConfig, training: Training, adapted: list[str]) -> None:
    """Raise RT064 unless the modules that train whole are there, alone in files, and have no adapters.

    PEFT trains copies of tied embeddings apart unless `ensure_weight_tying` is set (huggingface/peft 0.21.2,
    peft/tuners/tuners_utils.py, `_check_tied_modules`); here they stay tied, so both are named.
    """
    modules = parameter_modules(model)
    for name in split_names(training.modules_to_save):
        what = f"modules_to_save: {shown(name)}"
        named = [module for module in modules if is_named(module, name)]
        if not named:
            text = f"modules_to_save: no module of {model.name} is named {shown(name)}"
            fail("RT064", text, help=f'names are like "{next(iter(modules))}" or "{head_module(model)}", or their ends')
        both = next((module for module in named if module in adapted), None)
        if both is not None:
            fail("RT064", f"{what} names {both}, which gets an adapter", help="take it out of targets, or leave it out")
        other = next((module for module in named if is_stack_module(f"{module}.") or is_router_module(module)), None)
        packed = next((module for module in named if module in _packed_layers(model)), None)
        if other or packed:
            text = f"{what} names {other or packed}: routers, experts and packed layers do not train whole here"
            fail("RT064", text, help="leave it out")
    ends = (next(iter(modules)), head_module(model))
    if model.tied_embeddings and len({is_saved(training, module) for module in ends}) > 1:
        text = f"modules_to_save names one of {ends[0]} and {ends[1]}, which are one table in {model.name}"
        fail("RT064", text, help=f'name both or neither: "{ends[0]}, {ends[1]}"')


def _packed_layers(model: ModelConfig) -> set[str]:
    return {whole for part, whole in layers_by_part(model).items() if part != whole}


def _check_expression(model: ModelConfig, expression: str, modules: list[str], words: str) -> None:
    """Raise RT064 unless a regular expression matches layers that may have an adapter, and no other modules."""
    what = f"targets: the expression {shown(expression)}"
    others = [name for name in module_names(model) if name not in modules and matches_whole(expression, name)]
    if others:
        text = f"{what} matches {others[0]} too, which has no adapter here"
        fail("RT064", text, help=f"let it match linear layers alone: {words}")
    if not any(matches_whole(expression, module) and not is_stack_module(module) for module in modules):
        text = f"{what} matches no linear layer of {model.name}"
        fail("RT064", text, help=f'it matches whole names, like "{modules[0]}"')


def _check_numbers(key: str, numbers: ModuleNumbers | None, adapted: list[str]) -> None:
    """Raise RT064 where an entry of a pattern names no adapted layer, or two of them give one layer two numbers.

    PEFT takes the first of two, but sorts them in the files that it writes (peft/config.py, `save_pretrained`).
    """
    found: dict[str, tuple[str, float]] = {}
    for pattern, number in numbers or ():
        named = [module for module in adapted if matches_end(pattern, module)]
        if not named:
            text = f"{key}: no layer with an adapter is named {shown(pattern)}"
            fail("RT064", text, help=f'names are like "{adapted[0]}", or ends of them' if adapted else None)
        for module in named:
            first, before = found.setdefault(module, (pattern, number))
            if number != before:
                text = f"{key}: {module} is named by {shown(first)} and {shown(pattern)}"
                way_out = f"let one of them name it: {number_text(before)} or {number_text(number)}"
                fail("RT064", text, help=way_out)


def _check_target(model: ModelConfig, target: str, wholes: Mapping[str, str], words: str) -> None:
    """Raise RT064 unless a target names layers that may have an adapter, and no others."""
    what = f"targets: {shown(target)}"
    if target == ALL_LINEAR:
        return
    modules = [module for module in dict.fromkeys(wholes.values()) if is_named(module, target)]
    parts = [name for name, whole in wholes.items() if name != whole and is_named(name, target)]
    stack = next((name for name in (*modules, *parts) if is_stack_module(name)), None)
    other = next((name for name in modules if not is_stack_module(name)), None)
    if stack is not None and other is not None:
        text = f"{what} names a layer of routed experts, {_short(wholes.get(stack, stack))}, and another"
        ways = (".".join(name.split(".")[-2:]) for name in (other, wholes.get(stack, stack)))
        fail("RT064", text, help='write "{}" or "{}"'.format(*ways))
    if modules:
        return
    if parts:
        whole = _short(wholes[parts[0]])
        text = f"{what}: in {model.family} that is a part of {whole}, which has one adapter as a whole"
        fail("RT064", text, help=f'write "{whole}"')
    text = f"targets: no linear layer of {model.name} is named {shown(target)}"
    fail("RT064", text, help=f'use any of {words}, or "{ALL_LINEAR}"')


def _short(module: str) -> str:
    """Return the end of a layer's name that tells it from others, as targets have it."""
    return ".".join(module.split(".")[-1 - is_stack_module(module) :])


def _check_frozen(model: ModelConfig, plan: Plan) -> None:
    names = [each.name for owner in block_chain(model) for each in parameters(model, owner)]
    for pattern in split_names(plan.training.freeze):
        if not any(fnmatchcase(name, pattern) for name in names):
            text = f"freeze: no parameter of {model.name} is named {shown(pattern)}"
            fail("RT064", text, help=f'names are like "{names[0]}" or "{names[1]}"; `*` stands for any characters')
    if not trained_blocks(trained_model(model, plan)):
        fail("RT064", f"freeze: no parameter of {model.name} is left to train", help="freeze fewer of them")


def _check_base(model: ModelConfig, plan: Plan) -> None:
    """Refuse to pack frozen matrices where there is none to pack."""
    trained = trained_model(model, plan)
    if not any(each.packed for owner in block_chain(model) for each in parameters(trained, owner)):
        text = f"base = {shown(plan.training.base)} changes nothing: no matrix of a linear layer is frozen"
        fail("RT064", text, help="leave base out")


def _check_layout(model: ModelConfig, plan: Plan) -> None:
    """Refuse norms over tensor-parallel ranks."""
    if norms_over_ranks(model, plan):
        text = f"tp = {plan.tp}: frozen parameters or adapters of {model.name}, whose norms of queries and keys tensor-"
        fail("RT064", f"{text}parallel ranks take together, are not built", help="use tp = 1")
