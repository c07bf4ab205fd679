"""Settings of a job that no field carries: each is refused, listed as left out, or says what the plan does anyway.

Readers of jobs note a setting if it changes no byte of a device (`Job.ignored`), or if it may change memory and no
formula counts it (`Job.not_understood`). Training is another question than memory: label smoothing holds no byte and
trains something else. The tables below answer it by the setting's name. A setting that may change memory is refused
unless a table says that it changes neither what is trained nor the state that a plan holds.

    label_smoothing_factor: 0.1   ->  refused: the loss of a plan is not smoothed
    lr_scheduler_kwargs: ...      ->  left out, and something else is trained
    logging_steps: 10             ->  left out
    flash_attn_fuse_mlp: true     ->  left out: kernels are chosen by 'run --kernels'
    a name that nobody knows      ->  refused
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrainc.bridge.jobs.job import NOT_KNOWN
from ratrain.ratrainc.bridge.reasons import HOMES, KERNELS, MODEL, OF_RATE, OF_TRAINING, RECOMPUTE
from ratrain.ratrainc.bridge.settings import Left, is_off

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Note


@frozen
class NoteRule:
    """Treatment of a setting that no field of a job carries."""

    why: str
    refused: bool = False
    """true if a file with it is refused, unless it is off"""
    trains: bool = False
    """true if something else is trained without it, unless it is off"""
    agrees: tuple[object, ...] = ()
    """values that say what the plan does anyway"""
    unknown: bool = False
    """true if the framework is not known to have the setting"""
    way_out: str = "take it out of the file"


_SHAPE = "the learning rate of a plan warms up along a line, and then stays or falls along a line or half a cosine"
_NO_KEY = "no key of a plan is about it"
_UNITS = "one block is gathered at a time"
_ADAM = "AdamW of a plan corrects its moments for their bias, and its decay is decoupled"

IGNORED: Mapping[str, NoteRule] = {
    r"label_smoothing_factor": NoteRule("the loss of a plan is not smoothed", refused=True),
    r"neftune_noise_alpha|noisy_embedding_alpha": NoteRule("a plan adds no noise to embeddings", refused=True),
    r"model\.attn_dropout": NoteRule("a plan has no dropout", refused=True),
    r"eaft_.*|liger_use_token_scaling": NoteRule("the loss of a plan weighs tokens alike", refused=True),
    r"optim_args(\..*)?": NoteRule("the optimizer's own arguments are not read: say them as settings", refused=True),
    r"embedding_lr.*|lr_groups.*": NoteRule("a plan has one learning rate for all parameters", refused=True),
    r"optimizer\.(disable_grad|param_groups)": NoteRule("a plan trains all parameters alike", refused=True),
    r"algorithms\.gradient_clipping\.clipping_type": NoteRule(
        "a plan clips by the norm of the whole gradient", refused=True, agrees=("norm",)
    ),
    r"scheduler\.t_warmup": NoteRule("a warm-up is known in batches (ba) or as a share (dur)", refused=True),
    r"scheduler\.t_max": NoteRule(_SHAPE, trains=True, agrees=("1dur",)),
    r"max_duration": NoteRule("'run --steps' sets the length of a run"),
    r"model\.(config_overrides\.)?attn_config\.attn_uses_sequence_id": NoteRule(
        "which tokens it hides was not read", refused=True
    ),
    r"optimizer\.(amsgrad|maximize)": NoteRule(_ADAM, refused=True),
    r"optimizer\.params\.(adam_w_mode|bias_correction)": NoteRule(_ADAM, refused=True, agrees=(True, "auto")),
    r"optimizer\.params\..*": NoteRule(
        "an argument of the optimizer that is not read here", refused=True, agrees=("auto",)
    ),
    r"scheduler\.type": NoteRule(
        "the scheduler of a ds_config is not read: say it in the training arguments", refused=True
    ),
    r"scheduler\.(end_weight_decay|weight_decay_incr_style)": NoteRule(
        "the decay of a plan's weights is the same at each step", trains=True, agrees=("constant",)
    ),
    r"dataset\.(reset_attention_mask|reset_position_ids)": NoteRule(
        "documents of a stream are kept apart by both: say attention_mask in the plan", refused=True
    ),
    r"optimizer\.weight_decay_exclude_named_params": NoteRule(
        "a plan decays matrices, no norms and biases", trains=True
    ),
    r"tokens\.sequence_length": NoteRule("a plan has one length of sequences: that of the longest stage", trains=True),
    r"scheduler\.alpha_i": NoteRule(_SHAPE, trains=True, agrees=(1, 1.0)),
    r"lr_scheduler_kwargs\.warmup_type": NoteRule(_SHAPE, trains=True, agrees=("linear",)),
    r"lr_scheduler_kwargs\.num_cycles": NoteRule(_SHAPE, trains=True, agrees=(0.5,)),
    r".*lr_warmup_style": NoteRule(_SHAPE, trains=True, agrees=("linear",)),
    r"(optimizer\.learning_rate_scheduler|lr_scheduler|lr_scheduler_kwargs|scheduler)\..*": NoteRule(
        _SHAPE, trains=True, agrees=("auto",)
    ),
    r"lr_.*|cosine_.*|jagged_restart_.*": NoteRule(_SHAPE, trains=True),
    r"model\.model_config\._use_doc_masking": NoteRule("which tokens it hides was not read", refused=True),
    r"model\.peft_config\.bias": NoteRule("a plan trains no biases beside adapters", refused=True, agrees=("none",)),
    r"overrides_of_model_config.*|model\..*": NoteRule(MODEL),
    r"loraplus_lr_ratio": NoteRule("a plan has one learning rate for both matrices of an adapter", refused=True),
    r"loraplus_.*": NoteRule("read with loraplus_lr_ratio alone"),
    r"create_new_adapter": NoteRule("a plan goes on from one adapter: 'export-weights' merges others", refused=True),
    r"lora_model_dir|adapter_name_or_path": NoteRule("'run --init-adapter' goes on from adapters"),
    r"pissa_.*": NoteRule("read with pissa_init alone"),
    r"lora_fan_in_fan_out": NoteRule("the layout of the base's matrices, which their class says"),
    r"adam_(beta3|epsilon2)|dion_.*|galore_.*|apollo_.*|badam_.*": NoteRule("of another optimizer"),
}
"""Rules for settings that change no byte of a device, by a regular expression that the name matches whole."""

OPEN: Mapping[str, NoteRule] = {
    r"base_model": NoteRule("parameters that blocks compute with have one type"),
    r"recipe": NoteRule(
        "most of a run is in its recipe, and this one is not known here",
        refused=True,
        way_out="name a known recipe in the file or its launch script, such as llama3_8b_sft_2gpu_h100_bf16_config",
    ),
    r"(model\.peft_config\.|lora_)target_modules": NoteRule(
        "which linear layers have adapters without it is not known here for this model",
        refused=True,
        way_out="name them: [q_proj, v_proj]",
    ),
    # src/megatron/bridge/peft/module_matcher.py, ModuleMatcher.match
    r"peft\.exclude_modules": NoteRule(
        "Megatron-Bridge stops at it beside target_modules, which LoRA has in any case",
        refused=True,
        way_out="name target_modules alone",
    ),
    r"lora_(mlp|qkv|o|embedding)_kernel": NoteRule(KERNELS),
    r"bnb_4bit_quant_storage": NoteRule("the type that codes are stored in changes no number"),
    r"fp32_norms": NoteRule("parameters that blocks compute with have one type", trains=True),
    r"flash_attn.*|.*attn_implementation|flash_attention.*": NoteRule(KERNELS),
    r"layer_offloading.*": NoteRule(HOMES),
    r".*offload_(optimizer|param)\.ratio": NoteRule(HOMES),
    r"selective_checkpointing.*|ac_mode|ac_option|.*every_n_layers": NoteRule(RECOMPUTE),
    r"tiled_mlp.*": NoteRule("mlp_chunk says how many rows of an mlp are computed at a time"),
    r"(fsdp_config\.)?(fsdp_)?(limit_all_gathers|auto_wrap_policy)": NoteRule(_UNITS),
    r"custom_sharded_layers": NoteRule(_UNITS),
    r"zero_optimization\..*(bucket_size|threshold)": NoteRule("of DeepSpeed's buffers, which a plan does not have"),
    r"dtype|torch_dtype|weights": NoteRule("the training script loads the weights: 'run --init' does it here"),
    r"tensor_parallel_plan\._component_|parallelism\.tp_recompute_allgather": NoteRule(
        "how tensor-parallel ranks share out blocks is the compiler's"
    ),
    r"model\.model_config\.is_\w+_config": NoteRule(MODEL),
}
"""Rules for settings that may change memory and change neither what is trained nor the state of a plan."""
_UNREAD_STRATEGY = "version 1 does not read it"


def rule_of_ignored(note: Note) -> NoteRule:
    """Return the rule for a setting that changes no byte of a device; one without a rule is left out."""
    found = _matching(IGNORED, note.key)
    if found is not None:
        return found
    if note.why in (OF_TRAINING, OF_RATE):
        return NoteRule(_NO_KEY, trains=True)
    speaks_of_memory = any(word in note.why for word in ("byte", "memory", "hold", "count", "size"))
    return NoteRule(_NO_KEY if speaks_of_memory else note.why)


def rule_of_open(note: Note, title: str) -> NoteRule:
    """Return the rule for a setting that may change memory; one without a rule is refused."""
    if note.why.startswith(_UNREAD_STRATEGY):
        return NoteRule("it has no effect: state is sharded as FULL_SHARD")
    found = _matching(OPEN, note.key)
    if found is not None:
        return found
    if note.why.startswith(NOT_KNOWN):
        return NoteRule(f"{NOT_KNOWN} as a setting of {title}", refused=True, unknown=True)
    return NoteRule(f"no plan has it ({note.why})", refused=True)


def left_of(note: Note, rule: NoteRule) -> Left | None:
    """Return a setting as one that is left out; None if it says what the plan does anyway."""
    if note.value in rule.agrees or (rule.trains and is_off(note.value)):
        return None
    return Left(note.key, note.value, rule.why, rule.trains)


def _matching(rules: Mapping[str, NoteRule], key: str) -> NoteRule | None:
    return next((rule for pattern, rule in rules.items() if re.fullmatch(pattern, bare(key))), None)


def bare(key: str) -> str:
    """Return a setting's name without the name of the table that stands for another file."""
    return re.sub(r"^(deepspeed|accelerate)\.", "", key)
