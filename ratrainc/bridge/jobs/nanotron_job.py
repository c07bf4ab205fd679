"""Reader of nanotron's configs: YAML that names every size, the model's too.

Read in huggingface/nanotron, commit 2411b022 (2026-04-07).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ratrain.ratrain_ir.support.text import Source, shown
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Context, Job, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import (
    STRIDE,
    TYPE_WORDS,
    check_devices,
    dense,
    in_own_words,
    one_word,
    put_model,
    refuse_texts,
    take_options,
    yaml_said,
)
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, JobReader, SettingsFormat
from ratrain.ratrainc.bridge.jobs.yaml_text import yaml_settings
from ratrain.ratrainc.bridge.reasons import OF_FILES, OF_OVERLAP, OF_RATE, OF_VALUES

_CONFIG = "huggingface/nanotron: src/nanotron/config/config.py"
_PARALLEL = "huggingface/nanotron: src/nanotron/config/parallelism_config.py, ParallelismArgs"
_MODELS = "huggingface/nanotron: src/nanotron/config/models_config.py"
_SUMS = "huggingface/nanotron: src/nanotron/optim/gradient_accumulator.py, FP32GradientAccumulator"
_M = "model.model_config."
_WHAT = "a config of nanotron"
_RENAMED = {
    f"optimizer.{name}": f"optimizer.optimizer_factory.{name}"
    for name in ("adam_beta1", "adam_beta2", "adam_eps", "torch_adam_is_fused")
}
"""Names of versions before optimizer_factory, and the later ones."""
_TYPES = {word: kind for kind, word in TYPE_WORDS.items()}
_SIZES = {"vocab_size": 32000, "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
_FFN = 11008
"""Defaults of sizes in models_config.py, LlamaConfig and Qwen2Config."""

_KERNELS = ("flash_attention_2", "flex_attention", "sdpa", "ring_flash_triton", "ring", "llama3_ring_attention")
"""Attention implementations: src/nanotron/nn/attention.py, ALL_ATTENTION_FUNCTIONS."""
_GATHERS, _STRIDE = "llama3_ring_attention", "ring_attn_heads_k_stride"
_QWEN2 = f"{_M}is_qwen2_config"
INERT = {
    r"general\..*|checkpoints(\..*)?|logging(\..*)?|metrics_logging(\..*)?|profiler(\..*)?|lighteval(\..*)?": OF_FILES,
    r"s3_upload(\..*)?|tokenizer(\..*)?|data(\..*)?": OF_FILES,
    r"tokens\.(val_check_interval|limit_val_batches|limit_test_batches)": "of validation, which keeps no gradient",
    r"optimizer\.learning_rate_scheduler\..*|optimizer\.weight_decay_exclude_named_params": OF_RATE,
    r"model\.init_method\..*|model\.model_config\.(initializer_range|rms_norm_eps|rope_\w+|hidden_act)": OF_VALUES,
    r"model\.model_config\.(bos_token_id|eos_token_id|pad_token_id|use_cache|pretraining_tp)": OF_VALUES,
    r"model\.model_config\.(max_position_embeddings|no_rope_layer|z_loss_coefficient|_use_doc_masking)": OF_VALUES,
    r"model\.model_config\.(flex_attention_mask|_use_qkv_packed|log_attn_probs|ring_attn_heads_k_stride)": OF_VALUES,
    r"parallelism\.tp_linear_async_communication": OF_OVERLAP,
}


def _recognises(path: Path, text: str) -> bool:
    """Tell whether a text has the sections of nanotron, and a key that it alone has."""
    sections = all(re.search(rf"^{name}:", text, re.MULTILINE) for name in ("parallelism", "tokens", "model"))
    del path  # what the text says decides
    return sections and "batch_accumulation_per_replica" in text


def _read(path: Path, text: str, asked: Asked) -> Job:
    source = Source(str(path), text)
    own = yaml_settings(source, _WHAT)
    called = {new: name for name in own if (new := _RENAMED.get(name)) is not None}
    settings = {_RENAMED.get(name, name): each for name, each in own.items()}
    reader = JobReader("nanotron", settings, source.top())
    refuse_texts(reader, "nanotron", ("tokens", "optimizer", "parallelism", "model"))
    _parallelism(reader)
    _model(reader, asked)
    _lengths(reader)
    _optimizer(reader)
    _types(reader)
    recomputed = reader.take("parallelism.recompute_layer", bool)
    if recomputed is None:
        reader.assume("checkpointing", Checkpointing.NONE, "recompute_layer", f"{_PARALLEL}.recompute_layer")
    else:
        kind = Checkpointing.FULL if recomputed else Checkpointing.NONE
        reader.put("checkpointing", kind, "parallelism.recompute_layer")
    take_options(reader, asked)
    check_devices(reader)
    return in_own_words(reader.finish(INERT, method="pretrain"), lambda key: called.get(key, key))


def _parallelism(reader: JobReader) -> None:
    degrees = {}
    for name in ("dp", "pp", "tp"):
        key = f"parallelism.{name}"
        if not reader.has(key):
            reader.wrong("", f"{key} is missing: nanotron stops there", way_out=f"write {name}: 1 in parallelism")
        degrees[name] = reader.size(key) or 1
    for name, key in (("cp", "context_parallel_size"), ("ep", "expert_parallel_size")):
        size = reader.size(f"parallelism.{key}")
        degrees[name] = size or 1
        if size is None:
            reader.assume(name, 1, key, f"{_PARALLEL}.{key}")
        else:
            reader.put(name, size, f"parallelism.{key}")
    reader.put("tp", degrees["tp"], "parallelism.tp")
    reader.put("pp", degrees["pp"], "parallelism.pp")
    devices = degrees["dp"] * degrees["tp"] * degrees["pp"] * degrees["cp"]
    reader.put("devices", devices, "parallelism.dp")
    engine, says = one_word(reader, "parallelism.pp_engine", ("1f1b", "afab"), "afab")
    schedule = {"1f1b": "1f1b", "afab": "gpipe"}[engine]
    if says:
        reader.put("schedule", schedule, "parallelism.pp_engine")
    elif degrees["pp"] > 1:
        reader.assume("schedule", schedule, "pp_engine", f"{_PARALLEL}.__post_init__")
    mode = reader.take("parallelism.tp_mode", str)
    if mode is None:
        reader.assume("sequence_sharding", False, "tp_mode", f"{_PARALLEL}.__post_init__")
    elif mode.upper() not in ("ALL_REDUCE", "REDUCE_SCATTER"):
        expected = "all_reduce or reduce_scatter is expected"
        reader.wrong("parallelism.tp_mode", f"parallelism.tp_mode is {shown(mode)}: {expected}")
    else:
        reader.put("sequence_sharding", mode.upper() == "REDUCE_SCATTER", "parallelism.tp_mode")
    if reader.take("parallelism.tp_recompute_allgather", bool) is False:
        text = "gathered inputs of linears stay for the backward, and are not counted"
        reader.unknown("parallelism.tp_recompute_allgather", text)
    else:
        reader.ignore("parallelism.tp_recompute_allgather", "inputs of linears are gathered again, as is counted")


def _model(reader: JobReader, asked: Asked) -> None:
    for name in [name for name in reader.settings if name.startswith(f"{_M}moe_config.")]:
        reader.unknown(name, "experts are not counted")
    experts = any(note.key.startswith(f"{_M}moe_config.") for note in reader.notes)
    reader.ignore(f"{_M}moe_config", "no experts")
    other = _other_kind(reader)
    sizes = {name: _vocabulary(reader) if name == "vocab_size" else reader.size(f"{_M}{name}") for name in _SIZES}
    sizes = {name: default if sizes[name] is None else sizes[name] for name, default in _SIZES.items()}
    vocabulary, layers, hidden, heads = (sizes[name] or 1 for name in _SIZES)
    kv_heads = reader.size(f"{_M}num_key_value_heads") or heads
    bias = bool(reader.take(f"{_M}attention_bias", bool))
    window = reader.take(f"{_M}sliding_window_size", int)
    tied = reader.take(f"{_M}tie_word_embeddings", bool)
    ffn = reader.size(f"{_M}intermediate_size") or _FFN
    _check_heads(reader, heads, kv_heads)
    multiple = (reader.size("model.make_vocab_size_divisible_by") or 1) * (reader.values.get("tp") or 1)
    described = None
    if not other and not experts:
        described = dense(
            "nanotron",
            "qwen2" if bias else "llama",
            vocabulary=-(-vocabulary // multiple) * multiple,  # src/nanotron/helpers.py, _vocab_size_with_padding
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            ffn=ffn,
            eps=1e-6,
            tied_embeddings=bool(tied),
            sliding_window=window,
        )
    key = f"{_M}hidden_size"
    put_model(reader, asked, None, key, described)
    default = f"{_MODELS}, DEFAULT_ATTENTION_IMPLEMENTATION"
    kernel, says = one_word(reader, f"{_M}_attn_implementation", _KERNELS, "flash_attention_2")
    attention = Attention.SDPA if kernel == "sdpa" else Attention.FLASH
    if says:
        reader.put("attention", attention, f"{_M}_attn_implementation")
    else:
        reader.assume("attention", attention, "_attn_implementation", default)
    reader.values["context"] = form = Context.GATHER if kernel == _GATHERS else Context.RING
    if reader.values["cp"] > 1:
        source = "huggingface/nanotron: src/nanotron/nn/attention.py, ALL_ATTENTION_FUNCTIONS"
        reader.put_or_assume("context", form, f"{_M}_attn_implementation", source, says=says)
        if (stride := reader.size(f"{_M}{_STRIDE}")) is not None:
            reader.put("sizes", {**reader.values.get("sizes", {}), STRIDE: stride}, f"{_M}{_STRIDE}")
        if kernel not in ("ring", _GATHERS):
            key = f"{_M}_attn_implementation"
            reader.doubt(key, kernel, "of context ranks ring and llama3_ring_attention were read; counted as ring")
    if reader.take(f"{_M}z_loss_enabled", bool):
        reader.unknown(f"{_M}z_loss_enabled", "the z-loss keeps sums of its own, which are not counted")
    functional = "huggingface/nanotron: src/nanotron/parallel/tensor_parallel/functional.py, sharded_cross_entropy"
    reader.assume(
        "loss", Loss.VOCAB_PARALLEL, "sharded_cross_entropy", f"{functional}: in f32 (qwen.py, Loss; llama.py)"
    )
    for name in ("_fused_rms_norm", "_fused_rotary_emb"):
        reader.ignore(f"{_M}{name}", "fused norms and rotations keep no more than is counted", less=True)


def _other_kind(reader: JobReader) -> bool:
    """Tell whether the model is of another kind than Llama and Qwen2, and note it."""
    kinds = [name for name in reader.settings if re.fullmatch(rf"{re.escape(_M)}is_\w+_config", name)]
    known = (f"{_M}is_llama_config", _QWEN2)
    others = [name for name in kinds if reader.take(name, bool) and name not in known]
    reader.ignore(_QWEN2, OF_VALUES)
    for name in others:
        reader.unknown(name, "of this kind no model is built here: give --model")
    return bool(others)


def _vocabulary(reader: JobReader) -> int | None:
    """Take the vocabulary; -1 stands for the first stage's dataset's (Config.__post_init__)."""
    key = f"{_M}vocab_size"
    value = reader.take(key, int)
    if value == -1:
        first = _stages(reader)[:1]
        data = first[0].get("data") if first else None
        dataset = data.get("dataset") if isinstance(data, dict) else None
        value = dataset.get("vocab_size") if isinstance(dataset, dict) else None
        if not isinstance(value, int):
            reader.wrong(key, f"{key} is -1, and no dataset says its vocab_size", way_out="write the number of tokens")
            return None
    if value is not None and value < 1:
        reader.wrong(key, f"{key} is {value}: at least 1 is expected")
        return None
    return value


def _check_heads(reader: JobReader, heads: int, kv_heads: int) -> None:
    """Report heads that nanotron's Config.__post_init__ refuses."""
    tp = reader.values.get("tp") or 1
    if heads % tp:
        text = f"num_attention_heads {heads} is not a multiple of tp {tp}: nanotron stops"
        reader.wrong(f"{_M}num_attention_heads", text, code="RT064")
    elif heads % kv_heads or kv_heads < tp:
        text = f"num_key_value_heads {kv_heads} must divide {heads} heads, and be at least tp {tp}: nanotron stops"
        reader.wrong(f"{_M}num_key_value_heads", text, code="RT064")


def _stages(reader: JobReader) -> list[dict[str, Any]]:
    """Return the stages of the data, in the order of their first steps."""
    stages = [each for each in reader.take("data_stages", list) or [] if isinstance(each, dict)]
    return sorted(stages, key=_first_step)


def _first_step(stage: dict[str, Any]) -> int:
    step = stage.get("start_training_step")
    return step if isinstance(step, int) else 0


def _lengths(reader: JobReader) -> None:
    """Set the batch, and the length of the longest stage: the run must fit all of them."""
    for name, key in (
        ("micro_batch_size", "micro_batch_size"),
        ("gradient_accumulation", "batch_accumulation_per_replica"),
        ("seq_len", "sequence_length"),
    ):
        count = reader.size(f"tokens.{key}")
        if not reader.has(f"tokens.{key}"):
            reader.wrong("", f"tokens.{key} is missing: nanotron stops there", way_out=f"write {key} in tokens")
        reader.put(name, count, f"tokens.{key}")
    lengths = [each.get("sequence_length") for each in _stages(reader)]
    longest = max((each for each in lengths if isinstance(each, int)), default=0)
    if longest > (reader.values.get("seq_len") or longest):
        reader.put("seq_len", longest, "data_stages")
        reader.ignore("tokens.sequence_length", f"a stage of the data has longer sequences: {longest} decides")
    elif reader.has("data_stages"):
        reader.ignore("data_stages", "of the data: its sequences are no longer than tokens.sequence_length")
    reader.put("steps", reader.take("tokens.train_steps", int), "tokens.train_steps")
    reader.assume("packing", True, "data_stages", f"{_CONFIG}, NanosetDatasetsArgs: streams of tokens")


def _optimizer(reader: JobReader) -> None:
    factory = "optimizer.optimizer_factory."
    name, _ = one_word(reader, f"{factory}name", ("adamW", "sgd"), "adamW")
    fused = reader.take(f"{factory}torch_adam_is_fused", bool)
    kind = "sgd" if name == "sgd" else "adamw-fused" if fused else "adamw"
    reader.put("optimizer", kind, f"{factory}torch_adam_is_fused" if name != "sgd" else f"{factory}name")
    betas = [reader.take(f"{factory}adam_beta{n}", float) for n in (1, 2)]
    if betas[0] is not None and betas[1] is not None:
        reader.put("betas", (betas[0], betas[1]), f"{factory}adam_beta1")
    reader.put("eps", reader.take(f"{factory}adam_eps", float), f"{factory}adam_eps")
    reader.put("weight_decay", reader.take("optimizer.weight_decay", float), "optimizer.weight_decay")
    reader.put("max_grad_norm", reader.take("optimizer.clip_grad", float), "optimizer.clip_grad")
    rates = "optimizer.learning_rate_scheduler."
    for field, key, kind_ in (
        ("lr", "learning_rate", float),
        ("warmup_steps", "lr_warmup_steps", int),
        ("scheduler", "lr_decay_style", str),
        ("min_lr", "min_decay_lr", float),
    ):
        reader.put(field, reader.take(f"{rates}{key}", kind_), f"{rates}{key}")
    _phases(reader, rates)
    default = f"{_CONFIG}, LRSchedulerArgs.__post_init__"
    if "scheduler" not in reader.training:
        reader.assume("scheduler", "linear", "lr_decay_style", default)
    if "min_lr" not in reader.training and "lr" in reader.training:  # the rate then stays
        reader.assume("min_lr", reader.training["lr"], "min_decay_lr", default)
    stage = reader.take("optimizer.zero_stage", int)
    dp = reader.settings["parallelism.dp"].value if reader.has("parallelism.dp") else 1
    if stage is None:
        reader.wrong("optimizer.zero_stage", "optimizer.zero_stage is missing: nanotron stops there")
    elif stage > 0:
        # helpers.py, init_optimizer_and_grad_accumulator: one optimizer for every stage above 0
        reader.put("sharding", Sharding.ZERO1, "optimizer.zero_stage")
        if reader.values["cp"] > 1:  # of the ranks with the same weights, those of one sequence each hold all state
            source = "huggingface/nanotron: src/nanotron/helpers.py, init_optimizer_and_grad_accumulator"
            reader.assume("shard_size", reader.size("parallelism.dp") or 1, "optimizer.zero_stage", source)
    else:
        reader.put("sharding", Sharding.DDP if dp != 1 else Sharding.NONE, "optimizer.zero_stage")
    megabytes = reader.take("model.ddp_bucket_cap_mb", int)
    if megabytes is not None:
        sizes = {**reader.values.get("sizes", {}), "ddp_bucket_cap_mb": megabytes}
        reader.put("sizes", sizes, "model.ddp_bucket_cap_mb")


def _phases(reader: JobReader, rates: str) -> None:
    """Set the steps at the learning rate, and those in which it comes down (helpers.py, lr_scheduler_builder)."""
    begin, length = f"{rates}lr_decay_starting_step", f"{rates}lr_decay_steps"
    starts, falls = reader.take(begin, int), reader.size(length)
    warm, steps = reader.training.get("warmup_steps", 0), reader.training.get("steps")
    reader.put("decay_steps", falls, length)
    if falls is not None and starts is None:
        reader.put("stable_steps", 0, length)
    elif starts is not None and starts < warm:
        text = f"{begin} is {starts}: the decay begins before the {warm} steps of warm-up end"
        reader.wrong(begin, text, code="RT064", way_out=f"say {warm}, or more")
    elif starts is not None:
        reader.put("stable_steps", starts - warm, begin)
        # without a length nanotron takes warm-up and begin off the steps: the rate is down `warm` steps before the last
        rest = None if steps is None else steps - warm - starts
        if falls is None and rest is not None and rest < 1:
            reader.wrong(begin, f"{begin} leaves {rest} of {steps} steps for the decay", code="RT064")
        elif falls is None:
            reader.put("decay_steps", rest, begin)


def _types(reader: JobReader) -> None:
    """Set types: weights and products have model.dtype; masters and sums are f32 with accumulate_grad_in_fp32."""
    said = reader.take("model.dtype", str)
    if said is not None and said not in _TYPES:
        reader.wrong("model.dtype", f"model.dtype is {shown(said)}: one of {', '.join(_TYPES)} is expected")
        return
    own = _TYPES[said or "bfloat16"]
    for name in ("weight_dtype", "compute_dtype"):
        if said is None:
            reader.assume(name, own, "dtype", f"{_CONFIG}, ModelArgs.__post_init__")
        else:
            reader.put(name, own, "model.dtype")
    key = "optimizer.accumulate_grad_in_fp32"
    in_f32 = reader.take(key, bool)
    if in_f32 is None:
        reader.wrong(key, f"{key} is missing: nanotron stops there", way_out=f"write {key.partition('.')[2]}: true")
        return
    for name in ("gradient_dtype", "reduce_dtype"):
        reader.put(name, "f32" if in_f32 else own, key)
    if in_f32 and own != "f32":
        reader.assume("master_dtype", "f32", key, f"{_SUMS}.__init__")


# phrases

_SIMPLE = {
    "micro_batch_size": "tokens.micro_batch_size",
    "gradient_accumulation": "tokens.batch_accumulation_per_replica",
    "seq_len": "tokens.sequence_length",
    "tp": "parallelism.tp",
    "pp": "parallelism.pp",
}


def _takes_context(job: Job) -> bool:
    """Tell whether the model's code can have context ranks: Qwen2's has, with packed projections and their kernel."""
    told = {each.key: each.value for each in job.ignored}
    packed = told.get(f"{_M}_use_qkv_packed", True) is not False
    return packed and told.get(_QWEN2) is True and job.attention is Attention.FLASH


def _phrase(job: Job, field: str, value: Any) -> str | None:
    if field == "seq_len" and "data_stages" in getattr(job.origins.get(field), "key", ""):
        return None  # a stage of a list decides, which no dotted name reaches
    if field in _SIMPLE:
        return yaml_said((_SIMPLE[field], value))
    if field == "cp" and job.devices is not None:
        replicas = job.devices // (job.tp * job.pp * value)
        degrees = (("parallelism.context_parallel_size", value), ("parallelism.dp", replicas))
        if job.cp > 1:
            return yaml_said(*degrees)
        # with packed projections, the default, this kernel alone looks at other ranks (qwen.py, _forward_packed)
        kernel = ((f"{_M}_attn_implementation", _GATHERS), (f"{_M}{_STRIDE}", 1))
        whole = replicas == 1 and job.sharding is Sharding.DDP  # another mechanism then, whose bytes differ
        return yaml_said(*degrees, *kernel) if _takes_context(job) and not whole else None
    if field == "checkpointing" and value in (Checkpointing.FULL, Checkpointing.NONE):
        return yaml_said(("parallelism.recompute_layer", value is Checkpointing.FULL))
    if field == "optimizer" and value in ("adamw", "adamw-fused"):
        fused = value == "adamw-fused"
        name = (("optimizer.optimizer_factory.name", "adamW"),) if job.optimizer == "sgd" else ()
        key = getattr(job.origins.get("optimizer"), "key", "")
        key = key if key in _RENAMED else "optimizer.optimizer_factory.torch_adam_is_fused"
        return yaml_said((key, fused), *name)
    if field == "optimizer" and value == "sgd":
        return yaml_said(("optimizer.optimizer_factory.name", "sgd"))
    if field == "sharding" and value in (Sharding.ZERO1, Sharding.DDP):
        return yaml_said(("optimizer.zero_stage", int(value is Sharding.ZERO1)))
    if field == "sequence_sharding":
        return yaml_said(("parallelism.tp_mode", "REDUCE_SCATTER" if value else "ALL_REDUCE"))
    if field == "gradient_dtype" and value in ("f32", job.weight_dtype):
        return yaml_said(("optimizer.accumulate_grad_in_fp32", value == "f32"))
    return None


NANOTRON = SettingsFormat("nanotron", "nanotron", _recognises, _read, _phrase)
