"""Reader of axolotl's settings (`axolotl train FILE`): YAML by PyYAML, then pydantic's types.

axolotl makes training arguments of its settings and runs transformers' Trainer. Weights are loaded in the type of
training (`bf16: auto` is bf16 where the device has it) and, without FSDP or DeepSpeed, updated in it. `${...}` stays as
it is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratrain.ratrain_ir.config.training import ALL_LINEAR
from ratrain.ratrain_ir.support.text import Source, shown
from ratrain.ratrainc.bridge.jobs.accelerate import INERT as INERT_ACCELERATE
from ratrain.ratrainc.bridge.jobs.accelerate import bring_accelerate, put_devices
from ratrain.ratrainc.bridge.jobs.hf_arguments import put_sharding
from ratrain.ratrainc.bridge.jobs.hf_deepspeed import INERT_DEEPSPEED, Arguments
from ratrain.ratrainc.bridge.jobs.hf_fsdp import INERT_FSDP, FsdpDefaults, put_fsdp
from ratrain.ratrainc.bridge.jobs.hf_reader import HfReader, Said, settings_of
from ratrain.ratrainc.bridge.jobs.hf_rules import (
    LOSS_SOURCE,
    OPTIMIZERS,
    UPCAST_FSDP2,
    Names,
    TrainingDefaults,
    has_experts,
    low_rank_adapter,
    put_adapter,
    put_attention,
    put_experts,
    put_model,
    put_optimizer,
    put_training,
    put_types,
    put_unfrozen,
    targets_of,
    usual_targets,
)
from ratrain.ratrainc.bridge.jobs.hf_trainer import top_keys
from ratrain.ratrainc.bridge.jobs.hf_words import TYPES, Words, attention_word, phrase
from ratrain.ratrainc.bridge.jobs.job import (
    FSDP,
    Adapter,
    Attention,
    Checkpointing,
    Context,
    Job,
    Loss,
)
from ratrain.ratrainc.bridge.jobs.job_common import (
    STRIDE,
    excluded_of,
    layers_of,
    names_of,
    note_excluded,
    numbers_of,
    put_context,
)
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, SettingsFormat
from ratrain.ratrainc.bridge.reasons import OF_TRAINING
from ratrain.ratrainc.bridge.settings import Setting, is_off, is_one, product

_SCHEMAS = "axolotl src/axolotl/utils/schemas"
TRAINING = f"{_SCHEMAS}/training.py, HyperparametersConfig"
CONFIG = f"{_SCHEMAS}/config.py, AxolotlInputConfig"
DTYPE = "axolotl src/axolotl/utils/config/__init__.py, resolve_dtype"
_FSDP = FsdpDefaults(
    (1, f"{_SCHEMAS}/validation.py, check_fsdp_version_in_fsdp_config"),
    ("TRANSFORMER_BASED_WRAP", "transformers src/transformers/training_args.py, TrainingArguments._process_fsdp_args"),
)
_OWN_OPTIMIZERS = {"muon": "muon", "ao_adamw_4bit": "adamw-4bit", "ao_adamw_8bit": "adamw-8bit"}
_OTHER_OPTIMIZERS = (
    *("optimi_adamw", "ao_adamw_fp8", "adopt_adamw", "came_pytorch", "dion", "sinkgd", "flash_adamw", "flash_adam"),
    *("flash_sgd", "flash_sgdw", "flash_lion", "q_galore_adamw8bit"),
)
"""axolotl's own names: schemas/enums.py, CustomSupportedOptimizers."""
_FLAGS = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
"""Older switches, in the order in which the first that is on wins: schemas/enums.py, LEGACY_ATTN_FLAG_TO_IMPL."""
_LIGER, _CUT = "axolotl.integrations.liger.LigerPlugin", "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
_ADAPTERS = ("lora", "qlora")
_OF_US = ("base_model", "sequence_len", "micro_batch_size", "sample_packing", "val_set_size", "special_tokens")

_INERT: Mapping[str, str] = {
    **INERT_ACCELERATE,
    **INERT_DEEPSPEED,
    r"(datasets|test_datasets|pretraining_dataset|shuffle_.*|dataset_.*|skip_prepare_dataset|num_dataset_shards_to_save"
    r"|dataloader_.*|remove_unused_columns|push_dataset_to_hub|val_set_size|chat_template.*|eot_tokens|train_on_inputs"
    r"|default_system_message|special_tokens.*|tokens(\..*)?|added_tokens_overrides.*|bos_token|eos_token|pad_token|unk_token"
    r"|additional_special_tokens|min_sample_len|max_prompt_len|excess_length_strategy|eval_sequence_len"
    r"|eval_sample_packing|sample_packing_.*|pad_to_sequence_len|pad_to_multiple_of|group_by_length|curriculum_sampling"
    r"|multipack_real_batches|batch_flattening|pretrain_multipack_.*|pretraining_sample_concatenation|streaming.*"
    r"|total_(num|supervised)_tokens|preprocess_iterable|is_preprocess|role_boundaries|roles.*|noisy_embedding_alpha"
    r"|neftune_noise_alpha|fix_untrained_tokens)": "of the data",
    r"(output_dir|hub_.*|save_.*|saves_per_epoch|logging_steps|use_wandb|wandb_.*|use_mlflow|mlflow_.*|use_comet"
    r"|comet_.*|hf_mlflow_log_artifacts|use_tensorboard|use_trackio|trackio_.*|use_swanlab|swanlab_.*|gradio_.*|use_otel_metrics"
    r"|otel_.*|include_(tkps|tokens_per_second|num_input_tokens_seen)|profiler_steps.*|load_best_model_at_end"
    r"|metric_for_best_model|greater_is_better|resume_from_checkpoint|auto_resume_from_checkpoints|debug|strict"
    r"|dynamic_checkpoint.*|axolotl_config_path|merge_.*|loss_watchdog_.*)": "of logs and saving",
    r"(eval.*|evals_per_epoch|do_(bench|causal_lm)_eval|bench_.*|early_stopping_patience|generate_samples"
    r"|num_generation_samples|generation_.*)": "of evaluation: the answer is of a training step",
    r"(tokenizer_.*|processor_.*|model_type|trust_remote_code|base_model_config|cls_model_config|revision_of_model"
    r"|is_(falcon|llama|mistral|qwen)_derived_model|hf_use_auth_token|low_cpu_mem_usage|overrides_of_model_config.*"
    r"|resize_token_embeddings_to_32x|mean_resizing_embeddings|shrink_embeddings|device|device_map|local_rank|ddp"
    r"|world_size|experimental_skip_move_to_device|max_memory|gpu_memory_limit|lora_model_dir|lora_on_cpu"
    r"|embeddings_skip_upcast)": "of loading and the launch",
    r"(seed|tf32|gc_steps|gc_collect_steps|torch_empty_cache_steps|ddp_.*|accelerator_config.*|use_ray|ray_.*"
    r"|resources_per_worker.*|torch_compile_.*|flex_attn_compile_kwargs.*|pretrain_multipack_attn|ring_attn_func"
    r"|heads_k_stride|fp8_enable_fsdp_float8_all_gather|use_kernels)": "it holds no bytes of a step",
    r"(lr_.*|embedding_lr.*|cosine_.*|adam_(beta3|epsilon2)|optim_args.*|jagged_restart_.*|dion_.*|loraplus_.*"
    r"|label_smoothing_factor|peft_use_rslora|peft_init_lora_weights|lora_fan_in_fan_out|torchdistx_path"
    r"|lora_alpha_pattern.*"
    r"|bnb_config_kwargs.*|qlora_sharded_model_loading|relora_.*|lisa_.*_attribute|liger_use_token_scaling"
    r"|eaft_.*)": OF_TRAINING,
    r"fsdp_(final_state_dict_type)": "of saving",
    **INERT_FSDP,
}
"""Settings that change no byte of a step: schemas/*.py of axolotl."""

_UNCOUNTED: Mapping[str, str] = {
    "relora": "how adapters are merged on the way is not counted",
    "peft_layers_to_transform": "adapters of some layers alone are counted for all",
    "lora_rank_pattern": "ranks by layer are not counted",
    **{
        f"lora_{each}_kernel": "fused kernels of adapters keep fewer results than counted"
        for each in ("mlp", "qkv", "o", "embedding")
    },
    "layer_offloading": "layers that wait on the host are not counted",
    "selective_checkpointing": "what selective checkpointing keeps is not counted",
    "lisa_n_layers": "which layers train is not counted",
    "tiled_mlp": "the MLP in pieces is not counted",
    "tiled_mlp_num_shards": "the MLP in pieces is not counted",
    "flash_attn_fuse_mlp": "a fused MLP is not counted",
    "auto_find_batch_size": "the batch is made smaller until it fits; counted as it is said",
    "quantize_moe_experts": "experts in 4 or 8 bits are not counted",
    "use_scattermoe": "what ScatterMoE's kernels keep is not known here",
    "use_sonicmoe": "what SonicMoE's kernels keep is not known here",
    "qat": "quantisation-aware training is not counted",
    "trl": "settings of other trainers are not counted",
    "optim_target_modules": "an optimizer for some modules alone is counted for all",
    "gptq": "weights quantised by GPTQ are not counted",
    "model_quantization_config": "weights that are published quantised are not counted",
    "fp32_norms": "norms in f32 are not counted",
    "use_pose": "positions that are skipped are not counted",
    "peft_trainable_token_indices": "further trained tokens are not counted",
}
"""Settings that may change memory, with what is not counted where they are on."""


def _recognises(_path: Path, text: str) -> bool:
    keys = top_keys(text)
    return "base_model" in keys and bool(keys & {*_OF_US[1:], "datasets", "num_epochs", "adapter", "learning_rate"})


def _read(path: Path, text: str, asked: Asked) -> Job:
    source = Source(str(path), text)
    settings = settings_of(path, text, "a configuration of axolotl")
    reader = HfReader("axolotl", settings, source.top(), path=path, asked=asked)
    if (rl := reader.take("rl", str)) or reader.truth("reward_model") or reader.truth("process_reward_model"):
        text = f"{'rl: ' + rl if rl else 'a reward model'} trains by other rules, whose memory is not known here"
        key = "rl" if rl else reader.first("reward_model", "process_reward_model")
        reader.wrong(key, text, way_out="give the settings of supervised fine-tuning")
    put_model(reader, "base_model")
    bring_accelerate(reader)
    _put_devices(reader)
    reader.settle("seq_len", "sequence_len", "--seq-len", None if asked.seq_len else 512, f"{CONFIG}.sequence_len")
    micro, times = _put_batch(reader)
    loaded, mixed = _types(reader)
    _put_adapter(reader)
    put_unfrozen(reader, "unfrozen_parameters")
    defaults = TrainingDefaults((None, ""), ("cosine", f"{TRAINING}.lr_scheduler"), (1.0, f"{TRAINING}.num_epochs"))
    put_training(reader, Names("learning_rate", "lr_scheduler", "num_epochs"), defaults)
    _put_least_rate(reader)
    put_optimizer(reader, "optimizer", f"{TRAINING}.optimizer", _OWN_OPTIMIZERS, _OTHER_OPTIMIZERS)
    _put_checkpointing(reader)
    _put_sharding(reader, Arguments(micro, times, Said(reader.training["max_grad_norm"], "max_grad_norm"), mixed))
    _put_attention(reader)
    put_experts(reader, "experts_implementation", "overrides_of_model_config.output_router_logits")
    peers = reader.size("expert_parallel_size")
    reader.put("ep", peers if peers != 1 else None, "expert_parallel_size")
    _put_loss(reader)
    compiled = reader.first("torch_compile", "torch_compile_backend")
    if reader.has(compiled) and str(reader.settings[compiled].value).lower() not in ("false", "auto"):
        reader.put("compiled", True, compiled)
    reader.taken.add("torch_compile")
    if reader.truth("fp8"):
        reader.put("fp8", True, "fp8")
    reader.put("packing", reader.take("sample_packing", bool), "sample_packing")
    _put_context(reader)
    put_types(reader, loaded, mixed, upcast="" if any(reader.under("fsdp_config.")) else UPCAST_FSDP2)
    _note_uncounted(reader)
    return reader.finish(_INERT)


def _put_context(reader: HfReader) -> None:
    """Set the form of context ranks: by name, or by whether sequences are packed (validate_ring_attn_func)."""
    forms = {"varlen_llama3": Context.GATHER, "batch_ring": Context.RING}
    usual = "varlen_llama3" if reader.training.get("packing") else "batch_ring"
    put_context(reader, "ring_attn_func", forms, usual, f"{_SCHEMAS}/validation.py, validate_ring_attn_func")
    stride = reader.size(STRIDE)
    if stride is not None and reader.values["context"] is Context.GATHER:
        reader.put("sizes", {**reader.values.get("sizes", {}), STRIDE: stride}, STRIDE)


def _put_least_rate(reader: HfReader) -> None:
    """Set the learning rate at a cosine's end (core/trainers/mixins/scheduler.py, SchedulerMixin.create_scheduler)."""
    lr = reader.training.get("lr")
    if lr is None or reader.training.get("scheduler") != "cosine":
        return
    if (share := reader.take("cosine_min_lr_ratio", float)) is not None:
        reader.put("min_lr", product(share, lr), "cosine_min_lr_ratio")


def _put_devices(reader: HfReader) -> None:
    """Set devices and degrees; two given degrees of data parallelism say how many devices there are.

    A degree of 1 counts as left out, and one degree leaves the other ranks to the other one
    (axolotl src/axolotl/utils/distributed.py, _get_parallel_config_kwargs). FSDP shards over context ranks too
    (accelerate src/accelerate/parallelism_config.py, ParallelismConfig.dp_shard_cp_dim_names).
    """
    if reader.has(old := "sequence_parallel_degree"):
        reader.settings.setdefault("context_parallel_size", reader.settings[old])
        reader.taken.add(old)
    share, copies = reader.size("dp_shard_size"), reader.size("dp_replicate_size")
    tp, cp = reader.size("tensor_parallel_size"), reader.size("context_parallel_size")
    for field, key, size in (("tp", "tensor_parallel_size", tp), ("cp", "context_parallel_size", cp)):
        if size is not None and size > 1:
            reader.put(field, size, key)
    copied, shared = (copies or 1) > 1, (share or 1) > 1
    if reader.has("accelerate.num_processes") or not (shared and copied):
        key = "ray_num_workers"
        if reader.truth("use_ray") and reader.has(key) and not reader.has("accelerate.num_processes"):
            reader.settle("devices", key, "--devices")
        else:
            put_devices(reader)
    else:
        whole = (share or 1) * (copies or 1) * (tp or 1) * (cp or 1)
        if reader.asked.devices not in (None, whole):
            text = f"--devices {reader.asked.devices} contradicts the degrees, whose product is {whole}"
            reader.wrong("dp_shard_size", text, way_out=f"--devices {whole}")
        reader.put("devices", whole, "dp_shard_size")
    ranks = (reader.values.get("devices") or 0) // ((tp or 1) * (cp or 1))
    key, degree = ("dp_replicate_size", copies or 1) if copied else ("dp_shard_size", share or 1)
    if ranks % degree:
        text = f"{key} is {degree}, which does not divide {ranks} data-parallel ranks"
        reader.wrong(key, text, way_out="a degree that divides them, or other --devices")
    elif ranks and shared:
        reader.put("shard_size", (share or 1) * (cp or 1), "dp_shard_size")
    elif ranks and copied:
        reader.put("shard_size", ranks // degree * (cp or 1), key)


def _put_batch(reader: HfReader) -> tuple[Said, Said]:
    """Set micro-batch and accumulation; the older `batch_size` is their product."""
    micro_key, times_key = "micro_batch_size", "gradient_accumulation_steps"
    micro = reader.settle("micro_batch_size", micro_key, "--micro-batch-size", 1, f"{TRAINING}.{micro_key}")
    whole = reader.size("batch_size")
    if whole is not None and not reader.has(times_key) and micro:
        if whole % micro:
            text = f"batch_size is {whole}, which is not a multiple of {micro_key} {micro}"
            reader.wrong("batch_size", text, way_out=f"say {times_key}")
        reader.put("gradient_accumulation", max(1, whole // micro), "batch_size")
        return Said(micro, micro_key), Said(whole // micro, "batch_size")
    times = reader.settle("gradient_accumulation", times_key, "", 1, f"{TRAINING}.{times_key}")
    return Said(micro, micro_key), Said(times, times_key)


def _types(reader: HfReader) -> tuple[Said, Said]:
    """Return the type in which weights are loaded, and that of mixed precision (resolve_dtype)."""
    auto = reader.has("bf16") and str(reader.settings["bf16"].value).lower() == "auto"
    brain = None if auto else reader.take("bf16", bool)
    reader.taken.add("bf16")
    half, whole = reader.truth("fp16"), reader.truth("bfloat16")
    left_out = "" if reader.has("bf16") else f"{CONFIG}.bf16 (auto: where the device has bf16)"
    if brain is None:
        brain = not half
    reader.taken |= {"float16", "float32"}
    if brain or whole:
        key = "bf16" if brain else "bfloat16"
        kind = Said("bf16", key, left_out if key == "bf16" else "")
        if half and reader.has("bf16"):
            reader.ignore("fp16", "bf16 goes before it")
        return kind, kind
    if half:
        return Said("f16", "fp16"), Said("f16", "fp16")
    plain = reader.truth("float16") or reader.truth("load_in_8bit")
    key = "float16" if reader.truth("float16") else "load_in_8bit" if plain else "bf16"
    return Said("f16" if plain else "f32", key, "" if plain else DTYPE), Said(None, "bf16", DTYPE)


def _put_adapter(reader: HfReader) -> None:
    """Set the low-rank adapter, if there is one."""
    kind = reader.take("adapter", str)
    names = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_linear", "lora_target_modules", "lora_model_dir")
    four, eight = reader.truth("load_in_4bit"), reader.truth("load_in_8bit")
    if kind is None:
        for name in (*names, "lora_modules_to_save", "lora_target_parameters", "lora_exclude_modules"):
            reader.ignore(name, "no adapter is asked for: nothing reads it")
        if four or eight:
            key = "load_in_4bit" if four else "load_in_8bit"
            reader.wrong(key, "quantised weights train with an adapter alone", way_out="adapter: qlora")
        return
    if kind not in _ADAPTERS:
        way_out = f"one of {', '.join(_ADAPTERS)}"
        reader.wrong("adapter", f"adapter is {shown(kind)}, whose memory is not known here", way_out=way_out)
        return
    rank = reader.size("lora_r") or 8  # peft src/peft/tuners/lora/config.py, LoraConfig.r
    alpha = reader.take("lora_alpha", float) or 8.0
    named = targets_of(reader, "lora_target_modules")
    every = reader.truth("lora_target_linear")
    parameters = names_of(reader, "lora_target_parameters")
    targets = (ALL_LINEAR,) if every else named or usual_targets(reader, "lora_target_modules", parameters)
    reader.taken |= {*names}
    bits = 4 if four and kind == "qlora" else 8 if eight else 4 if four else None
    adapter = low_rank_adapter(
        *(reader, rank, alpha, targets, bits, _other_kind(reader)),
        double=_DOUBLE,  # loaders/model.py, ModelLoader._set_quantization_config
        quantisation=_QUANTISATION,
        rslora="peft_use_rslora",
        start=_other_start(reader),
        further_targets=tuple(each for each in named if each != ALL_LINEAR) if every else (),
        target_parameters=parameters,
        excluded=excluded_of(reader, "lora_exclude_modules"),
        layers=layers_of(reader, "peft_layers_to_transform"),
        layers_pattern=names_of(reader, "peft_layers_pattern"),
        rank_pattern=numbers_of(reader, "lora_rank_pattern"),
        alpha_pattern=numbers_of(reader, "lora_alpha_pattern"),
        modules_to_save=names_of(reader, "lora_modules_to_save"),
        ensure_weight_tying=bool(reader.glance("peft_ensure_weight_tying", bool)),
    )
    put_adapter(reader, adapter, "adapter")
    _trace_adapter(reader)
    reader.taken -= {"peft_layers_pattern", *reader.under("lora_alpha_pattern")}
    for name, more in (("lora_modules_to_save", adapter.modules_to_save), ("lora_target_parameters", parameters)):
        if more and not (more is parameters and has_experts(reader)):
            reader.unknown(name, "further trained modules are not counted")
    note_excluded(reader, "lora_exclude_modules", adapter.excluded)
    if reader.has("lora_model_dir"):
        reader.ignore("lora_model_dir", "of loading and the launch")


_QUANTISATION = "bnb_config_kwargs.bnb_4bit_quant_type"
_DOUBLE = "bnb_config_kwargs.bnb_4bit_use_double_quant"


def _trace_adapter(reader: HfReader) -> None:
    """Note the settings of the adapter."""
    peft = "peft src/peft/tuners/lora/config.py, LoraConfig"
    reader.trace("rank", "lora_r", f"{peft}.r")
    reader.trace("alpha", "lora_alpha", f"{peft}.lora_alpha")
    reader.trace("targets", "lora_target_linear" if reader.truth("lora_target_linear") else "lora_target_modules")
    bits = "load_in_4bit" if reader.truth("load_in_4bit") else "load_in_8bit"
    for part, key in (
        ("dropout", "lora_dropout"),
        ("base_bits", bits),
        ("double_quantised", _DOUBLE),
        ("quantisation", _QUANTISATION),
        ("kind", "peft_use_dora"),
        ("rslora", "peft_use_rslora"),
        ("start", "peft_init_lora_weights"),
        ("further_targets", "lora_target_modules"),
        ("target_parameters", "lora_target_parameters"),
        ("excluded", "lora_exclude_modules"),
        ("layers", "peft_layers_to_transform"),
        ("layers_pattern", "peft_layers_pattern"),
        ("rank_pattern", "lora_rank_pattern"),
        ("alpha_pattern", "lora_alpha_pattern"),
        ("modules_to_save", "lora_modules_to_save"),
        ("ensure_weight_tying", "peft_ensure_weight_tying"),
    ):
        reader.trace(part, key)


def _other_start(reader: HfReader) -> str:
    """Return the setting by which adapters start otherwise than as PEFT's usual ones; empty without one."""
    key = "peft_init_lora_weights"
    said = reader.settings[key].value if reader.has(key) else True
    return "" if str(said).lower() == "true" else f"{key}: {shown(said)}"


def _other_kind(reader: HfReader) -> str:
    """Return the setting that makes another kind of adapter than plain low-rank products; empty without one."""
    if reader.truth("peft_use_dora"):
        return "DoRA (peft_use_dora)"
    loftq = next((name for name in reader.under("peft") if "loftq" in name and reader.has(name)), "")
    held = reader.settings["peft"].value if reader.has("peft") else None
    return "LoftQ (peft.loftq_config)" if loftq or (isinstance(held, dict) and held.get("loftq_config")) else ""


def _put_checkpointing(reader: HfReader) -> None:
    """Set activation checkpointing and offload.

    The offloader takes the place of recomputation for adapters, and comes on top of it for full training
    (loaders/model.py, ModelLoader._apply_activation_checkpointing).
    """
    key, away = "gradient_checkpointing", "activation_offloading"
    said = str(reader.settings[key].value).lower() if reader.has(key) else None
    mode = str(reader.settings[away].value).lower() if reader.has(away) else "false"
    reader.taken |= {key, away, f"{key}_kwargs"}
    if said in ("offload", "offload_disk"):  # older words: validation.py, check_gradient_checkpointing_w_offload
        on, mode, away_key = True, "true" if said == "offload" else "disk", key
    else:
        on, away_key = bool(reader.take(key, bool)), away
    if mode not in ("false", "true", "legacy", "disk", "hidden_states"):
        way_out = "true, legacy, disk or hidden_states"
        reader.wrong(away, f"{away} is {shown(mode)}, which axolotl does not have", way_out=way_out)
        return
    moved = mode != "false"
    if moved and not on:
        reader.wrong(away, f"{away} needs {key}, which is off", way_out=f"{key}: true")
    for name in reader.under(f"{key}_kwargs."):
        reader.ignore(name, "both kinds keep the input of each layer")
    replaced = moved and mode != "hidden_states" and reader.values.get("adapter") is not None
    kind = Checkpointing.FULL if on and not replaced else Checkpointing.NONE
    reader.lay("checkpointing", Said(kind, key, "" if reader.has(key) else f"{CONFIG}.{key}"))
    reader.put("offload_activations", moved or None, away_key)


def _put_sharding(reader: HfReader, arguments: Arguments) -> None:
    """Set how ranks share out state: FSDP is on where `fsdp` or `fsdp_config` is there."""
    table = reader.open("fsdp_config", "an fsdp_config")
    words = reader.settings["fsdp"].value if reader.has("fsdp") else None
    reader.taken |= {"fsdp", "fsdp_config"}
    if (table or words) and reader.has("deepspeed"):
        reader.wrong("deepspeed", "deepspeed and fsdp exclude one another", way_out="leave one of them out")
    elif table or words:
        listed = words.split() if isinstance(words, str) else words if isinstance(words, list) else []
        for word in (str(each) for each in listed):
            if word.upper() == "SHARD_GRAD_OP":
                place = reader.settings["fsdp"].place
                reader.settings.setdefault("fsdp_config.reshard_after_forward", Setting(False, place))
            elif word == "offload":
                reader.settings.setdefault("fsdp_config.offload_params", Setting(True, reader.settings["fsdp"].place))
            elif word not in ("full_shard", "auto_wrap", "True"):
                way_out = "full_shard, shard_grad_op, offload, auto_wrap"
                reader.wrong("fsdp", f"fsdp has {shown(word)}, which is none of its words", way_out=way_out)
        put_fsdp(reader, "fsdp_config.", _FSDP, "fsdp_version")
        reader.taken |= {"fsdp_version", "fsdp_config.fsdp_version", "fsdp_config.version"}
    put_sharding(reader, arguments, fsdp=False)


def _put_attention(reader: HfReader) -> None:
    flags = [name for name in _FLAGS if reader.truth(name)]
    key = "attn_implementation"
    if reader.has(key) and flags:
        text = f"{key} and {flags[0]}, the older word, are both there, which axolotl refuses"
        reader.wrong(flags[0], text, way_out=f"say {key} alone")
    elif flags:
        put_attention(reader, Said(_FLAGS[flags[0]], flags[0]))
        return
    put_attention(reader, reader.said(key, str, None, ""))


def _plugins(reader: HfReader) -> list[str]:
    reader.taken.add("plugins")
    said = reader.settings["plugins"].value if reader.has("plugins") else []
    names = [str(each) for each in said] if isinstance(said, list) else [str(said)]
    if names:
        reader.ignore("plugins", "their own settings say what they change")
    for name in names:
        if name.rpartition(".")[2] not in (_LIGER.rpartition(".")[2], _CUT.rpartition(".")[2]):
            reader.unknown("plugins", f"what {name} changes is not known here")
    return [name.rpartition(".")[2] for name in names]


def _put_loss(reader: HfReader) -> None:
    """Set the loss: upcast logits, unless a plugin fuses or a setting chunks it."""
    plugins = _plugins(reader)
    liger = "LigerPlugin" in plugins
    cut = reader.take("cut_cross_entropy", bool)
    fused, whole = "liger_fused_linear_cross_entropy", "liger_cross_entropy"
    on = {name: reader.truth(name) for name in (fused, whole, "chunked_cross_entropy", "flash_attn_cross_entropy")}
    chunks = reader.size("chunked_cross_entropy_num_chunks")
    for name in reader.under("liger_"):
        reader.taken.add(name)
        if not liger:
            reader.ignore(name, "Liger's plugin is not among the plugins: nothing reads it")
    if "CutCrossEntropyPlugin" in plugins and cut is not False:
        reader.put("loss", Loss.FUSED, "cut_cross_entropy" if cut else "plugins")
    elif liger and on[fused]:
        reader.put("loss", Loss.FUSED, fused)
    elif liger and on[whole]:
        reader.put("loss", Loss.WHOLE, whole)
    elif on["chunked_cross_entropy"]:
        reader.put("loss", Loss.CHUNKED, "chunked_cross_entropy")
        reader.lay(
            "loss_chunks",
            Said(chunks, "chunked_cross_entropy_num_chunks")
            if chunks
            else Said(8, "chunked_cross_entropy", "axolotl src/axolotl/monkeypatch/loss/chunked.py"),
        )
    else:
        if on["flash_attn_cross_entropy"]:
            reader.unknown("flash_attn_cross_entropy", "what it keeps is not known here; counted as PyTorch's")
        reader.assume("loss", Loss.UPCAST, "loss", LOSS_SOURCE)
    norms, gates = "liger_rms_norm", reader.first("liger_glu_activation", "liger_swiglu")
    if liger and reader.truth(norms) and reader.truth(gates):
        reader.put("compiled", True, norms)


def _note_uncounted(reader: HfReader) -> None:
    """Note settings whose effect on memory is not counted, where they are on."""
    for name, why in _UNCOUNTED.items():
        said = reader.settings[name].value if reader.has(name) else None
        if not is_off(said) and not (is_one(said) and name.endswith("size")):
            reader.unknown(name, why)
        reader.taken.add(name)
        for each in reader.under(f"{name}."):
            reader.unknown(each, why)
    sharded = reader.values.get("sharding") in FSDP
    if reader.engine or sharded or reader.values.get("adapter") or reader.values.get("loss") is Loss.FUSED:
        return
    if (
        reader.values.get("attention") in (Attention.SDPA, Attention.EAGER)
        and reader.values.get("weight_dtype") != "f32"
    ):
        # loaders/model.py, ModelLoader._configure_embedding_dtypes
        reader.unknown("base_model", "embeddings, head and norms are held in f32 without flash attention: not counted")


def _loss_words(value: Any) -> Mapping[str, Any] | None:
    tables: dict[Any, Mapping[str, Any]] = {
        Loss.FUSED: {"plugins": [_CUT], "cut_cross_entropy": True},
        Loss.CHUNKED: {"plugins": [], "chunked_cross_entropy": True},
        Loss.UPCAST: {"plugins": [], "chunked_cross_entropy": False},
    }
    return tables.get(value)


def _checkpointing_words(on: bool, job: Job) -> Mapping[str, Any]:
    return {"gradient_checkpointing": on, **({"activation_offloading": False} if job.offload_activations else {})}


def _adapter_words(value: Adapter, before: Adapter | None) -> Mapping[str, Any]:
    four = value.base_bits == 4
    kind = {"adapter": "qlora" if four else "lora", "load_in_4bit": four, "load_in_8bit": value.base_bits == 8}
    if before is not None and before.rank != value.rank:
        return {"lora_r": value.rank}
    if before is not None:
        return kind
    every = value.targets == (ALL_LINEAR,)
    targets = {"lora_target_linear": True} if every else {"lora_target_modules": list(value.targets)}
    return {**kind, "lora_r": value.rank, "lora_alpha": value.alpha, **targets}


WORDS = Words(
    adapter=_adapter_words,
    micro="micro_batch_size",
    seq_len="sequence_len",
    optimizer="optimizer",
    optimizers={**OPTIMIZERS, "muon": "muon"},
    checkpointing=_checkpointing_words,
    offload_activations=lambda on: {"gradient_checkpointing": True, "activation_offloading": on},
    attention=attention_word,
    loss=_loss_words,
    weights=TYPES.get,
    loads_mixed=True,
    context="context_parallel_size",
    fsdp={
        "fsdp_version": 2,
        "fsdp_config": {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True},
    },
    offload="offload_params",
    off=("deepspeed", "fsdp", "fsdp_config", "fsdp_version"),
)


def _phrase(job: Job, name: str, value: Any) -> str | None:
    said = phrase(WORDS, job, name, value)
    if name == "offload_activations" and said and value and job.adapter is not None:
        # any other word takes the place of recomputation: loaders/model.py, _apply_activation_checkpointing
        return said.replace("activation_offloading: true", "activation_offloading: hidden_states")
    origin = job.origins.get("attention")
    if name == "attention" and said and origin is not None and origin.key in _FLAGS:
        return f"{origin.key}: null\n{said}"
    if name == "loss" and said:
        return said.replace("plugins: []", f"plugins: [{', '.join(_others(job))}]").replace(
            f"plugins: [{_CUT}]", f"plugins: [{', '.join([*_others(job), _CUT])}]"
        )
    return said


def _others(job: Job) -> list[str]:
    """Return the plugins that are on and make no loss."""
    notes = [each for each in (*job.ignored, *job.not_understood) if each.key == "plugins"]
    listed = notes[0].value if notes and isinstance(notes[0].value, list) else []
    return [str(each) for each in listed if str(each) not in (_LIGER, _CUT)]


FORMAT = SettingsFormat("axolotl", "axolotl", _recognises, _read, _phrase)
