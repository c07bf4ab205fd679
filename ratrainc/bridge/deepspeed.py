"""Import of DeepSpeed's ds_config, for versions up to 0.19.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratrain.ratrain_ir.config.optimizer import LINEAR, Optimizer
from ratrain.ratrain_ir.config.plan_keys import CONTIGUOUS, OF_HEADS
from ratrain.ratrain_ir.support.text import Source
from ratrain.ratrainc.bridge.deepspeed_rules import (
    ADAM_W,
    BETAS,
    BF16,
    CLIP,
    DECAY_OF_TORCH,
    FORBIDDEN,
    FP16,
    GROUP,
    IDLE,
    LOSS_SCALE,
    MAY_BE_AUTO,
    MICRO,
    OF_PYDANTIC,
    OF_TORCH,
    OFF,
    OLD_HIGHEST,
    OPTIMIZER,
    OPTIONS,
    PARAMS,
    PEERS,
    REDUCTION,
    REPLICAS,
    RULES,
    SCHEDULER,
    SCHEDULER_PARAMS,
    SEQUENCE_RANKS,
    STAGE,
    STAGES,
    STRICT,
    SUM_TYPE,
    SUMS_SOURCE,
    TABLES,
    TIMES,
    TIMING,
    TRAINS,
    TYPES,
    ULYSSES,
    UNBIASED,
    VIEWS,
    WHOLE,
    ZERO,
    scheduler_source,
)
from ratrain.ratrainc.bridge.hjson_text import hjson_settings
from ratrain.ratrainc.bridge.settings import (
    Default,
    Framework,
    Left,
    Setting,
    SettingsReader,
    near,
    one_of,
    product,
    put_batch,
    put_context_ranks,
    put_ranks,
    put_seq_len,
    replicas_of,
    until_said,
)

_THEIRS = {ours: theirs for theirs, ours in TYPES.items()}


def _settings(file: str, text: str) -> dict[str, Setting]:
    return hjson_settings(Source(file, text), "a ds_config of DeepSpeed")


def _stops(name: str) -> bool:
    """Tell whether an unknown name resembles a setting that decides a size."""
    return near(name, _AT_THE_TOP) or name.rpartition(".")[2] in (WHOLE, MICRO, TIMES)


_AT_THE_TOP = {name for name, rule in RULES.items() if rule.keys and "." not in name}


def _read(reader: SettingsReader) -> None:
    take_old_names(reader)
    _refuse_what_is_on(reader)
    _refuse_auto(reader)
    pp, tp = _stages(reader), reader.integer(PEERS) or 1
    reader.put("pp", pp, STAGES)
    if tp > 1:
        reader.put("tp", tp, PEERS)
        reader.put("sequence_sharding", False, PEERS)
    dp = _batch(reader, pp, tp, put_context_ranks(reader, SEQUENCE_RANKS))
    put_seq_len(reader, None)
    _put_context_layout(reader)
    _state(reader)
    _optimizer(reader)
    _schedule(reader)
    if (norm := _number(reader, CLIP, "clip", "max_norm")) is not None:
        reader.put("clip", "global" if norm else "none", CLIP)
        if norm:
            reader.put("max_norm", norm, CLIP)
    if not reader.report.errors:
        _check_asked(reader, dp)


def _put_context_layout(reader: SettingsReader) -> None:
    """Put what Ulysses exchanges, and one run of each sequence a rank, as it cuts, if two do not go into the length."""
    cp, length = reader.values.get("cp", 1), reader.values.get("seq_len")
    if cp > 1:
        reader.put("context_exchange", OF_HEADS, SEQUENCE_RANKS)
    if length is not None and length % cp == 0 and length % (2 * cp):
        reader.put("context_layout", CONTIGUOUS, SEQUENCE_RANKS)
        reader.defaults["context_layout"] = Default(CONTIGUOUS, ULYSSES)


def take_old_names(reader: SettingsReader) -> None:
    """Rename settings of older versions, and rewrite values of older forms."""
    settings = reader.settings
    for name in [name for name in settings if settings[name].value == {}]:
        del settings[name]  # a table with nothing in it
    if (old := reader.flag(ZERO)) or reader.has(ZERO):
        settings[STAGE] = Setting(int(old), settings[ZERO].place)
    both = any(name.split(".")[0] == "bf16" for name in settings)
    for name in [name for name in settings if name.startswith("bfloat16.")]:
        if both:
            reader.leave(name, "DeepSpeed reads bf16, the newer name, where both are there")
        else:
            new = f"bf16.{name.partition('.')[2]}"
            settings[new] = settings.pop(name)
            reader.called[new] = name


def _refuse_what_is_on(reader: SettingsReader) -> None:
    for name, why in FORBIDDEN.items():
        if _auto(reader, name):
            reader.leave(name, f"the plan has it off: what calls DeepSpeed fills 'auto' in, and {why}", trains=True)
        elif reader.has(name) and reader.flag(name):
            reader.wrong(name, f"{name} is on: {why}", way_out="switch it off")
    tables = tuple(f"{name}." for name, why in TABLES.items() if why == OFF)
    reader.taken.update(name for name in reader.settings if name.startswith(tables) and name not in FORBIDDEN)
    if reader.word(REDUCTION) not in (None, "mean"):
        reader.wrong(REDUCTION, "gradients of a plan are the mean over replicas, not their sum")
    if reader.has(f"{PARAMS}max_grad_norm"):
        text = "DeepSpeed takes no max_grad_norm among the parameters of an optimizer"
        reader.wrong(f"{PARAMS}max_grad_norm", text, way_out=f"say it as {CLIP}")
        reader.taken.add(f"{PARAMS}max_grad_norm")


def _auto(reader: SettingsReader, name: str) -> bool:
    """Tell whether a setting is "auto", which the program that calls DeepSpeed fills in."""
    return reader.has(name) and reader.settings[name].value == "auto"


def _asked(reader: SettingsReader, name: str) -> Any:
    """Return the value of the command's option for a setting, or None."""
    return getattr(reader.asked, OPTIONS[name][1]) if name in OPTIONS else None


def _refuse_auto(reader: SettingsReader) -> None:
    """Refuse "auto" for settings that neither an option nor the plan's file can provide afterwards."""
    for name in [name for name in reader.settings if _auto(reader, name)]:
        if name in RULES and RULES[name].keys and name not in MAY_BE_AUTO:
            reader.wrong(name, f"{name} is 'auto': what calls DeepSpeed fills it in", way_out="write its value instead")
            del reader.settings[name]


def _number(reader: SettingsReader, name: str, *keys: str) -> Any:
    """Read a number from the file or an option, or take DeepSpeed's default.

    If it is "auto" without an option: report it, leave its `keys` out of the plan, and return None.
    """
    option, asked = OPTIONS.get(name, ("", ""))[0], _asked(reader, name)
    if _auto(reader, name):
        if asked is None:
            where = f"give {option}, or say" if option else "say"
            text = f"{until_said(keys)}: what calls DeepSpeed fills 'auto' in; {where} {' and '.join(keys)}"
            reader.leave(name, f"{text} in [optimizer]", trains=True)
            reader.unsaid.update(keys)
        reader.taken.add(name)
        return asked
    if asked is not None and not reader.has(name):
        return asked
    said = reader.integer(name) if name.endswith("_steps") else reader.number(name)
    if asked is not None and said is not None and said != asked:
        reader.wrong(name, f"{option} {asked} contradicts {name} {said}")
    return said


def _stages(reader: SettingsReader) -> int:
    """Read the number of pipeline stages. If only the model's code knows it, `--pp` must give it."""
    asked = reader.asked.pp
    pipeline = [name for name in reader.settings if name.startswith("pipeline.")]
    if not pipeline or (reader.has(STAGES) and not _auto(reader, STAGES)):
        return one_of(reader, STAGES, reader.size(STAGES), asked, "--pp")
    reader.taken.add(STAGES)
    if asked is None:
        reader.wrong(pipeline[0], "the model's code says how many stages it has", way_out="give --pp P")
    return asked or 1


def _batch(reader: SettingsReader, pp: int, tp: int, peers: int) -> int | None:
    """Find the number of replicas and the batch as DeepSpeed does: two of three sizes determine the third.

    The sizes are the sequences of a step, the sequences of a micro-batch on a GPU, and the micro-batches of a step.
    Return None after an error.
    """
    sizes = {name: _size(reader, name) for name in (WHOLE, MICRO, TIMES)}
    whole, micro, times = sizes.values()
    replicas, world = reader.size(REPLICAS), None
    if replicas is not None:
        world = replicas * tp * pp * peers
    elif reader.asked.clusters is None and whole and micro and times:
        if whole % (micro * times):
            reader.wrong(WHOLE, f"{WHOLE} {whole} is not a multiple of {MICRO} {micro} * {TIMES} {times}")
            return None
        world = whole // (micro * times) * tp * pp * peers
    others = (("tensor-parallel ranks", tp), ("stages", pp), ("sequence-parallel ranks", peers))
    dp = put_ranks(reader, world, WHOLE if replicas is None else REPLICAS, *others)
    reader.carry("dp", dp, WHOLE)
    open_sizes = [name for name in sizes if _auto(reader, name) and sizes[name] is None]
    if open_sizes and (whole, micro, times).count(None) > 1:
        wanted = [OPTIONS[name][0] for name in (MICRO, WHOLE) if sizes[name] is None]
        if micro is None and whole is None and times is not None:
            wanted = wanted[:1]
        text = (
            f"{' and '.join(open_sizes)} {'are' if len(open_sizes) > 1 else 'is'} 'auto': what calls DeepSpeed fills "
        )
        way_out = f"give {' N and '.join(wanted)} N"
        reader.wrong(open_sizes[0], text + ("them in" if len(open_sizes) > 1 else "it in"), way_out=way_out)
    elif dp is not None:
        _put_sizes(reader, whole, micro, times, dp)
    return dp


def _size(reader: SettingsReader, name: str) -> int | None:
    """Read one of the three sizes of the batch, or take the option for it; None if neither gives it."""
    option = OPTIONS.get(name, ("", ""))[0]
    asked: int | None = _asked(reader, name)
    if _auto(reader, name):
        reader.taken.add(name)
        return asked
    said = reader.size(name)
    if said is not None and asked is not None and said != asked:
        reader.wrong(name, f"{option} {asked} contradicts {name} {said}")
    return asked if said is None else said


def _put_sizes(reader: SettingsReader, whole: int | None, micro: int | None, times: int | None, dp: int) -> None:
    if micro is None and whole is None:
        text, way_out = f"neither {WHOLE} nor {MICRO} is said", "give --micro-batch-size N or --global-batch N"
        reader.wrong("", text, way_out=way_out)
        return
    if micro is None and whole is not None:
        if whole % (dp * (times or 1)):
            reader.wrong(WHOLE, f"{WHOLE} {whole} is not a multiple of {TIMES} {times or 1} * {dp} replicas")
            return
        micro = whole // (dp * (times or 1))
    implied = None if micro is None or times is None else micro * times * dp
    if whole is not None and implied is not None and whole != implied:
        text = f"{WHOLE} {whole} is not {MICRO} {micro} * {TIMES} {times} * {dp} replicas = {implied}"
        each = implied // dp
        other = "" if whole % each else f", or give as many --clusters as make {whole // each} replicas"
        reader.wrong(WHOLE, text, way_out=f"leave one of the three out{other}")
        return
    put_batch(reader, (MICRO, micro), (WHOLE, whole if whole is not None else implied), dp)
    if times is not None:
        reader.put("micro_batches", times, TIMES)


def _state(reader: SettingsReader) -> None:
    """Put ZeRO's stage, groups and types; sequence-parallel ranks share out state as replicas do.

    (deepspeed/runtime/engine.py, DeepSpeedEngine._configure_distributed_model: seq_data_parallel_group)
    """
    zero, replicas = reader.integer(STAGE) or 0, replicas_of(reader)
    if not 0 <= zero <= 3:
        reader.wrong(STAGE, f"{STAGE} is {zero}: 0 to 3 is expected")
        return
    reader.put("zero", zero, STAGE)
    reader.put("reduce", "each-micro-batch" if zero > 1 else "last", STAGE)
    group = reader.integer(GROUP)
    if group is not None and group > 0 and zero == 3 and group != replicas:
        reader.put("shard_group", group, GROUP)
    elif group is not None:
        reader.leave(GROUP, "all replicas share out state" if zero == 3 else f"only {STAGE} 3 reads it")
    views = reader.integer(VIEWS)
    if views is not None and views > 1 and zero == 3 and views != (reader.values.get("shard_group") or replicas):
        reader.put("view_group", views, VIEWS)
    elif views is not None:
        why = "views are gathered from all that have shards" if zero == 3 else f"only {STAGE} 3 reads it"
        reader.leave(VIEWS, why)
    view = _view(reader)
    if view is None:
        return
    reader.put("view_dtype", view, BF16, FP16)
    if view == "f16":
        scale = None if _auto(reader, LOSS_SCALE) else reader.number(LOSS_SCALE)
        reader.put("loss_scale", scale or "dynamic", LOSS_SCALE)
    if not reader.has(SUM_TYPE):
        reader.default(SUM_TYPE, _THEIRS[view], SUMS_SOURCE)
        return
    sums = reader.word(SUM_TYPE)
    if sums in TYPES:
        reader.put("grad_shard_dtype" if zero and (replicas or 1) > 1 else "grad_dtype", TYPES[sums], SUM_TYPE)
    elif sums is not None:
        reader.wrong(SUM_TYPE, f"{SUM_TYPE} is '{sums}': one of {', '.join(TYPES)} is expected", code="RT063")


def _view(reader: SettingsReader) -> str | None:
    """Read the type that blocks compute with; if it is "auto", `--dtype` must give it. None after an error."""
    types, asked = {BF16: "bf16", FP16: "f16"}, reader.asked.dtype
    unknown = [name for name in types if _auto(reader, name)]
    reader.taken.update(unknown)
    said = {name: reader.flag(name) for name in types if reader.has(name) and name not in unknown}
    on = [types[name] for name in said if said[name]]
    if len(on) == 2:
        reader.wrong(FP16, "bf16 and fp16 exclude one another")
        return None
    possible = on or ["f32", *(types[name] for name in types if name not in said)]
    if asked is not None and asked not in possible:
        reader.wrong(next(iter(said)), f"--dtype {asked} contradicts the file, which says {' or '.join(possible)}")
        return None
    if unknown and asked is None and not on:
        text = (
            f"{' and '.join(unknown)} {'are' if len(unknown) > 1 else 'is'} 'auto': what calls DeepSpeed says the type"
        )
        reader.wrong(unknown[0], text, way_out="give --dtype bf16, f16 or f32")
        return None
    view = on[0] if on else asked or "f32"
    for name in unknown:
        reader.leave(name, f"'auto' is {'on' if types[name] == view else 'off'} with {view}")
    if not on and asked is None:
        for name in types:
            reader.flag(name)  # the default of one that is left out is then named
    return view


def _optimizer(reader: SettingsReader) -> None:
    kind = reader.word(OPTIMIZER)
    if kind is None:
        _without_optimizer(reader)
        return
    if kind.lower() not in ("adam", "adamw"):
        said = [name for name in reader.settings if name.startswith(PARAMS)]
        names = ", ".join(name.removeprefix(PARAMS) for name in said)
        values = f", and takes over none of its values ({names})" if said else ""
        way_out = "say AdamW and its values, or take the optimizer out of the file and say its keys in the plan"
        reader.wrong(OPTIMIZER, f"ratrain trains with AdamW, not with {kind}{values}", way_out=way_out)
        reader.taken.update(said)
        return
    if reader.has(UNBIASED) and not reader.flag(UNBIASED):
        reader.wrong(UNBIASED, "moments of a plan are corrected for their bias")
    reader.carry("lr", _number(reader, f"{PARAMS}lr", "lr"), f"{PARAMS}lr")
    reader.carry("eps", _number(reader, f"{PARAMS}eps", "eps"), f"{PARAMS}eps")
    if _auto(reader, BETAS):
        _number(reader, BETAS, "betas")
    else:
        reader.carry("betas", reader.items(BETAS), BETAS)
    _weight_decay(reader, kind.lower())


def _without_optimizer(reader: SettingsReader) -> None:
    """Handle a file without an optimizer: take its keys from options, and leave the others out of the plan."""
    asked = {"lr": reader.asked.lr, "weight_decay": reader.asked.weight_decay, "betas": None, "eps": None}
    if not reader.has(SCHEDULER):
        asked["warmup_steps"] = reader.asked.warmup_steps
    for key, value in asked.items():
        reader.carry(key, value, OPTIMIZER)
    unsaid = [key for key, value in asked.items() if value is None]
    reader.unsaid.update(unsaid)
    text = f"{until_said(unsaid)}: what calls DeepSpeed brings its own optimizer; say them in [optimizer]"
    options = [f"--{key.replace('_', '-')}" for key in unsaid if key not in ("betas", "eps")]
    text += f", or give {', '.join(options)}" if options else ""
    reader.left.append(Left("optimizer", None, text, trains=True))


def _weight_decay(reader: SettingsReader, kind: str) -> None:
    """Put the weight decay, which is decoupled in AdamW. Report Adam with adam_w_mode false, which has L2 instead."""
    name = f"{PARAMS}weight_decay"
    if kind == "adamw":
        reader.leave(ADAM_W, "of AdamW the decay is decoupled in any case")
    decoupled = kind == "adamw" or reader.flag(ADAM_W)
    of_torch = reader.has(OF_TORCH) and reader.flag(OF_TORCH)
    if of_torch and not reader.has(name) and reader.asked.weight_decay is None:
        decay = reader.default(name, *DECAY_OF_TORCH[decoupled])
    else:
        decay = _number(reader, name, "weight_decay")
    if decay and not decoupled:
        reader.differ(name, "with adam_w_mode false it is added to gradients (L2), which no plan does: the plan has 0")
        decay = 0.0
    reader.carry("weight_decay", decay, name)


def _schedule(reader: SettingsReader) -> None:
    kind = reader.word(SCHEDULER)
    if kind is None:
        reader.carry("warmup_steps", reader.asked.warmup_steps, SCHEDULER)
        return
    said = [name for name in reader.settings if name.startswith(TIMING)]
    if kind not in SCHEDULER_PARAMS:
        way_out = "take the scheduler out of the file, and say lr, warmup_steps and total_steps in the plan"
        reader.wrong(SCHEDULER, f"no plan has a learning rate like that of {kind}", way_out=way_out)
        reader.taken.update(said)
        return
    defaults = SCHEDULER_PARAMS[kind]
    for name in said:
        if name.removeprefix(TIMING) not in (*defaults, "last_batch_iteration"):
            reader.wrong(name, f"{kind} has no parameter {name.removeprefix(TIMING)}", code="RT063")
            reader.taken.add(name)
    for leaf, value in defaults.items():
        if value is not None and not reader.has(f"{TIMING}{leaf}") and _asked(reader, f"{TIMING}{leaf}") is None:
            reader.default(f"{TIMING}{leaf}", value, scheduler_source(kind))
    _warm_up(reader, defaults)
    if kind == "WarmupCosineLR":
        _cosine(reader)
        return
    _highest(reader, kind)
    if kind == "WarmupDecayLR" and _need_end(reader, kind):
        name = f"{TIMING}total_num_steps"
        if (steps := _number(reader, name, "total_steps")) is not None:
            reader.put("total_steps", steps, name)
            reader.put("decay", LINEAR, SCHEDULER)


def _warm_up(reader: SettingsReader, defaults: Mapping[str, object]) -> None:
    name, kind, least = (
        f"{TIMING}warmup_num_steps",
        f"{TIMING}warmup_type",
        [f"{TIMING}warmup_min_{of}" for of in ("lr", "ratio")],
    )
    steps = _number(reader, name, "warmup_steps")
    if steps is None and name in reader.defaults:
        steps = defaults["warmup_num_steps"]
    if steps is not None and steps < 1:
        reader.wrong(name, f"{name} is {steps}: DeepSpeed wants at least 1")
    elif steps is not None:
        reader.put("warmup_steps", max(2, steps), name)  # as DeepSpeed divides by the logarithm
    reader.taken.add(kind)
    if reader.settings.get(kind, Setting("log", reader.top)).value != "linear":
        reader.differ(kind, "the warm-up of a plan is linear: as long, and lower up to its end")
    for each in least:
        if reader.settings.get(each, Setting(0, reader.top)).value == 0:
            reader.taken.add(each)
        else:
            text = "the warm-up of a plan begins at the first step's share of the learning rate"
            reader.leave(each, text, trains=True)


def _highest(reader: SettingsReader, kind: str) -> None:
    """Put `lr`: the highest rate of a WarmupLR or WarmupDecayLR scheduler, which overrides the optimizer's.

    Report an error where WarmupLR leaves it out and versions of DeepSpeed take different ones. Put nothing if no rate
    is known.
    """
    name, rate = f"{TIMING}warmup_max_lr", f"{PARAMS}lr"
    known = reader.values.get("lr")
    if _auto(reader, name):
        highest = reader.asked.lr if reader.asked.lr is not None else known
        if highest is None:
            _number(reader, name, "lr")
        reader.taken.add(name)
    elif reader.has(name):
        highest = reader.number(name)
    elif reader.asked.lr is not None:
        highest = reader.asked.lr
    elif kind == "WarmupDecayLR":
        highest = reader.defaults[name].value
    else:
        highest = known
        if known is not None and known != OLD_HIGHEST:
            text = (
                f"warmup_max_lr is not said: before 0.17.2 DeepSpeed takes {OLD_HIGHEST}, later the "
                f"optimizer's lr {known}"
            )
            way_out = f"say warmup_max_lr in the file; --lr {known} has the later DeepSpeed"
            reader.wrong(SCHEDULER, text, way_out=way_out)
    if highest is None:
        return
    reader.left[:] = [each for each in reader.left if each.key != rate]
    if reader.has(rate) and highest != known:
        reader.leave(rate, f"{kind} sets the learning rate, whatever the optimizer says: {highest}")
    reader.defaults.pop(rate, None)
    reader.unsaid.discard("lr")
    reader.put("lr", highest, name)


def _need_end(reader: SettingsReader, kind: str) -> bool:
    name = f"{TIMING}total_num_steps"
    if reader.has(name) or reader.asked.steps is not None:
        return True
    reader.wrong(SCHEDULER, f"{kind} needs total_num_steps", way_out="say it in the file, or give --steps N")
    return False


def _cosine(reader: SettingsReader) -> None:
    if not _need_end(reader, "WarmupCosineLR"):
        return
    name, ratio_name = f"{TIMING}total_num_steps", f"{TIMING}cos_min_ratio"
    steps = _number(reader, name, "total_steps", "min_lr")
    default = reader.defaults.get(ratio_name)
    ratio = reader.number(ratio_name) if default is None else default.value
    if steps is None or "lr" not in reader.values:
        unknown = "it is a part of a learning rate, or of a length, that is not known"
        if steps is None:
            reader.leave(ratio_name, unknown)
        else:
            reader.differ(ratio_name, f"the plan has min_lr = {Optimizer().min_lr}: {unknown}")
            reader.put("total_steps", steps, name)
            reader.unsaid.add("min_lr")
    elif ratio is not None:
        reader.put("total_steps", steps, name)
        reader.put("min_lr", product(ratio, reader.values["lr"]), ratio_name)


def _check_asked(reader: SettingsReader, dp: int | None) -> None:
    """Refuse an option whose value the plan did not get; DeepSpeed would not use it either."""
    values, asked = reader.values, reader.asked
    batch = values.get("micro_batch_size", 0) * values.get("micro_batches", 0) * (dp or 0)
    norm = values.get("max_norm", 0.0 if values.get("clip") == "none" else None)
    for option, wanted, found in (
        ("--micro-batch-size", asked.micro_batch_size, values.get("micro_batch_size")),
        ("--global-batch", asked.global_batch, batch),
        ("--dtype", asked.dtype, values.get("view_dtype")),
        ("--lr", asked.lr, values.get("lr")),
        ("--weight-decay", asked.weight_decay, values.get("weight_decay")),
        ("--max-norm", asked.max_norm, norm),
        ("--warmup-steps", asked.warmup_steps, values.get("warmup_steps")),
        ("--steps", asked.steps, values.get("total_steps")),
    ):
        if wanted is not None and wanted != found:
            instead = "nothing of it" if found is None else f"{found} in its place"
            text = f"{option} {wanted} contradicts this file: the plan has {instead}"
            reader.wrong("", text, way_out=f"leave {option} out, or change the file")


DEEPSPEED = Framework(
    "DeepSpeed",
    "a ds_config of DeepSpeed",
    _settings,
    RULES,
    _read,
    TABLES,
    STRICT,
    _stops,
    idle=IDLE,
    trains=TRAINS,
    takes_text=lambda name: name.startswith(OF_PYDANTIC),
)
