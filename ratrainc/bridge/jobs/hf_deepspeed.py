"""DeepSpeed under the Trainer: a ds_config whose "auto" values transformers fills in, and its state on a device.

`"auto"` becomes the training arguments' value for batch, clipping, optimizer and type
(HfTrainerDeepSpeedConfig.trainer_config_process), and a function of the model's width for three buckets
(trainer_config_finalize). DeepSpeed drops any other "auto", and its default holds (DeepSpeedConfigModel). A value that
is not "auto" and contradicts the training arguments is refused, as transformers does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen

from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.bridge.deepspeed_rules import (
    BF16,
    CLIP,
    FP16,
    GROUP,
    MICRO,
    OPTIMIZER,
    OPTIMIZERS,
    PARAMS,
    SIZES,
    STAGE,
    SUM_TYPE,
    TIMES,
    TYPES,
    VIEWS,
    WHOLE,
    ZERO,
)
from ratrain.ratrainc.bridge.jobs.hf_reader import DEEPSPEED, HfReader, Said
from ratrain.ratrainc.bridge.jobs.job import ZERO_STAGES, Origin
from ratrain.ratrainc.bridge.jobs.job_common import note_ratio
from ratrain.ratrainc.bridge.reasons import OF_TRAINING
from ratrain.ratrainc.bridge.settings import as_number

WHAT = "a ds_config of DeepSpeed"
ZERO_CONFIG = "deepspeed deepspeed/runtime/zero/config.py, DeepSpeedZeroConfig"
FILLED = "transformers src/transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig"
PLUGIN = "accelerate src/accelerate/utils/dataclasses.py, DeepSpeedPlugin"

_TABLE = f"{ZERO}."
_SIZES = {name.removeprefix(_TABLE): size for name, size in SIZES.items() if name != f"{_TABLE}overlap_comm"}
_SIZES["sub_group_size"] = _SIZES.pop("sub_group_size")  # last: the first size of a file is named as the place of all
_OPTIMIZERS = {**OPTIMIZERS, "sgd": "sgd"}
_MISMATCH = "transformers refuses a ds_config that contradicts the training arguments"
INLINE: Mapping[str, str] = {
    STAGE: "zero_stage",
    f"{_TABLE}offload_optimizer.device": "offload_optimizer_device",
    f"{_TABLE}offload_param.device": "offload_param_device",
    TIMES: "gradient_accumulation_steps",
    CLIP: "gradient_clipping",
}
"""Names of accelerate's own `deepspeed_config`, which has a few settings in place of a file."""

INERT: Mapping[str, str] = {
    r"zero_optimization\.(stage3_)?gather_(16bit|fp16)_weights_on_model_save": "of saving",
    r"zero_optimization\.(reduce_scatter|allgather_partitions|use_multi_rank_bucket_allreduce|round_robin_gradients"
    r"|ignore_unused_parameters|memory_efficient_linear|elastic_checkpoint|load_from_fp32_weights)": "of the order of "
    "communication and of checking: it holds nothing",
    r"zero_optimization\.(stage3_)?(model_persistence_threshold|module_granularity_threshold"
    r"|allgather_sequential)": "of which weights are gathered together; at most what max_live_parameters says",
    r"zero_optimization\.offload_(optimizer|param)\.(pin_memory|buffer_count|buffer_size|fast_init|nvme_path|max_in_cpu"
    r"|pipeline_read|pipeline_write)": "of the host's memory",
    r"(fp16|bf16)\.(loss_scale|loss_scale_window|initial_scale_power|hysteresis|min_loss_scale|auto_cast"
    r"|consecutive_hysteresis)": "a loss scale is one number",
    r"(optimizer|scheduler)\.params\..*": OF_TRAINING,
    r"scheduler\.type": OF_TRAINING,
    r"activation_checkpointing\..*": "models of transformers checkpoint by themselves",
    r"(steps_per_print|wall_clock_breakdown|dump_state|memory_breakdown|flops_profiler\..*|tensorboard\..*|wandb\..*"
    r"|csv_monitor\..*|comms_logger\..*)": "of logs",
    r"(zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|checkpoint\..*|aio\..*)": "of files, and of which "
    "optimizers pass",
    r"(prescale_gradients|gradient_predivide_factor)": "gradients are scaled in place",
}
"""Settings of a ds_config that change no byte of a device."""


@frozen
class Arguments:
    """Training arguments that fill in "auto", and must agree otherwise: value and setting each."""

    micro: Said
    times: Said
    norm: Said
    mixed: Said
    """type of mixed precision: bf16, f16 or None"""
    fills: bool = True
    """false if there are none, and the ds_config itself says the type"""


def put_deepspeed(reader: HfReader, arguments: Arguments, inline: str = "") -> None:
    """Set what DeepSpeed shards, offloads and holds, from the settings under `deepspeed.`.

    `inline` is the prefix of accelerate's own table, if the settings are there.
    """

    def at(name: str) -> str:
        if inline:
            return f"{inline}{INLINE[name]}" if name in INLINE else name
        return f"{DEEPSPEED}{name}"

    reader.engine = True
    if not inline and not any(True for _ in reader.under(at(ZERO))):
        text = "the ds_config has no zero_optimization, without which accelerate refuses it"
        reader.wrong("deepspeed", text, way_out='add "zero_optimization": {"stage": 2}')
        return
    stage = _stage(reader, at, inline)
    _put_offload(reader, at, stage)
    _check_batch(reader, at, arguments)
    if arguments.fills:
        _check_type(reader, at, arguments)
    for name, field in ((SUM_TYPE, "gradient_dtype"), ("communication_data_type", "reduce_dtype")):
        _put_type(reader, at(name), field)
    _put_sizes(reader, at, stage)
    _put_own_optimizer(reader, at)
    _note_groups(reader, at, stage)


def _auto(reader: HfReader, key: str) -> bool:
    """Tell whether a setting is "auto" or left out; both are filled in."""
    return not reader.has(key) or reader.settings[key].value == "auto"


def _stage(reader: HfReader, at: Callable[[str], str], inline: str) -> int:
    key = at(STAGE)
    if reader.has(at(ZERO)):  # of old files: true was stage 1
        key = at(ZERO)
        said = Said(int(reader.truth(key)), key)
    elif inline:
        said = reader.said(key, int, 2, f"{PLUGIN}.zero_stage")
    else:
        said = reader.said(key, int, 0, f"{ZERO_CONFIG}.stage")
    if not 0 <= said.value <= 3:
        reader.wrong(key, f"{reader.own(key)} is {said.value}: 0 to 3 is expected")
        return 0
    reader.lay("sharding", Said(ZERO_STAGES[said.value], said.key, said.source))
    return int(said.value)


def _put_offload(reader: HfReader, at: Callable[[str], str], stage: int) -> None:
    for name, old, field in (
        ("offload_optimizer", "cpu_offload", "offload_optimizer"),
        ("offload_param", "cpu_offload_param", "offload_parameters"),
    ):
        key = at(f"{_TABLE}{name}.device")
        where = reader.take(key, str)
        if where not in (None, "none", "cpu", "nvme", "auto"):
            reader.wrong(key, f"{reader.own(key)} is {shown(where)}: none, cpu or nvme is expected")
        if where in ("cpu", "nvme") and (stage == 3 or (stage and name == "offload_optimizer")):
            reader.put(field, True, key)
        elif where in ("cpu", "nvme"):
            reader.ignore(key, f"stage {stage} offloads nothing of it")
        note_ratio(reader, at(f"{_TABLE}{name}.ratio"))
        if reader.truth(at(f"{_TABLE}{old}")):
            reader.put(field, True, at(f"{_TABLE}{old}"))


def _check_batch(reader: HfReader, at: Callable[[str], str], arguments: Arguments) -> None:
    """Report sizes that contradict the training arguments; find the devices from the whole batch."""
    for name, said in ((MICRO, arguments.micro), (TIMES, arguments.times), (CLIP, arguments.norm)):
        key = at(name)
        reader.taken.add(key)
        if _auto(reader, key):
            continue
        value = reader.take(key, float)
        if value is not None and said.value is not None and value != said.value:
            text = f"{reader.own(key)} is {shown(reader.settings[key].value)}, and {said.key} {shown(said.value)}"
            reader.wrong(key, f"{text}: {_MISMATCH}", way_out=f'write "auto", or the same number as {said.key}')
    key, micro, times = at(WHOLE), arguments.micro.value, arguments.times.value
    reader.taken.add(key)
    if _auto(reader, key) or micro is None or times is None:
        return
    whole, devices = reader.size(key), reader.values.get("devices")
    if whole is None:
        return
    if whole % (micro * times) or (devices is not None and whole != micro * times * devices):
        text = f"{reader.own(key)} is {whole}, which is not {micro} * {times} * the number of devices"
        reader.wrong(key, f"{text}: {_MISMATCH}", way_out='write "auto"')
    elif devices is None:
        reader.put("devices", whole // (micro * times), key)
    reader.put("whole_batch", whole, key)
    reader.put("follows", "", key)


def _check_type(reader: HfReader, at: Callable[[str], str], arguments: Arguments) -> None:
    """Report a type that contradicts the training arguments."""
    for name, kind in ((BF16, "bf16"), (FP16, "f16")):
        key = reader.first(at(name), *((at("bfloat16.enabled"),) if kind == "bf16" else ()))
        reader.taken.add(key)
        if _auto(reader, key):
            continue
        on, wanted = reader.truth(key), arguments.mixed.value == kind
        if on != wanted:
            state = f"{reader.own(key)} is {'true' if on else 'false'}"
            asked = f"the training arguments ask for {arguments.mixed.value or 'no mixed precision'}"
            text = f"{state}, and {asked} ({arguments.mixed.key}): {_MISMATCH}"
            reader.wrong(key, text, way_out='write "enabled": "auto"')


def engine_type(reader: HfReader) -> Said | None:
    """Return the type that a ds_config switches on by itself; None if it leaves that open."""
    for name, kind in ((BF16, "bf16"), (FP16, "f16")):
        key = f"{DEEPSPEED}{name}"
        if not _auto(reader, key) and reader.truth(key):
            return Said(kind, key)
        reader.taken.add(key)
    return None


def _put_type(reader: HfReader, key: str, field: str) -> None:
    if _auto(reader, key):
        reader.taken.add(key)
    elif (said := reader.take(key, str)) in TYPES:
        reader.put(field, TYPES[said], key)
    else:
        reader.wrong(key, f"{reader.own(key)} is {shown(said)}: one of {', '.join(TYPES)} is expected")


def _put_sizes(reader: HfReader, at: Callable[[str], str], stage: int) -> None:
    """Set the sizes of DeepSpeed's buffers in elements, of which three may follow from the model's width."""
    sizes: dict[str, Any] = {}
    model = reader.values.get("model")
    for name, (_, default, by_width) in _SIZES.items():
        key = reader.first(at(f"{_TABLE}{name}"), at(f"{_TABLE}{name.removeprefix('stage3_')}"))
        reader.taken.add(key)
        if name.startswith("stage3_") and stage != 3:
            reader.ignore(key, "only stage 3 reads it")
        elif not reader.has(key) or (_auto(reader, key) and by_width is None):
            sizes[name] = default
        elif not _auto(reader, key):
            sizes[name] = reader.take(key, int)
        elif model is not None and by_width is not None:
            sizes[name] = by_width(model.hidden_size)
        else:
            reader.unknown(key, '"auto" follows from the width of the model, which is not known')
    overlap, whole = at(f"{_TABLE}overlap_comm"), at(f"{_TABLE}contiguous_gradients")
    # ZeRO 3 overlaps unless it is switched off: config.py, DeepSpeedZeroConfig.overlap_comm_valid
    sizes["overlap_comm"] = int(stage == 3 if _auto(reader, overlap) else reader.truth(overlap))
    sizes["contiguous_gradients"] = int(_auto(reader, whole) or reader.truth(whole))
    reader.taken |= {overlap, whole}
    reader.values["sizes"] = sizes
    said = next((at(f"{_TABLE}{name}") for name in sizes if reader.has(at(f"{_TABLE}{name}"))), None)
    if said:
        reader.origins["sizes"] = Origin(said, reader.where(said))
    else:
        reader.origins["sizes"] = Origin(ZERO, ZERO_CONFIG, default=True)


def _put_own_optimizer(reader: HfReader, at: Callable[[str], str]) -> None:
    """Set DeepSpeed's own optimizer in place of the Trainer's, if the ds_config has one."""
    key = at(OPTIMIZER)
    kind = reader.take(key, str)
    if kind is None:
        return
    if kind.lower() in ("adam", "adamw") and reader.truth(at(f"{PARAMS}torch_adam")):
        reader.put("optimizer", "adamw", key)  # engine.py, _configure_basic_optimizer
    elif kind.lower() in _OPTIMIZERS:
        reader.put("optimizer", _OPTIMIZERS[kind.lower()], key)
    else:
        reader.put("optimizer", kind.lower(), key)
        reader.unknown(key, "the state of this optimizer is not known here")
    for name, field in (("lr", "lr"), ("eps", "eps"), ("weight_decay", "weight_decay")):
        own = at(f"{PARAMS}{name}")
        if not _auto(reader, own):
            reader.put(field, reader.take(own, float), own)
    own = at(f"{PARAMS}betas")
    pair = [as_number(each) for each in reader.take(own, list) or []] if not _auto(reader, own) else []
    if len(pair) == 2 and None not in pair:
        reader.put("betas", tuple(pair), own)
    elif pair:
        reader.wrong(own, f"{reader.own(own)} is {shown(reader.settings[own].value)}: two numbers are expected")


def _note_groups(reader: HfReader, at: Callable[[str], str], stage: int) -> None:
    """Set the ranks that share one copy of the state, and note what else DeepSpeed keeps."""
    group, views = at(GROUP), at(VIEWS)
    if stage == 3 and (size := reader.take(group, int)) is not None and size > 0:
        reader.put("shard_size", size, group)
    reader.taken |= {group, views}
    if not _auto(reader, views) and (reader.take(views, int) or 1) > 1:
        reader.unknown(views, "a second copy of the weights within a node (hpZ) is not counted")


INERT_DEEPSPEED: Mapping[str, str] = {rf"{re.escape(DEEPSPEED)}({name})": why for name, why in INERT.items()}
"""Settings of a ds_config that stands under `deepspeed.`."""
