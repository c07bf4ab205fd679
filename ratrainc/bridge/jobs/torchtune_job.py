"""Reader of torchtune's configs: YAML of OmegaConf, whose components are named by their Python paths.

Which recipe runs a config is not in it. One of the distributed recipes is taken if a setting that only they have is
there, or more than one device is given; else the recipe for a single device.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.text import Source, shown
from ratrain.ratrainc.bridge.jobs.job import Adapter, Attention, Checkpointing, Job, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import (
    EXCHANGES,
    check_devices,
    dense,
    ignore_used,
    model_of_name,
    put_context,
    put_model,
    take_options,
    yaml_said,
)
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, JobReader, SettingsFormat
from ratrain.ratrainc.bridge.jobs.omegaconf_text import interpolated
from ratrain.ratrainc.bridge.jobs.torchtune_rules import (
    CHUNKED,
    CHUNKS_SOURCE,
    INERT,
    LORA_MLP,
    LORA_NAMES,
    LOSSES,
    OPTIMIZERS,
    OTHER_OPTIMIZERS,
    REPO,
    SINGLE,
    SPREAD,
    UPCAST_SOURCE,
    builder_model,
    hub_name,
    mlp_width,
    open_builder,
)
from ratrain.ratrainc.bridge.jobs.yaml_text import yaml_settings

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

_DTYPES = {"bf16": "bf16", "fp32": "f32"}
_SPREAD_KEYS = (
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "tensor_parallel_dim",
    "tensor_parallel_plan._component_",
    "context_parallel_dim",
    "data_parallel_shard_dim",
    "data_parallel_replicate_dim",
    "custom_sharded_layers",
    "ac_mode",
    "enable_fp8_training",
)
"""Settings that only recipes for several devices read."""
_COMPONENT = re.compile(r"""^[^#\n]*\b_component_:\s*['"]?torchtune\.""", re.MULTILINE)


def _recognises(path: Path, text: str) -> bool:
    """Tell whether a text has a component of torchtune."""
    del path  # what the text says decides
    return _COMPONENT.search(text) is not None


def _read(path: Path, text: str, asked: Asked) -> Job:
    source = Source(str(path), text)
    settings, used = interpolated(yaml_settings(source, "a config of torchtune"))
    reader = JobReader("torchtune", settings, source.top())
    _check_recipe(reader)
    spread = _devices(reader, asked)
    _model(reader, asked)
    _types(reader)
    _batch(reader)
    _optimizer(reader)
    _activations(reader)
    _loss(reader)
    take_options(reader, asked)
    replicas = check_devices(reader)
    if spread and replicas is not None:
        _replicas(reader, replicas)
    ignore_used(reader, used)
    return reader.finish(INERT)


def _check_recipe(reader: JobReader) -> None:
    """Raise `DiagnosticError` if the config is of a recipe that does not train, or not one model."""
    tables = {name.split(".")[0] for name in reader.settings}
    if "optimizer" not in tables:
        text = "this config trains nothing: it has no optimizer, as configs of evaluation and generation have none"
        reader.wrong("", text, way_out="name the config of a training")
    elif "model" not in tables:
        text = "this config has no model, as recipes have that train several: they are not read"
        reader.wrong("", text, way_out="name a config of full or LoRA fine-tuning")
    elif "ref_checkpointer" in tables:
        text = "this config trains by preferences, with a reference model that stays on the device: it is not read"
        reader.wrong("", text, way_out="name a config of full or LoRA fine-tuning")
    reader.report.check()


def _devices(reader: JobReader, asked: Asked) -> bool:
    """Set sharding and degrees; return true for the recipes for several devices."""
    says = [key for key in _SPREAD_KEYS if reader.has(key)]
    if not says and (asked.devices or 1) == 1:
        reader.assume("devices", 1, "device", f"{SINGLE}: no setting of a distributed recipe is in the file")
        reader.assume("sharding", Sharding.NONE, "device", SINGLE)
        return False
    reader.assume("sharding", Sharding.FSDP2, says[0] if says else "fully_shard", f"{SPREAD}._setup_model")
    tp = reader.choose("tp", "tensor_parallel_dim", int, 1, f"{SPREAD}.__init__")
    plan = reader.take("tensor_parallel_plan._component_", str)
    if tp > 1 and plan is None:
        reader.wrong("tensor_parallel_dim", "tensor_parallel_dim goes with a tensor_parallel_plan: torchtune stops")
    if tp > 1 and plan is not None:
        plans = f"{REPO}: torchtune/models/llama3/_parallelism.py, _get_base_llama_tp_training_plan"
        reader.assume("sequence_sharding", True, "tensor_parallel_plan._component_", plans)
        if not plan.endswith("base_llama_tp_plan"):
            reader.unknown("tensor_parallel_plan._component_", "a plan that is not known here is taken as Llama's")
    reader.choose("cp", "context_parallel_dim", int, 1, f"{SPREAD}.__init__")
    put_context(reader, "context_parallel_rotate_method", EXCHANGES, "allgather", f"{SPREAD}.__init__")
    reader.choose("reshard_after_forward", "fsdp_reshard_after_forward", bool, True, f"{SPREAD}.setup")
    if reader.choose("offload_parameters", "fsdp_cpu_offload", bool, False, f"{SPREAD}.__init__"):
        reader.put("offload_optimizer", True, "fsdp_cpu_offload")
    if reader.take("enable_fp8_training", bool):
        reader.put("fp8", True, "enable_fp8_training")
    reader.unknown("custom_sharded_layers", "sharded on their own: torchtune gathers them apart from the layers")
    shard, copies = _degrees(reader)
    if shard is not None and shard > 0 and copies > 0:
        # torchtune/training/_distributed.py, ParallelDims
        reader.put("devices", shard * copies * reader.values["tp"] * reader.values["cp"], "data_parallel_shard_dim")
    for key in ("tp", "cp"):
        if reader.values[key] < 1:
            reader.wrong(reader.origins[key].key, f"{reader.origins[key].key} is {reader.values[key]}: at least 1")
            reader.values[key] = 1
    return True


def _degrees(reader: JobReader) -> tuple[int | None, int]:
    """Take the data-parallel degrees: ranks that shard (None or -1: all that are left), and copies."""
    return reader.take("data_parallel_shard_dim", int), reader.take("data_parallel_replicate_dim", int) or 1


def _replicas(reader: JobReader, replicas: int) -> None:
    """Check the data-parallel degrees; set the ranks that share one copy of the state."""
    shard, copies = _degrees(reader)
    shard = replicas // max(1, copies) if shard in (None, -1) else shard
    if shard is None or copies < 1 or shard * copies != replicas:
        key = "data_parallel_shard_dim" if reader.has("data_parallel_shard_dim") else "data_parallel_replicate_dim"
        reader.wrong(key, f"{key}: {shard} * {copies} is not {replicas} data-parallel ranks", code="RT064")
    elif copies > 1:
        # FSDP shards over context ranks too (torchtune/training/_distributed.py, ParallelDims.build_mesh)
        reader.put("shard_size", shard * reader.values["cp"], "data_parallel_replicate_dim")


def _model(reader: JobReader, asked: Asked) -> None:
    key = "model._component_"
    component = reader.take(key, str)
    if component is None:
        reader.wrong("", "model._component_ is missing: torchtune stops there", way_out="name the model's builder")
        return
    name = component.rpartition(".")[2]
    quantised = name.startswith("qlora_")
    base = re.sub(r"^(q?lora_)", "", name)
    model = builder_model(base)
    if model is None and open_builder(component) is not None:
        model = _described(reader, component)
    if model is None and hub_name(base) is not None:
        model = model_of_name(hub_name(base))
    put_model(reader, asked, name, key, model)
    if base == name:
        reader.put("method", "full", key)
    else:
        reader.put("method", "lora", key)
        _adapter(reader, quantised=quantised)


def _described(reader: JobReader, component: str) -> ModelConfig | None:
    """Return the model of a builder that takes all sizes; None if one is missing, which is reported."""
    family, theta = open_builder(component) or ("llama", 10000.0)
    names = ("vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads")
    sizes = [reader.take(f"model.{name}", int) for name in names]
    for name, size in zip(names, sizes, strict=True):
        if size is None or size < 1:
            reader.wrong(f"model.{name}", f"model.{name} is {shown(size)}: {component} needs at least 1")
    if any(size is None or size < 1 for size in sizes):
        return None
    vocabulary, layers, hidden, heads, kv_heads = (size or 1 for size in sizes)
    return dense(
        component.rpartition(".")[2],
        family,
        vocabulary=vocabulary,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=reader.take("model.intermediate_dim", int) or mlp_width(hidden),
        eps=reader.take("model.norm_eps", float) or 1e-5,
        rope_theta=reader.take("model.rope_base", float) or theta,
    )


def _adapter(reader: JobReader, *, quantised: bool) -> None:
    """Set the adapter; its defaults are in torchtune/models/llama3_1/_model_builders.py, lora_llama3_1_8b."""
    attention = reader.take("model.lora_attn_modules", list)
    targets = [LORA_NAMES.get(str(each), str(each)) for each in attention or []]
    targets += LORA_MLP if reader.take("model.apply_lora_to_mlp", bool) else ()
    targets += ["lm_head"] if reader.take("model.apply_lora_to_output", bool) else []
    if not targets:
        reader.wrong("model.lora_attn_modules", "no linear takes an adapter", way_out="name some: [q_proj, v_proj]")
    rank, alpha = reader.take("model.lora_rank", int), reader.take("model.lora_alpha", float)
    quantised = quantised or bool(reader.take("model.quantize_base", bool))
    adapter = Adapter(
        8 if rank is None else rank,
        16.0 if alpha is None else alpha,
        tuple(targets),
        reader.take("model.lora_dropout", float) or 0.0,
        base_bits=4 if quantised else None,
        double_quantised=quantised,  # pytorch/ao: torchao/dtypes/nf4tensor.py, NF4Tensor.double_quantize_scalers
        kind="DoRA (model.use_dora)" if reader.take("model.use_dora", bool) else "",
        quantisation="nf4" if quantised else "",
    )
    reader.put("adapter", adapter, "model.lora_rank")
    builder = f"{REPO}: torchtune/models/llama3_1/_model_builders.py, lora_llama3_1_8b"
    reader.trace("rank", "model.lora_rank", builder)
    reader.trace("alpha", "model.lora_alpha", builder)
    reader.trace("targets", "model.lora_attn_modules")
    reader.trace("further_targets", "model.apply_lora_to_output")
    reader.trace("dropout", "model.lora_dropout")
    reader.trace("base_bits", "model.quantize_base" if reader.has("model.quantize_base") else "model._component_")
    reader.trace("kind", "model.use_dora")
    if reader.has("model.use_dora"):
        reader.ignore("model.use_dora", "the adapter's kind says it")


def _types(reader: JobReader) -> None:
    """Set types: weights, gradients, moments and products all have `dtype`, and there are no masters."""
    said = reader.take("dtype", str)
    if reader.has("dtype") and said not in _DTYPES:
        expected = "bf16 or fp32 is expected: the recipes refuse fp16"
        reader.wrong("dtype", f"dtype is {shown(reader.settings['dtype'].value)}: {expected}")
        return
    source = f"{REPO}: torchtune/training/precision.py, get_dtype"
    for name in ("weight_dtype", "compute_dtype", "gradient_dtype", "reduce_dtype"):
        if said is None:
            reader.assume(name, "f32", "dtype", source)
        else:
            reader.put(name, _DTYPES[said], "dtype")


def _batch(reader: JobReader) -> None:
    for name, key in (("micro_batch_size", "batch_size"), ("gradient_accumulation", "gradient_accumulation_steps")):
        reader.put(name, reader.size(key), key)
        if not reader.has(key):
            reader.wrong("", f"{key} is missing: torchtune stops there", way_out=f"write {key}: 1, or another number")
    reader.put("seq_len", reader.take("tokenizer.max_seq_len", int), "tokenizer.max_seq_len")
    reader.put("packing", reader.take("dataset.packed", bool), "dataset.packed")
    reader.put("epochs", reader.take("epochs", float), "epochs")
    reader.put("steps", reader.take("max_steps_per_epoch", int), "max_steps_per_epoch")
    reader.put("max_grad_norm", reader.take("clip_grad_norm", float), "clip_grad_norm")
    parts = [key for key in reader.settings if key.startswith("compile.")]
    reader.taken.update(parts)
    if reader.take("compile.loss", bool) is False:
        reader.put("sizes", {"compile_loss": 0}, "compile.loss")
    if "compile.model" in parts:
        reader.put("compiled", reader.take("compile.model", bool), "compile.model")
    elif parts:
        reader.assume("compiled", True, "compile.model", f"{SPREAD}.setup")
    else:
        reader.choose("compiled", "compile", bool, False, f"{SPREAD}.setup")
    reader.assume("attention", Attention.SDPA, "attention", f"{REPO}: torchtune/modules/attention_utils.py")


def _optimizer(reader: JobReader) -> None:
    key = "optimizer._component_"
    component = reader.take(key, str)
    name = component.rpartition(".")[2] if component else None
    if name == "CPUOffloadOptimizer":
        reader.put("offload_optimizer", True, key)
        component = reader.take("optimizer.optimizer_class", str) or "torch.optim.AdamW"
        key = "optimizer.optimizer_class" if reader.has("optimizer.optimizer_class") else key
    if component in OPTIMIZERS:
        kind, betas, eps, decay = OPTIMIZERS[component]
        _adam(reader, component, kind, betas, eps, decay)
    elif component in OTHER_OPTIMIZERS:
        kind = OTHER_OPTIMIZERS[component]
        momentum = reader.take("optimizer.momentum", float)
        reader.put("optimizer", f"{kind}-momentum" if kind == "sgd" and momentum else kind, key)
    elif component is not None:
        known = ", ".join([*OPTIMIZERS, *OTHER_OPTIMIZERS])
        reader.wrong(key, f"the optimizer {component} is not known here", way_out=f"one of {known}")
    else:
        reader.wrong("", f"{key} is missing: torchtune stops there", way_out=f"write {key}: torch.optim.AdamW")
    in_backward = reader.choose("optimizer_in_backward", "optimizer_in_bwd", bool, False, f"{SPREAD}.__init__")
    if in_backward:
        for other, off in (("gradient_accumulation_steps", 1), ("clip_grad_norm", None)):
            if reader.has(other) and reader.settings[other].value != off:
                text = f"optimizer_in_bwd excludes {other}: torchtune stops"
                reader.wrong("optimizer_in_bwd", text, code="RT064", way_out=f"write {other}: {off or 'null'}")


def _adam(reader: JobReader, component: str, kind: str, betas: tuple[float, float], eps: float, decay: float) -> None:
    key = "optimizer._component_"
    fused, foreach = reader.take("optimizer.fused", bool), reader.take("optimizer.foreach", bool)
    if component.startswith("torch.") and fused:
        kind, key = "adamw-fused", "optimizer.fused"
    elif component.startswith("torch.") and foreach is False:
        kind, key = "adamw-foreach-off", "optimizer.foreach"
    reader.put("optimizer", kind, key)
    source = f"{component}.__init__"
    said = reader.take("optimizer.betas", list)
    pair = [each for each in said or [] if isinstance(each, int | float)]
    if len(pair) == 2:
        reader.put("betas", (float(pair[0]), float(pair[1])), "optimizer.betas")
    else:
        reader.assume("betas", betas, "optimizer.betas", source)
    reader.put("lr", reader.take("optimizer.lr", float), "optimizer.lr")
    reader.choose("eps", "optimizer.eps", float, eps, source)
    reader.choose("weight_decay", "optimizer.weight_decay", float, decay, source)
    reader.put("scheduler", reader.take("lr_scheduler._component_", str), "lr_scheduler._component_")
    reader.put("warmup_steps", reader.take("lr_scheduler.num_warmup_steps", int), "lr_scheduler.num_warmup_steps")


def _activations(reader: JobReader) -> None:
    key = "enable_activation_checkpointing"
    full, mode = reader.take(key, bool), reader.take("ac_mode", str)
    kind = Checkpointing.FULL if full else Checkpointing.NONE
    reader.put_or_assume("checkpointing", kind, key, f"{SPREAD}.__init__", says=full is not None)
    if mode is not None and full:
        reader.unknown("ac_mode", "with enable_activation_checkpointing neither is applied: torchtune keeps all")
        reader.put("checkpointing", Checkpointing.NONE, "ac_mode")
    elif mode in ("full", "selective"):
        reader.put("checkpointing", Checkpointing.FULL, "ac_mode")
        if mode == "selective":
            _every(reader)
    elif mode not in (None, "none"):
        reader.wrong("ac_mode", f"ac_mode is {shown(mode)}: none, full or selective is expected")
    offloaded = reader.choose("offload_activations", "enable_activation_offloading", bool, False, f"{SPREAD}.__init__")
    if offloaded and not full:
        text = f"enable_activation_offloading goes with {key}: torchtune stops without"
        reader.wrong("enable_activation_offloading", text, code="RT064", way_out=f"write {key}: true")
    reader.ignore("activation_offloading_use_streams", "copies overlap with compute, or they do not")


def _every(reader: JobReader) -> None:
    """Set the layers that `ac_option: N` recomputes: each N-th (torchtune/training/activations.py)."""
    each, model = reader.take("ac_option", int), reader.values.get("model")
    if each is None:
        reader.wrong("ac_option", "ac_mode: selective goes with ac_option: N, which recomputes each N-th layer")
    elif each > 1 and model is not None:
        reader.put("checkpoint_layers", model.layers // each, "ac_option")
        reader.put("checkpoint_stride", each, "ac_option")
    elif each > 1:
        reader.unknown("ac_option", "how many layers each N-th of them is, the model says")


def _loss(reader: JobReader) -> None:
    key = "loss._component_"
    component = reader.take(key, str)
    if component in LOSSES:
        loss = LOSSES[component]
        reader.put("loss", loss, key)
        if loss is Loss.CHUNKED:
            reader.choose("loss_chunks", "loss.num_output_chunks", int, 8, CHUNKS_SOURCE)
    else:
        reader.assume("loss", Loss.UPCAST, key, UPCAST_SOURCE)
        reader.unknown(key, "a loss that is not known here is counted as cross-entropy of whole logits in f32")


# phrases

_OPTIMIZER_WORDS = {kind: component for component, (kind, *_) in reversed(OPTIMIZERS.items())} | {
    kind: component for component, kind in OTHER_OPTIMIZERS.items()
}


def _phrase(job: Job, field: str, value: Any) -> str | None:
    simple = {
        "micro_batch_size": "batch_size",
        "gradient_accumulation": "gradient_accumulation_steps",
        "seq_len": "tokenizer.max_seq_len",
        "compiled": "compile",
    }
    if field in simple:
        return yaml_said((simple[field], value))
    if field in _PHRASES:
        found: str | None = _PHRASES[field](job, value)
        return found
    return None


def _say_checkpointing(job: Job, value: Checkpointing) -> str | None:
    if getattr(job.origins.get("checkpointing"), "key", "") == "ac_mode":
        words = {Checkpointing.FULL: "full", Checkpointing.NONE: "none"}
        return yaml_said(("ac_mode", words[value])) if value in words else None
    known = {Checkpointing.FULL: True, Checkpointing.NONE: False}
    return yaml_said(("enable_activation_checkpointing", known[value])) if value in known else None


def _say_cp(job: Job, value: int) -> str | None:
    if job.devices is None or job.shard_size is not None:
        return None
    return yaml_said(
        ("context_parallel_dim", value), ("data_parallel_shard_dim", job.devices // (job.tp * job.pp * value))
    )


def _say_optimizer(_job: Job, value: str) -> str | None:
    if value == "adamw-fused":
        return yaml_said(("optimizer._component_", "torch.optim.AdamW"), ("optimizer.fused", True))
    if value == "adamw-foreach-off":
        return yaml_said(("optimizer._component_", "torch.optim.AdamW"), ("optimizer.foreach", False))
    component = _OPTIMIZER_WORDS.get(value)
    if component is None:
        return None
    off = (("optimizer.fused", False),) if value == "adamw" else ()
    return yaml_said(("optimizer._component_", component), *off)


def _say_activations(job: Job, value: bool) -> str:
    more = (("enable_activation_checkpointing", True),) if value and job.checkpointing is Checkpointing.NONE else ()
    return yaml_said(("enable_activation_offloading", value), *more)


def _say_parameters(job: Job, value: bool) -> str | None:
    return yaml_said(("fsdp_cpu_offload", value)) if job.sharding is Sharding.FSDP2 else None


def _say_in_backward(job: Job, value: bool) -> str:
    pairs: list[tuple[str, Any]] = [("optimizer_in_bwd", value)]
    if value and job.gradient_accumulation != 1:
        pairs.append(("gradient_accumulation_steps", 1))
    if value and job.training.max_grad_norm is not None:
        pairs.append(("clip_grad_norm", None))
    return yaml_said(*pairs)


def _say_tp(_job: Job, value: int) -> str:
    plan = "torchtune.models.llama3.base_llama_tp_plan"
    more = (("tensor_parallel_plan._component_", plan),) if value > 1 else ()
    return yaml_said(("tensor_parallel_dim", value), *more)


def _say_loss(_job: Job, value: Loss) -> str | None:
    words = {Loss.CHUNKED: CHUNKED, Loss.UPCAST: "torch.nn.CrossEntropyLoss"}
    return yaml_said(("loss", f"{{_component_: {words[value]}}}")) if value in words else None


def _say_sharding(_job: Job, value: Sharding) -> str | None:
    return yaml_said(("fsdp_reshard_after_forward", True)) if value is Sharding.FSDP2 else None


def _say_adapter(job: Job, value: Adapter) -> str | None:
    """Say another rank, or a quantised base; a full fine-tuning has another builder and another recipe."""
    if job.adapter is None:
        return None
    if job.adapter.rank != value.rank:
        return yaml_said(("model.lora_rank", value.rank))
    return yaml_said(("model.quantize_base", True)) if value.base_bits == 4 else None


_PHRASES: dict[str, Any] = {
    "adapter": _say_adapter,
    "checkpointing": _say_checkpointing,
    "optimizer": _say_optimizer,
    "offload_activations": _say_activations,
    "offload_parameters": _say_parameters,
    "offload_optimizer": _say_parameters,
    "optimizer_in_backward": _say_in_backward,
    "tp": _say_tp,
    "cp": _say_cp,
    "loss": _say_loss,
    "sharding": _say_sharding,
}

TORCHTUNE = SettingsFormat("torchtune", "torchtune", _recognises, _read, _phrase)
