"""Readers of transformers' TrainingArguments and of TRL's supervised fine-tuning (`trl sft --config FILE`).

TRL's file has the settings of SFTConfig (training arguments with other defaults), ModelConfig and ScriptArguments in
one table, read by TrlParser: PyYAML, then argparse's types, so that the text `2e-4` is the number. A file of training
arguments alone (YAML or JSON) names no model: the training script loads it, in a type that the file does not say.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ratrain.ratrain_ir.config.training import ALL_LINEAR
from ratrain.ratrain_ir.support.text import Source, shown
from ratrain.ratrainc.bridge.jobs.hf_arguments import INERT, Defaults, put_loss, take_arguments
from ratrain.ratrainc.bridge.jobs.hf_reader import HfReader, Said, settings_of
from ratrain.ratrainc.bridge.jobs.hf_rules import (
    LOADING,
    TrainingDefaults,
    has_experts,
    put_adapter,
    put_asked_model,
    put_attention,
    put_experts,
    put_model,
    put_types,
    targets_of,
    type_of,
    usual_targets,
)
from ratrain.ratrainc.bridge.jobs.hf_words import Words, attention_word, liger, phrase
from ratrain.ratrainc.bridge.jobs.job import Adapter, Attention, Job, Loss
from ratrain.ratrainc.bridge.jobs.job_common import TYPE_WORDS, names_of
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, SettingsFormat

MODEL_CONFIG = "trl trl/trainer/model_config.py, ModelConfig"
SFT_CONFIG = "trl trl/trainer/sft_config.py, SFTConfig"
BASE_CONFIG = "trl trl/trainer/base_config.py, _BaseConfig"
SFT_TRAINER = "trl trl/trainer/sft_trainer.py, SFTTrainer.__init__"
_TRL_DEFAULTS = Defaults(
    bf16=(True, f"{BASE_CONFIG}.__post_init__"),
    checkpointing=(True, f"{BASE_CONFIG}.gradient_checkpointing"),
    training=TrainingDefaults(lr=(2e-5, f"{SFT_CONFIG}.learning_rate")),
)
_OLD = {
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "dataset_batch_size": None,
    "use_flash_attention_2": "attn_implementation: flash_attention_2",
}
"""Names of older versions of TRL, which the current one does not read, and the newer ones."""
_OTHER_TRAINERS = (
    *("num_generations", "max_completion_length", "max_prompt_length", "reward_funcs", "beta", "reward_model_path"),
    *("ref_model_init_kwargs", "precompute_ref_log_probs", "desirable_weight", "teacher_model_name_or_path"),
)
"""Settings of TRL's other trainers (DPO, GRPO, KTO, ...), whose memory has more than one model."""

_OF_TRL = (
    *("max_length", "packing_strategy", "padding_free", "assistant_only_loss", "completion_only_loss", "use_peft"),
    *("lora_target_modules", "lora_r", "dataset_text_field", "chat_template_path", "activation_offloading"),
    *("model_revision", "max_seq_length", "dataset_config", "dataset_train_split", "dataset_kwargs"),
)
_OF_ARGUMENTS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "lr_scheduler_type"),
    *("save_strategy", "eval_strategy", "save_total_limit", "dataloader_num_workers", "report_to", "optim"),
    *("adam_beta1", "adam_beta2", "max_grad_norm", "warmup_ratio", "warmup_steps", "gradient_checkpointing"),
    *("gradient_accumulation_steps", "learning_rate", "output_dir", "logging_steps", "save_steps", "deepspeed"),
)
_OF_OTHERS = (
    *("base_model", "sequence_len", "micro_batch_size", "finetuning_type", "cutoff_len", "template", "stage"),
    *("_component_", "distributed_type", "compute_environment", "zero_optimization", "train_micro_batch_size_per_gpu"),
)
_TRL_INERT = {
    **INERT,
    r"(dataset_text_field|chat_template_path|eos_token|pad_token|truncation_mode|shuffle_dataset|packing_strategy"
    r"|padding_free|eval_packing|completion_only_loss|assistant_only_loss|pad_to_multiple_of|datasets.*|test_split_size"
    r"|ignore_bias_buffers)": "of the data",
    r"(lora_task_type|use_rslora|bnb_4bit_quant_type|router_aux_loss_coef|model_init_kwargs.*)": "it changes no size",
}


def top_keys(text: str) -> set[str]:
    """Return the names that may be a file's settings: keys at the beginning of a line, or of the object of a JSON text.

    A text that is neither has no names.
    """
    if text.lstrip().startswith(("{", "//", "/*")):
        import hjson

        try:
            table = hjson.loads(text)
        except (ValueError, IndexError, RecursionError, OverflowError):  # the reader says what is wrong with it
            return set()
        return set(table) if isinstance(table, dict) else set()
    return set(re.findall(r"^[\"']?(\w+)[\"']?[ \t]*:", text, re.MULTILINE))


def _is_trl(_path: Path, text: str) -> bool:
    keys = top_keys(text)
    arguments = keys & set(_OF_ARGUMENTS)
    ours = keys & {*_OF_TRL, "model_name_or_path"}
    return bool(ours) and bool(arguments or len(ours) > 1) and not keys & set(_OF_OTHERS)


def _is_arguments(path: Path, text: str) -> bool:
    keys = top_keys(text)
    arguments = keys & set(_OF_ARGUMENTS)
    sure = arguments & {*_OF_ARGUMENTS[:3]}
    return bool(len(arguments) >= 3 or (sure and len(arguments) > 1)) and not (
        keys & set(_OF_OTHERS) or _is_trl(path, text)
    )


def _read_trl(path: Path, text: str, asked: Asked) -> Job:
    source = Source(str(path), text)
    reader = HfReader("trl", settings_of(path, text, "a configuration of TRL"), source.top(), path=path, asked=asked)
    _refuse_others(reader)
    published = put_model(reader, "model_name_or_path")
    adapters = _put_peft(reader)
    _put_length(reader)
    arguments = take_arguments(reader, _TRL_DEFAULTS)
    _put_trl_loss(reader)
    put_attention(reader, reader.said("attn_implementation", str, None, ""))
    put_experts(reader, "model_init_kwargs.experts_implementation", "model_init_kwargs.output_router_logits")
    reader.put("packing", reader.take("packing", bool), "packing")
    if (offload := reader.take("activation_offloading", bool)) is not None:
        reader.put("offload_activations", offload, "activation_offloading")
    loaded = reader.said("dtype", str, "float32", f"{MODEL_CONFIG}.dtype")
    put_types(reader, _loaded(reader, loaded, published), arguments.mixed, adapters=adapters)
    return reader.finish(_TRL_INERT)


def _refuse_others(reader: HfReader) -> None:
    """Report names of older versions, and settings of other trainers than supervised fine-tuning."""
    for key in (key for key in _OLD if reader.has(key)):
        newer = _OLD[key]
        reader.taken.add(key)
        way_out = f"write {newer}" if newer else "take it out of the file"
        reader.wrong(key, f"{key} is a name of older versions, which TRL reads no more", way_out=way_out)
    for key in (key for key in _OTHER_TRAINERS if reader.has(key)):
        text = f"{key} is of another trainer than supervised fine-tuning, whose memory is not known here"
        reader.wrong(key, text, way_out="give the settings of an SFT run")


_PARTS = {
    "rank": "lora_r",
    "alpha": "lora_alpha",
    "targets": "lora_target_modules",
    "dropout": "lora_dropout",
    "double_quantised": "use_bnb_nested_quant",
    "kind": "use_dora",
    "rslora": "use_rslora",
    "quantisation": "bnb_4bit_quant_type",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
}
"""Settings of what an adapter has."""
_OF_DEFAULTS, _OF_4_BITS = ("lora_r", "lora_alpha", "lora_dropout"), ("use_bnb_nested_quant",)
"""Settings whose default TRL says: of every adapter, and of one beside a base in 4 bits."""


def _put_peft(reader: HfReader) -> Said:
    """Set TRL's low-rank adapter, if there is one; return the type that its weights have."""
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit", "load_in_8bit")
    four, eight = reader.truth("load_in_4bit"), reader.truth("load_in_8bit")
    if four and eight:
        reader.wrong("load_in_8bit", "load_in_4bit and load_in_8bit are both on", way_out="leave one of them out")
    if not reader.truth("use_peft"):
        for name in (*names, "lora_target_parameters", "lora_modules_to_save", "use_dora", "use_bnb_nested_quant"):
            reader.ignore(name, "use_peft is off: nothing reads it")
        return Said("f32", "adapter", f"{SFT_TRAINER}")
    rank = reader.size("lora_r") or 16
    alpha, drop = reader.take("lora_alpha", float), reader.take("lora_dropout", float)
    key = "lora_target_modules"
    parameters = names_of(reader, "lora_target_parameters")
    targets = targets_of(reader, key) or usual_targets(reader, key, parameters)
    adapter = Adapter(
        rank,
        32.0 if alpha is None else alpha,
        targets,
        0.05 if drop is None else drop,
        4 if four else 8 if eight else None,
        reader.truth("use_bnb_nested_quant"),
        "DoRA (use_dora)" if reader.truth("use_dora") else "",
        rslora=bool(reader.glance("use_rslora", bool)),
        quantisation=reader.glance("bnb_4bit_quant_type", str) or "nf4" if four else "",
        target_parameters=parameters,
        modules_to_save=names_of(reader, "lora_modules_to_save"),
    )
    put_adapter(reader, adapter, "use_peft")
    for part, name in _PARTS.items():
        reader.trace(part, name, f"{MODEL_CONFIG}.{name}" if name in (*_OF_DEFAULTS, *_OF_4_BITS[: int(four)]) else "")
    reader.trace("base_bits", "load_in_4bit" if four else "load_in_8bit")
    for name in ("lora_target_parameters", "lora_modules_to_save", "bnb_4bit_quant_storage"):
        if reader.has(name) and not (name == "lora_target_parameters" and has_experts(reader)):
            reader.unknown(name, "further trained or stored parameters are not counted")
    source = f"{SFT_TRAINER} (quantised models)" if adapter.base_bits else "peft get_peft_model, autocast_adapter_dtype"
    return Said("bf16" if adapter.base_bits else "f32", "adapter", source)


def _put_length(reader: HfReader) -> None:
    key = "max_length"
    if key in reader.settings and not reader.has(key):  # null: rows are as long as the data's
        reader.taken.add(key)
        reader.settle("seq_len", "", "--seq-len")
    else:
        default = 1024 if reader.asked.seq_len is None else None
        reader.settle("seq_len", key, "--seq-len", default, f"{SFT_CONFIG}.max_length")


def _put_trl_loss(reader: HfReader) -> None:
    """Set the loss: by default TRL multiplies by the head and upcasts a piece of 256 tokens at a time."""
    kind = reader.take("loss_type", str)
    if reader.truth("use_liger_kernel"):
        put_loss(reader)
        if kind == "chunked_nll":
            text = "loss_type chunked_nll and use_liger_kernel exclude one another in TRL"
            reader.wrong("loss_type", text, way_out="leave one of them out")
        return
    reader.taken.add("use_liger_kernel")
    if kind in (None, "chunked_nll"):
        said = Said(Loss.FUSED, "loss_type", "" if kind else f"{SFT_CONFIG}.loss_type")
        reader.lay("loss", said)
    elif kind == "nll":
        reader.put("loss", Loss.UPCAST, "loss_type")
    elif kind == "dft":
        reader.put("loss", Loss.UPCAST, "loss_type")
        reader.unknown("loss_type", "what this loss keeps is not known here; counted as that of nll")
    else:
        way_out = "nll, chunked_nll or dft"
        reader.wrong("loss_type", f"loss_type is {shown(kind)}, which is no loss of SFT", way_out=way_out)


def _loaded(reader: HfReader, said: Said, published: str | None) -> Said:
    """Return the type of loaded weights; `auto` is that of the published ones."""
    if said.value != "auto":
        return Said(type_of(reader, said.key, said.value) or "f32", said.key, said.source)
    if published is None:
        reader.unknown(said.key, "the type of the published weights is not known here; counted as bf16")
    return Said(published or "bf16", said.key, said.source)


def _read_arguments(path: Path, text: str, asked: Asked) -> Job:
    what = "training arguments of transformers"
    source = Source(str(path), text)
    reader = HfReader("transformers", settings_of(path, text, what), source.top(), path=path, asked=asked)
    put_asked_model(reader)
    reader.settle("seq_len", "", "--seq-len")
    arguments = take_arguments(reader)
    put_loss(reader)
    put_attention(reader, Said(None, "attn_implementation"))
    put_experts(reader)
    loaded = Said("bf16", "dtype", f"{LOADING}: as published (auto); assumed bf16")
    if not reader.engine:
        reader.doubt("dtype", None, "the training script loads the model, and its type; counted as bf16")
    put_types(reader, loaded, arguments.mixed)
    return reader.finish(INERT)


def _trl_loss_words(value: Any) -> dict[str, Any] | None:
    table: dict[Any, dict[str, Any]] = {
        Loss.FUSED: {"loss_type": "chunked_nll", "use_liger_kernel": False},
        Loss.UPCAST: {"loss_type": "nll", "use_liger_kernel": False},
    }
    return table.get(value)


def _adapter_words(value: Adapter, before: Adapter | None) -> dict[str, Any]:
    if before is not None and before.rank != value.rank:
        return {"lora_r": value.rank}
    four = value.base_bits == 4
    kind = {"load_in_4bit": four, "load_in_8bit": value.base_bits == 8, "use_bnb_nested_quant": four}
    if before is not None:
        return kind
    lora = {"lora_r": value.rank, "lora_alpha": value.alpha, "lora_dropout": value.dropout}
    targets = ALL_LINEAR if value.targets == (ALL_LINEAR,) else list(value.targets)
    return {"use_peft": True, **lora, "lora_target_modules": targets, **(kind if four else {})}


TRL_WORDS = Words(
    adapter=_adapter_words,
    seq_len="max_length",
    offload_activations=lambda on: {"activation_offloading": on},
    attention=attention_word,
    loss=_trl_loss_words,
    weights=lambda value: {"dtype": TYPE_WORDS[value]} if value in TYPE_WORDS else None,
)
ARGUMENTS_WORDS = Words(
    loss=liger("use_liger_kernel"),
    offload_activations=lambda on: {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": on}},
)


def _trl_phrase(job: Job, name: str, value: Any) -> str | None:
    return phrase(TRL_WORDS, job, name, value)


def _arguments_phrase(job: Job, name: str, value: Any) -> str | None:
    return None if isinstance(value, Attention) else phrase(ARGUMENTS_WORDS, job, name, value)


TRL = SettingsFormat("trl", "TRL", _is_trl, _read_trl, _trl_phrase)
TRANSFORMERS = SettingsFormat("transformers", "transformers", _is_arguments, _read_arguments, _arguments_phrase)
