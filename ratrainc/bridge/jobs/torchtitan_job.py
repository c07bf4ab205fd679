"""Reader of torchtitan's TOML files as jobs, for versions from February 2024 to v0.2.2.

Older names become the newer ones as in `import-plan` (torchtitan.py), and stand in the file's own words again in what
the job says of its origins. What is said of versions was read in pytorch/torchtitan, tag v0.2.2 (2026-02-20), and
commit cca07028 (2025-01-31) for files with older names.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from ratrain.ratrain_ir.support.text import Source, shown
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Job, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import (
    EXCHANGES,
    check_devices,
    in_own_words,
    one_word,
    put_accumulation,
    put_context,
    put_model,
    refuse_texts,
    take_options,
    toml_said,
)
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, JobReader, SettingsFormat
from ratrain.ratrainc.bridge.jobs.torchtitan_flavors import FUSED_FLAVORS, INERT, flavor_model
from ratrain.ratrainc.bridge.settings import Asked as PlanAsked
from ratrain.ratrainc.bridge.settings import SettingsReader
from ratrain.ratrainc.bridge.torchtitan import TORCHTITAN, take_old_names
from ratrain.ratrainc.bridge.torchtitan_rules import (
    BEFORE_AMP,
    CONTEXT,
    CONVERTERS,
    COUNT,
    EACH,
    LAYERS_EACH,
    LOCAL,
    OLD_SCHEDULES,
    OTHER_SCHEDULES,
    PARTS,
    POINTS,
    PP,
    REDUCE,
    RENAMED,
    REPLICATE,
    RESHARD,
    RULES,
    SCHEDULE,
    SCHEDULES,
    SHARD,
    STATE,
    STEPS,
    TABLE,
    TP,
    TYPES,
    VIEW,
    WARM_UP,
    WHOLE,
)

_REPO = "pytorch/torchtitan@v0.2.2"
_EARLY = "pytorch/torchtitan@cca0702: torchtitan/config_manager.py"
_PARALLELIZE = f"{_REPO}: torchtitan/models/llama3/infra/parallelize.py"
_DIMENSIONS = f"{_REPO}: torchtitan/distributed/parallel_dims.py, ParallelDims"
_AMP = f"{_REPO}: torchtitan/distributed/utils.py, maybe_enable_amp"
_AC = "activation_checkpoint."
_OFFLOAD = "training.enable_cpu_offload"
_EXPERTS = "parallelism.expert_parallel_degree"
_LOSS = "parallelism.disable_loss_parallel"
_ROTATIONS = ("parallelism.context_parallel_rotate_method", "experimental.context_parallel_rotate_method")
_SECTION = re.compile(r"^\s*\[(\w+)[\].]", re.MULTILINE)


def _recognises(path: Path, text: str) -> bool:
    """Tell whether a text is TOML with sections that torchtitan has."""
    sections = set(_SECTION.findall(text))
    own = {"parallelism", "activation_checkpoint", "job", "experimental", "lr_scheduler", "optimizer"}
    del path  # what the text says decides
    return "training" in sections and len(sections & own) > 1


def _read(path: Path, text: str, asked: Asked) -> Job:
    top = Source(str(path), text).top()
    plan = SettingsReader(TORCHTITAN, TORCHTITAN.settings_of(str(path), text, PlanAsked()), top, PlanAsked())
    old = take_old_names(plan)
    plan.report.check()
    reader = JobReader("torchtitan", plan.settings, top, taken=plan.taken - {SHARD})
    sections = ("training", "parallelism", "experimental", "optimizer", "lr_scheduler")
    refuse_texts(reader, "torchtitan", sections)
    early = bool(old & BEFORE_AMP)
    _degrees(reader)
    _model(reader, asked)
    shard, copies = _sharding(reader, asked)
    _types(reader, early=early)
    pp = reader.values["pp"]
    if pp > 1:
        _pipeline(reader)
    else:
        for name in reader.settings:
            if name.startswith(PP) or name == PARTS:
                reader.ignore(name, "there is no pipeline")
    _lengths(reader, pp, early=early)
    take_options(reader, asked)
    replicas = check_devices(reader)
    _hybrid(reader, shard, copies, replicas)
    _whole_batch(reader, replicas)
    _optimizer(reader, early=early)
    _activations(reader)
    _loss_and_kernels(reader)
    return in_own_words(reader.finish(INERT, method="pretrain"), lambda key: plan.called.get(key, key))


def _source(key: str) -> str:
    return f"{_REPO}: {RULES[key].source}"


def _size(reader: JobReader, field: str, key: str) -> int:
    """Set a field from a setting of at least 1, or to torchtitan's default; report a smaller one."""
    return reader.choose_size(field, key, RULES[key].default, _source(key))


def _degrees(reader: JobReader) -> None:
    for field, key in (("tp", TP), ("pp", f"{PP}degree"), ("cp", CONTEXT)):
        _size(reader, field, key)
    key = next((each for each in _ROTATIONS if reader.has(each)), _ROTATIONS[0])
    put_context(reader, key, EXCHANGES, "allgather", f"{_REPO}: torchtitan/config/job_config.py, Parallelism")
    if reader.values["tp"] > 1:
        reader.assume("sequence_sharding", True, TP, f"{_PARALLELIZE}, apply_tp")
    experts = reader.take(_EXPERTS, int)
    if experts is not None:
        reader.put("ep", max(1, experts), _EXPERTS)
    if (experts or 1) > 1:
        reader.unknown(_EXPERTS, "experts are not counted")


def _model(reader: JobReader, asked: Asked) -> None:
    name, flavor = reader.take("model.name", str), reader.take("model.flavor", str)
    key = "model.flavor" if flavor is not None else "model.name"
    if name is None:
        put_model(reader, asked, flavor, key, None)
        return
    ending = next((each for each in FUSED_FLAVORS if (flavor or "").endswith(each)), "")
    described = flavor_model(name, (flavor or "").removesuffix(ending))
    put_model(reader, asked, f"{name} {flavor}" if flavor else name, key, described)
    flex = reader.take("model.use_flex_attn", bool)
    if ending or flex:
        reader.put("attention", Attention.FLASH, key)
    else:
        source = f"{_REPO}: torchtitan/models/llama3/model/args.py, TransformerModelArgs.attn_type"
        reader.assume("attention", Attention.SDPA, "attn_type", source)
    reader.ignore("model.attn_mask_type", "changes what is seen, and keeps no scores")


def _sharding(reader: JobReader, asked: Asked) -> tuple[int | None, int]:
    """Set the devices, if the file's degrees say them; return the ranks that shard (None: all left) and the copies."""
    shard, copies = reader.take(SHARD, int), reader.take(REPLICATE, int)
    copies = 1 if copies is None else copies
    if copies == -1:  # data_parallel_type = "ddp" of older versions: all ranks
        devices = asked.devices
        each = math.prod(reader.values[name] for name in ("tp", "pp", "cp"))
        return 1, max(1, (devices or each) // each)
    if copies < 1:
        reader.wrong(REPLICATE, f"{REPLICATE} is {copies}: at least 1 is expected")
        copies = 1
    if shard is None or shard == -1:
        return None, copies
    if shard < 1:
        reader.wrong(SHARD, f"{SHARD} is {shard}: at least 1, or -1, is expected")
        return None, copies
    model = math.prod(reader.values[name] for name in ("tp", "pp", "cp"))
    reader.put("devices", shard * copies * model, SHARD)
    return shard, copies


def _hybrid(reader: JobReader, shard: int | None, copies: int, replicas: int | None) -> None:
    """Set what is sharded, over how many ranks: FSDP shards over context-parallel ranks too."""
    cp = reader.values["cp"]
    if shard is None and replicas is not None:
        if replicas % copies:
            reader.wrong(REPLICATE, f"{replicas} data-parallel ranks are not a multiple of {copies}", code="RT064")
        shard = max(1, replicas // copies)
    sharded = shard is None or shard > 1 or cp > 1
    key = SHARD if reader.has(SHARD) else REPLICATE
    if sharded:
        reader.assume("sharding", Sharding.FSDP2, key, f"{_PARALLELIZE}, apply_fsdp")
        if shard is not None and (copies > 1 or cp > 1):
            reader.put("shard_size", shard * cp, key)
    elif copies > 1:
        reader.assume("sharding", Sharding.DDP, REPLICATE, f"{_PARALLELIZE}, apply_ddp")
        if reader.values["tp"] * reader.values["pp"] > 1:
            text = "replicas of tensor or pipeline ranks need data_parallel_shard_degree: torchtitan stops"
            reader.wrong(REPLICATE, text, code="RT064")
    else:
        reader.assume("sharding", Sharding.NONE, key, _DIMENSIONS)
    policy, says = one_word(reader, RESHARD, ("default", "always", "never"), "default")
    reshard = policy == "always" or (policy == "default" and reader.values["pp"] == 1)
    reader.put_or_assume("reshard_after_forward", reshard, RESHARD, f"{_PARALLELIZE}, apply_fsdp", says=says)
    _cast(reader, sharded=sharded)


def _types(reader: JobReader, *, early: bool) -> None:
    """Set the type of weights, gradients and moments, and note in `compute_dtype` what the file says of products."""
    word, says = one_word(reader, STATE, tuple(sorted(TYPES)), "float32")
    source = f"{_REPO}: torchtitan/config/job_config.py, Training.dtype"
    for name in ("weight_dtype", "gradient_dtype"):
        reader.put_or_assume(name, TYPES[word], STATE, source, says=says)
    for name, key in (("compute_dtype", VIEW), ("reduce_dtype", REDUCE)):
        word, says = one_word(reader, key, tuple(TYPES), RULES[key].default)
        reader.put_or_assume(name, TYPES[word], key, _source(key), says=says)
    # before June 2025 nothing but FSDP cast weights
    reader.values["autocast"] = not early


def _cast(reader: JobReader, *, sharded: bool) -> None:
    """Set who casts weights to the type of products: FSDP, autocast if no ranks share a model, or nobody."""
    alone = reader.values["tp"] == reader.values["pp"] == 1
    possible = reader.values.pop("autocast")
    if sharded:
        return
    own = reader.values["weight_dtype"]
    reader.assume("reduce_dtype", own, REDUCE, f"{_PARALLELIZE}, apply_ddp")
    if alone and possible and reader.values["compute_dtype"] != own:
        reader.assume("autocast", True, VIEW, _AMP)
    elif not (alone and possible):
        reader.assume("compute_dtype", own, VIEW, _AMP)


def _pipeline(reader: JobReader) -> None:
    said = reader.take(SCHEDULE, str) or RULES[SCHEDULE].default
    known = {each.lower(): each for each in (*SCHEDULES, *OTHER_SCHEDULES)} | OLD_SCHEDULES
    name = known.get(said.lower())
    if name is None:
        reader.wrong(SCHEDULE, f"{SCHEDULE} is '{said}', which is no schedule of torch.distributed.pipelining")
        return
    word = SCHEDULES.get(name, "interleaved")
    if name not in SCHEDULES:
        reader.unknown(SCHEDULE, "it is counted as interleaved")
    reader.put_or_assume("schedule", word, SCHEDULE, _source(SCHEDULE), says=reader.has(SCHEDULE))
    if reader.take(TABLE, str):
        reader.unknown(TABLE, "the order of a table is not read")
    chunks, key = _chunks(reader, several=word not in ("1f1b", "gpipe"))
    if key:
        reader.put("virtual_stages", chunks, key)
    elif chunks > 1:
        source = f"{_REPO}: torchtitan/distributed/pipeline_parallel.py, pipeline_llm"
        reader.assume("virtual_stages", chunks, SCHEDULE, source)


def _chunks(reader: JobReader, *, several: bool) -> tuple[int, str]:
    """Return the chunks of layers of a pipeline rank, and the setting that says them; "" if none does."""
    pp, model = reader.values["pp"], reader.values.get("model")
    parts, points = reader.take(PARTS, list), None
    if reader.has(POINTS):
        value = reader.settings[POINTS].value
        points = [each for each in value.split(",") if each] if isinstance(value, str) else reader.take(POINTS, list)
        reader.taken.add(POINTS)
    layers = reader.take(LAYERS_EACH, int)
    count, key = (len(parts), PARTS) if parts else (len(points) + 1, POINTS) if points else (0, "")
    ends = {name: f"{PP}{name}_stage_less_layers" for name in ("first", "last")}
    less = {name: reader.take(key_, int) for name, key_ in ends.items()}
    if not count and layers and model is not None:
        # pipeline_parallel.py, pipeline_llm: embedding and head count as layers, 1 each unless the file says more
        whole = model.layers + sum(1 if each is None else each for each in less.values())
        count, key = -(-whole // max(1, layers)), LAYERS_EACH
    if count and count % pp:
        reader.wrong(key, f"{count} stages cannot be shared out over {pp} pipeline ranks", code="RT064")
        return 1, ""
    return (count // pp, key) if count else (2 if several else 1, "")


def _lengths(reader: JobReader, pp: int, *, early: bool) -> None:
    key = "training.seq_len"
    _size(reader, "seq_len", key)
    size = reader.size(LOCAL) or RULES[LOCAL].default
    if pp == 1 and reader.has(LOCAL):
        reader.put("micro_batch_size", size, LOCAL)
    elif pp == 1:
        reader.assume("micro_batch_size", size, LOCAL, _source(LOCAL))
    else:
        _pipeline_batch(reader, pp, size, early=early)
    reader.put("steps", reader.take(STEPS, int), STEPS)
    warm = reader.take(WARM_UP, int)
    if warm is not None:
        reader.put("warmup_steps", warm, WARM_UP)


def _pipeline_batch(reader: JobReader, pp: int, local: int, *, early: bool) -> None:
    """Set the micro-batch of a pipeline: a size of its own, or before April 2025 a part of the local batch."""
    if reader.has(EACH) or not (early or reader.has(COUNT)):
        _size(reader, "micro_batch_size", EACH)
        if local % reader.values["micro_batch_size"]:
            text = f"{LOCAL} {local} is no multiple of {EACH} {reader.values['micro_batch_size']}"
            reader.wrong(EACH, text, code="RT064")
        return
    count = reader.take(COUNT, int)
    parts = count if count is not None and count > 0 else pp
    if local % parts:
        reader.wrong(COUNT, f"a local batch of {local} is no multiple of {parts} micro-batches", code="RT064")
        return
    if count is None:
        source = f"{_EARLY}, --experimental.pipeline_parallel_microbatches"
        reader.assume("micro_batch_size", local // parts, COUNT, source)
    else:
        reader.put("micro_batch_size", local // parts, COUNT)


def _whole_batch(reader: JobReader, replicas: int | None) -> None:
    """Set the micro-batches of a step by the global batch; without one, a step has one local batch."""
    whole = reader.take(WHOLE, int)
    size = reader.values.get("micro_batch_size")
    local = reader.settings[LOCAL].value if reader.has(LOCAL) else RULES[LOCAL].default
    if whole is not None and whole > 0:
        put_accumulation(reader, whole, WHOLE, replicas)
    elif isinstance(local, int) and size:
        reader.assume("gradient_accumulation", max(1, local // size), WHOLE, _source(WHOLE))


def _optimizer(reader: JobReader, *, early: bool) -> None:
    one_word(reader, "optimizer.name", ("AdamW", "Adam"), RULES["optimizer.name"].default)
    words = {"fused": "adamw-fused", "foreach": "adamw", "for-loop": "adamw-foreach-off"}
    kind, says_kind = one_word(reader, "optimizer.implementation", tuple(words), "fused")
    fused = reader.take("optimizer.fused", bool)
    if says_kind:
        reader.put("optimizer", words[kind], "optimizer.implementation")
    elif fused is not None:
        reader.put("optimizer", "adamw-fused" if fused else "adamw", "optimizer.fused")
    elif early:
        reader.assume("optimizer", "adamw", "optimizer.fused", f"{_EARLY}, --optimizer.fused")
    else:
        source = f"{_REPO}: torchtitan/config/job_config.py, Optimizer.implementation"
        reader.assume("optimizer", "adamw-fused", "optimizer.implementation", source)
    reader.put("optimizer_in_backward", reader.take("optimizer.early_step_in_backward", bool), _EARLY_STEP)
    reader.choose("lr", "optimizer.lr", float, RULES["optimizer.lr"].default, _source("optimizer.lr"))
    said = {key: reader.take(key, float) for key in ("optimizer.beta1", "optimizer.beta2")}
    betas = tuple(RULES[key].default if value is None else value for key, value in said.items())
    key = next((key for key, value in said.items() if value is not None), None)
    if key is None:
        reader.assume("betas", betas, "optimizer.beta1", _source("optimizer.beta1"))
    else:
        reader.put("betas", betas, key)
    for field in ("eps", "weight_decay"):
        key = f"optimizer.{field}"
        reader.choose(field, key, float, RULES[key].default, _source(key))
    norm = "training.max_norm"
    value = reader.settings[norm].value if reader.has(norm) else RULES[norm].default
    if isinstance(value, float) and math.isinf(value):
        reader.taken.add(norm)  # clips nothing
    else:
        reader.choose("max_grad_norm", norm, float, RULES[norm].default, _source(norm))


_EARLY_STEP = "optimizer.early_step_in_backward"


def _activations(reader: JobReader) -> None:
    """Set what is recomputed: `selective` is per op, or whole layers, each N-th of them."""
    source = f"{_REPO}: torchtitan/config/job_config.py, ActivationCheckpoint"
    mode_key, option_key = f"{_AC}mode", f"{_AC}selective_ac_option"
    mode, says = one_word(reader, mode_key, ("none", "full", "selective", "memory_budget"), "selective")
    said = reader.settings[option_key].value if reader.has(option_key) else "2"
    reader.taken.add(option_key)
    option = str(said)
    kind = {"none": Checkpointing.NONE, "memory_budget": Checkpointing.NONE}.get(mode, Checkpointing.FULL)
    if mode == "selective" and option == "op":
        kind = Checkpointing.OPS
    if mode == "memory_budget":
        reader.unknown(mode_key, "what a memory budget recomputes, torch.compile decides: it is counted as nothing")
    shapes = f"{_AC}per_op_sac_force_recompute_mm_shapes_by_fqns"
    reader.ignore(shapes, "more products are recomputed than is counted", less=True)
    reader.ignore(f"{_AC}memory_budget", "of the mode memory_budget")
    reader.put_or_assume("checkpointing", kind, mode_key, f"{source}.mode", says=says)
    if mode != "selective" or option == "op":
        return
    if not option.isdigit():
        reader.wrong(option_key, f"{option_key} is {shown(said)}: 'op' or a whole number is expected")
        return
    each, model = int(option), reader.values.get("model")
    if each > 1 and model is not None and reader.has(option_key):
        reader.put("checkpoint_layers", model.layers // each, option_key)
    elif each > 1 and model is not None:
        reader.assume("checkpoint_layers", model.layers // each, option_key, f"{source}.selective_ac_option")
    elif each > 1:
        reader.unknown(option_key if reader.has(option_key) else mode_key, "how many layers that are, the model says")


def _loss_and_kernels(reader: JobReader) -> None:
    whole = reader.take(_LOSS, bool) or reader.take("training.disable_loss_parallel", bool)
    if (enabled := reader.take("training.enable_loss_parallel", bool)) is not None:
        whole = whole or not enabled
    source = f"{_REPO}: torchtitan/components/loss.py, cross_entropy_loss"
    parallel = reader.values["tp"] > 1 and not whole
    loss = Loss.VOCAB_PARALLEL if parallel else Loss.UPCAST
    source = f"{_PARALLELIZE}, apply_tp" if parallel else source
    reader.put_or_assume("loss", loss, _LOSS, source, says=reader.has(_LOSS))
    if reader.take(_OFFLOAD, bool):
        for name in ("offload_parameters", "offload_optimizer"):
            reader.put(name, True, _OFFLOAD)
        if reader.values.get("sharding") is not Sharding.FSDP2:
            reader.ignore(_OFFLOAD, "FSDP alone offloads, and nothing is sharded here")
            reader.values.update(offload_parameters=False, offload_optimizer=False)
    compiled, old = reader.take("compile.enable", bool), reader.take("training.compile", bool)
    parts = reader.take("compile.components", list)
    if compiled is not None or old is not None:
        key = "compile.enable" if compiled is not None else "training.compile"
        reader.put("compiled", bool(compiled or old) and (parts is None or "model" in parts), key)
        if parts is not None and "loss" not in parts:
            reader.put("sizes", {"compile_loss": 0}, "compile.components")
    _float8(reader)


def _float8(reader: JobReader) -> None:
    said = reader.settings[CONVERTERS].value if reader.has(CONVERTERS) else []
    reader.taken.add(CONVERTERS)
    converters = said.split(",") if isinstance(said, str) else said if isinstance(said, list) else []
    switches = ("float8.enable_float8_linear", "training.enable_float8_linear", "training.enable_fp8_linear")
    switch = next((key for key in switches if reader.take(key, bool)), None)
    names = [str(each).rpartition(".")[2] for each in converters]
    if switch is not None or "float8" in names:
        reader.put("fp8", True, switch or CONVERTERS)
    if others := [each for each in names if each not in ("", "float8")]:
        reader.unknown(CONVERTERS, f"converters that are not known here: {', '.join(others)}")


# phrases

_SIMPLE = {
    "seq_len": "training.seq_len",
    "tp": TP,
    "pp": f"{PP}degree",
    "cp": CONTEXT,
    "offload_parameters": _OFFLOAD,
    "offload_optimizer": _OFFLOAD,
    "optimizer_in_backward": _EARLY_STEP,
}
_IMPLEMENTATIONS = {"adamw-fused": "fused", "adamw": "foreach", "adamw-foreach-off": "for-loop"}


def _phrase(job: Job, field: str, value: Any) -> str | None:
    pairs = _pairs(job, field, value)
    return None if pairs is None else toml_said(*[(_own_name(job, key), each) for key, each in pairs])


def _own_name(job: Job, key: str) -> str:
    """Return a setting's name in the version that the file is of: an older one if the file has older names."""
    found = {each.key for each in job.origins.values() if not each.default}
    olders = [old for old, new in RENAMED.items() if new == key]
    return next((old for old in olders if old in found), olders[0] if olders and found & RENAMED.keys() else key)


def _pairs(job: Job, field: str, value: Any) -> list[tuple[str, Any]] | None:
    devices = job.origins.get("devices")
    if field == "cp" and job.devices is not None and devices is not None and devices.key != "--devices":
        shard = max(1, job.devices // (job.tp * job.pp * value))  # the degrees make up the devices
        return [(CONTEXT, value), (SHARD, shard)]
    if field in _SIMPLE:
        offloads = _SIMPLE[field] == _OFFLOAD and value
        return None if offloads and job.sharding is not Sharding.FSDP2 else [(_SIMPLE[field], value)]
    if field == "micro_batch_size":
        return _batch_pairs(job, int(value), job.gradient_accumulation)
    if field == "gradient_accumulation":
        return _batch_pairs(job, job.micro_batch_size, int(value))
    if field == "checkpointing":
        words = {Checkpointing.FULL: "full", Checkpointing.NONE: "none", Checkpointing.OPS: "selective"}
        if value not in words:
            return None
        option = [(f"{_AC}selective_ac_option", "op")] if value is Checkpointing.OPS else []
        return [(f"{_AC}mode", words[value]), *option]
    if field == "optimizer" and value in _IMPLEMENTATIONS:
        if getattr(job.origins.get("optimizer"), "key", "") == "optimizer.fused":
            return [("optimizer.fused", value == "adamw-fused")] if value != "adamw-foreach-off" else None
        return [("optimizer.implementation", _IMPLEMENTATIONS[value])]
    if field == "sharding" and job.dp is not None:
        if value is Sharding.FSDP2:
            return [(SHARD, job.dp), (REPLICATE, 1)]
        return [(SHARD, 1), (REPLICATE, job.dp)] if value is Sharding.DDP and job.model_ranks == 1 else None
    if field == "loss" and job.tp > 1 and value in (Loss.VOCAB_PARALLEL, Loss.UPCAST):
        return [(_LOSS, value is Loss.UPCAST)]
    if field == "compiled":
        old = getattr(job.origins.get("compiled"), "key", "") == "training.compile"
        return [("training.compile" if old else "compile.enable", value)]
    return None


def _batch_pairs(job: Job, size: int | None, times: int | None) -> list[tuple[str, Any]] | None:
    """Return what makes micro-batches of `size` sequences, `times` a step and device."""
    if size is None:
        return None
    pairs: list[tuple[str, Any]] = [(LOCAL, size)] if job.pp == 1 else [(EACH, size)]
    if job.dp is not None and times is not None:
        pairs.append((WHOLE, size * times * job.dp))
        if job.pp > 1:
            pairs.append((LOCAL, size * times))
    elif times is not None and times != 1:
        return None  # the global batch counts devices, which are not known
    return pairs


TORCHTITAN_JOB = SettingsFormat("torchtitan", "torchtitan", _recognises, _read, _phrase)
