"""DeepSpeed: its ds_config.json, as of 2025."""

from __future__ import annotations

import json

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.ratrain_ir.frontend.text import Source, json_places
from ratrain.ratrainc.bridge.settings import (
    Framework,
    Rule,
    Setting,
    SettingsReader,
    flat,
    one_of,
    put_batch,
    put_clip,
    put_ranks,
    put_seq_len,
)

_WHOLE, _MICRO, _TIMES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
_STAGE, _GROUP, _VIEWS, _SUM_TYPE = (
    "zero_optimization.stage",
    "zero_optimization.mics_shard_size",
    "zero_optimization.zero_hpz_partition_size",
    "data_types.grad_accum_dtype",
)
_TYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


def _all(why: str, prefix: str, names: str) -> dict[str, Rule]:
    return {prefix + name: Rule("", why) for name in names.split()}


RULES: dict[str, Rule] = {
    _WHOLE: Rule("micro_batches", "with the two below: of the three, two say the third"),
    _MICRO: Rule("micro_batch_size", "as it is"),
    _TIMES: Rule("micro_batches", "as it is"),
    "pipeline.stages": Rule("pp", "a number; else --pp says it, as the model's code does"),
    "tensor_parallel.autotp_size": Rule("tp", "as it is"),
    "gradient_clipping": Rule("clip, max_norm", "global; none where 0", 0.0),
    _STAGE: Rule("zero, reduce", "as it is; each-micro-batch from 2 on", 0),
    _GROUP: Rule("shard_group", "with stage 3"),
    _VIEWS: Rule("view_group", "with stage 3", 1),
    "bf16.enabled": Rule("view_dtype", "bf16"),
    "fp16.enabled": Rule("view_dtype", "f16; f32 without either"),
    "fp16.loss_scale": Rule("loss_scale", "dynamic where 0, or left out", 0.0),
    _SUM_TYPE: Rule("grad_shard_dtype, grad_dtype", "of shards; without ZeRO of whole gradients"),
    "optimizer.type": Rule("optimizer", "Adam, AdamW, FusedAdam; others are named"),
    "optimizer.params.lr": Rule("lr", "as it is"),
    "optimizer.params.betas": Rule("betas", "as it is", [0.9, 0.999]),
    "optimizer.params.eps": Rule("eps", "as it is", 1e-8),
    "optimizer.params.weight_decay": Rule("weight_decay", "as it is"),
    "scheduler.type": Rule("total_steps, min_lr", "WarmupLR: neither; WarmupCosineLR; others are named"),
    "scheduler.params.warmup_num_steps": Rule("warmup_steps", "with a scheduler that is known"),
    "scheduler.params.total_num_steps": Rule("total_steps", "with WarmupCosineLR"),
    "scheduler.params.cos_min_ratio": Rule("min_lr", "with WarmupCosineLR: of lr", 0.0001),
    "scheduler.params.warmup_max_lr": Rule("lr", "with WarmupLR: where it is the optimizer's"),
    "scheduler.params.warmup_type": Rule(
        "warmup_steps", "linear; of others the warm-up is linear here, and they are named", "log"
    ),
    **_all(
        "the warm-up begins at the first step's share of the learning rate",
        "scheduler.params.",
        "warmup_min_lr warmup_min_ratio",
    ),
    **_all(
        "communication beside compute is the compiler's placement: nothing to switch on",
        "zero_optimization.",
        "overlap_comm contiguous_gradients reduce_scatter",
    ),
    **_all(
        "pieces and look-ahead of communication are the compiler's choice",
        "zero_optimization.",
        "allgather_partitions allgather_bucket_size reduce_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_max_live_parameters stage3_max_reuse_distance sub_group_size round_robin_gradients",
    ),
    **_all(
        "state has the homes that the compiler gives it",
        "zero_optimization.",
        "offload_optimizer.device offload_optimizer.pin_memory offload_param.device offload_param.pin_memory cpu_offload",
    ),
    **_all(
        "'export-weights' writes weights of a checkpoint",
        "zero_optimization.",
        "stage3_gather_16bit_weights_on_model_save",
    ),
    **_all(
        "a dynamic loss scale starts and adapts by rules of ratrain",
        "fp16.",
        "initial_scale_power loss_scale_window hysteresis min_loss_scale consecutive_hysteresis auto_cast",
    ),
    **_all(
        "'recompute{policy=...}' among the passes says what is computed again",
        "activation_checkpointing.",
        "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary profile",
    ),
    **_all(
        "of logs and measurements: 'run' is given places for them",
        "",
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown",
    ),
    **_all(
        "gradients are reduced in the type that they have",
        "",
        "communication_data_type prescale_gradients gradient_predivide_factor",
    ),
}


def _settings(file: str, text: str) -> dict[str, Setting]:
    source = Source(file, text)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        place = source.at(error.lineno, error.colno) if isinstance(error, json.JSONDecodeError) else source.top()
        fail("RT063", f"the file is not usable JSON: {error}", place.location, source=place.source)
    if not isinstance(data, dict):
        fail("RT063", "a ds_config is a JSON object", source.top().location)
    places, repeated = json_places(source)
    for name, _, later in repeated:
        fail("RT064", f"{name} is said twice", later.location, source=later.source, help="leave one of them")
    return {name: Setting(value, places(name.split(".")[0])) for name, value in flat(data)}


def _read(reader: SettingsReader) -> None:
    for name, setting in reader.settings.items():
        if setting.value == "auto":
            reader.leave(name, "'auto' is filled in by what calls DeepSpeed")
    for name in reader.taken:  # as if the file did not have them
        del reader.settings[name]
    pp = one_of(reader, "pipeline.stages", reader.size("pipeline.stages"), reader.asked.pp, "--pp")
    tp = reader.size("tensor_parallel.autotp_size") or 1
    reader.put("pp", pp, "pipeline.stages")
    if tp > 1:
        reader.put("tp", tp, "tensor_parallel.autotp_size")
        reader.put("sequence_sharding", False, "tensor_parallel.autotp_size")
    whole, micro, times = (reader.size(name) for name in (_WHOLE, _MICRO, _TIMES))
    world = None
    if reader.asked.clusters is None and whole and micro and times:
        if whole % (micro * times):
            reader.wrong(_WHOLE, f"{_WHOLE} {whole} is not a multiple of {_MICRO} {micro} * {_TIMES} {times}")
            return
        world = whole // (micro * times) * tp * pp
    dp = put_ranks(reader, world, _WHOLE, ("tensor peers", tp), ("stages", pp))
    reader.carry("dp", dp, _WHOLE)
    _batch(reader, whole, micro, times, dp)
    put_seq_len(reader, None)
    put_clip(reader, "gradient_clipping")
    _state(reader)
    _optimizer(reader)
    _schedule(reader)


def _batch(reader: SettingsReader, whole: int | None, micro: int | None, times: int | None, dp: int | None) -> None:
    """What DeepSpeed makes of the three sizes, any of which may be missing."""
    if dp is None:
        return
    if whole is None and micro is None:
        reader.wrong("", f"neither {_WHOLE} nor {_MICRO} is said")
        return
    if micro is None and whole is not None:
        if whole % (dp * (times or 1)):
            reader.wrong(_WHOLE, f"{_WHOLE} {whole} is not a multiple of {_TIMES} {times or 1} * {dp} replicas")
            return
        micro = whole // (dp * (times or 1))
    implied = None if micro is None or times is None else micro * times * dp
    if whole is not None and implied is not None and whole != implied:
        text = f"{_WHOLE} {whole} is not {_MICRO} {micro} * {_TIMES} {times} * {dp} replicas = {implied}"
        reader.wrong(_WHOLE, text, way_out="leave one of the three out, or give another --clusters")
        return
    put_batch(reader, (_MICRO, micro), (_WHOLE, whole if whole is not None else implied), dp)
    if times is not None:
        reader.put("micro_batches", times, _TIMES)


def _state(reader: SettingsReader) -> None:
    zero = reader.integer(_STAGE)
    reader.carry("zero", zero, _STAGE)
    reader.put("reduce", "each-micro-batch" if (zero or 0) > 1 else "last", _STAGE)
    group = reader.integer(_GROUP)
    if group is not None and group > 0 and zero == 3 and group != reader.values.get("dp"):
        reader.put("shard_group", group, _GROUP)
    elif group is not None:
        reader.leave(_GROUP, "all replicas share out state")
    views = reader.integer(_VIEWS)
    if (
        views is not None
        and views > 1
        and zero == 3
        and views != (reader.values.get("shard_group") or reader.values.get("dp"))
    ):
        reader.put("view_group", views, _VIEWS)
    elif views is not None:
        reader.leave(_VIEWS, "views are gathered from all that have shards")
    bf16, fp16 = reader.flag("bf16.enabled"), reader.flag("fp16.enabled")
    if bf16 and fp16:
        reader.wrong("fp16.enabled", "bf16 and fp16 exclude one another")
    reader.put("view_dtype", "bf16" if bf16 else "f16" if fp16 else "f32", "bf16.enabled", "fp16.enabled")
    if fp16:
        reader.put("loss_scale", reader.number("fp16.loss_scale") or "dynamic", "fp16.loss_scale")
    sums = reader.word(_SUM_TYPE)
    if sums in _TYPES:
        sharded = zero and (reader.values.get("dp") or 1) > 1
        reader.put("grad_shard_dtype" if sharded else "grad_dtype", _TYPES[sums], _SUM_TYPE)
    elif sums is not None:
        reader.wrong(_SUM_TYPE, f"{_SUM_TYPE} is '{sums}': one of {', '.join(_TYPES)} is expected", code="RT063")


def _optimizer(reader: SettingsReader) -> None:
    kind = reader.word("optimizer.type")
    if kind is None:
        return
    if kind.lower() not in ("adam", "adamw", "fusedadam"):
        reader.leave("optimizer.type", "ratrain trains with AdamW: of this optimizer nothing is carried over")
        return
    for key in ("lr", "eps", "weight_decay"):
        reader.carry(key, reader.number(f"optimizer.params.{key}"), f"optimizer.params.{key}")
    reader.carry("betas", reader.items("optimizer.params.betas"), "optimizer.params.betas")


def _schedule(reader: SettingsReader) -> None:
    kind = reader.word("scheduler.type")
    if kind is None:
        return
    params = "scheduler.params."
    if kind not in ("WarmupLR", "WarmupCosineLR"):
        reader.leave(
            "scheduler.type",
            "the learning rate of a plan is constant or a cosine, after a linear warm-up: it stays at lr",
        )
    reader.carry("warmup_steps", reader.integer(f"{params}warmup_num_steps"), f"{params}warmup_num_steps")
    if reader.word(f"{params}warmup_type") != "linear":
        reader.leave(f"{params}warmup_type", "the warm-up of a plan is linear")
    highest = reader.number(f"{params}warmup_max_lr")
    if highest is not None and kind == "WarmupLR" and "lr" not in reader.values:
        reader.put("lr", highest, f"{params}warmup_max_lr")
    elif highest is not None and highest != reader.values.get("lr"):
        reader.wrong(
            f"{params}warmup_max_lr",
            f"warmup_max_lr {highest} contradicts the optimizer's lr {reader.values.get('lr')}",
        )
    if kind == "WarmupCosineLR":
        reader.carry("total_steps", reader.size(f"{params}total_num_steps"), f"{params}total_num_steps")
        ratio = reader.number(f"{params}cos_min_ratio")
        if "total_steps" not in reader.values:
            reader.leave(
                "scheduler.type", "without total_num_steps the cosine has no end: the learning rate stays at lr"
            )
            reader.leave(f"{params}cos_min_ratio", "without a cosine the learning rate stays at lr")
        elif ratio is not None and "lr" in reader.values:
            reader.put("min_lr", ratio * reader.values["lr"], f"{params}cos_min_ratio")


DEEPSPEED = Framework("DeepSpeed", "a ds_config of DeepSpeed", _settings, RULES, _read)
