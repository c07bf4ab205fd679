"""torchtitan: its TOML of a job, as of 2025."""

from __future__ import annotations

import re
from typing import Any

from ratrain.ratrain_ir.frontend.text import Source, toml_places
from ratrain.ratrain_ir.frontend.toml_text import toml_data
from ratrain.ratrainc.bridge.settings import (
    Framework,
    Rule,
    Setting,
    SettingsReader,
    flat,
    put_batch,
    put_clip,
    put_ranks,
    put_seq_len,
)

SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "breadth-first",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
"""Names of schedules of torch.distributed.pipelining, and of a plan."""
TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_PP = "parallelism.pipeline_parallel_"
_SHARD, _REPLICATE = (f"parallelism.data_parallel_{what}_degree" for what in ("shard", "replicate"))
_RESHARD, _PARTS, _POINTS = (
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.module_fqns_per_model_part",
    f"{_PP}split_points",
)
_CONTEXT = "parallelism.context_parallel_degree"
_VIEW, _REDUCE = "training.mixed_precision_param", "training.mixed_precision_reduce"
_SEEDS = ("debug.seed", "training.seed")


def _all(why: str, section: str, names: str) -> dict[str, Rule]:
    return {f"{section}.{name}": Rule("", why) for name in names.split()}


RULES: dict[str, Rule] = {
    f"{_PP}degree": Rule("pp", "as it is", 1),
    "parallelism.tensor_parallel_degree": Rule("tp", "as it is, with sequence_sharding", 1),
    _REPLICATE: Rule("dp, shard_group", "replicas of groups that share out state", 1),
    _SHARD: Rule("dp, zero, shard_group", "1: ZeRO 0; -1: of all ranks, which --clusters says", -1),
    _RESHARD: Rule(
        "zero", "always: 3; never: 2, and 1 in a pipeline; default: never in a pipeline, else always", "default"
    ),
    _CONTEXT: Rule("dp", "1; with more, its ranks are left out: sequences are not shared out over ranks", 1),
    f"{_PP}schedule": Rule("schedule, chunks", f"{', '.join(SCHEDULES)}; others are named", "1F1B"),
    f"{_PP}microbatch_size": Rule("micro_batch_size", "in a pipeline", 1),
    _PARTS: Rule("cuts, chunks", "where its layers begin"),
    _POINTS: Rule("cuts, chunks", "of older versions: where its layers begin"),
    f"{_PP}layers_per_stage": Rule("", "how many chunks that makes depends on the model: say chunks in the plan"),
    f"{_PP}first_stage_less_layers": Rule("", 'cuts = "auto" weighs the embedding'),
    f"{_PP}last_stage_less_layers": Rule("", 'cuts = "auto" weighs the head'),
    f"{_PP}schedule_csv": Rule("", "'compile --schedule-file' takes it"),
    "training.local_batch_size": Rule("micro_batch_size", "without a pipeline; in one, of a step of a replica", 8),
    "training.global_batch_size": Rule(
        "micro_batches", "by micro_batch_size and dp; -1: one local batch of each replica", -1
    ),
    "training.seq_len": Rule("seq_len", "as it is", 2048),
    "training.max_norm": Rule("clip, max_norm", "global; none where 0", 1.0),
    "training.steps": Rule("total_steps", "with a cosine; else 'run --steps'", 10000),
    _SEEDS[0]: Rule("seed", "as it is"),
    _SEEDS[1]: Rule("seed", "of older versions: as it is"),
    _VIEW: Rule("view_dtype", "as it is", "bfloat16"),
    _REDUCE: Rule(
        "grad_dtype, grad_shard_dtype",
        "of shards, and in a pipeline of whole gradients; with ZeRO 0 it is f32",
        "float32",
    ),
    "optimizer.name": Rule("optimizer", "AdamW; others are named", "AdamW"),
    "optimizer.lr": Rule("lr", "as it is", 8e-4),
    "optimizer.beta1": Rule("betas", "the first", 0.9),
    "optimizer.beta2": Rule("betas", "the second", 0.95),
    "optimizer.eps": Rule("eps", "as it is", 1e-8),
    "optimizer.weight_decay": Rule("weight_decay", "as it is", 0.1),
    "lr_scheduler.warmup_steps": Rule("warmup_steps", "as it is", 200),
    "lr_scheduler.decay_ratio": Rule(
        "total_steps", "0: a constant rate; left out: to the end of steps; others are named"
    ),
    "lr_scheduler.decay_type": Rule("total_steps", "cosine; others are named, and the rate stays at lr", "linear"),
    "lr_scheduler.min_lr_factor": Rule("min_lr", "with a cosine: of lr", 0.0),
    "activation_checkpoint.mode": Rule("passes", "full: recompute{policy=full}; others are named", "selective"),
    **_all(
        "of the model: its config.json says it (--model)",
        "model",
        "name flavor hf_assets_path tokenizer_path converters",
    ),
    **_all("of the data: 'run' is given it", "training", "dataset dataset_path"),
    **_all("how this process is run changes no plan", "training", "gc_freq gc_debug deterministic"),
    **_all("state has the homes that the compiler gives it", "training", "enable_cpu_offload"),
    **_all("master weights are f32", "training", "dtype"),
    **_all("of the job: it changes no plan", "job", "dump_folder description print_args config_file"),
    **_all(
        "communication beside compute is the compiler's placement: nothing to switch on",
        "parallelism",
        "enable_async_tensor_parallel",
    ),
    **_all("the head of tensor peers is shared out in any case", "parallelism", "disable_loss_parallel"),
    **_all(
        "experts, which the models here do not have",
        "parallelism",
        "expert_parallel_degree expert_tensor_parallel_degree",
    ),
    **_all("which kernels compute is said to 'run' (--kernels)", "optimizer", "implementation"),
    **_all("which kernels compute is said to 'run' (--kernels)", "compile", "enable components"),
    **_all("'recompute{policy=auto}' chooses what is computed again", "activation_checkpoint", "selective_ac_option"),
}


def _settings(file: str, text: str) -> dict[str, Setting]:
    source = Source(file, text)
    places = toml_places(source)
    return {name: Setting(value, places(name)) for name, value in flat(toml_data(source, "RT063"))}


def _read(reader: SettingsReader) -> None:
    pp, tp = reader.size(f"{_PP}degree") or 1, reader.size("parallelism.tensor_parallel_degree") or 1
    reader.put("pp", pp, f"{_PP}degree")
    if tp > 1:
        reader.put("tp", tp, "parallelism.tensor_parallel_degree")
    dp, shard = _replicas(reader, pp, tp)
    if dp is None or shard is None:
        return
    reader.put("dp", dp, _SHARD, _REPLICATE)
    if 1 < shard < dp:
        reader.put("shard_group", shard, _SHARD)
    if pp > 1:
        _schedule_and_cuts(reader, pp)
    _batch(reader, pp, dp)
    put_seq_len(reader, "training.seq_len")
    put_clip(reader, "training.max_norm")
    seeds = [name for name in _SEEDS if reader.has(name)]
    if len({reader.settings[name].value for name in seeds}) > 1:
        reader.wrong(seeds[1], f"{seeds[1]} contradicts {seeds[0]}")
    for name in seeds:
        reader.carry("seed", reader.integer(name), name)
    _state(reader, pp, sharded=shard > 1)
    _optimizer(reader)
    _recompute(reader)


def _replicas(reader: SettingsReader, pp: int, tp: int) -> tuple[int | None, int | None]:
    """The replicas, and how many of them have all shards between them."""
    replicas, shard, context = reader.size(_REPLICATE) or 1, reader.integer(_SHARD), reader.size(_CONTEXT) or 1
    if context > 1:
        reader.leave(_CONTEXT, f"sequences are not shared out over ranks: of {context} ranks the plan has one")
    if shard == 0:
        reader.wrong(_SHARD, f"{_SHARD} is 0: at least 1, or -1, is expected")
    said = None if shard is None or shard < 1 else shard
    world = None if said is None else said * replicas * pp * tp * context
    dp = put_ranks(
        reader,
        world,
        _SHARD,
        ("stages", pp),
        ("tensor peers", tp),
        ("replicas", replicas),
        ("context-parallel ranks", context),
    )
    return (None, None) if dp is None else (dp * replicas, dp)


def _schedule_and_cuts(reader: SettingsReader, pp: int) -> None:
    name = reader.word(f"{_PP}schedule") or "1F1B"
    known = {word.lower(): schedule for word, schedule in SCHEDULES.items()}
    schedule = known.get(name.lower())
    if schedule is None:
        reader.leave(
            f"{_PP}schedule", "no schedule that is known here: the strategy, or a schedule of the plan, places another"
        )
    else:
        reader.put("schedule", schedule, f"{_PP}schedule")
    parts, points = reader.items(_PARTS), reader.items(_POINTS)
    if parts is not None and points is not None:
        reader.wrong(_POINTS, f"{_POINTS} and {_PARTS} exclude one another")
        return
    said = parts if parts is not None else points
    if said is None:
        return
    place = _PARTS if parts is not None else _POINTS
    starts = [_first_layer(part) for part in said[1:]] if parts is not None else [_first_layer([part]) for part in said]
    count = len(starts) + 1
    if None in starts:
        reader.leave(place, "a part of it has no layer: 'cuts' of the plan says where stages start")
    elif count % pp:
        reader.wrong(place, f"{count} parts cannot be shared out evenly over {pp} stages")
    else:
        reader.put("cuts", starts, place)
        if count > pp:
            reader.put("chunks", count // pp, place)


def _first_layer(part: Any) -> int | None:
    """The first layer of a list of modules; None where there is none."""
    names = [name for name in part if isinstance(name, str)] if isinstance(part, list) else []
    layers = [int(match[1]) for name in names if (match := re.fullmatch(r"layers\.(\d{1,6})", name))]
    return min(layers, default=None)


def _batch(reader: SettingsReader, pp: int, dp: int) -> None:
    local, whole = reader.size("training.local_batch_size") or 1, reader.integer("training.global_batch_size")
    micro_name = f"{_PP}microbatch_size" if pp > 1 else "training.local_batch_size"
    micro = reader.size(micro_name)
    if whole is None or whole < 1:
        whole = local * dp
    if whole % (local * dp):
        reader.wrong(
            "training.global_batch_size",
            f"{whole} sequences are no multiple of local_batch_size {local} * {dp} replicas",
        )
        return
    put_batch(reader, (micro_name, micro), ("training.global_batch_size", whole), dp)
    if pp > 1 and whole != local * dp:
        reader.leave(
            "training.local_batch_size", f"the pipeline is filled once a step, not {whole // (local * dp)} times"
        )


def _state(reader: SettingsReader, pp: int, *, sharded: bool) -> None:
    said = reader.word(_RESHARD)
    if said not in ("default", "always", "never"):
        reader.wrong(_RESHARD, f"{_RESHARD} is '{said}': default, always or never is expected", code="RT063")
    if not sharded:
        reader.leave(_RESHARD, "with one replica a shard group, parameters are whole")
        reader.put("zero", 0, _SHARD)
        reader.put("reduce", "last", _SHARD)
    else:
        resharded = said == "always" or (said == "default" and pp == 1)
        reader.put("zero", 3 if resharded else 2 if pp == 1 else 1, _RESHARD, _SHARD)
        # in a pipeline gradients are whole until the last micro-batch; else each backward reduces
        reader.put("reduce", "last" if pp > 1 else "each-micro-batch", _SHARD)
    types = {}
    for name in (_VIEW, _REDUCE):
        word = reader.word(name)
        if word not in TYPES:
            reader.wrong(name, f"{name} is '{word}': one of {', '.join(TYPES)} is expected", code="RT063")
            return
        types[name] = TYPES[word]
    reader.put("view_dtype", types[_VIEW], _VIEW)
    reader.put("loss_scale", 1.0, _VIEW)
    if not sharded:
        reader.put("grad_dtype", "f32", _VIEW)
        reader.leave(_REDUCE, "without shards gradients are f32")
    else:
        reader.put("grad_dtype", types[_REDUCE if pp > 1 else _VIEW], _REDUCE, _VIEW)
        reader.put("grad_shard_dtype", types[_REDUCE], _REDUCE)


def _optimizer(reader: SettingsReader) -> None:
    if reader.word("optimizer.name") != "AdamW":
        reader.leave("optimizer.name", "ratrain trains with AdamW")
    for key in ("lr", "eps", "weight_decay"):
        reader.carry(key, reader.number(f"optimizer.{key}"), f"optimizer.{key}")
    betas = [reader.number(f"optimizer.beta{n}") for n in (1, 2)]
    if None not in betas:
        reader.put("betas", betas, "optimizer.beta1", "optimizer.beta2")
    reader.carry("warmup_steps", reader.integer("lr_scheduler.warmup_steps"), "lr_scheduler.warmup_steps")
    kind, ratio = reader.word("lr_scheduler.decay_type"), reader.number("lr_scheduler.decay_ratio")
    steps, factor = reader.size("training.steps"), reader.number("lr_scheduler.min_lr_factor")
    if kind == "cosine" and ratio is None and steps is not None:
        reader.put("total_steps", steps, "training.steps")
        if factor:
            reader.put("min_lr", factor * reader.values.get("lr", 0.0), "lr_scheduler.min_lr_factor")
        return
    reader.leave("training.steps", "how long a run is, is said to 'run --steps'")
    if ratio == 0:
        for name in ("lr_scheduler.decay_type", "lr_scheduler.min_lr_factor"):
            reader.leave(name, "with decay_ratio 0 the learning rate stays at lr")
        return
    for name in ("lr_scheduler.decay_type", "lr_scheduler.decay_ratio", "lr_scheduler.min_lr_factor"):
        reader.leave(
            name, "the learning rate of a plan is constant, or a cosine from warm-up to the last step: it stays at lr"
        )


def _recompute(reader: SettingsReader) -> None:
    mode = reader.word("activation_checkpoint.mode")
    if mode == "full":
        reader.passes.append("recompute{policy=full}")
    elif mode != "none":
        reader.leave("activation_checkpoint.mode", "'recompute{policy=auto}' chooses what is computed again")


TORCHTITAN = Framework("torchtitan", "a job's TOML of torchtitan", _settings, RULES, _read)
