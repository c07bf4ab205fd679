"""Words of the family's files for another value of a job's field: `gradient_checkpointing: true`.

A phrase is a piece of YAML, or of JSON where the file is JSON, that goes into the file at its top, table into table. It
ends with the file's name in a comment if that is not the file of the training's settings:

    phrase(WORDS, job, "offload_optimizer", True)
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}}  # in zero3.json
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, field, frozen

from ratrain.ratrain_ir.config.hub_names import hub_model
from ratrain.ratrainc.bridge.jobs.hf_rules import ATTENTION_WORDS, OPTIMIZERS, types_held
from ratrain.ratrainc.bridge.jobs.job import (
    FSDP,
    OF_TRAINER,
    UNSHARDED,
    ZERO_STAGES,
    Adapter,
    Checkpointing,
    Context,
    Job,
    Loss,
    Note,
    Origin,
    Sharding,
)
from ratrain.ratrainc.bridge.jobs.job_common import STRIDE

Table = Mapping[str, Any]
_OF_ACCELERATE = ("num_processes", "distributed_type", "mixed_precision", "compute_environment", "machine_rank")
TYPES: Mapping[str, Table] = {
    "bf16": {"bf16": True, "fp16": False},
    "f16": {"fp16": True, "bf16": False},
    "f32": dict.fromkeys(("bf16", "fp16"), False),
}
_SUMS = "gradient_accumulation_kwargs"
_ENGINE = {"zero_optimization": {}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
_AUTO = ("gradient_clipping", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu", "train_batch_size")


@frozen
class Words:
    """A format's words for fields of a job."""

    micro: str = "per_device_train_batch_size"
    times: str = "gradient_accumulation_steps"
    seq_len: str | None = None
    context: str | None = None
    """word for context ranks; without one accelerate's file says them"""
    optimizer: str = "optim"
    optimizers: Mapping[str, str] = OPTIMIZERS
    checkpointing: Callable[[bool, Job], Table] = lambda on, _job: {"gradient_checkpointing": on}
    offload_activations: Callable[[bool], Table | None] = lambda _on: None
    attention: Callable[[Any], Table | None] = lambda _value: None
    loss: Callable[[Any], Table | None] = lambda _value: None
    weights: Callable[[str], Table | None] = lambda _value: None
    adapter: Callable[[Adapter, Adapter | None], Table | None] = lambda _value, _before: None
    """words for an adapter in place of another one, or of none"""
    loads_mixed: bool = False
    """true if weights are loaded in the type of mixed precision"""
    fsdp: Table = field(factory=lambda: {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}})
    """what switches FSDP 2 on"""
    offload: str = "cpu_offload"
    """FSDP's offload, in `fsdp_config`"""
    off: tuple[str, ...] = ("deepspeed", "fsdp", "fsdp_config")
    """settings that say how state is sharded; null for those that are not asked for"""


def phrase(words: Words, job: Job, name: str, value: Any) -> str | None:
    """Say in the file's own words that a field of the job takes another value; None if it has none for it."""
    main = _is_json(job)
    if name in ("micro_batch_size", "gradient_accumulation", "seq_len"):
        keys = {"micro_batch_size": words.micro, "gradient_accumulation": words.times, "seq_len": words.seq_len}
        key = keys[name]
        return _said({key: value}, main) if key else None
    if name == "optimizer":
        word = next((word for word, kind in words.optimizers.items() if kind == value), None)
        return _said({words.optimizer: word}, main) if word else None
    if name == "cp":
        return _context_ranks(words, job, value, main)
    if name == "adapter":
        table = words.adapter(value, job.adapter) if _adapter_types(job, value) is not None else None
        return _said(table, main) if table else None
    if name == "checkpointing" and value in (Checkpointing.NONE, Checkpointing.FULL):
        return _checkpointing(words, job, value is Checkpointing.FULL, main)
    if name in ("offload_parameters", "offload_optimizer", "sharding", "reshard_after_forward"):
        return _of_sharding(words, job, name, value, main)
    tables: Mapping[str, Callable[[Any], Table | None]] = {
        "offload_activations": words.offload_activations,
        "attention": words.attention,
        "loss": words.loss,
        "reduces_each": lambda value: {"accelerator_config": {_SUMS: {"sync_each_batch": value}}},
        "weight_dtype": words.weights,
        "compute_dtype": TYPES.get,
    }
    held = job.sharding not in UNSHARDED or job.master_dtype
    if name == "reduces_each" and job.sharding not in FSDP:
        return None  # others hold the same bytes either way
    if name not in tables or (held and name in ("weight_dtype", "compute_dtype")):
        return None  # the mechanism decides types
    whole = words.loads_mixed or job.weight_dtype == "f32"
    if name == "compute_dtype" and value == "f32" and (_accelerate(job) or not whole):
        return None  # accelerate's file may say another one, and without mixed precision products have weights' type
    table = tables[name](value)
    return _said(table, main) if table else None


def _context_ranks(words: Words, job: Job, value: int, main: bool) -> str | None:
    """Say context ranks: in the training's settings if they have a word for it, else in accelerate's file for FSDP 2.

    accelerate's sizes make up all devices (parallelism_config.py, ParallelismConfig._validate_accelerator).
    """
    if job.shard_size not in (None, job.replicas):
        return None
    if words.context:
        return _said({words.context: value}, main)
    launch = _accelerate(job)
    if not launch or job.sharding is not Sharding.FSDP2 or job.devices is None:
        return None
    sizes = {"cp_size": value, "dp_shard_size": job.devices // (job.tp * job.pp * value)}
    table = {"parallelism_config": {f"parallelism_config_{name}": size for name, size in sizes.items()}}
    return _said(table, False, launch)


def _checkpointing(words: Words, job: Job, on: bool, main: bool) -> str:
    origin = job.origins.get("checkpointing")
    if origin is not None and not origin.default and "fsdp" in origin.key:
        table: dict[str, Any] = {}
        table["fsdp_config"] = {origin.key.rpartition(".")[2]: on}
        return _said(table, _json(origin.place), _elsewhere(job, origin.place))
    return _said(words.checkpointing(on, job), main)


def _of_sharding(words: Words, job: Job, name: str, value: Any, main: bool) -> str | None:
    """Say how state is sharded or offloaded, in the file that says it."""
    origin, launch = job.origins.get("sharding"), _accelerate(job)
    engine = origin is not None and not origin.default and "zero" in origin.key
    if engine and origin is not None:
        table = _engine_table(job, name, value)
        if table is not None or not (name == "sharding" and value is Sharding.FSDP2):
            inline, other = origin.key.startswith("deepspeed."), _elsewhere(job, origin.place)
            if table is None:
                return None
            if origin.key.endswith("zero_stage"):
                return _said({"deepspeed_config": _INLINE[name](value)}, False, other)
            return _said({"deepspeed": table} if inline else table, _json(origin.place), "" if inline else other)
    fully = job.sharding in FSDP
    if name != "sharding":
        keys = {"reshard_after_forward": "reshard_after_forward"}
        if not fully or (name == "reshard_after_forward" and job.sharding is Sharding.FSDP1):
            return None
        if launch and _sharded_by_launch(job):
            key = keys.get(name, "offload_params")
            return _said({"fsdp_config": {f"fsdp_{key}": value}}, False, launch)
        return _said({"fsdp_config": {keys.get(name, words.offload): value}}, main)
    if _changed_by_launch(job):
        table = _LAUNCH.get(value)
        return _said(table, False, launch) if table else None
    return None if value is Sharding.DDP and (job.devices or 1) == 1 else _main_sharding(words, value, main)


def changed_job(job: Job, name: str, value: Any) -> Job:
    """Return the job with another value of a field, and with what its framework then changes too.

    The types that are held follow from the mechanism that shares out state; Liger's switch fuses norms and gated
    products with the loss.
    """
    if name == "adapter":
        return evolve(job, adapter=value, method="lora", **(_adapter_types(job, value) or {}))
    changed = evolve(job, **{name: value})
    if name == "cp" and job.framework == "nanotron" and job.cp == 1:
        # the kernel of its words, and ZeRO over the ranks of one sequence's place alone (nanotron_job.py)
        group = changed.dp if job.sharding is Sharding.ZERO1 else None
        return evolve(changed, context=Context.GATHER, sizes={**job.sizes, STRIDE: 1}, shard_size=group)
    if name == "cp" and job.shard_size is not None:  # all ranks with the same weights, or those of one token's place
        return evolve(changed, shard_size=None if job.shard_size == job.replicas else changed.dp)
    if name == "loss" and value is Loss.FUSED and job.framework in _LIGER_ALONE:
        return evolve(changed, compiled=True)
    if name != "sharding" or job.framework not in OF_TRAINER:
        return changed
    if job.sharding not in UNSHARDED:
        return changed  # from one of DeepSpeed's stages to another, whose types are the same
    # DeepSpeed holds f32 masters exactly if it trains in mixed precision; elsewhere autocast tells that
    mixed = job.compute_dtype if job.autocast or job.master_dtype else None
    # its own preparation takes the place of accelerate's where axolotl's file says how state is sharded
    upcasts = job.framework != "axolotl" or _changed_by_launch(job)
    engine = value in ZERO_STAGES[1:]
    # LLaMA-Factory casts what trains to f32 before a mechanism sees it
    trains = job.gradient_dtype if job.trains_part and job.framework == "llama-factory" else job.weight_dtype
    types = types_held(value, trains, mixed, engine=engine, upcasts=upcasts)
    if job.trains_part and not engine:
        del types["weight_dtype"]  # frozen weights stay as they are loaded
    return evolve(changed, **types)


def _adapter_types(job: Job, adapter: Adapter) -> dict[str, Any] | None:
    """Return the types that change with an adapter, by field; None if they are not known.

    PEFT makes adapters f32 (hf_rules.PEFT_ADAPTERS), TRL casts those on quantised weights to bf16
    (hf_trainer._put_peft); LLaMA-Factory loads frozen weights as they are published. An engine casts all the same.
    """
    if job.framework == "axolotl" and job.offload_activations and job.adapter is None:
        return None  # axolotl offloads in place of recomputation where an adapter trains
    if job.framework not in OF_TRAINER or (job.master_dtype and job.sharding in ZERO_STAGES):
        return {}
    if job.sharding not in UNSHARDED:
        return {} if job.adapter is not None else None  # the mechanism casts what trains: not followed here
    if job.framework == "llama-factory" and job.adapter is not None:
        return {}
    if job.framework == "llama-factory":
        published = hub_model(job.model_name) if job.model_name else None
        origin = job.origins.get("weight_dtype")
        if published is None:
            return None
        if origin is not None and origin.key == "pure_bf16":
            return {"gradient_dtype": "f32", "reduce_dtype": "f32"}
        kind = published.dtype
        return {"weight_dtype": kind, "compute_dtype": job.compute_dtype if job.autocast else kind}
    kind = "bf16" if job.framework == "trl" and adapter.base_bits else "f32"
    return {"gradient_dtype": kind, "reduce_dtype": kind}


_LIGER_ALONE = ("llama-factory", "transformers")
"""Formats that fuse the loss by Liger's switch alone."""


def _engine_table(job: Job, name: str, value: Any) -> Table | None:
    """Say what DeepSpeed shards or offloads, as settings of a ds_config."""
    if name == "sharding":
        return {"zero_optimization": {"stage": ZERO_STAGES.index(value)}} if value in ZERO_STAGES else None
    if name == "offload_optimizer" and job.sharding is not Sharding.DDP:
        return {"zero_optimization": {"offload_optimizer": {"device": "cpu" if value else "none"}}}
    if name == "offload_parameters" and job.sharding is Sharding.ZERO3:
        return {"zero_optimization": {"offload_param": {"device": "cpu" if value else "none"}}}
    return None


_INLINE: Mapping[str, Callable[[Any], Table]] = {
    "sharding": lambda value: {"zero_stage": ZERO_STAGES.index(value)},
    "offload_optimizer": lambda value: {"offload_optimizer_device": "cpu" if value else "none"},
    "offload_parameters": lambda value: {"offload_param_device": "cpu" if value else "none"},
}
_LAUNCH: Mapping[Any, Table] = {
    Sharding.DDP: {"distributed_type": "MULTI_GPU"},
    Sharding.FSDP2: {
        "distributed_type": "FSDP",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
        },
    },
    **{
        stage: {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": ZERO_STAGES.index(stage)}}
        for stage in ZERO_STAGES[1:]
    },
}
"""Sharding in the words of accelerate's file."""


def _main_sharding(words: Words, value: Any, main: bool) -> str | None:
    off: dict[str, Any] = dict.fromkeys(words.off)
    if value is Sharding.FSDP2:
        return _said({**off, **words.fsdp}, main)
    if value in ZERO_STAGES[1:]:
        table = {**_ENGINE, **dict.fromkeys(_AUTO, "auto"), "zero_optimization": {"stage": ZERO_STAGES.index(value)}}
        return _said({**off, "deepspeed": table}, main)
    return _said(off, main) if value is Sharding.DDP else None


def phrase_of_accelerate(job: Job, name: str, value: Any) -> str | None:
    """Say a field in the words of accelerate's file alone."""
    if name == "compute_dtype" and job.sharding in UNSHARDED and not job.master_dtype:
        word = {"bf16": "bf16", "f16": "fp16", "f32": "no"}.get(value)
        return _said({"mixed_precision": word}, False) if word else None
    fields = ("offload_parameters", "offload_optimizer", "sharding", "reshard_after_forward")
    checkpoints = name == "checkpointing" and value in (Checkpointing.NONE, Checkpointing.FULL)
    if checkpoints and job.sharding in FSDP:
        return _said({"fsdp_config": {"fsdp_activation_checkpointing": value is Checkpointing.FULL}}, False)
    made = _context_ranks(Words(), job, value, False) if name == "cp" else None
    said = _of_sharding(Words(), job, name, value, False) if name in fields else made
    return said.partition("  # in ")[0] if said else None


def attention_word(value: Any) -> Table | None:
    """Return the words for an attention implementation by transformers' names; None if it has none."""
    return {"attn_implementation": ATTENTION_WORDS[value]} if value in ATTENTION_WORDS else None


def liger(key: str) -> Callable[[Any], Table | None]:
    """Return the words for a loss by a switch of Liger's kernels."""
    tables: Mapping[Any, Table] = {Loss.FUSED: {key: True}, Loss.UPCAST: {key: False}}
    return tables.get


def _said(table: Table, as_json: bool, file: str = "") -> str:
    """Write settings as a piece of JSON or YAML, with the name of their file if it is another one."""
    if as_json:
        text = ", ".join(f"{json.dumps(key)}: {json.dumps(_number(value))}" for key, value in table.items())
    else:
        text = "\n".join(f"{key}: {_yaml(value)}" for key, value in table.items())
    return f"{text}  # in {file}" if file else text


def _yaml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./ -]*", value) and value not in ("no", "yes", "on", "off"):
        return value
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_yaml(each) for each in value) + "]"
    return json.dumps(_number(value))


def _number(value: Any) -> Any:
    """Return a value as people write it: `lora_alpha: 32`, which is held as a float."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _json(place: str) -> bool:
    return re.search(r"\.(json|hjson)(:\d+)?$", place) is not None


def _is_json(job: Job) -> bool:
    """Tell whether the training's settings stand in a JSON file."""
    own = [each for each in job.origins.values() if not each.default and "." not in each.key.removeprefix("deepspeed.")]
    own = [each for each in own if each.key not in (*_OF_ACCELERATE, "gradient_clipping", "train_batch_size")]
    return any(_json(each.place) for each in own)


def _accelerate(job: Job) -> str:
    """Return the name of accelerate's file; empty without one."""
    notes: list[Origin | Note] = [*job.origins.values(), *job.ignored, *job.not_understood]
    places = [each.place for each in notes if each.key in _OF_ACCELERATE and ":" in each.place]
    return Path(places[0].rpartition(":")[0]).name if places else ""


def _sharded_by_launch(job: Job) -> bool:
    """Tell whether accelerate's file says how state is sharded, or names the file that does."""
    origin = job.origins.get("sharding")
    named = any(each.key == "deepspeed_config.deepspeed_config_file" for each in job.ignored)
    ours = ("fsdp_config.fsdp_", "deepspeed_config.")
    return origin is not None and (named or origin.key.startswith(ours) or origin.key in _OF_ACCELERATE)


def _changed_by_launch(job: Job) -> bool:
    """Tell whether accelerate's file is the one to change where state is to be sharded in another way."""
    origin = job.origins.get("sharding")
    return bool(_accelerate(job)) and (origin is None or origin.default or _sharded_by_launch(job))


def _elsewhere(job: Job, place: str) -> str:
    """Return the file's name of a place outside the training's settings; empty within them."""
    file = Path(place.rpartition(":")[0])
    main = [
        each.place.rpartition(":")[0]
        for name, each in job.origins.items()
        if name in ("model", "model_name", "micro_batch_size", "gradient_accumulation") and not each.default
    ]
    return "" if str(file) in main else file.name
