"""Rules that the Hugging Face family shares: what transformers' Trainer makes of names, and which types it holds.

The Trainer itself casts nothing: `from_pretrained` loads weights in some type, and then

    one device or DDP       weights stay as they are loaded; torch.autocast casts op by op; the optimizer updates the
                            loaded weights, so a bf16 model has no f32 copy anywhere
    FSDP 1 and 2            accelerate casts trained weights to f32 if mixed precision is on; FSDP gathers them in the
                            compute type, and reduces gradients in it. With an fsdp_config of version 2 axolotl puts a
                            preparation of its own in place of accelerate's, which casts nothing
                            (axolotl src/axolotl/monkeypatch/accelerate/fsdp2.py, fsdp2_prepare_model)
    DeepSpeed with bf16     the engine holds weights and gradients in bf16, and f32 masters apart

Example: a model loaded in bf16 trains with `bf16: true` on one device with 2 bytes a weight, 2 a gradient and 2 + 2 of
moments; under FSDP 2 with 4 + 4 + 4 + 4, sharded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.hf_keys import DROPOUT
from ratrain.ratrain_ir.config.hub_names import hub_model
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.training import ALL_LINEAR
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.ratrain_ir.model.parameter_names import head_module
from ratrain.ratrain_ir.support.diagnostics import nearest
from ratrain.ratrain_ir.support.files import is_directory, is_there
from ratrain.ratrain_ir.support.module_patterns import expression_error
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.bridge.jobs.hf_reader import HfReader, Said
from ratrain.ratrainc.bridge.jobs.job import (
    FSDP,
    THAWED,
    Adapter,
    Attention,
    Checkpointing,
    Experts,
    Origin,
    Sharding,
    Thawed,
)
from ratrain.ratrainc.bridge.jobs.job_common import ON_THE_COMMAND_LINE, names_of
from ratrain.ratrainc.bridge.settings import product

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.bridge.jobs.job_reader import JobReader

ARGUMENTS = "transformers src/transformers/training_args.py, TrainingArguments"
LOADING = "transformers src/transformers/modeling_utils.py, PreTrainedModel.from_pretrained"
ATTENTION_SOURCE = "transformers src/transformers/modeling_utils.py, PreTrainedModel.get_correct_attn_implementation"
EXPERTS_SOURCE = "transformers src/transformers/modeling_utils.py, PreTrainedModel.get_correct_experts_implementation"
PREPARED = "accelerate src/accelerate/accelerator.py, Accelerator.prepare_model"
UPCAST_FSDP2 = "accelerate src/accelerate/utils/fsdp_utils.py, fsdp2_prepare_model"
OF_ITS_WEIGHT = "torch: a gradient has its weight's type"
FSDP_POLICY = "accelerate src/accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin.set_mixed_precision"
ENGINE = "deepspeed deepspeed/runtime/engine.py, DeepSpeedEngine"
LOSS_SOURCE = "transformers src/transformers/loss/loss_utils.py, ForCausalLMLoss"
PEFT_ADAPTERS = Said("f32", "adapter", "peft src/peft/mapping_func.py, get_peft_model (autocast_adapter_dtype)")
"""Type of low-rank adapters as PEFT makes them."""

OPTIMIZERS: Mapping[str, str] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "adamw_torch_8bit": "adamw-8bit",  # blocks of 256 with a scale each, as bitsandbytes has: torchao optim/adam.py
    "adamw_torch_4bit": "adamw-4bit",
    "paged_adamw_8bit": "adamw-8bit-paged",
    "paged_adamw_32bit": "adamw-paged",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion_32bit": "lion",
    "lion_8bit": "lion-8bit",
}
"""The job's optimizer for names of transformers' `optim` (training_args.py, OptimizerNames; trainer_optimizer.py)."""
OTHER_OPTIMIZERS = (
    *("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision", "ademamix", "ademamix_8bit", "adagrad"),
    *("paged_lion_32bit", "paged_lion_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "rmsprop", "rmsprop_bnb"),
    *("rmsprop_bnb_8bit", "rmsprop_bnb_32bit", "galore_adamw", "galore_adamw_8bit", "galore_adafactor", "lomo"),
    *("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "galore_adafactor_layerwise", "adalomo", "grokadamw"),
    *("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd", "apollo_adamw", "apollo_adamw_layerwise"),
    "stable_adamw",
)
"""Further names of `optim`, whose state is not known here."""

_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("bfloat16", "bf16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("float16", "fp16", "half", "torch.float16"), "f16"),
    **dict.fromkeys(("float32", "fp32", "float", "torch.float32"), "f32"),
}

_ATTENTION: Mapping[str, Attention] = {
    "eager": Attention.EAGER,
    "sdpa": Attention.SDPA,
    "flash_attention_2": Attention.FLASH,
    "flash_attention_3": Attention.FLASH,
    "flash_attention_4": Attention.FLASH,
}
_EXPERTS = {each.value: each for each in (Experts.GROUPED, Experts.EAGER)}
ATTENTION_WORDS = {Attention.EAGER: "eager", Attention.SDPA: "sdpa", Attention.FLASH: "flash_attention_2"}


@frozen
class Names:
    """A format's names of the settings of training."""

    lr: str = "learning_rate"
    scheduler: str = "lr_scheduler_type"
    epochs: str = "num_train_epochs"


@frozen
class TrainingDefaults:
    """Defaults of the settings of training: value and source each."""

    lr: tuple[float | None, str] = (5e-5, f"{ARGUMENTS}.learning_rate")
    scheduler: tuple[str, str] = ("linear", f"{ARGUMENTS}.lr_scheduler_type")
    epochs: tuple[float, str] = (3.0, f"{ARGUMENTS}.num_train_epochs")


OF_TRANSFORMERS = TrainingDefaults()
_NAMES = Names()


def put_training(reader: HfReader, names: Names = _NAMES, defaults: TrainingDefaults = OF_TRANSFORMERS) -> None:
    """Set what is trained with, which memory does not depend on."""
    for name, key, (default, source) in (
        ("lr", names.lr, defaults.lr),
        ("weight_decay", "weight_decay", (0.0, f"{ARGUMENTS}.weight_decay")),
        ("eps", "adam_epsilon", (1e-8, f"{ARGUMENTS}.adam_epsilon")),
        ("epochs", names.epochs, defaults.epochs),
    ):
        reader.lay(name, reader.said(key, float, default, source))
    reader.lay("scheduler", reader.said(names.scheduler, str, *defaults.scheduler))
    first = reader.said("adam_beta1", float, 0.9, f"{ARGUMENTS}.adam_beta1")
    second = reader.said("adam_beta2", float, 0.999, f"{ARGUMENTS}.adam_beta2")
    origin = first if not first.source or second.source else second
    reader.lay("betas", evolve(origin, value=(first.value, second.value)))
    norm = reader.said("max_grad_norm", float, 1.0, f"{ARGUMENTS}.max_grad_norm")
    reader.lay("max_grad_norm", norm)
    if norm.value == 0:
        reader.training["max_grad_norm"] = None
    if (steps := reader.take("max_steps", int)) is not None and steps > 0:
        reader.put("steps", steps, "max_steps")
    warm = reader.take("warmup_steps", float)
    if warm is not None and warm >= 1:
        reader.put("warmup_steps", int(warm), "warmup_steps")
    else:  # a share of all steps: training_args.py, TrainingArguments.get_warmup_steps
        share = warm or reader.take("warmup_ratio", float)
        reader.put("warmup_ratio", share, "warmup_steps" if warm else "warmup_ratio")
        if warm == 0 and not share:
            reader.put("warmup_steps", 0, "warmup_steps")
    _put_least_rate(reader)
    if reader.training.get("scheduler") == "warmup_stable_decay":
        _put_phases(reader)


def _put_phases(reader: HfReader) -> None:
    """Set lengths, curve and end of a rate that stays level first (transformers optimization.py, get_wsd_schedule)."""
    table = "lr_scheduler_kwargs."
    level = reader.take(f"{table}num_stable_steps", int)
    if level is not None and level < 0:
        reader.wrong(f"{table}num_stable_steps", f"{table}num_stable_steps is {level}: at least 0 is expected")
    else:
        reader.put("stable_steps", level, f"{table}num_stable_steps")
    reader.put("decay_steps", reader.size(f"{table}num_decay_steps"), f"{table}num_decay_steps")
    source = "huggingface/transformers: src/transformers/optimization.py, get_wsd_schedule"
    reader.choose("decay_style", f"{table}decay_type", str, "cosine", source)
    lr, share = reader.training.get("lr"), reader.take(f"{table}min_lr_ratio", float)
    if share is not None and lr is not None:
        reader.put("min_lr", product(share, lr), f"{table}min_lr_ratio")


def _put_least_rate(reader: HfReader) -> None:
    """Set the learning rate that the schedule ends at, from the schedule's own arguments."""
    reader.open("lr_scheduler_kwargs", "arguments of a schedule")
    lr, share = reader.training.get("lr"), reader.take("lr_scheduler_kwargs.min_lr_rate", float)
    reader.put("min_lr", reader.take("lr_scheduler_kwargs.min_lr", float), "lr_scheduler_kwargs.min_lr")
    if share is not None and lr is not None:
        reader.put("min_lr", product(share, lr), "lr_scheduler_kwargs.min_lr_rate")


def put_optimizer(
    reader: HfReader,
    key: str = "optim",
    source: str = f"{ARGUMENTS}.optim (default_optim)",
    own: Mapping[str, str] | None = None,
    others: tuple[str, ...] = (),
) -> None:
    """Set the optimizer; `own` and `others` are a format's further names, known and not known here.

    Report a name that the framework does not have.
    """
    known = {**OPTIMIZERS, **(own or {})}
    name = reader.said(key, str, "adamw_torch_fused", source)
    kind = known.get(name.value)
    if kind == "sgd" and "momentum" in str(reader.settings[a].value if reader.has(a := "optim_args") else ""):
        kind = "sgd-momentum"  # trainer_optimizer.py, _get_sgd
    if kind is None and name.value not in (*OTHER_OPTIMIZERS, *others):
        hint = nearest(name.value, [*known, *OTHER_OPTIMIZERS, *others])
        way_out = hint or f"names are {', '.join(known)}"
        reader.wrong(key, f"{reader.framework} has no optimizer {shown(name.value)}", way_out=way_out)
    elif kind is None:
        reader.unknown(key, "the state of this optimizer is not known here")
    reader.lay("optimizer", evolve(name, value=kind or name.value))


def put_attention(reader: HfReader, said: Said) -> None:
    """Set the attention implementation from its name in transformers; None means the default, sdpa."""
    if said.value is None:
        reader.assume("attention", Attention.SDPA, said.key, ATTENTION_SOURCE)
        return
    name = str(said.value).removeprefix("paged|")
    if name in _ATTENTION:
        reader.lay("attention", evolve(said, value=_ATTENTION[name]))
    elif "flash-attn" in name or "flash_attn" in name:  # a kernel of the hub: kernels-community/flash-attn2
        reader.lay("attention", evolve(said, value=Attention.FLASH))
    elif "/" in name or name in ("flex_attention", "xformers", "sage", "fp8"):
        reader.lay("attention", evolve(said, value=Attention.FLASH))
        reader.unknown(said.key, f"what {name} keeps for its backward is not known here; counted as flash attention's")
    else:
        known = list(_ATTENTION)
        reader.wrong(
            said.key,
            f"{said.key} is {shown(name)}, which is no attention implementation",
            way_out=nearest(name, known) or f"one of {', '.join(known)}",
        )


def put_experts(reader: HfReader, implementation: str = "", losses: str = "") -> None:
    """Set the code of experts from its name in transformers, and if an auxiliary loss keeps the routers' logits.

    `implementation` and `losses` are the framework's keys, empty where it has none. Nothing happens for a model without
    experts.
    """
    model = reader.values.get("model")
    keys = [key for key in (implementation, losses) if key]
    if model is None or model.experts is None:
        for key in keys:
            reader.ignore(key, "the model has no experts")
        return
    said = reader.take(implementation, str) if implementation else None
    keeps = reader.take(losses, float if losses.endswith("_coef") else bool) if losses else None
    if keeps:
        reader.put("router_logits", True, losses)
    elif model.inert.get("output_router_logits"):
        reader.assume("router_logits", True, "output_router_logits", "config.json of the model")
    if said is None:
        reader.assume("experts", Experts.GROUPED, "experts_implementation", EXPERTS_SOURCE)
        return
    reader.put("experts", _EXPERTS.get(said, Experts.GROUPED), implementation)
    if said not in _EXPERTS:
        reader.unknown(implementation, f"what {said} keeps is not known here; counted as grouped_mm")


def type_of(reader: HfReader, key: str, said: Any) -> str | None:
    """Return the job's name of a type in the file's words; report one that is none."""
    kind = _TYPES.get(str(said).lower())
    if kind is None:
        reader.wrong(
            key, f"{key} is {shown(said)}, which is no type of weights", way_out="bfloat16, float16 or float32"
        )
    return kind


def put_model(reader: HfReader, key: str) -> str | None:
    """Set the model and its name; return the type of its published weights, None if that is not known.

    A directory or config.json is loaded, from the file's folder or the current one; a name of the hub is looked up. A
    name that is not known leaves the model None. Raises `DiagnosticError` if a configuration is not supported.
    """
    name = reader.take(key, str)
    reader.put("model_name", name, key)
    published = hub_model(name) if name else None
    model = _model_at(reader.path.parent, name) if name else None
    if reader.asked.model is not None:
        put_asked_model(reader)
    elif model is not None or published is not None:
        reader.put("model", model or load_model(published.preset) if published else model, key)
    _put_dropout(reader, key)
    return published.dtype if published else None


def put_asked_model(reader: HfReader) -> None:
    """Set the model that the command gives; nothing happens without one."""
    if reader.asked.model is not None:
        reader.values["model"] = reader.asked.model
        reader.origins["model"] = Origin("--model", ON_THE_COMMAND_LINE)
        _put_dropout(reader, "--model")


def _model_at(folder: Path, name: str) -> ModelConfig | None:
    for path in (folder / name, Path(name)):
        if is_directory(path) and is_there(path / "config.json"):
            return load_model(str(path))
        if path.name.endswith(".json") and is_there(path):
            return load_model(str(path))
    return None


_PRESET_RATE = {"gpt2": 0.1}
"""Dropout of families whose class drops unless a file says otherwise: transformers
src/transformers/models/gpt2/configuration_gpt2.py, GPT2Config.resid_pdrop."""


def _put_dropout(reader: HfReader, key: str) -> None:
    """Set the largest dropout rate of the model's layers."""
    model = reader.values.get("model")
    if model is None:
        return
    rates = [model.inert.get(name, _PRESET_RATE.get(model.family, 0.0)) for name in DROPOUT.get(model.family, ())]
    source = f"transformers src/transformers/models/{model.family}/configuration_{model.family}.py"
    reader.assume("dropout", float(max(rates, default=0.0)), key, source)


def put_checkpointing(reader: HfReader, key: str, kwargs: str, default: tuple[bool, str]) -> None:
    """Set activation checkpointing as the Trainer switches it on (trainer.py, Trainer._inner_training_loop)."""
    said = reader.said(key, bool, *default)
    reader.lay("checkpointing", evolve(said, value=Checkpointing.FULL if said.value else Checkpointing.NONE))
    reader.open(kwargs, "arguments of activation checkpointing")
    every, offload = f"{kwargs}.every_n_layers", f"{kwargs}.offload"
    if not said.value:
        for name in reader.under(f"{kwargs}."):
            reader.ignore(name, "checkpointing is off")
        return
    if (step := reader.size(every)) not in (None, 1) and step is not None:
        model = reader.values.get("model")
        if model is None:
            reader.unknown(every, "how many layers are checkpointed follows from the model, which is not known")
        else:
            reader.put("checkpoint_layers", ceil(model.layers / step), every)
    if reader.truth(offload):
        reader.put("offload_activations", True, offload)
    reader.ignore(f"{kwargs}.use_reentrant", "both kinds keep the input of each layer")


def has_experts(reader: JobReader) -> bool:
    """Tell whether the model of a file is known, and has experts."""
    model = reader.values.get("model")
    return model is not None and model.experts is not None


def put_adapter(reader: HfReader, adapter: Adapter, key: str) -> None:
    """Set a low-rank adapter, and that it trains in place of the weights."""
    reader.put("adapter", adapter, key)
    reader.put("method", "lora", key)


def low_rank_adapter(
    reader: HfReader,
    rank: int,
    alpha: float,
    targets: tuple[str, ...],
    bits: int | None,
    kind: str,
    *,
    double: str,
    quantisation: str,
    rslora: str,
    **parts: Any,
) -> Adapter:
    """Make an adapter beside a base in `bits` bits; dropout, scale and form of the base are taken from the settings.

    `double`, `quantisation` and `rslora` name settings: bitsandbytes' second quantisation, on unless it is false, its
    type, nf4 unless it is said, and the scale by the root of the rank. `parts` are further fields of the adapter.
    """
    return Adapter(
        rank,
        alpha,
        targets,
        reader.take("lora_dropout", float) or 0.0,
        bits,
        bits == 4 and reader.take(double, bool) is not False,
        kind,
        rslora=bool(reader.glance(rslora, bool)),
        quantisation=reader.glance(quantisation, str) or "nf4" if bits == 4 else "",
        **parts,
    )


def put_unfrozen(reader: HfReader, key: str) -> None:
    """Set what trains by expressions of names of parameters, whose dots stand for dots.

    An expression matches the beginning of a name; rows at its end, `[:32000]`, have gradients, and the others zeros.
    (axolotl src/axolotl/utils/freeze.py, freeze_layers_except)
    """
    said = reader.settings[key].value if reader.has(key) else None
    reader.taken.add(key)
    expressions = [said] if isinstance(said, str) else said
    if not expressions:
        return
    if not isinstance(expressions, list) or not all(isinstance(each, str) for each in expressions):
        reader.wrong(key, f"{key} is {shown(said)}: expressions of names are expected", way_out=f"{key}: [{_EXAMPLE}]")
        return
    if reader.values.get("adapter") is not None:
        reader.wrong(key, f"{key} would freeze the adapter, whose names it does not choose", way_out="leave one out")
        return
    patterns, rows = [], False
    for each in expressions:
        cut = _ROWS.match(each)
        start, end = (int(cut[2] or 0), int(cut[3]) if cut[3] else None) if cut else (0, None)
        rows |= cut is not None
        text = re.sub(r"\.(?!\+)", r"\.", cut[1] if cut else each)
        if (error := expression_error(text)) is not None:
            reader.wrong(key, f"{key}: {shown(each)} is no regular expression: {error}", way_out="correct it")
        elif end is not None and start >= end:
            reader.wrong(key, f"{key}: {shown(each)} has no rows: axolotl stops", way_out="an end above the start")
        else:
            patterns.append(text)
    if len(patterns) == len(expressions):
        thawed = _thawed_by(patterns, reader.values.get("model"))
        reader.put("thawed", evolve(thawed, expressions=tuple(expressions), rows=rows), key)
        reader.put("method", "frozen", key)
        reader.trace("layers", key, of=THAWED)


_ROWS = re.compile(r"^(.+)\[([0-9]*)(?::([0-9]*))?\]$")
_EXAMPLE = "model.layers.3[01].*"


def _thawed_by(patterns: Iterable[str], model: ModelConfig | None) -> Thawed:
    """Return the parameters of a model whose names patterns match; nothing of one that is not known."""
    if model is None:
        return Thawed()
    names = dict.fromkeys(each.name for owner in block_chain(model) for each in parameters(model, owner))
    found = {name for name in names if any(re.match(each, name) for each in patterns)}
    of_layers = [{name for name in names if f".{layer}." in name} for layer in range(model.layers)]
    whole = [number for number, layer in enumerate(of_layers) if layer <= found]
    tables = {name: name.split(".")[-2] for name in (next(iter(names)), f"{head_module(model)}.weight")}
    counted = {*tables}.union(*(of_layers[number] for number in whole))
    return Thawed(
        chosen=tuple(whole),
        extra_modules=tuple(module for name, module in tables.items() if name in found),
        parameters=tuple(name for name in names if name in found),
        odd=next((name for name in names if name in found - counted), ""),
    )


def targets_of(reader: JobReader, key: str) -> tuple[str, ...]:
    """Take names of linears from a list or a text with commas; all, all_linear and all-linear are `all-linear`.

    Return none without the setting. Report another value.
    """
    names = names_of(reader, key)
    return (ALL_LINEAR,) if names in (("all",), ("all_linear",), ("all-linear",)) else names


def usual_targets(reader: JobReader, key: str, parameters: tuple[str, ...]) -> tuple[str, ...]:
    """Return PEFT's targets for a model without any in the file: queries and values in LLaMA-like families.

    Of a model with experts PEFT takes target parameters alone (`_convert_peft_config_moe`, `_prepare_adapter_config`).
    """
    model = reader.values.get("model")
    if parameters and has_experts(reader):
        return ()
    packed = {"gpt2": ("c_attn",), "gpt_neox": ("query_key_value",)}
    known = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text")
    if model is not None and model.family in packed:
        return packed[model.family]
    if model is not None and model.family in known:  # peft utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_...
        return ("q_proj", "v_proj")
    reader.doubt(key, None, "PEFT's targets of this model are not known here; counted as q and v")
    return ("q_proj", "v_proj")


def types_held(
    sharding: Sharding, loaded: str, mixed: str | None, *, engine: bool = False, upcasts: bool = True
) -> dict[str, Any]:
    """Return the types of full training under a mechanism, by field of the job.

    `loaded`: type of the weights as the trainer gets them. `mixed`: type of mixed precision, None without. `engine`:
    DeepSpeed's engine holds the state, in its own types whatever is loaded. `upcasts`: FSDP casts trained weights to
    f32 under mixed precision.
    """
    kind = mixed or ("f32" if engine else loaded)
    if engine:
        whole = sharding is Sharding.DDP and kind == "bf16"  # engine.py, get_data_types
        held, gradient, reduced = kind, "f32" if whole else kind, kind
    elif sharding in FSDP:
        held = "f32" if mixed and upcasts else loaded
        gradient, reduced = held, mixed or held
    else:
        held = gradient = reduced = loaded
    return {
        "weight_dtype": held,
        "compute_dtype": kind,
        "autocast": bool(mixed) and not engine and sharding not in FSDP,
        "gradient_dtype": gradient,
        "reduce_dtype": reduced,
        "master_dtype": "f32" if engine and kind != "f32" else None,
    }


def put_types(
    reader: HfReader,
    loaded: Said,
    mixed: Said,
    cast: str = "",
    adapters: Said = PEFT_ADAPTERS,
    upcast: str = UPCAST_FSDP2,
) -> None:
    """Set the types that a run holds; see the module's text.

    `loaded`: type in which weights are loaded. `mixed`: type of mixed precision, None without. `cast`: source of the
    rule by which the framework casts trained weights to f32 after loading; empty without one. `adapters`: type of
    low-rank adapters, which PEFT makes f32 by default. `upcast`: source of the rule by which FSDP 2 casts trained
    weights to f32 under mixed precision; empty without one.
    """
    adapter = reader.values.get("adapter") is not None
    frozen = adapter or reader.values.get("thawed") is not None
    sharding = reader.values.get("sharding", Sharding.NONE)
    if reader.engine:
        _put_engine_types(reader, sharding, mixed)
        return
    fully = sharding in FSDP
    trained = Said("f32", loaded.key, cast) if cast else adapters if adapter and not fully else loaded
    rule = (PREPARED if sharding is Sharding.FSDP1 else upcast) if fully else trained.source
    types = types_held(sharding, trained.value, mixed.value, upcasts=bool(rule))
    if fully and mixed.value and rule:
        trained = Said(types["weight_dtype"], mixed.key, rule)
    reader.lay("weight_dtype", loaded if frozen else trained)
    reader.lay("compute_dtype", mixed if mixed.value else loaded if frozen and not fully else trained)
    if types["autocast"]:
        reader.assume("autocast", True, mixed.key, PREPARED)
    reader.assume("gradient_dtype", types["gradient_dtype"], "gradient", rule or OF_ITS_WEIGHT)
    if fully:
        reader.assume("reduce_dtype", types["reduce_dtype"], "reduce_dtype", FSDP_POLICY)
    else:
        source = "torch DistributedDataParallel: buckets of gradients"
        reader.assume("reduce_dtype", types["reduce_dtype"], "gradient", source)


def _put_engine_types(reader: HfReader, sharding: Sharding, mixed: Said) -> None:
    """Set the types of DeepSpeed's engine; gradients and their sums may have types of their own."""
    types = types_held(sharding, "f32", mixed.value, engine=True)  # the engine casts whatever is loaded
    rule = Said(types["weight_dtype"], mixed.key, f"{ENGINE}._configure_distributed_model")
    for name in ("weight_dtype", "compute_dtype"):
        reader.lay(name, rule)
    reader.origins.setdefault("gradient_dtype", Origin("grad_accum_dtype", f"{ENGINE}.get_data_types", default=True))
    reader.values.setdefault("gradient_dtype", types["gradient_dtype"])
    reader.origins.setdefault(
        "reduce_dtype", Origin("communication_data_type", f"{ENGINE}.communication_data_type", default=True)
    )
    reader.values.setdefault("reduce_dtype", types["reduce_dtype"])
    if types["master_dtype"]:
        reader.assume("master_dtype", types["master_dtype"], mixed.key, f"{ENGINE}._configure_zero_optimizer")


def put_whole_or_ddp(reader: HfReader) -> None:
    """Set DDP if several devices train without another mechanism."""
    devices = reader.values.get("devices")
    if "sharding" not in reader.values and devices is not None:
        reader.assume("sharding", Sharding.DDP if devices > 1 else Sharding.NONE, "devices", PREPARED)
