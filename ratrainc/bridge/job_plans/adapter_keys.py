"""Keys of `[train]` from the low-rank adapter of a job.

    lora_r, lora_alpha, use_rslora       rank, alpha, rslora
    lora_target_modules                  targets: names as PEFT has them; an expression, or some layers alone, as `re:`
    lora_exclude_modules                 targets: the names that remain; where some of a name's layers do, as `re:`
    lora_modules_to_save                 modules_to_save
    load_in_4bit, nf4                    base = "nf4"

What a plan trains otherwise (DoRA, dropout, a base in fp4 or in 8 bits) is refused by name. Rules of names are those of
huggingface/peft 0.21.2, peft/tuners/tuners_utils.py (`check_target_module_exists`, `_set_trainable`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.quantised import NF4
from ratrain.ratrain_ir.config.training import ALL_LINEAR, LORA
from ratrain.ratrain_ir.model.adapters import is_stack_module
from ratrain.ratrain_ir.model.checked_training import check_training
from ratrain.ratrain_ir.model.expert_targets import GATE_UP, ExpertTargets, expert_targets, touches_experts
from ratrain.ratrain_ir.model.module_names import layers_by_part, parameter_modules
from ratrain.ratrain_ir.model.parameter_names import head_module, is_router_module
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.module_patterns import (
    EXPRESSION,
    expression_error,
    expression_of,
    is_expression,
    is_named,
)
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.bridge.jobs.job import ADAPTER, THAWED
from ratrain.ratrainc.bridge.jobs.job_common import LISTS_LINEARS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.bridge.job_plans.job_plan import JobPlan
    from ratrain.ratrainc.bridge.jobs.job import Adapter

_OF_MEGATRON = {"linear_proj": "o_proj", "linear_fc2": "down_proj"}
_JOINT_IN_MEGATRON = {"linear_qkv": "q_proj, k_proj and v_proj", "linear_fc1": "gate_proj and up_proj"}
"""Linear layers of Megatron-Bridge (src/megatron/bridge/peft/lora.py, LoRA): as they are here, and joint ones."""
_TABLES = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe")
"""Embeddings and heads, which have no adapters in a plan."""


def put_adapter(made: JobPlan) -> None:
    """Put the keys of a job's adapter; report what no plan trains."""
    adapter = made.job.adapter
    assert adapter is not None
    _refuse(made, adapter)
    made.put("method", LORA, "adapter")
    made.put("rank", adapter.rank, f"{ADAPTER}rank")
    made.put("alpha", adapter.alpha, f"{ADAPTER}alpha")
    if adapter.rslora:
        made.put("rslora", True, f"{ADAPTER}rslora")
    targets = _targets(made, adapter)
    if targets:
        made.put("targets", targets, f"{ADAPTER}targets")
    # "all-linear" as a plan's own word says it already
    twice = targets not in (None, ALL_LINEAR) and _of_experts(made, adapter).doubled
    for name, usual in (("rank_pattern", adapter.rank), ("alpha_pattern", adapter.alpha)):
        numbers = dict(getattr(adapter, name)) | ({GATE_UP: 2 * usual} if twice else {})
        if numbers:
            made.put(name, numbers, f"{ADAPTER}{name}")
    if adapter.modules_to_save:
        made.put("modules_to_save", ", ".join(_saved(made, adapter)), f"{ADAPTER}modules_to_save")
    if adapter.base_bits == 4:
        _put_base(made, adapter)


def check_trained(made: JobPlan, plan: Plan) -> None:
    """Report, with the file's words and places, where the keys of [train] do not fit the model, if it is known."""
    if not plan.training or made.job.model is None:
        return
    try:
        check_training(made.job.model, plan)
    except DiagnosticError as error:
        for each in error.diagnostics:
            key = re.match(r"\w*", each.message)
            own = key[0] if key else ""
            part = {"base": "base_bits"}.get(own, own)
            beginning = ADAPTER if made.job.adapter is not None else THAWED
            name = part if part == "tp" else f"{beginning}{part}"
            about = (
                re.match(rf"{own}(:| names)", each.message) is not None
            )  # else it speaks of a key's value in the plan
            rest = each.message.removeprefix(own) if about else f": {each.message}"
            made.wrong(name, f"{made.key(name)}{rest}", each.help or "change it in the file", code=each.code)
        made.report.check()


def is_carried(made: JobPlan, key: str) -> bool:
    """Tell whether a setting, or the table that it stands in, is part of what the plan has of adapters or layers."""
    own = (origin.key for name, origin in made.job.origins.items() if name.startswith((ADAPTER, THAWED)))
    return any(key == each or key.startswith(f"{each}.") for each in own)


def _refuse(made: JobPlan, adapter: Adapter) -> None:
    """Report other kinds of adapters, starts and bases, and dropout."""
    if adapter.kind:
        text = f"{adapter.kind} is another training than low-rank products beside the weights, which a plan has"
        made.wrong(f"{ADAPTER}kind", text, "take it out of the file")
    if adapter.start:
        text = f"{adapter.start}: adapters of a plan start as PEFT's usual ones, the second matrix at zero"
        made.wrong(f"{ADAPTER}start", text, "take it out of the file")
    if adapter.dropout:
        name = f"{ADAPTER}dropout"
        text = f"{made.key(name)}: adapters drop {adapter.dropout:g} of their inputs; a plan has no dropout"
        made.wrong(name, text, "say 0 in the file")
    name = f"{ADAPTER}base_bits"
    if adapter.base_bits == 8:
        text = (
            f"{made.key(name)}: a base in 8 bits of bitsandbytes multiplies in 8 bits too, which no base of a plan does"
        )
        made.wrong(name, text, "load it in 4 bits (nf4), or as it is published")
    elif adapter.base_bits not in (None, 4):
        made.wrong(name, f"{made.key(name)}: no base of a plan has {adapter.base_bits} bits", "load it in 4 bits (nf4)")
    elif adapter.base_bits == 4 and adapter.quantisation != NF4:
        name = f"{ADAPTER}quantisation"
        text = f"{made.key(name)}: adapters would train beside other weights: a base of a plan is nf4"
        made.wrong(name, f"{text}, not {adapter.quantisation}", "say nf4")


def _put_base(made: JobPlan, adapter: Adapter) -> None:
    made.put("base", NF4, f"{ADAPTER}base_bits")
    if not adapter.double_quantised:
        why = "the base's scales stay in f32 there; those of a plan's nf4 have 8 bits"
        made.leave(f"{ADAPTER}double_quantised", False, why, trains=True)
    elif made.job.framework == "torchtune":
        why = "torchao rounds the base's scales to equal steps of 8 bits; a plan's nf4 as bitsandbytes does"
        made.leave(f"{ADAPTER}base_bits", NF4, why, trains=True)


# targets


def _targets(made: JobPlan, adapter: Adapter) -> str | None:
    """Return the targets in a plan's words; None if they are refused, which is reported."""
    name = f"{ADAPTER}targets"
    names = _names(made, adapter)
    if names is None or names == [ALL_LINEAR]:
        return names[0] if names else None
    what, odd = made.key(name), next((each for each in names if is_expression(each)), None)
    if odd is not None and len(names) + len(adapter.layers) + len(adapter.target_parameters) > 1:
        text = f"{what}: {shown(odd)} is a regular expression, which stands alone in PEFT"
        made.wrong(name, text, "write one expression of whole names, without other names, parameters and layers")
        return None
    if odd is not None and (error := expression_error(odd)) is not None:
        made.wrong(name, f"{what}: {shown(odd)} is no regular expression: {error}", "correct it")
        return None
    if odd is not None and made.job.model is not None and touches_experts(made.job.model.family, odd):
        text = f"{what}: {shown(odd)} names experts or routers, for which PEFT takes parameters of all layers"
        made.wrong(name, text, "name them, without an expression")
        return None
    if odd is not None:
        return _but_excluded(made, adapter, f"{EXPRESSION}{odd}")
    for each in names:
        if each in _JOINT_IN_MEGATRON and made.job.framework == "megatron-bridge":
            text = f"{what}: {each} has one adapter for {_JOINT_IN_MEGATRON[each]}; a plan has one for each"
            made.wrong(name, text, f"name others: target_modules: [{', '.join(_OF_MEGATRON)}]")
            return None
        if each.rpartition(".")[2] in _TABLES:
            table = f"{ADAPTER}further_targets" if f"{ADAPTER}further_targets" in made.job.origins else name
            text = f"{made.key(table)}: {each} would get an adapter; in a plan linear layers within the model do"
            made.wrong(table, text, "leave it out, or train it whole (modules_to_save)")
            return None
    of_experts = _of_experts(made, adapter)
    if of_experts.missing:
        text = f"{what}: {of_experts.missing} is missing, which is one parameter with others that are there: PEFT stops"
        made.wrong(name, text, "name both, or neither")
        return None
    if of_experts.linears != adapter.targets:  # of what PEFT takes for parameters the old names go
        names = [each for each in names if each in of_experts.linears or ALL_LINEAR in adapter.targets]
    parameters = [each.removesuffix(".weight") for each in of_experts.parameters]
    if made.job.framework == "megatron-bridge":
        names = [_OF_MEGATRON.get(each, each) for each in names]
    if adapter.layers and parameters:
        text = f"{made.key(f'{ADAPTER}layers')}: a plan's experts have adapters in all layers, or in none"
        made.wrong(f"{ADAPTER}layers", text, "leave it out, or the parameters of experts")
        return None
    names = [each for each in names if not any(is_named(each, other) for other in adapter.excluded)]
    if not names and adapter.excluded and not parameters:
        text = f"{made.key(f'{ADAPTER}excluded')}: no layer is left to get an adapter: PEFT stops"
        made.wrong(f"{ADAPTER}excluded", text, "leave one out there")
        return None
    if adapter.layers:
        return _but_excluded(made, adapter, _in_layers(names, adapter), names)
    return _but_excluded(made, adapter, ", ".join(dict.fromkeys([*names, *parameters])), names)


def _of_experts(made: JobPlan, adapter: Adapter) -> ExpertTargets:
    """Return the targets apart by linear layers and parameters, for which PEFT takes old names of experts."""
    model = made.job.model
    if model is None or made.job.framework == "megatron-bridge":
        return ExpertTargets(adapter.targets, adapter.target_parameters)
    return expert_targets(model.family, adapter.targets, adapter.target_parameters)


def _but_excluded(made: JobPlan, adapter: Adapter, targets: str, names: Iterable[str] | None = None) -> str | None:
    """Return targets without the layers that get no adapter; None if they are refused, which is reported.

    `names` are those in the targets, None of an expression. A name that is left out where it is named whole has been
    taken out of them; what leaves out some of the layers that a name names makes an expression of the targets.
    """
    key = f"{ADAPTER}excluded"
    whole = next((expression_of(each) for each in adapter.excluded), None)
    some = [each for each in adapter.excluded if names is None or any(is_named(each, name) for name in names)]
    if not some and whole is None:
        return targets
    if adapter.target_parameters:
        text = f"{made.key(key)}: it leaves out some of the layers of a name, which an expression says in a plan; an"
        made.wrong(key, f"{text} expression stands alone, without parameters of experts", "leave names out whole")
        return None
    within = expression_of(targets) or rf"(?:.*\.)?(?:{'|'.join(re.escape(each) for each in names or ())})"
    left_out = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, some))})" if whole is None else whole
    found = rf"(?!(?:{left_out})\Z)(?:{within})"
    error = expression_error(left_out) or expression_error(found)
    if error is None and re.compile(left_out).groups and re.search(r"\\[1-9]", within):
        error = "its groups change the numbers of those that the targets refer to"
    if error is not None:
        made.wrong(key, f"{made.key(key)}: {shown(left_out)} is no regular expression here: {error}", "correct it")
        return None
    return f"{EXPRESSION}{found}"


def _names(made: JobPlan, adapter: Adapter) -> list[str] | None:
    """Return the names of targets; all linear layers by their own names if the file restricts them, or adds others."""
    job, model = made.job, made.job.model
    if ALL_LINEAR not in adapter.targets:
        return list(adapter.targets)
    what = made.key(f"{ADAPTER}targets")
    if job.framework in LISTS_LINEARS and model is not None and model.experts is not None:
        text = f"{what}: which layers of a model with experts are linear depends on the version of transformers"
        made.wrong(f"{ADAPTER}targets", text, "name them: q_proj, k_proj, v_proj, o_proj")
        return None
    if adapter.layers and job.framework not in LISTS_LINEARS:
        why = "beside all-linear PEFT takes adapters in all layers"
        made.leave(f"{ADAPTER}layers", list(adapter.layers), why)
    layers = adapter.layers if job.framework in LISTS_LINEARS else ()
    if adapter.excluded and model is not None and model.experts is not None:
        text = f"{what}: which layers are left out of a model with experts depends on the version of PEFT"
        made.wrong(f"{ADAPTER}excluded", text, "name the others: q_proj, k_proj, v_proj, o_proj")
        return None
    if (
        not layers
        and not adapter.excluded
        and not adapter.target_parameters
        and _are_linear(adapter.further_targets, model)
    ):
        return [ALL_LINEAR]
    if model is None:
        text = f"{what}: names of the linear layers are needed beside other settings of targets"
        made.wrong(
            f"{ADAPTER}targets",
            f"{text}, and the model is not known here",
            "name them: q_proj, v_proj, ..., or give --model",
        )
        return None
    return list(dict.fromkeys([*_linear_names(model), *adapter.further_targets]))


def _linear_names(model: ModelConfig) -> list[str]:
    """Return the last parts of the names of all linear layers but the head, routers and experts."""
    whole = dict.fromkeys(layers_by_part(model).values())
    linear = (each for each in whole if not is_stack_module(each) and not is_router_module(each))
    return list(dict.fromkeys(each.rpartition(".")[2] for each in linear))


def _are_linear(names: Iterable[str], model: ModelConfig | None) -> bool:
    """Tell whether names are those of linear layers of the model; for an unknown one, whether they look so."""
    if model is None:
        return all(re.fullmatch(r"([\w.]+\.)?\w+_proj", each) for each in names)
    modules = set(layers_by_part(model).values())
    return all(any(is_named(module, each) for module in modules) for each in names)


def _in_layers(names: Iterable[str], adapter: Adapter) -> str:
    """Return an expression for names in some layers, by the first number in a path, or that after a list's name.

    A whole path is taken in whatever layer.
    """
    numbers = "|".join(map(str, adapter.layers))
    lists = "|".join(adapter.layers_pattern)
    before = rf"(?:.*\.)?(?:{lists})" if lists else r"(?:[a-z_]\w*\.)*[a-z_]\w*"
    ends, paths = (
        [re.escape(each) for each in names],
        [re.escape(each) for each in names if re.search(r"\.\d+\.", each)],
    )
    within = rf"(?={before}\.(?:{numbers})\.)(?:.*\.)?(?:{'|'.join(ends)})"
    return EXPRESSION + "|".join([within, *paths])


# modules that train whole


def _saved(made: JobPlan, adapter: Adapter) -> list[str]:
    """Return the modules that train whole, by ends of names after a dot: PEFT takes ends of names wherever they begin.

    A table that is tied is named twice, as both of its modules.
    """
    model, names = made.job.model, list(adapter.modules_to_save)
    if model is None:
        return names
    modules = parameter_modules(model)
    found = [module for module in modules if module.endswith(tuple(names))]
    ends = (next(iter(modules)), head_module(model))
    tied = model.tied_embeddings and any(each in found for each in ends)
    if tied and adapter.ensure_weight_tying:
        found = list(dict.fromkeys([*found, *ends]))
    elif tied and all(each in found for each in ends):
        why = "embedding and head, which are one table in the model, train as two there (no ensure_weight_tying)"
        made.leave(f"{ADAPTER}modules_to_save", names, f"{why}; in a plan they stay one", trains=True)
    if set(found) == {module for module in modules if any(is_named(module, each) for each in names)}:
        return names
    short = list(dict.fromkeys(module.rpartition(".")[2] for module in found))
    same = {module for module in modules if any(is_named(module, each) for each in short)} == set(found)
    return short if same else found
