"""Reader of LLM Foundry's YAML: a model of its own (MPT) or of the hub, trained by Composer with FSDP.

Read in mosaicml/llm-foundry, commit 8c8dd48f (2025-07-21), and mosaicml/composer, commit 64051888 (2026-04-29).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.text import Source, shown
from ratrain.ratrainc.bridge.jobs.hf_fsdp import AHEAD
from ratrain.ratrainc.bridge.jobs.hf_rules import targets_of, usual_targets
from ratrain.ratrainc.bridge.jobs.job import Adapter, Attention, Checkpointing, Job, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import (
    check_devices,
    dense,
    excluded_of,
    ignore_used,
    layers_of,
    names_of,
    note_excluded,
    numbers_of,
    one_word,
    put_accumulation,
    put_model,
    take_options,
    yaml_said,
)
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, JobReader, SettingsFormat
from ratrain.ratrainc.bridge.jobs.omegaconf_text import interpolated
from ratrain.ratrainc.bridge.jobs.yaml_text import yaml_settings
from ratrain.ratrainc.bridge.reasons import OF_FILES, OF_RATE, OF_VALUES
from ratrain.ratrainc.bridge.settings import product

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

_CONFIG = "mosaicml/llm-foundry: llmfoundry/utils/config_utils.py, TrainConfig"
_MPT = "mosaicml/llm-foundry: llmfoundry/models/mpt/configuration_mpt.py, MPTConfig"
_FSDP = "mosaicml/composer: composer/utils/parallelism.py, FSDPConfig"
_MIXED = "mosaicml/composer: composer/distributed/mosaic_parallelism.py, get_mixed_precision"
_PRECISIONS = {"fp32": "f32", "amp_fp16": "f16", "amp_bf16": "bf16", "amp_fp8": "bf16"}
_F = "fsdp_config."
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
_OPTIMIZERS = {
    "decoupled_adamw": "adamw-foreach-off",
    "decoupled_lionw": "lion",
    "adalr_lion": "lion",
    "clip_lion": "lion",
}
"""Optimizers of llmfoundry/optim/__init__.py; Composer's DecoupledAdamW goes parameter by parameter."""
_DEFAULTS = {"d_model": 2048, "n_heads": 16, "n_layers": 24, "vocab_size": 50368}
_PARTS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "targets": "target_modules",
    "dropout": "lora_dropout",
    "kind": "use_dora",
    "rslora": "use_rslora",
    "start": "init_lora_weights",
    **{name: name for name in ("target_parameters", "layers_pattern", "rank_pattern", "alpha_pattern")},
    "layers": "layers_to_transform",
    "excluded": "exclude_modules",
    **{name: name for name in ("modules_to_save", "ensure_weight_tying")},
}
"""Settings of what an adapter has, by the names of `peft_config`."""

_DATA = "of the data, whose batches are counted by max_seq_len"
INERT = {
    r"run_name|save_\w+|load_\w+|loggers(\..*)?|callbacks(\..*)?|log_\w+|python_log_level|progress_bar": OF_FILES,
    r"console_log_interval|metadata(\..*)?|flatten_metadata|autoresume|profiler(\..*)?|code_paths": OF_FILES,
    r"only_\w+_checkpoint|tokenizer(\..*)?|seed|dist_timeout|cuda_load_lazy|expandable_segments": OF_FILES,
    r"(train_loader|dataset)\..*|train_subset_num_batches": _DATA,
    r"spin_dataloaders|accumulate_train_batch_on_tokens": _DATA,
    r"eval_\w+(\..*)?|icl_\w+(\..*)?|device_eval_\w+": "of evaluation, which keeps no gradient",
    r"scheduler(\..*)?|optimizer\.\w+|algorithms\.gradient_clipping\..*|max_duration": OF_RATE,
    r"variables(\..*)?": "other settings of the file take their value from it",
    r"model\.(name|init_device|max_seq_len|init_config\..*|logit_scale|norm_\w+|use_cache)": OF_VALUES,
    r"model\.(embedding_fraction|pretrained|use_auth_token|trust_remote_code|use_pad_tok_in_ffn|fc_type)": OF_VALUES,
    r"model\.attn_config\.(softmax_scale|attn_uses_sequence_id|alibi_bias_max|rope_\w+(\..*)?|clip_qkv)": OF_VALUES,
    r"model\.attn_config\.(fused_qkv|sliding_window_size)": OF_VALUES,
    # any field of transformers' configuration may stand there, sizes too: llmfoundry/utils/config_utils.py,
    # set_config_overrides
    r"model\.config_overrides\.(max_seq_len|max_position_embeddings|use_cache|\w+_token_id)": OF_VALUES,
    r"model\.config_overrides\.initializer_range": OF_VALUES,
    r"model\.config_overrides\.(rope_\w+(\..*)?|attn_config\.(attn_uses_sequence_id|softmax_scale))": OF_VALUES,
    r"fsdp_config\.(limit_all_gathers|verbose|state_dict_type|sync_module_states|use_orig_params)": "of the process",
    r"fsdp_config\.(backward_prefetch\w*|forward_prefetch\w*|load_\w+|save_\w+)": "of the process",
    r"fsdp_config\.(sharded_ckpt\w*|auto_wrap)": "of the process",
    r"fsdp_config\.activation_checkpointing_reentrant": "which function recomputes",
    r"max_split_size_mb": "of the allocator",
}


def _recognises(path: Path, text: str) -> bool:
    """Tell whether a text is YAML with the sections that LLM Foundry has by these names."""
    names = set(re.findall(r"^([a-z_]+):", text, re.MULTILINE))
    own = {"max_duration", "device_train_microbatch_size", "global_train_batch_size", "fsdp_config", "max_seq_len"}
    del path  # what the text says decides
    return {"train_loader", "model"} <= names and len(names & own) > 1


def _read(path: Path, text: str, asked: Asked) -> Job:
    source = Source(str(path), text)
    settings, used = interpolated(yaml_settings(source, "a YAML of LLM Foundry"))
    reader = JobReader("llm-foundry", settings, source.top())
    for name, setting in settings.items():
        if isinstance(setting.value, str) and "${oc.env" in setting.value:
            text_ = f"{name} takes a variable of the environment, which LLM Foundry refuses"
            reader.wrong(name, text_, way_out="write its value under variables")
    reader.put("tp", reader.take("tp_config.tensor_parallel_degree", int), "tp_config.tensor_parallel_degree")
    _model(reader, asked)
    _batch(reader)
    _types(reader)
    _activations(reader)
    _optimizer(reader)
    compiled = [name for name in settings if name == "compile_config" or name.startswith("compile_config.")]
    reader.taken.update(compiled)
    if any(reader.has(name) for name in compiled):
        reader.put("compiled", True, compiled[0])
    take_options(reader, asked)
    replicas = check_devices(reader)
    _sharding(reader, replicas)
    whole = reader.take("global_train_batch_size", int)
    put_accumulation(reader, whole, "global_train_batch_size", replicas)
    if whole is not None and "gradient_accumulation" not in reader.values:
        reader.ignore("global_train_batch_size", "the micro-batches of a step follow from it with --devices")
    ignore_used(reader, {name for name in used if not name.startswith("variables.")})
    return reader.finish(INERT)


def _model(reader: JobReader, asked: Asked) -> None:
    kind = reader.take("model.name", str)
    hub = reader.take("model.pretrained_model_name_or_path", str)
    if kind == "mpt_causal_lm":
        put_model(reader, asked, None, "model.d_model" if reader.has("model.d_model") else "model.name", _mpt(reader))
        reader.assume("method", "pretrain", "model.name", _MPT)
        word, says = one_word(reader, "model.attn_config.attn_impl", ("flash", "torch"), "flash")
        attention = Attention.FLASH if word == "flash" else Attention.EAGER
        key = "model.attn_config.attn_impl"
        if says:
            reader.put("attention", attention, key)
        else:
            defaults = "mosaicml/llm-foundry: llmfoundry/models/utils/config_defaults.py, attn_config_defaults"
            reader.assume("attention", attention, key, defaults)
        _mpt_loss(reader)
        return
    put_model(reader, asked, hub, "model.pretrained_model_name_or_path", None)
    if kind not in ("hf_causal_lm", "hf_prefix_lm"):
        reader.unknown("model.name", "a model of this kind is not known here: give --model")
    pretrained = reader.take("model.pretrained", bool)
    reader.put("method", "pretrain" if pretrained is False else "full", "model.name")
    own = "model.config_overrides.attn_config.attn_impl"
    if reader.take(own, str) == "flash":
        reader.put("attention", Attention.FLASH, own)
    elif reader.has(own):
        reader.unknown(own, "which tensors this attention keeps is not known here")
    flash = reader.take("model.use_flash_attention_2", bool)
    if flash:
        reader.put("attention", Attention.FLASH, "model.use_flash_attention_2")
    loss = "huggingface/transformers: src/transformers/loss/loss_utils.py, ForCausalLMLoss"
    reader.assume("loss", Loss.UPCAST, "loss", loss)
    _adapter(reader)


def _mpt_loss(reader: JobReader) -> None:
    key = "model.loss_fn"
    words = {"fused_crossentropy": Loss.WHOLE, "torch_crossentropy": Loss.UPCAST}
    word, says = one_word(reader, key, tuple(words), "fused_crossentropy")
    if says:
        reader.put("loss", words[word], key)
    else:
        source = "mosaicml/llm-foundry: llmfoundry/models/mpt/modeling_mpt.py, ComposerMPTCausalLM.__init__"
        reader.assume("loss", words[word], key, source)


def _mpt(reader: JobReader) -> ModelConfig | None:
    """Return the model that an MPT's settings describe; None after an error."""
    sizes = {name: reader.size(f"model.{name}") or default for name, default in _DEFAULTS.items()}
    hidden, heads = sizes["d_model"], sizes["n_heads"]
    attention = "model.attn_config."
    kind, _ = one_word(
        reader,
        f"{attention}attn_type",
        ("multihead_attention", "multiquery_attention", "grouped_query_attention"),
        "multihead_attention",
    )
    groups = reader.size(f"{attention}kv_n_heads")
    kv_heads = 1 if kind == "multiquery_attention" else groups if kind == "grouped_query_attention" else heads
    if hidden % heads or heads % (kv_heads or 1):
        text = f"d_model {hidden}, {heads} heads and {kv_heads} of keys and values do not divide one another"
        reader.wrong("model.n_heads", text, code="RT064")
        return None
    ratio = reader.take("model.expansion_ratio", float)
    ffn_key = "model.ffn_config.ffn_type"
    ffn_kind = reader.take(ffn_key, str) or "mptmlp"
    if ffn_kind not in ("mptmlp", "mptglu", "te_ln_mlp"):
        reader.unknown(ffn_key, "of this kind no model is built here: give --model")
        return None
    gated = ffn_kind == "mptglu"
    width = reader.size("model.ffn_config.ffn_hidden_size")
    biased = not reader.take("model.no_bias", bool)
    alibi, rope = (bool(reader.take(f"{attention}{name}", bool)) for name in ("alibi", "rope"))
    learned = reader.take("model.learned_pos_emb", bool)
    table = not (alibi or rope) and learned is not False
    tied = reader.take("model.tie_word_embeddings", bool)
    rates = [reader.take(key, float) for key in ("model.resid_pdrop", "model.emb_pdrop", f"{attention}attn_pdrop")]
    reader.put("dropout", max((each for each in rates if each is not None), default=None), "model.resid_pdrop")
    longest = reader.size("model.max_seq_len") or reader.size("max_seq_len")
    own = reader.take("model.attention_bias", bool)
    norm = reader.take("model.norm_type", str) or "low_precision_layernorm"
    return dense(
        "mpt",
        "gpt2" if table else "gpt_neox",
        vocabulary=sizes["vocab_size"],
        layers=sizes["n_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=width or int((4 if ratio is None else ratio) * hidden),
        eps=1e-5,
        head_dim=reader.size("model.head_dim") or hidden // heads,
        norm="rms" if "rmsnorm" in norm else "layer",
        tied_embeddings=tied is not False,
        position="learned" if table else "alibi" if alibi else "rope",
        learned_positions=longest if table else None,
        qkv_bias=biased if own is None else own,
        o_bias=biased,
        mlp_bias=biased,
        gated_mlp=gated,
        activation="gelu",
        parallel_residual=False,
        packed_qkv=True,
        qk_norm="whole" if reader.take(f"{attention}qk_ln", bool) else "none",
    )


def _adapter(reader: JobReader) -> None:
    """Set the adapter of `peft_config`: LoRA, by the names of peft's LoraConfig."""
    prefix = "model.peft_config."
    if not any(name.startswith(prefix) for name in reader.settings):
        return
    kind = reader.take(f"{prefix}peft_type", str)
    if kind is not None and kind.upper() != "LORA":
        reader.unknown(f"{prefix}peft_type", "adapters of this kind are not counted")
    rank, alpha = reader.size(f"{prefix}r"), reader.take(f"{prefix}lora_alpha", float)
    start = reader.settings[name].value if reader.has(name := f"{prefix}init_lora_weights") else True
    reader.taken.add(name)
    parameters = names_of(reader, f"{prefix}target_parameters")
    adapter = Adapter(  # defaults are those of huggingface/peft: LoraConfig
        rank or 8,
        8.0 if alpha is None else alpha,
        targets_of(reader, f"{prefix}target_modules") or usual_targets(reader, f"{prefix}target_modules", parameters),
        reader.take(f"{prefix}lora_dropout", float) or 0.0,
        kind="DoRA (model.peft_config.use_dora)" if reader.take(f"{prefix}use_dora", bool) else "",
        rslora=bool(reader.take(f"{prefix}use_rslora", bool)),
        start="" if str(start).lower() == "true" else f"{name}: {shown(start)}",
        target_parameters=parameters,
        excluded=excluded_of(reader, f"{prefix}exclude_modules"),
        layers=layers_of(reader, f"{prefix}layers_to_transform"),
        layers_pattern=names_of(reader, f"{prefix}layers_pattern"),
        rank_pattern=numbers_of(reader, f"{prefix}rank_pattern"),
        alpha_pattern=numbers_of(reader, f"{prefix}alpha_pattern"),
        modules_to_save=names_of(reader, f"{prefix}modules_to_save"),
        ensure_weight_tying=bool(reader.take(f"{prefix}ensure_weight_tying", bool)),
    )
    reader.put("adapter", adapter, f"{prefix}r")
    for part, key in _PARTS.items():
        reader.trace(part, f"{prefix}{key}", "huggingface/peft: LoraConfig" if key in ("r", "lora_alpha") else "")
    reader.put("method", "lora", f"{prefix}r")
    for name in ("task_type", "bias"):
        reader.ignore(f"{prefix}{name}", "changes no size")
    note_excluded(reader, f"{prefix}exclude_modules", adapter.excluded)


def _batch(reader: JobReader) -> None:
    reader.put("seq_len", reader.size("max_seq_len"), "max_seq_len")
    key = "device_train_microbatch_size"
    said = reader.settings[key].value if reader.has(key) else "auto"
    if said == "auto":
        reader.taken.add(key)
        reader.ignore(key, "Composer finds the largest micro-batch that fits: give --micro-batch-size to ask for one")
    else:
        reader.put("micro_batch_size", reader.size(key), key)
    packing = "train_loader.dataset.packing_ratio"
    text = reader.settings.get("train_loader.name")
    if text is not None and text.value == "text":
        reader.assume("packing", True, "train_loader.name", "mosaicml/llm-foundry: llmfoundry/data/text_data.py")
    elif reader.has(packing):
        reader.taken.add(packing)
        reader.put("packing", True, packing)


def _types(reader: JobReader) -> None:
    """Set types: weights, gradients and moments are f32, and FSDP or autocast casts weights for products."""
    key = "precision"
    word, says = one_word(reader, key, tuple(_PRECISIONS), "amp_bf16")
    own = _PRECISIONS[word]
    if word == "amp_fp8":
        reader.put("fp8", True, key)
    reader.put_or_assume("compute_dtype", own, key, f"{_CONFIG}.precision", says=says)
    for name in ("weight_dtype", "gradient_dtype"):
        reader.assume(name, "f32", key, "mosaicml/composer: composer/core/precision.py, get_precision_context")
    mixed = f"{_F}mixed_precision"
    sharded = any(name.startswith(_F) for name in reader.settings)
    policy, policy_says = one_word(reader, mixed, ("DEFAULT", "PURE", "FULL"), "DEFAULT")
    reduced = own if policy == "PURE" and sharded else "f32"
    source = _MIXED if sharded else f"{_CONFIG}.fsdp_config"
    reader.put_or_assume("reduce_dtype", reduced, mixed, source, says=policy_says)
    if own != "f32" and (not sharded or policy == "FULL"):
        context = "mosaicml/composer: composer/core/precision.py, get_precision_context"
        reader.assume("autocast", True, key, context)
    if reader.take(f"{_F}keep_low_precision_grads", bool):
        reader.put("gradient_dtype", own, f"{_F}keep_low_precision_grads")


def _sharding(reader: JobReader, replicas: int | None) -> None:
    """Set what is sharded: by FSDP if there is an fsdp_config, else nothing."""
    sharded = any(name.startswith(_F) for name in reader.settings)
    key = f"{_F}sharding_strategy"
    strategy, says = one_word(reader, key, _STRATEGIES, "FULL_SHARD")
    shard = reader.take(f"{_F}data_parallel_shard_degree", int)
    copies = reader.take(f"{_F}data_parallel_replicate_degree", int)
    if not sharded or replicas == 1:
        reader.taken.update(name for name in reader.settings if name.startswith(_F))
        kind = Sharding.NONE if replicas == 1 else Sharding.DDP
        text = "mosaicml/composer: composer/distributed/dist_strategy.py, prepare_ddp_module"
        reader.assume("sharding", kind, "fsdp_config", text)
        return
    kind = Sharding.DDP if strategy == "NO_SHARD" else Sharding.FSDP1
    ahead = f"{_F}limit_all_gathers"
    if reader.take(ahead, bool) is False:
        reader.unknown(ahead, AHEAD)
    if says:
        reader.put("sharding", kind, key)
        reader.put("reshard_after_forward", "GRAD_OP" not in strategy and "ZERO2" not in strategy, key)
    else:
        reader.assume("sharding", kind, key, f"{_FSDP}.sharding_strategy")
    if shard is not None and shard > 0 and (copies or 1) != 1:
        reader.put("shard_size", shard, f"{_F}data_parallel_shard_degree")
    elif copies is not None and copies > 1 and replicas is not None:
        if replicas % copies:
            text = f"{replicas} data-parallel ranks are not a multiple of {copies}"
            reader.wrong(f"{_F}data_parallel_replicate_degree", text, code="RT064")
        else:
            reader.put("shard_size", replicas // copies, f"{_F}data_parallel_replicate_degree")
    elif "HYBRID" in strategy:
        reader.unknown(key, "how many ranks share one copy is a node's number, which the file does not say")


def _activations(reader: JobReader) -> None:
    key = f"{_F}activation_checkpointing"
    on = reader.take(key, bool)
    kind = Checkpointing.FULL if on else Checkpointing.NONE
    reader.put_or_assume("checkpointing", kind, key, f"{_FSDP}.activation_checkpointing", says=on is not None)
    target = "model.activation_checkpointing_target"
    for name in [name for name in reader.settings if name == target or name.startswith(f"{target}.")]:
        reader.unknown(name, "which parts of a layer are recomputed is not counted: it is taken for whole layers")
    reader.choose("offload_activations", f"{_F}activation_cpu_offload", bool, False, f"{_FSDP}.activation_cpu_offload")
    if reader.take(f"{_F}cpu_offload", bool):
        text = "Composer refuses fsdp_config.cpu_offload: it is not supported yet"
        reader.wrong(f"{_F}cpu_offload", text, way_out=f"write {_F}cpu_offload: false")


def _optimizer(reader: JobReader) -> None:
    key = "optimizer.name"
    name = reader.take(key, str)
    if name is None:
        reader.wrong(
            "", f"{key} is missing: LLM Foundry stops there", way_out="write optimizer: {name: decoupled_adamw}"
        )
    elif name not in _OPTIMIZERS:
        known = ", ".join(_OPTIMIZERS)
        reader.wrong(key, f"the optimizer {shown(name)} is not known here", way_out=f"one of {known}")
    else:
        reader.put("optimizer", _OPTIMIZERS[name], key)
    source = "mosaicml/composer: composer/optim/decoupled_weight_decay.py, DecoupledAdamW.__init__"
    adam = name == "decoupled_adamw"
    reader.put("lr", reader.take("optimizer.lr", float), "optimizer.lr")
    pair = [each for each in reader.take("optimizer.betas", list) or [] if isinstance(each, int | float)]
    if len(pair) == 2:
        reader.put("betas", (float(pair[0]), float(pair[1])), "optimizer.betas")
    elif adam:
        reader.assume("betas", (0.9, 0.95), "optimizer.betas", source)
    for field, default in (("eps", 1e-8), ("weight_decay", 1e-5)):
        value = reader.take(f"optimizer.{field}", float)
        if value is None and adam:
            reader.assume(field, default, f"optimizer.{field}", source)
        reader.put(field, value, f"optimizer.{field}")
    reader.put("scheduler", reader.take("scheduler.name", str), "scheduler.name")
    _lengths(reader)
    clip = "algorithms.gradient_clipping.clipping_threshold"
    reader.put("max_grad_norm", reader.take(clip, float), clip)


def _lengths(reader: JobReader) -> None:
    """Set lengths that are said in batches, epochs or a share of the run, and the learning rate at the end.

    Others (tokens, samples, seconds) are left to the notes (mosaicml/composer: composer/core/time.py, TimeUnit).
    """
    for key, units in (
        ("max_duration", {"ba": "steps", "ep": "epochs"}),
        ("scheduler.t_warmup", {"ba": "warmup_steps", "dur": "warmup_ratio"}),
    ):
        said = reader.settings[key].value if reader.has(key) else None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)(ba|ep|dur)", str(said).strip())
        if match is not None and match[2] in units and (match[2] == "dur" or match[1].isdecimal()):
            reader.taken.add(key)
            reader.put(units[match[2]], float(match[1]) if match[2] in ("dur", "ep") else int(match[1]), key)
    lr, share = reader.training.get("lr"), "scheduler.alpha_f"
    if lr is not None and reader.has(share) and (part := reader.take(share, float)) is not None:
        reader.put("min_lr", product(part, lr), share)


# phrases

_SIMPLE = {
    "micro_batch_size": "device_train_microbatch_size",
    "seq_len": "max_seq_len",
    "offload_activations": f"{_F}activation_cpu_offload",
    "tp": "tp_config.tensor_parallel_degree",
}


def _phrase(job: Job, field: str, value: Any) -> str | None:
    if field in _SIMPLE:
        return yaml_said((_SIMPLE[field], value))
    if field == "gradient_accumulation" and job.dp is not None and job.micro_batch_size is not None:
        return yaml_said(("global_train_batch_size", job.micro_batch_size * value * job.dp))
    if field == "checkpointing" and value in (Checkpointing.FULL, Checkpointing.NONE):
        return yaml_said((f"{_F}activation_checkpointing", value is Checkpointing.FULL))
    if field == "optimizer":
        words = {kind: name for name, kind in reversed(_OPTIMIZERS.items())}
        return yaml_said(("optimizer.name", words[value])) if value in words else None
    if field == "sharding" and value in (Sharding.FSDP1, Sharding.DDP):
        strategy = "FULL_SHARD" if value is Sharding.FSDP1 else "NO_SHARD"
        return yaml_said((f"{_F}sharding_strategy", strategy))
    if field == "reduce_dtype" and value in ("f32", job.compute_dtype):
        return yaml_said((f"{_F}mixed_precision", "DEFAULT" if value == "f32" else "PURE"))
    if field == "loss" and getattr(job.origins.get("loss"), "key", "") == "model.loss_fn":
        words_ = {Loss.WHOLE: "fused_crossentropy", Loss.UPCAST: "torch_crossentropy"}
        return yaml_said(("model.loss_fn", words_[value])) if value in words_ else None
    return None


LLM_FOUNDRY = SettingsFormat("llm-foundry", "LLM Foundry", _recognises, _read, _phrase)
