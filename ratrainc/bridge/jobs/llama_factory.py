"""Reader of LLaMA-Factory's settings (`llamafactory-cli train FILE`): YAML by OmegaConf, over training arguments.

What differs from the Trainer's own: checkpointing is on unless `disable_gradient_checkpointing` says otherwise, trained
weights are cast to f32 unless `pure_bf16` or ZeRO 3 is on, and lists may be texts with commas.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import evolve

from ratrain.ratrain_ir.config.training import ALL_LINEAR
from ratrain.ratrain_ir.support.diagnostics import nearest
from ratrain.ratrain_ir.support.text import Source, shown
from ratrain.ratrainc.bridge.jobs.hf_arguments import INERT, Defaults, put_loss, take_arguments
from ratrain.ratrainc.bridge.jobs.hf_reader import HfReader, Said, settings_of
from ratrain.ratrainc.bridge.jobs.hf_rules import (
    OPTIMIZERS,
    low_rank_adapter,
    put_adapter,
    put_attention,
    put_experts,
    put_model,
    put_types,
    targets_of,
)
from ratrain.ratrainc.bridge.jobs.hf_trainer import top_keys
from ratrain.ratrainc.bridge.jobs.hf_words import Words, liger, phrase
from ratrain.ratrainc.bridge.jobs.job import THAWED, Adapter, Attention, Checkpointing, Job, Sharding, Thawed
from ratrain.ratrainc.bridge.jobs.job_common import names_of
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, SettingsFormat

_HPARAMS = "llama-factory src/llamafactory/hparams"
CAST = "llama-factory src/llamafactory/model/adapter.py, init_adapter (cast_trainable_params_to_fp32)"
LOADER = "llama-factory src/llamafactory/model/loader.py, load_model (torch_dtype: auto)"
_ATTENTION = {"auto": None, "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
"""Names of `flash_attn`: src/llamafactory/extras/constants.py, AttentionFunction."""
_ATTENTION_WORDS = {Attention.EAGER: "disabled", Attention.SDPA: "sdpa", Attention.FLASH: "fa2"}
_OF_US = (
    *("finetuning_type", "cutoff_len", "template", "lora_rank", "lora_target", "flash_attn", "neat_packing"),
    *("freeze_trainable_layers", "quantization_bit", "pure_bf16", "enable_liger_kernel", "dataset_dir"),
)
_SWITCHES = (
    *("use_unsloth", "use_unsloth_gc", "shift_attn", "upcast_layernorm", "upcast_lmhead_output", "use_llama_pro"),
    *("use_kt", "use_dft_loss", "use_asft_loss", "use_eaft_loss", "use_hyper_parallel", "use_v1_kernels"),
    *("use_mca", "use_megatron_bridge", "resize_vocab", "mixture_of_depths"),
)
"""Switches whose effect on memory is not counted; nothing is said of them where they are off."""
_OPTIMIZERS = {"use_galore": "galore", "use_apollo": "apollo", "use_badam": "badam", "use_adam_mini": "adam-mini"}

_INERT = {
    **INERT,
    r"(template|tool_format|default_system|enable_thinking|preserve_thinking|train_on_prompt|mask_history|max_samples"
    r"|overwrite_cache|buffer_size|mix_strategy|interleave_probs|ignore_pad_token_for_loss|val_size|tokenized_path"
    r"|media_dir|image_.*|video_.*|audio_.*|use_audio_in_video|crop_to_patches|disable_shuffling)": "of the data",
    r"(cache_dir|use_fast_tokenizer|split_special_tokens|add_(special_)?tokens|new_special_tokens_config"
    r"|init_special_tokens|low_cpu_mem_usage|offload_folder|print_param_status|(hf|ms|om)_hub_token|model_max_length"
    r"|infer_.*|vllm_.*|sglang_.*|export_.*|use_kv_cache|adapter_folder|compute_accuracy"
    r"|include_effective_tokens_per_second|ray_.*|master_(addr|port)|num_workers|resources_per_worker"
    r"|placement_strategy|profiler_.*|enable_torch_profiler)": "of loading, generation, logs and the launch",
    r"(galore|apollo|badam|kt|ppo|pref|kto|simpo|eaft|asft|hyper_parallel|dpo|oft|reward_model|ref_model)_.*": "no "
    "switch that is read turns it on",
    r"(use_rslora|pissa_.*|loraplus_.*|create_new_adapter|adapter_name_or_path|use_reentrant_gc|use_cache"
    r"|gradient_checkpointing(_kwargs.*)?|activation_checkpointing(_kwargs.*)?"
    r"|quantization_(type|device_map)|double_quantization"
    r"|freeze_(vision_tower|multi_modal_projector|language_model))": "it holds nothing",
}


def _recognises(_path: Path, text: str) -> bool:
    keys = top_keys(text)
    others = {"base_model", "distributed_type", "train_dataset", "dist_config"}  # the last two: its version 1, another
    return len(keys & set(_OF_US)) > 1 and not keys & others


def _read(path: Path, text: str, asked: Asked) -> Job:
    source = Source(str(path), text)
    settings = settings_of(path, text, "a configuration of LLaMA-Factory")
    reader = HfReader("llama-factory", settings, source.top(), path=path, asked=asked)
    stage = reader.take("stage", str) or "sft"
    if stage not in ("sft", "pt"):
        text = f"stage {shown(stage)} trains with more than one model, whose memory is not known here"
        reader.wrong("stage", text, way_out="sft or pt")
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if reader.has(name):
            reader.wrong(name, f"{name} is of a run by Megatron, which is not read", way_out="a run by transformers")
    published = put_model(reader, "model_name_or_path")
    reader.settle("seq_len", "cutoff_len", "--seq-len", None if asked.seq_len else 2048, f"{_HPARAMS}/data_args.py")
    _put_method(reader)
    _put_checkpointing(reader)
    arguments = take_arguments(reader, Defaults(reads_checkpointing=False))
    _put_optimizer(reader)
    _put_attention(reader)
    put_experts(reader, losses="moe_aux_loss_coef")
    put_loss(reader, reader.first("enable_liger_kernel", "use_liger_kernel"))
    packing, neat = reader.take("packing", bool), reader.take("neat_packing", bool)
    if packing is None and not neat:
        reader.assume("packing", stage == "pt", "packing", f"{_HPARAMS}/parser.py, get_train_args")
    else:
        reader.put("packing", bool(packing or neat), "neat_packing" if neat else "packing")
    if reader.truth("fp8"):
        reader.put("fp8", True, "fp8")
    for name in ("fp8_backend", "fp8_enable_fsdp_float8_all_gather"):
        reader.ignore(name, "of how fp8 is gone about")
    for name in (each for each in _SWITCHES if each not in reader.taken):
        if reader.has(name) and reader.settings[name].value is not False:
            reader.unknown(name, "its effect on memory is not counted")
        reader.taken.add(name)
    _put_types(reader, published, arguments.mixed)
    return reader.finish(_INERT)


def _put_method(reader: HfReader) -> None:
    """Set what is trained: low-rank adapters by default."""
    kind = reader.said("finetuning_type", str, "lora", f"{_HPARAMS}/finetuning_args.py, FinetuningArguments")
    lora = ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "additional_target")
    if kind.value != "lora":
        for name in lora:
            reader.ignore(name, f"finetuning_type is {kind.value}: nothing reads it")
    if kind.value == "lora":
        _put_lora(reader, kind)
    elif kind.value == "full":
        reader.lay("method", kind)
    elif kind.value == "freeze":
        reader.lay("method", evolve(kind, value="frozen"))
        _put_thawed(reader)
    else:
        known = ("lora", "full", "freeze")
        text = f"finetuning_type is {shown(kind.value)}, whose memory is not known here"
        reader.wrong("finetuning_type", text, way_out=nearest(kind.value, known) or f"one of {', '.join(known)}")
    bits = reader.take("quantization_bit", int)
    if bits is not None and kind.value != "lora":
        reader.wrong("quantization_bit", "quantised weights train with low-rank adapters alone", way_out="lora")


_THAWED = {
    "layers": "freeze_trainable_layers",
    "modules": "freeze_trainable_modules",
    "extra_modules": "freeze_extra_modules",
    "spread": "use_llama_pro",
}
"""Settings of what trains alone."""


def _put_thawed(reader: HfReader) -> None:
    """Set the layers and modules that train while others are frozen."""
    source = f"{_HPARAMS}/finetuning_args.py, FreezeArguments"
    key = _THAWED["layers"]
    said = reader.take(key, float)
    if said is not None and said != int(said):
        reader.wrong(
            key, f"{key} is {said:g}: a whole number is expected", way_out="2: the last two; -2: the first two"
        )
        return
    thawed = Thawed(
        2 if said is None else int(said),
        names_of(reader, _THAWED["modules"]) or ("all",),
        names_of(reader, _THAWED["extra_modules"]),
        reader.truth(_THAWED["spread"]),
    )
    reader.put("thawed", thawed, "finetuning_type")
    for part, name in _THAWED.items():
        reader.trace(part, name, f"{source}.{name}" if part == "layers" else "", THAWED)
        reader.taken.add(name)


_PARTS = {
    "rank": "lora_rank",
    "alpha": "lora_alpha",
    "targets": "lora_target",
    "dropout": "lora_dropout",
    "base_bits": "quantization_bit",
    "double_quantised": "double_quantization",
    "kind": "use_dora",
    "rslora": "use_rslora",
    "quantisation": "quantization_type",
    "start": "pissa_init",
    "modules_to_save": "additional_target",
}
"""Settings of what an adapter has."""
_DEFAULTS = {
    "lora_rank": f"{_HPARAMS}/finetuning_args.py, LoraArguments.lora_rank",
    "lora_alpha": f"{_HPARAMS}/finetuning_args.py, FinetuningArguments.__post_init__",
    "lora_target": f"{_HPARAMS}/finetuning_args.py, LoraArguments.lora_target",
}


def _put_lora(reader: HfReader, kind: Said) -> None:
    rank = reader.size("lora_rank") or 8
    alpha = reader.take("lora_alpha", float) or 2.0 * rank  # FinetuningArguments.__post_init__
    targets = targets_of(reader, "lora_target") or (ALL_LINEAR,)
    bits = reader.take("quantization_bit", int)
    if bits not in (None, 4, 8):
        reader.wrong("quantization_bit", f"quantization_bit is {bits}: bitsandbytes has 4 and 8", way_out="4 or 8")
    other = "DoRA (use_dora)" if reader.truth("use_dora") else ""
    method = reader.take("quantization_method", str) or "bnb"
    if bits is not None and method.lower() not in ("bnb", "bitsandbytes"):
        other = f"{method} (quantization_method)"
    adapter = low_rank_adapter(
        *(reader, rank, alpha, targets, bits, other),
        double="double_quantization",
        quantisation="quantization_type",
        rslora="use_rslora",
        start="PiSSA (pissa_init)" if reader.glance("pissa_init", bool) else "",
        modules_to_save=names_of(reader, "additional_target"),
    )
    for part, key in _PARTS.items():
        reader.trace(part, key, _DEFAULTS.get(key, ""))
    if kind.source:
        reader.values |= {"adapter": adapter, "method": "lora"}
        reader.assume("adapter", adapter, kind.key, kind.source)
        reader.assume("method", "lora", kind.key, kind.source)
    else:
        put_adapter(reader, adapter, kind.key)
    if reader.has("additional_target"):
        reader.unknown("additional_target", "further trained modules are not counted")


def _put_checkpointing(reader: HfReader) -> None:
    key = "disable_gradient_checkpointing"
    source = f"{_HPARAMS}/model_args.py, BaseModelArguments.{key}; src/llamafactory/model/model_utils/checkpointing.py"
    said = reader.said(key, bool, False, source)
    reader.lay("checkpointing", evolve(said, value=Checkpointing.NONE if said.value else Checkpointing.FULL))


def _put_optimizer(reader: HfReader) -> None:
    """Set an optimizer of LLaMA-Factory's own in place of the training arguments'."""
    for key, name in _OPTIMIZERS.items():
        if reader.truth(key):
            reader.put("optimizer", name, key)
            reader.unknown(key, "the state of this optimizer is not known here")
    if reader.truth("use_muon"):
        reader.put("optimizer", "muon", "use_muon")


def _put_attention(reader: HfReader) -> None:
    said = reader.said("flash_attn", str, "auto", f"{_HPARAMS}/model_args.py, BaseModelArguments.flash_attn")
    if said.value not in _ATTENTION:
        way_out = nearest(said.value, _ATTENTION) or f"one of {', '.join(_ATTENTION)}"
        reader.wrong(
            "flash_attn", f"flash_attn is {shown(said.value)}, which LLaMA-Factory does not have", way_out=way_out
        )
        return
    model = reader.values.get("model")
    if said.value == "auto" and model is not None and model.family == "gemma2":
        reader.assume(
            "attention", Attention.FLASH, said.key, "llama-factory src/llamafactory/model/model_utils/attention.py"
        )
        reader.doubt("flash_attn", "auto", "Gemma 2 trains by flash attention if it is installed, else by eager")
        return
    put_attention(
        reader, evolve(said, value=_ATTENTION[said.value], source="" if reader.has("flash_attn") else said.source)
    )


def _put_types(reader: HfReader, published: str | None, mixed: Said) -> None:
    """Set the types: weights are loaded as they are published, and trained ones cast to f32 unless told otherwise."""
    if published is None and not reader.engine:
        reader.doubt("torch_dtype", "auto", "the type of the published weights is not known here; counted as bf16")
    loaded = Said(published or "bf16", "torch_dtype", LOADER)
    adapter = reader.values.get("adapter")
    pure = reader.truth("pure_bf16")
    kept = reader.values.get("sharding") is Sharding.ZERO3 and (adapter is None or adapter.base_bits is None)
    if pure and reader.values.get("sharding") is Sharding.ZERO3:
        reader.wrong("pure_bf16", "pure_bf16 and ZeRO 3 exclude one another", way_out="pure_bf16: false")
    if pure:
        loaded = evolve(loaded, key="pure_bf16", source="" if reader.has("pure_bf16") else LOADER)
    put_types(reader, loaded, mixed, "" if pure or kept or reader.truth("use_badam") else CAST)


_WEIGHTS: Mapping[str, Mapping[str, Any]] = {"bf16": {"pure_bf16": True}, "f32": {"pure_bf16": False}}


def _adapter_words(value: Adapter, before: Adapter | None) -> Mapping[str, Any]:
    if before is not None and before.rank != value.rank:
        return {"lora_rank": value.rank, "lora_alpha": before.alpha}
    bits = {"quantization_bit": value.base_bits} if value.base_bits else {}
    if before is not None:
        return bits
    targets = "all" if value.targets == (ALL_LINEAR,) else ",".join(value.targets)
    return {
        "finetuning_type": "lora",
        "lora_rank": value.rank,
        "lora_alpha": value.alpha,
        "lora_target": targets,
        **bits,
    }


WORDS = Words(
    adapter=_adapter_words,
    seq_len="cutoff_len",
    optimizers=OPTIMIZERS,
    checkpointing=lambda on, _job: {"disable_gradient_checkpointing": not on},
    attention=lambda value: {"flash_attn": _ATTENTION_WORDS[value]} if value in _ATTENTION_WORDS else None,
    loss=liger("enable_liger_kernel"),
    weights=_WEIGHTS.get,
)


def _phrase(job: Job, name: str, value: Any) -> str | None:
    if name == "weight_dtype" and job.adapter is not None:
        return None  # the base has the type of the published weights
    said = phrase(WORDS, job, name, value)
    pure = (origin := job.origins.get("weight_dtype")) is not None and origin.key == "pure_bf16"
    if said and name == "sharding" and value is Sharding.ZERO3 and pure:
        return f"pure_bf16: false\nbf16: true\n{said}"
    return said


FORMAT = SettingsFormat("llama-factory", "LLaMA-Factory", _recognises, _read, _phrase)
