"""Reader of DeepSpeed's ds_config as a job, alone or together with training arguments of Hugging Face.

What "auto" stands for is filled in as transformers does (src/transformers/integrations/deepspeed.py,
HfTrainerDeepSpeedConfig, stored version 02348331); without the arguments it stays unknown. Names of arguments begin
with `arguments.` while they are read, since both files have settings of the same name.
What DeepSpeed does was read in deepspeedai/DeepSpeed 0.19.6.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ratrain.ratrain_ir.support.text import Source, read_text, shown
from ratrain.ratrainc.bridge.deepspeed import DEEPSPEED, take_old_names
from ratrain.ratrainc.bridge.deepspeed_rules import (
    ARGUMENTS,
    BETAS,
    BF16,
    CHECKED,
    CLIP,
    FILLED,
    FP16,
    GROUP,
    INERT,
    MICRO,
    OF_TORCH,
    OPTIMIZER,
    OPTIMIZERS,
    PARAMS,
    PEERS,
    REPLICAS,
    RULES,
    SEQUENCE_RANKS,
    SIZES,
    STAGE,
    STAGES,
    SUM_TYPE,
    SUMS_SOURCE,
    TIMES,
    TYPES,
    ULYSSES,
    VIEWS,
    WHOLE,
    ZERO,
    ZERO_CONFIG,
)
from ratrain.ratrainc.bridge.hjson_text import hjson_settings
from ratrain.ratrainc.bridge.jobs import hf_rules
from ratrain.ratrainc.bridge.jobs.job import ZERO_STAGES, Attention, Checkpointing, Context, Job, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import check_devices, in_own_words, note_ratio, put_model, take_options
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, JobReader, SettingsFormat
from ratrain.ratrainc.bridge.jobs.yaml_text import yaml_settings
from ratrain.ratrainc.bridge.settings import Asked as PlanAsked
from ratrain.ratrainc.bridge.settings import Setting, SettingsReader

_ENGINE = "deepspeedai/DeepSpeed: deepspeed/runtime/engine.py, DeepSpeedEngine"
_TRAINER = "huggingface/transformers: src/transformers/training_args.py, TrainingArguments"
_A = "arguments."
_OFFLOADED = ("offload_optimizer", "offload_param")
_LENGTHS = ("max_seq_length", "max_length", "cutoff_len", "model_max_length")
"""Training arguments of several trainers for the length of sequences."""
_AUTO = "what calls DeepSpeed fills 'auto' in: give the training arguments too"
_OWN = frozenset(
    ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "zero_allow_untested_optimizer")
)
"""Settings at the top of a ds_config that no other framework has there."""
_COMMENT = re.compile(r"\s*(//[^\n]*|#[^\n]*|/\*.*?\*/)", re.DOTALL)
_TOKEN = re.compile(
    r"//[^\n]*|\#[^\n]*|/\*.*?\*/|(?P<open>[{\[])|(?P<close>[}\]])"
    r"|(?:\"(?P<quoted>(?:\\.|[^\"\\\n])*)\"|'(?P<single>(?:\\.|[^'\\\n])*)'|(?P<word>\w+))(?P<key>\s*:)?",
    re.DOTALL,
)
"""Comments, brackets, and texts or words of Hjson, with the colon that makes a key of one."""


def _recognises(path: Path, text: str) -> bool:
    """Tell whether a text is an object of JSON or Hjson with a setting at its top that only DeepSpeed has."""
    del path  # what the text says decides
    start = text
    while (match := _COMMENT.match(start)) is not None:
        start = start[match.end() :]
    return start.lstrip().startswith("{") and any(name in _OWN for name in _top_keys(start))


def _top_keys(text: str) -> Iterator[str]:
    """Yield the keys at the top of an object, also of one that is cut short or otherwise broken.

    Keys of tables in it are left out: arguments of a trainer may have a ds_config as one of their values.
    """
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += (token["open"] is not None) - (token["close"] is not None)
        if depth == 1 and token["key"] is not None:
            yield token["quoted"] or token["single"] or token["word"] or ""


def _read(path: Path, text: str, asked: Asked) -> Job:
    top = Source(str(path), text).top()
    plan = SettingsReader(DEEPSPEED, DEEPSPEED.settings_of(str(path), text, PlanAsked()), top, PlanAsked())
    take_old_names(plan)
    plan.report.check()
    settings = {name: each for name, each in plan.settings.items() if name != ZERO}
    beside = _arguments(asked)
    reader = JobReader("deepspeed", settings | beside, top)
    filled = _fill(reader, trainer=bool(beside))
    _degrees(reader)
    _model(reader, asked, trainer=bool(beside))
    _batch(reader, asked)
    _state(reader)
    _types(reader)
    _optimizer(reader, trainer=bool(beside))
    if beside:
        _trainer(reader)
    take_options(reader, asked)
    check_devices(reader)
    own = plan.called | filled
    return in_own_words(reader.finish(INERT), lambda key: own.get(key, key).removeprefix(_A))


def _arguments(asked: Asked) -> dict[str, Setting]:
    """Read the files of training arguments; put `arguments.` before their names."""
    found: dict[str, Setting] = {}
    for path in asked.beside:
        text = read_text(path, "RT063", "training arguments")
        source = Source(str(path), text)
        yaml = path.suffix in (".yaml", ".yml")
        read = yaml_settings if yaml else hjson_settings
        found |= {f"{_A}{name}": each for name, each in read(source, "training arguments").items()}
    return found


def _fill(reader: JobReader, *, trainer: bool) -> dict[str, str]:
    """Fill in "auto" from the training arguments; return the arguments that settings were filled from.

    Without them "auto" is dropped, with a note where bytes depend on it.
    Report a setting of both files that differs: transformers stops there.
    """
    betas = [reader.take(f"{_A}adam_beta{n}", float) for n in (1, 2)] if trainer else []
    if any(each is not None for each in betas):
        pair = [default if each is None else each for each, default in zip(betas, (0.9, 0.999), strict=True)]
        first = next(name for name in (f"{_A}adam_beta1", f"{_A}adam_beta2") if reader.has(name))
        reader.settings[f"{_A}adam_betas"] = Setting(pair, reader.settings[first].place)
    filled: dict[str, str] = {}
    for name, (argument, default) in FILLED.items():
        key = f"{_A}{argument}"
        said = reader.settings.get(name)
        if said is None or not trainer:
            continue
        value = reader.settings[key].value if reader.has(key) else default
        if said.value == "auto":
            filled |= {name: argument} if reader.has(key) else {}
            reader.settings[name] = Setting(value, reader.settings[key].place if reader.has(key) else said.place)
        elif reader.has(key) and name in CHECKED and said.value != value:
            text = f"{name} is {shown(said.value)}, but {argument} is {shown(value)}: transformers stops there"
            reader.wrong(name, text, code="RT064", way_out=f'write "{name}": "auto"')
    for name in [name for name, each in reader.settings.items() if each.value == "auto"]:
        place = reader.settings[name].place
        if name in (BF16, FP16, OPTIMIZER):
            reader.unknown(name, _AUTO)
        elif name not in SIZES:
            reader.ignore(name, _AUTO)
        if name not in SIZES:
            reader.settings[name] = Setting(None, place)
    return filled


def _degrees(reader: JobReader) -> None:
    peers = reader.take(PEERS, int)
    for field, name, value in (
        ("tp", PEERS, peers or None),
        ("pp", STAGES, reader.size(STAGES)),
        ("cp", SEQUENCE_RANKS, reader.size(SEQUENCE_RANKS)),
    ):
        if value is not None:
            reader.put(field, value, name)
        else:
            reader.values[field] = 1
    reader.values["context"] = Context.HEADS
    if reader.values["cp"] > 1:
        reader.assume("context", Context.HEADS, SEQUENCE_RANKS, ULYSSES)


def _model(reader: JobReader, asked: Asked, *, trainer: bool) -> None:
    name = reader.take(f"{_A}model_name_or_path", str) if trainer else None
    put_model(reader, asked, name, f"{_A}model_name_or_path", None)
    key = next((f"{_A}{each}" for each in _LENGTHS if reader.has(f"{_A}{each}")), None)
    if key is not None:
        reader.put("seq_len", reader.size(key), key)


def _batch(reader: JobReader, asked: Asked) -> None:
    """Set the batch as DeepSpeed does: two of three sizes determine the third, with the number of devices."""
    whole, micro, times = (reader.size(name) for name in (WHOLE, MICRO, TIMES))
    model = reader.values["tp"] * reader.values["pp"] * reader.values["cp"]
    replicas = reader.size(REPLICAS)
    if asked.devices is not None and asked.devices > 0 and asked.devices % model == 0:
        replicas = asked.devices // model
    elif replicas is None and whole and micro and times and whole % (micro * times) == 0:
        replicas = whole // (micro * times)
        reader.put("devices", replicas * model, WHOLE)
    source = "deepspeedai/DeepSpeed: deepspeed/runtime/config.py, DeepSpeedConfig._set_batch_related_parameters"
    if whole is not None and replicas is not None:
        parts = (micro or 1) * (times or 1) * replicas
        if whole % parts or (micro and times and whole != parts):
            sizes = f"{MICRO} {micro or 1} * {TIMES} {times or 1} * {replicas} data-parallel ranks"
            text = (
                f"{WHOLE} {whole} is not {sizes}" if micro and times else f"{WHOLE} {whole} is no multiple of {sizes}"
            )
            reader.wrong(WHOLE, text, code="RT064", way_out="leave one of the three out, or give other --devices")
        elif micro is None:
            reader.assume("micro_batch_size", whole // parts, MICRO, source)
        elif times is None:
            reader.assume("gradient_accumulation", whole // parts, TIMES, source)
        reader.put("whole_batch", whole, WHOLE)
        open_field = "gradient_accumulation" if micro else "micro_batch_size"
        reader.put("follows", "" if micro and times else open_field, WHOLE)
    reader.put("micro_batch_size", micro, MICRO)
    reader.put("gradient_accumulation", times, TIMES)
    open_ = any(name in reader.settings and not reader.has(name) for name in (WHOLE, MICRO, TIMES))  # "auto"
    if times is None and not open_ and (micro is None) != (whole is None):
        reader.assume("gradient_accumulation", 1, TIMES, source)


def _state(reader: JobReader) -> None:
    """Set what is sharded and offloaded, and the sizes of ZeRO's buffers."""
    stage = reader.take(STAGE, int)
    if stage is None:
        reader.assume("sharding", Sharding.DDP, STAGE, f"deepspeedai/DeepSpeed: {RULES[STAGE].source}")
        stage = 0
    elif not 0 <= stage <= 3:
        reader.wrong(STAGE, f"{STAGE} is {stage}: 0 to 3 is expected")
        stage = 0
    else:
        reader.put("sharding", ZERO_STAGES[stage], STAGE)
    group, views = reader.take(GROUP, int), reader.take(VIEWS, int)
    if group is not None and group > 0 and stage == 3:
        reader.put("shard_size", group, GROUP)
    if views is not None and views > 1 and stage == 3:
        reader.unknown(VIEWS, "a second copy of the weights within a node is not counted")
    for part, field in zip(_OFFLOADED, ("offload_optimizer", "offload_parameters"), strict=True):
        key = f"zero_optimization.{part}.device"
        device = reader.take(key, str)
        if device not in (None, "none", "cpu", "nvme"):
            reader.wrong(key, f"{key} is {shown(device)}: none, cpu or nvme is expected")
        elif device is not None:
            reader.put(field, device != "none", key)
        ratio = f"zero_optimization.{part}.ratio"
        note_ratio(reader, ratio)
    for old, field in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_parameters")):
        if reader.take(f"zero_optimization.{old}", bool):
            reader.put(field, True, f"zero_optimization.{old}")
    for name in ("zero_quantized_weights", "zero_quantized_gradients", "zenflow"):
        reader.unknown(f"zero_optimization.{name}", "its buffers are not counted")
    _sizes(reader, stage)


def _sizes(reader: JobReader, stage: int) -> None:
    """Set the sizes of ZeRO's buffers; "auto" follows from the model's width (trainer_config_finalize)."""
    sizes: dict[str, int] = {}
    model = reader.values.get("model")
    width = None if model is None else model.hidden_size
    wanted = [name for name, (least, _, _) in SIZES.items() if stage >= least]
    for name in SIZES:
        _, default, by_width = SIZES[name]
        said = reader.settings[name].value if name in reader.settings else None
        if said == "auto":
            reader.taken.add(name)
            value = by_width(width) if width is not None and by_width is not None else None
            if value is None:
                reader.unknown(name, "the model's width says it, and the model is not known")
        elif name.endswith("overlap_comm"):
            flag = reader.take(name, bool)
            value = int(stage == 3 if flag is None else flag)
        else:
            number = reader.take(name, int)
            value = default if number is None else number
        if value is not None and name in wanted:
            sizes[name.partition(".")[2]] = value
    if sizes:
        said_one = next((each for each in wanted if reader.has(each) and reader.settings[each].value != "auto"), None)
        if said_one is None:
            reader.assume("sizes", sizes, "zero_optimization", ZERO_CONFIG)
        else:
            reader.put("sizes", sizes, said_one)


def _types(reader: JobReader) -> None:
    """Set types: weights and products as bf16 or fp16 say, masters f32, and gradients as data_types say."""
    on = {name: reader.take(name, bool) for name in (BF16, FP16)}
    if on[BF16] and on[FP16]:
        reader.wrong(FP16, "bf16 and fp16 exclude one another", code="RT064")
    key = BF16 if on[BF16] else FP16
    open_ = [name for name in (BF16, FP16) if any(each.key == name for each in reader.notes)]
    if open_ and not any(on.values()):
        return
    own = "bf16" if on[BF16] else "f16" if on[FP16] else "f32"
    for field in ("weight_dtype", "compute_dtype"):
        if own == "f32":
            reader.assume(field, own, BF16, f"{_ENGINE}.get_data_types")
        else:
            reader.put(field, own, key)
    sums, sent = reader.take(SUM_TYPE, str), reader.take("communication_data_type", str)
    for field, name, said, source in (
        ("gradient_dtype", SUM_TYPE, sums, f"deepspeedai/DeepSpeed: {SUMS_SOURCE}"),
        ("reduce_dtype", "communication_data_type", sent, f"{_ENGINE}.communication_data_type"),
    ):
        if said is not None and said not in TYPES:
            reader.wrong(name, f"{name} is {shown(said)}: one of {', '.join(TYPES)} is expected")
        elif said is not None:
            reader.put(field, TYPES[said], name)
        else:
            reader.assume(field, own, name, source)
    narrow = f"{key.partition('.')[0]}.{own}_master_weights_and_grads"
    if own == "f16":
        narrow = "fp16.fp16_master_weights_and_grads"
    if reader.take(narrow, bool):
        reader.put("gradient_dtype", own, narrow)
    elif own != "f32":
        reader.assume("master_dtype", "f32", key, f"{_ENGINE}._configure_zero_optimizer")
    if reader.take("bf16.bf16_optimizer_states", bool):
        reader.put("state_dtype", "bf16", "bf16.bf16_optimizer_states")
    if reader.take("torch_autocast.enabled", bool):
        kind = reader.take("torch_autocast.dtype", str) or "bfloat16"
        reader.put("compute_dtype", {"bfloat16": "bf16", "float16": "f16"}.get(kind, "f32"), "torch_autocast.enabled")
        reader.values["autocast"] = True


_TRAINER_OPTIMIZERS = {**hf_rules.OPTIMIZERS, "adamw_hf": "adamw", "adamw_apex_fused": "adamw-fused"}
"""Words of TrainingArguments.optim, those of older versions too (training_args.py, OptimizerNames)."""


def _optimizer(reader: JobReader, *, trainer: bool) -> None:
    kind = reader.take(OPTIMIZER, str)
    argument = f"{_A}optim"
    said = reader.take(argument, str) if trainer else None
    if kind is not None and kind.lower() in OPTIMIZERS:
        word = OPTIMIZERS[kind.lower()]
        if word == "adamw-fused" and reader.take(OF_TORCH, bool):
            word = "adamw"
        reader.put("optimizer", word, OPTIMIZER)
    elif kind is not None:
        known = ", ".join(OPTIMIZERS)
        reader.wrong(OPTIMIZER, f"the optimizer {kind} is not known here", way_out=f"one of {known}")
    elif said is not None and said in _TRAINER_OPTIMIZERS:
        reader.put("optimizer", _TRAINER_OPTIMIZERS[said], argument)
    elif said is not None:
        reader.wrong(argument, f"optim {said} is not known here", way_out=f"one of {', '.join(_TRAINER_OPTIMIZERS)}")
    elif trainer:
        reader.assume("optimizer", "adamw-fused", "optim", f"{_TRAINER}.optim")
    else:
        reader.settings["optimizer"] = Setting(None, reader.top)
        reader.unknown("optimizer", "what calls DeepSpeed brings its own: it is counted as AdamW")
    for field, name, kind_ in (("lr", f"{PARAMS}lr", float), ("eps", f"{PARAMS}eps", float)):
        reader.put(field, reader.take(name, kind_), name)
    reader.put("weight_decay", reader.take(f"{PARAMS}weight_decay", float), f"{PARAMS}weight_decay")
    pair = [each for each in reader.take(BETAS, list) or [] if isinstance(each, int | float)]
    reader.put("betas", (float(pair[0]), float(pair[1])) if len(pair) == 2 else None, BETAS)
    norm = reader.take(CLIP, float)
    reader.put("max_grad_norm", norm or None, CLIP)
    reader.put("scheduler", reader.take("scheduler.type", str), "scheduler.type")
    _warm_up(reader, "scheduler.params.warmup_num_steps")


def _trainer(reader: JobReader) -> None:
    """Set what only the training arguments say: recomputation, kernels and the run's length."""
    key = f"{_A}gradient_checkpointing"
    on = reader.take(key, bool)
    if on is None:
        reader.assume(
            "checkpointing", Checkpointing.NONE, "gradient_checkpointing", f"{_TRAINER}.gradient_checkpointing"
        )
    else:
        reader.put("checkpointing", Checkpointing.FULL if on else Checkpointing.NONE, key)
    fused = reader.take(f"{_A}use_liger_kernel", bool)
    if fused:
        reader.put("loss", Loss.FUSED, f"{_A}use_liger_kernel")
    else:
        loss = "huggingface/transformers: src/transformers/loss/loss_utils.py, ForCausalLMLoss"
        reader.assume("loss", Loss.UPCAST, "loss", loss)
    words = {"eager": Attention.EAGER, "sdpa": Attention.SDPA, "flash_attention_2": Attention.FLASH}
    kernel = reader.take(f"{_A}attn_implementation", str)
    if kernel is not None and kernel not in words:
        reader.unknown(f"{_A}attn_implementation", "it is counted as PyTorch's fused kernels")
    elif kernel is not None:
        reader.put("attention", words[kernel], f"{_A}attn_implementation")
    reader.put("compiled", reader.take(f"{_A}torch_compile", bool), f"{_A}torch_compile")
    for field, name, kind in (
        ("steps", "max_steps", int),
        ("epochs", "num_train_epochs", float),
        ("warmup_ratio", "warmup_ratio", float),
        ("packing", "packing", bool),
    ):
        value: Any = reader.take(f"{_A}{name}", kind)
        reader.put(field, None if value == -1 else value, f"{_A}{name}")
    if not reader.has(OPTIMIZER):
        _trainer_optimizer(reader)
    for argument in ARGUMENTS:
        reader.taken.add(f"{_A}{argument}")


def _trainer_optimizer(reader: JobReader) -> None:
    """Set the values of the optimizer that the trainer builds, where DeepSpeed builds none."""
    for field, name in (("lr", "learning_rate"), ("eps", "adam_epsilon"), ("weight_decay", "weight_decay")):
        reader.put(field, reader.take(f"{_A}{name}", float), f"{_A}{name}")
    betas = reader.take(f"{_A}adam_betas", list)
    said = next((name for name in (f"{_A}adam_beta1", f"{_A}adam_beta2") if reader.has(name)), "")
    reader.put("betas", None if betas is None else (float(betas[0]), float(betas[1])), said)
    _warm_up(reader, f"{_A}warmup_steps")


def _warm_up(reader: JobReader, name: str) -> None:
    """Set the steps of the warm-up, or its share of all steps: transformers takes a number below 1 as a share."""
    steps = reader.take(name, float)
    if steps is not None and 0 < steps < 1:
        reader.put("warmup_ratio", steps, name)
    elif steps is not None:
        reader.put("warmup_steps", round(steps), name)


# phrases


def _phrase(job: Job, field: str, value: Any) -> str | None:
    found = _said(job, field, value)
    return None if found is None else json.dumps(found)[1:-1]


def _said(job: Job, field: str, value: Any) -> dict[str, Any] | None:
    """Return the settings, as JSON has them, that give a field another value."""
    key = getattr(job.origins.get(field), "key", "")
    if field == "micro_batch_size":
        return {_argument(key, MICRO, "per_device_train_batch_size"): value}
    if field == "gradient_accumulation":
        return {_argument(key, TIMES, "gradient_accumulation_steps"): value}
    if field == "checkpointing" and value in (Checkpointing.FULL, Checkpointing.NONE) and key:
        return {"gradient_checkpointing": value is Checkpointing.FULL}
    if field == "sharding":
        return {"zero_optimization": {"stage": ZERO_STAGES.index(value)}} if value in ZERO_STAGES else None
    if field in ("offload_optimizer", "offload_parameters"):
        name = "offload_optimizer" if field == "offload_optimizer" else "offload_param"
        return {"zero_optimization": {name: {"device": "cpu" if value else "none"}}}
    if field == "optimizer":
        words = {word: kind for kind, word in OPTIMIZERS.items()} | {"adamw-fused": "AdamW"}
        return {"optimizer": {"type": words[value]}} if value in words else None
    if field == "cp":
        return {SEQUENCE_RANKS: value}
    if field == "tp":
        return {"tensor_parallel": {"autotp_size": value}}
    if field == "pp":
        return {"pipeline": {"stages": value}}
    if field == "seq_len" and key in _LENGTHS:
        return {key: value}
    if field == "loss" and value in (Loss.FUSED, Loss.UPCAST) and key:
        return {"use_liger_kernel": value is Loss.FUSED}
    return None


def _argument(key: str, own: str, argument: str) -> str:
    """Return the training argument's name if the arguments say the value, else the ds_config's."""
    return argument if key == argument else own


DEEPSPEED_JOB = SettingsFormat("deepspeed", "DeepSpeed", _recognises, _read, _phrase)
