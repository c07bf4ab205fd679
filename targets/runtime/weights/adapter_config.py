"""Keys of PEFT's `adapter_config.json`: those that are compared with a plan, and those that may change nothing.

Keys and rules are those of huggingface/peft 0.21.2: `LoraConfig` (peft/tuners/lora/config.py), and
`check_target_module_exists` (peft/tuners/tuners_utils.py) for the layers that a configuration names. These are compared
by what they match, not by their text. A plan with `targets = "q_proj"` takes any of

    "target_modules": ["q_proj"]      ["model.layers.0.self_attn.q_proj", ...]      ".*[.]q_proj"

Stacks of experts and matrices of routers are parameters there: `"target_parameters": ["mlp.gate.weight"]`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.config.fields import as_float
from ratrain.ratrain_ir.config.training import ALL_LINEAR, ALL_WITH_EXPERTS, split_names
from ratrain.ratrain_ir.model.adapters import is_saved, is_stack_module, is_target
from ratrain.ratrain_ir.model.module_names import layers_by_part, parameter_modules
from ratrain.ratrain_ir.model.parameter_names import head_module, is_router_module
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, fail
from ratrain.ratrain_ir.support.files import read_text
from ratrain.ratrain_ir.support.module_patterns import (
    ModuleNumbers,
    expression_error,
    expression_of,
    is_named,
    matches_whole,
    number_text,
)
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

COMPARED = frozenset(
    {
        *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"),
        *("target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("modules_to_save", "ensure_weight_tying"),
    }
)
"""Keys that must say what the plan says."""
PLAIN: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "lora_dropout": (0, 0.0, None),
    "init_lora_weights": (True, False, "gaussian", None),  # others change the base's weights too
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None,),
    "layer_replication": (None, []),
    "megatron_config": (None,),
    "use_qalora": (False, None),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
}
"""Keys that change what is trained or computed, with the values that change nothing: others are refused."""
INERT: Mapping[str, str] = {
    "task_type": "the class around the model, whose layers are the same",
    "auto_mapping": "the class around the model",
    "peft_version": "a note of the version that wrote the folder",
    "base_model_name_or_path": "a note of the place of the base, which --init names",
    "revision": "a note of the version of the base",
    "inference_mode": "loading for use or for training, of the same numbers",
    "fan_in_fan_out": "the layout of the base's matrix; PEFT corrects it by the class of the layer",
    "megatron_core": "read with megatron_config alone",
    "qalora_group_size": "read with use_qalora alone",
    "loftq_config": "read with init_lora_weights = loftq alone",
    "eva_config": "read with init_lora_weights = eva alone",
    "corda_config": "read with init_lora_weights = corda alone",
    "lora_ga_config": "read with init_lora_weights = lora_ga alone",
    "runtime_config": "the place of matrices in memory",
}
"""Keys that change no number here, with the reason."""
_MOST_SHOWN = 8


def read_config(path: str, model: ModelConfig) -> None:
    """Refuse, with RT091, the configuration of other adapters than a model trains; RT002 if it cannot be read."""
    try:
        config = json.loads(read_text(path, "configuration of adapters"))
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        fail("RT091", f"'{path}' is not the configuration of LoRA adapters", help="PEFT writes one beside its weights")
    report = Diagnostics()
    _check_keys(path, config, report)
    said = config.get("use_rslora", False)
    if said != model.training.rslora:
        text = f"'{path}' has use_rslora = {shown(said)}, the program rslora = {shown(model.training.rslora)}"
        report.error("RT091", text, help=f"compile with rslora = {str(said).lower()} in the plan's [train]")
    report.check()
    config = _with_experts(config, model.family)
    modules = list(dict.fromkeys(layers_by_part(model).values()))
    adapted = [module for module in modules if is_target(model.training, module)]
    _check_targets(path, config, modules, adapted, report)
    _check_saved(path, config, model, report)
    report.check()
    ranks = {module: model.training.rank_of(module) for module in adapted}
    alphas = {module: model.training.alpha_of(module) for module in adapted}
    _check_numbers(path, config, ("r", "rank_pattern"), ("rank", ranks), report)
    _check_numbers(path, config, ("lora_alpha", "alpha_pattern"), ("alpha", alphas), report)
    report.check()


def _with_experts(config: Mapping[str, Any], family: str) -> Mapping[str, Any]:
    """Return a configuration with the layers that "all-linear" stands for in a family with experts."""
    targets = config.get("target_modules")
    if family not in ALL_WITH_EXPERTS or not (isinstance(targets, str) and targets.lower() == ALL_LINEAR):
        return config
    named = split_names(ALL_WITH_EXPERTS[family])
    linear = [each for each in named if each.startswith(tuple("qkvo"))]
    doubled = {
        pattern: {**(config.get(pattern) or {}), r".*\.gate_up_proj": 2 * (as_float(config.get(key, 8)) or 0)}
        for pattern, key in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    }
    parameters = ["gate.weight", *(each for each in named if is_stack_module(f".{each}"))]
    return {**config, "target_modules": linear, "target_parameters": parameters, **doubled}


def peft_path(module: str) -> str:
    """Return the path of an adapted layer in PEFT, where the matrix of a router is a parameter."""
    return f"{module}.weight" if is_router_module(module) else module


def _check_keys(path: str, config: Mapping[str, Any], report: Diagnostics) -> None:
    """Refuse keys that change numbers, and unknown ones but for those that say nothing (null, false, empty)."""
    for key, plain in PLAIN.items():
        if config.get(key, plain[0]) not in plain:
            report.error("RT091", f"'{path}': {key} = {shown(config[key])} is not built")
    for key in config.keys() - PLAIN.keys() - INERT.keys() - COMPARED:
        if config[key]:
            text = f"'{path}' has {shown(key)} = {shown(config[key])}, which is unknown: it may change the adapters"
            report.error("RT091", text, help="remove it from the file if it does not")


def _check_targets(
    path: str, config: Mapping[str, Any], modules: list[str], adapted: list[str], report: Diagnostics
) -> None:
    """Refuse a configuration that names other layers, out of `modules`, than the plan adapts."""
    named = {module for module in modules if _names_layer(path, config, module)}
    help_text = "the plan's targets must be those that the adapters were trained with"
    for module in [module for module in modules if (module in named) is not (module in adapted)][:_MOST_SHOWN]:
        text = "names" if module in named else "does not name"
        other = "has no adapter in the program" if module in named else "has one in the program"
        report.error("RT091", f"'{path}' {text} {module}, which {other}", help=help_text)


def saved_modules(model: ModelConfig) -> list[str]:
    """Return the modules that train whole beside a model's adapters; of a tied table that of the embedding."""
    saved = [module for module in parameter_modules(model) if is_saved(model.training, module)]
    return [module for module in saved if not (model.tied_embeddings and module == head_module(model))]


def ties_saved(model: ModelConfig) -> bool:
    """Tell whether a tied table trains whole beside adapters."""
    return model.tied_embeddings and is_saved(model.training, head_module(model))


def _check_saved(path: str, config: Mapping[str, Any], model: ModelConfig, report: Diagnostics) -> None:
    """Refuse other modules that train whole than the plan's; a name is the end of theirs (PEFT: `_set_trainable`)."""
    names = tuple(_names(path, config, "modules_to_save"))
    found = {module for module in parameter_modules(model) if module.endswith(names)} if names else set()
    if ties_saved(model):
        found -= {head_module(model)}
        if not config.get("ensure_weight_tying"):
            text = f"'{path}' trains copies of a tied table apart: ensure_weight_tying is not set"
            report.error("RT091", text, help="leave embedding and head out of modules_to_save")
    wanted = set(saved_modules(model))
    if found != wanted:
        said = ", ".join(sorted(found)) or "none"
        text = f"'{path}' has modules_to_save = {said}, the program {', '.join(sorted(wanted)) or 'none'}"
        report.error("RT091", text, help="compile with the same modules_to_save in the plan's [train]")


def _names_layer(path: str, config: Mapping[str, Any], module: str) -> bool:
    """Tell whether PEFT sets an adapter beside a layer; stacks of experts and routers are its target parameters."""
    if is_stack_module(module) or is_router_module(module):
        return any(is_named(peft_path(module), name) for name in _names(path, config, "target_parameters"))
    if _matches(path, config, "exclude_modules", module):
        return False
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        return True
    return _matches(path, config, "target_modules", module) and (
        isinstance(targets, str) or _is_in_layers(path, config, module)
    )


def _matches(path: str, config: Mapping[str, Any], key: str, module: str) -> bool:
    """Tell whether a key's names, or its regular expression, match a module."""
    said = config.get(key)
    if isinstance(said, str):
        error = expression_error(said)
        if error is not None:
            fail("RT091", f"'{path}': {key} = {shown(said)} is no regular expression: {error}", help="correct it")
        return bool(said) and matches_whole(said, module)
    return any(is_named(module, name) for name in _names(path, config, key))


def _names(path: str, config: Mapping[str, Any], key: str) -> list[str]:
    """Return the names of a key, if it has any."""
    said = config.get(key)
    said = [] if said is None else said
    if not isinstance(said, list) or not all(isinstance(each, str) for each in said):
        fail("RT091", f"'{path}': {key} = {shown(said)} is no list of names", help="PEFT writes one")
    return said


def _is_in_layers(path: str, config: Mapping[str, Any], module: str) -> bool:
    """Tell whether a module is in the layers of `layers_to_transform`: by the first number in its name."""
    said = config.get("layers_to_transform")
    if said is None or said == []:
        return True
    layers = said if isinstance(said, list) else [said]
    pattern = config.get("layers_pattern")
    patterns = [pattern] if isinstance(pattern, str) and pattern else pattern or []
    usable = isinstance(patterns, list) and all(isinstance(each, str) for each in patterns)
    if not usable or not all(type(each) is int for each in layers):
        text = f"'{path}': layers_to_transform = {shown(said)}, layers_pattern = {shown(pattern)} name no layers"
        fail("RT091", text, help="the first has numbers of layers, the second names of lists of layers")
    errors = [error for each in patterns if (error := expression_error(each)) is not None]
    if errors:
        fail("RT091", f"'{path}': layers_pattern = {shown(pattern)}: {errors[0]}", help="correct it")
    ways = [rf"(?:^|.*?\.){each}\.(\d+)\." for each in patterns] or [r".*?\.[^.]*\.(\d+)\."]
    found = next((match for way in ways if (match := re.match(way, module))), None)
    return found is not None and int(found.groups()[-1]) in layers


def _check_numbers(
    path: str,
    config: Mapping[str, Any],
    keys: tuple[str, str],
    own: tuple[str, Mapping[str, float]],
    report: Diagnostics,
) -> None:
    """Refuse other ranks or alphas than the plan's, by layer: keys of the file, and the plan's key with its values."""
    key, pattern_key = keys
    name, wanted = own
    usual, patterns = as_float(config.get(key, 8)), config.get(pattern_key) or {}
    if usual is None or not isinstance(patterns, dict):
        text = f"'{path}': {key} = {shown(config.get(key))} or {pattern_key} = {shown(patterns)} is no number"
        report.error("RT091", text, help="PEFT writes a number, and an object of numbers")
        return
    entries = [(pattern, as_float(number)) for pattern, number in patterns.items()]
    known = [(pattern, number) for pattern, number in entries if number is not None]
    numbers = ModuleNumbers.of_entries(known, lambda number: number > 0)
    if patterns and (numbers is None or len(known) < len(entries)):
        text = f"'{path}': {pattern_key} = {shown(json.dumps(patterns))} is not usable"
        report.error("RT091", text, help="names or regular expressions without spaces, with numbers above 0")
        return
    for module, want in wanted.items():
        have = usual if numbers is None else numbers.of(peft_path(module), usual)
        if have != want:
            given = key if numbers is None else f"{key} and {pattern_key}"
            text = f"'{path}' has {given} = {number_text(have)} for {module}, the program {name} = {number_text(want)}"
            way_out = f"{name} = {number_text(usual)}"
            if numbers is not None:
                way_out += f" and {name}_pattern = {shown(str(numbers))}"
            report.error("RT091", text, help=f"compile with {way_out} in the plan's [train]")
            return


def config_of(model: ModelConfig, base: str | None, modules: list[str], stacks: list[str]) -> dict[str, Any]:
    """Return PEFT's configuration of a model's adapters: beside linear layers `modules`, and parameters `stacks`.

    Where PEFT converts targets to those of transformers 5, it takes the last parts of the names that an expression
    matches, and so other layers: they are named instead.
    """
    training = model.training
    routers = [each for each in layers_by_part(model).values() if is_router_module(each) and is_target(training, each)]
    ranks = {module: training.rank_of(module) for module in routers}
    alphas = {module: training.alpha_of(module) for module in routers}
    expression = None if model.family in ALL_WITH_EXPERTS else expression_of(training.targets)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "r": training.rank,
        "lora_alpha": _json_number(training.alpha),
        "lora_dropout": 0.0,
        "use_rslora": training.rslora,
        "use_dora": False,
        "bias": "none",
        "fan_in_fan_out": model.family == "gpt2",
        "target_modules": modules if expression is None else expression,
        **({"target_parameters": stacks} if stacks else {}),
        "modules_to_save": saved_modules(model) or None,
        **({"ensure_weight_tying": True} if ties_saved(model) else {}),
        "rank_pattern": _patterns(training.rank_pattern, training.rank, ranks),
        "alpha_pattern": _patterns(training.alpha_pattern, training.alpha, alphas),
        "layers_to_transform": None,
        "layers_pattern": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _patterns(numbers: ModuleNumbers | None, usual: float, routers: Mapping[str, float]) -> dict[str, float]:
    """Return numbers as PEFT finds them: first the routers' numbers, which it would not find by a parameter's path."""
    paths = {peft_path(module): number for module, number in routers.items()}
    missed = {
        path: number for path, number in paths.items() if (numbers.of(path, usual) if numbers else usual) != number
    }
    return {pattern: _json_number(number) for pattern, number in (*missed.items(), *(numbers or ()))}


def _json_number(number: float) -> float:
    """Return a whole number as an integer, as PEFT's ranks are."""
    return int(number) if number == int(number) else number
