"""Import of torchtitan's TOML files, for versions from February 2024 to v0.2.2."""

from __future__ import annotations

import math
import re
from typing import Any

from ratrain.ratrain_ir.config.optimizer import DECAYS, Optimizer
from ratrain.ratrain_ir.config.plan_keys import ZIGZAG
from ratrain.ratrain_ir.schedules.named import SCHEDULES as PLACED
from ratrain.ratrain_ir.support.text import Source, toml_places
from ratrain.ratrain_ir.support.toml_text import toml_data
from ratrain.ratrainc.bridge.reasons import RECOMPUTE
from ratrain.ratrainc.bridge.settings import (
    Framework,
    Setting,
    SettingsReader,
    flat,
    product,
    put_batch,
    put_clip,
    put_context_ranks,
    put_ranks,
    put_seq_len,
)
from ratrain.ratrainc.bridge.torchtitan_rules import (
    BALANCER,
    BEFORE_AMP,
    CONTEXT,
    CONVERTERS,
    COUNT,
    DECAY,
    EACH,
    END,
    FLOAT8_SECTIONS,
    IDLE,
    KIND,
    LAYERS_EACH,
    LEAST,
    LOCAL,
    OLD_SCHEDULES,
    ONE_DEGREE,
    OTHER_SCHEDULES,
    PARTS,
    POINTS,
    PP,
    RATIO,
    REDUCE,
    RENAMED,
    REPLICATE,
    RESHARD,
    RULES,
    SCHEDULE,
    SCHEDULES,
    SEEDS,
    SELECTED,
    SHARD,
    SPLIT,
    STATE,
    STEPS,
    STRICT,
    TABLE,
    TABLES,
    TP,
    TRAINS,
    TYPES,
    VIEW,
    WARM_UP,
    WHOLE,
)


def _settings(file: str, text: str) -> dict[str, Setting]:
    source = Source(file, text)
    places = toml_places(source)
    return {name: Setting(value, places(name)) for name, value in flat(toml_data(source, "RT063"))}


_LEAVES = {name.partition(".")[2] for name, rule in RULES.items() if rule.keys and "_" in name.partition(".")[2]}


def _stops(name: str) -> bool:
    """Tell whether an unknown name ends like a setting that decides what is trained."""
    return name.rpartition(".")[2] in _LEAVES


def _read(reader: SettingsReader) -> None:
    old = take_old_names(reader)
    pp, tp = reader.size(f"{PP}degree") or 1, reader.size(TP) or 1
    reader.put("pp", pp, f"{PP}degree")
    if tp > 1:
        reader.put("tp", tp, TP)
    dp, shard = _replicas(reader, pp, tp)
    chunks = _schedule_and_cuts(reader, pp) if pp > 1 else 1
    if dp is not None and shard is not None:
        reader.put("dp", dp, SHARD, REPLICATE)
        if 1 < shard < dp * int(reader.values.get("cp", 1)):
            reader.put("shard_group", shard, SHARD, CONTEXT)
        if pp == 1:
            _batch(reader, dp, LOCAL, reader.size(LOCAL))
        elif chunks is not None:
            _batch(reader, dp, *_micro_batch(reader, pp, chunks, old))
        _state(reader, pp, sharded=shard > 1)
        if shard == 1 and reader.values.get("view_dtype", "f32") != "f32":
            _compute_without_shards(reader, alone=pp == tp == 1, old=bool(old & BEFORE_AMP))
    put_seq_len(reader, "training.seq_len")
    _clip(reader)
    seeds = [name for name in SEEDS if reader.has(name)]
    if len(seeds) > 1 and reader.settings[seeds[0]].value != reader.settings[seeds[1]].value:
        reader.wrong(seeds[1], f"{seeds[1]} contradicts {seeds[0]}")
    for name in seeds:
        reader.carry("seed", reader.integer(name), name)
    _optimizer(reader)
    _recompute(reader)
    _not_converted(reader)


def _not_converted(reader: SettingsReader) -> None:
    """Drop settings of float8 where no layer is converted to it: they change nothing, there or here."""
    sections = [name for name in reader.settings if name.startswith(FLOAT8_SECTIONS)]
    converted = reader.settings.get(CONVERTERS, Setting([], reader.top)).value
    if not converted and not any(reader.settings[name].value is True for name in sections):
        reader.taken.update(sections)


def _clip(reader: SettingsReader) -> None:
    """Put `clip` and `max_norm`. In torchtitan a norm of inf clips nothing, and 0 makes every gradient 0."""
    name = "training.max_norm"
    said = reader.settings[name].value if reader.has(name) else None
    if isinstance(said, float) and math.isinf(said):
        reader.taken.add(name)
        reader.put("clip", "none", name)
    elif said == 0:
        reader.taken.add(name)
        text = f"{name} is 0, by which torchtitan makes every gradient 0"
        reader.wrong(name, text, way_out="say inf where gradients are not to be clipped")
    else:
        put_clip(reader, name)


def take_old_names(reader: SettingsReader) -> set[str]:
    """Rename settings of older versions; return the old names that were found."""
    settings = reader.settings
    found = {name for name in settings if name in RENAMED or name in BEFORE_AMP}
    for name in [name for name in settings if name in RENAMED]:
        new = RENAMED[name]
        if new in settings and settings[new].value != settings[name].value:
            reader.wrong(name, f"{name}, the older name of {new}, contradicts it", way_out="leave one of them")
        settings[new] = settings.pop(name)
        reader.called[new] = name
    if reader.has("training.warmup_pct"):
        text = "warmup_pct is a share of the steps of a version before March 2024"
        reader.wrong("training.warmup_pct", text, way_out="say training.warmup_steps, in steps")
        reader.taken.add("training.warmup_pct")
    _one_degree(reader)
    return found


def _one_degree(reader: SettingsReader) -> None:
    """Read data_parallel_degree of older versions, whose meaning depends on data_parallel_type (fsdp or ddp)."""
    kind, degree = "fsdp" if not reader.has(KIND) else reader.word(KIND), reader.settings.get(ONE_DEGREE)
    reader.taken.add(ONE_DEGREE)
    if kind is not None and kind not in ("fsdp", "ddp"):
        reader.wrong(KIND, f"{KIND} is '{kind}': fsdp or ddp is expected", code="RT063")
    if degree is None and not reader.has(KIND):
        return
    for name in (SHARD, REPLICATE):
        if reader.has(name):
            reader.wrong(name, f"{name} and {ONE_DEGREE if degree else KIND} exclude one another")
            return
    if degree is not None:
        reader.settings[SHARD if kind == "fsdp" else REPLICATE] = degree
    elif kind == "ddp":
        reader.settings[REPLICATE] = Setting(-1, reader.settings[KIND].place)
    if kind == "ddp":
        reader.settings[SHARD] = Setting(1, reader.settings[KIND].place)
        reader.taken.add(SHARD)


def _replicas(reader: SettingsReader, pp: int, tp: int) -> tuple[int | None, int | None]:
    """Return the number of replicas, and the ranks that share the state; (None, None) after an error.

    FSDP shards over context ranks too (torchtitan/distributed/parallel_dims.py, ParallelDims.build_mesh: dp_shard_cp).
    """
    shard, context = reader.integer(SHARD), _context_ranks(reader)
    # A replicate degree of -1 comes from `_one_degree`: with ddp, as with fsdp, it means all remaining ranks.
    rest = reader.integer(REPLICATE) == -1 and shard == 1 and reader.has(KIND)  # of ddp, as of fsdp: all ranks
    replicas = 1 if rest else reader.size(REPLICATE) or 1
    if shard is not None and shard < 1 and shard != -1:
        reader.wrong(SHARD, f"{SHARD} is {shard}: at least 1, or -1, is expected")
    said = None if shard is None or shard < 1 or rest else shard
    world = None if said is None else said * replicas * pp * tp * context
    others = (
        ("stages", pp),
        ("tensor-parallel ranks", tp),
        ("replicas", replicas),
        ("context-parallel ranks", context),
    )
    dp = put_ranks(reader, world, SHARD, *others)
    if dp is None:
        return None, None
    return (dp, context) if rest else (dp * replicas, dp * context)


def _context_ranks(reader: SettingsReader) -> int:
    """Put the context ranks, and the tokens that each has; return how many there are."""
    context = put_context_ranks(reader, CONTEXT)
    if context == 1:
        return context
    word = reader.word(BALANCER)
    if word == "ptrr":
        reader.leave(BALANCER, "which tokens a context rank has follows no mask in a plan: it is zigzag")
    elif word == "headtail":
        reader.put("context_layout", ZIGZAG, BALANCER)
    elif word is not None:
        text = f"{BALANCER} is '{word}': headtail or ptrr is expected"
        reader.wrong(BALANCER, text, code="RT063", way_out="take it out: ranks have an early and a late run then")
    return context


def _schedule_and_cuts(reader: SettingsReader, pp: int) -> int | None:
    """Put schedule, cuts and chunks; return the number of chunks of a stage, or None after an error."""
    said = reader.word(SCHEDULE) or "1F1B"
    known = {word.lower(): word for word in (*SCHEDULES, *OTHER_SCHEDULES)}
    known |= OLD_SCHEDULES
    name = known.get(said.lower())
    if reader.has(TABLE) and reader.word(TABLE):
        reader.wrong(
            TABLE, "the order of a table is in no plan", way_out="take it out, and give 'compile --schedule-file'"
        )
        return None
    reader.leave(TABLE, "it names no file")
    if name is None:
        reader.wrong(
            SCHEDULE,
            f"{reader.name(SCHEDULE)} is '{said}', which is no schedule of torch.distributed.pipelining",
            code="RT063",
        )
        return None
    if name in SCHEDULES:
        reader.put("schedule", SCHEDULES[name], SCHEDULE)
    else:
        reader.leave(
            SCHEDULE, "no schedule that is known here: the strategy, or a schedule of the plan, places another"
        )
    several = name not in SCHEDULES or PLACED[SCHEDULES[name]].chunks > 1
    count = _cuts(reader, pp)
    if count == 0:
        return None
    if count is not None:
        chunks = count // pp
    elif several and reader.has(LAYERS_EACH):
        text = "how many stages a rank has with it depends on the layers of the model"
        reader.wrong(LAYERS_EACH, text, way_out=f"say {PARTS} in its place")
        return None
    else:
        reader.leave(LAYERS_EACH, "there is one stage a rank in any case")
        chunks = reader.default("stages a rank", 2, SPLIT) if several else 1
    if (chunks > 1) != several and name in SCHEDULES:
        text = f"{said} has {'several stages' if several else 'one stage'} a rank, not {chunks}"
        reader.wrong(PARTS if reader.has(PARTS) else POINTS, text)
        return None
    if chunks > 1:
        reader.put("chunks", chunks, PARTS, POINTS, SCHEDULE)
    return chunks


def _cuts(reader: SettingsReader, pp: int) -> int | None:
    """Put the file's cuts; return its number of chunks over all stages, None without cuts, 0 after an error."""
    if reader.has(POINTS) and isinstance(value := reader.settings[POINTS].value, str):
        reader.settings[POINTS] = Setting(value.split(",") if value else [], reader.settings[POINTS].place)
    parts, points = reader.items(PARTS), reader.items(POINTS)
    if parts and points:
        reader.wrong(POINTS, f"{POINTS} and {PARTS} exclude one another")
        return 0
    if not parts and not points:
        return None
    place = PARTS if parts else POINTS
    reader.leave(LAYERS_EACH, f"{place} says where stages begin")
    starts = [_first_layer(part) for part in parts[1:]] if parts else [_first_layer([point]) for point in points or []]
    count = len(starts) + 1
    if count % pp:
        reader.wrong(place, f"{count} parts cannot be shared out evenly over {pp} stages")
        return 0
    if None in starts:
        reader.leave(place, "a part of it has no layer: 'cuts' of the plan says where stages start")
    else:
        reader.put("cuts", starts, place)
    return count


def _first_layer(part: Any) -> int | None:
    """Return the first layer in a list of module names; None if there is none."""
    names = [name.strip() for name in part if isinstance(name, str)] if isinstance(part, list) else []
    layers = [int(match[1]) for name in names if (match := re.fullmatch(r"layers\.(\d{1,6})", name))]
    return min(layers, default=None)


def _micro_batch(reader: SettingsReader, pp: int, chunks: int, old: set[str]) -> tuple[str, int | None]:
    """Return the setting that gives the micro-batch of a pipeline, and its number of sequences or None.

    Versions before April 2025 give the number of micro-batches of the local batch, later ones the sequences of each.
    """
    local = reader.size(LOCAL)
    if reader.has(COUNT) and reader.has(EACH):
        reader.wrong(COUNT, f"{COUNT} and {EACH} are of different versions", way_out="leave one of them")
        return EACH, None
    before = any(name.split(".")[0] == "experimental" or name == "training.pipeline_parallel_degree" for name in old)
    if reader.has(EACH) or not (before or reader.has(COUNT) or "training.batch_size" in old):
        return EACH, reader.size(EACH)
    count = reader.size(COUNT)
    if count is None and not before and local != pp * chunks:
        text = (
            f"{COUNT} and {EACH} are left out, and versions that call the local batch batch_size differ in "
            "what they take"
        )
        reader.wrong("", text, way_out=f"say {COUNT}, or {EACH}")
        return COUNT, None
    if count is None and chunks > 1:
        text = f"{COUNT} is left out, and versions differ in whether it is {pp} or {pp * chunks} then"
        reader.wrong("", text, way_out=f"say {COUNT}")
        return COUNT, None
    if count is None:
        count = reader.default(COUNT, pp, "torchtitan/parallelisms/pipelining_utils.py, build_pipeline_schedule")
    if local is not None and local % count:
        reader.wrong(
            COUNT if reader.has(COUNT) else LOCAL,
            f"{reader.name(LOCAL)} {local} is no multiple of {count} micro-batches ({reader.name(COUNT)})",
        )
        return COUNT, None
    return COUNT, None if local is None else local // count


def _batch(reader: SettingsReader, dp: int, micro_name: str, micro: int | None) -> None:
    local, whole = reader.size(LOCAL) or 1, reader.integer(WHOLE)
    if whole is None or whole < 1:
        whole = local * dp
    if whole % (local * dp):
        reader.wrong(WHOLE, f"{whole} sequences are no multiple of {reader.name(LOCAL)} {local} * {dp} replicas")
        return
    if micro is not None and local % micro:
        reader.wrong(micro_name, f"{reader.name(LOCAL)} {local} is no multiple of {micro_name} {micro}")
        return
    put_batch(reader, (micro_name, micro), (WHOLE, whole), dp)
    if micro_name != LOCAL and whole != local * dp:
        reader.leave(LOCAL, f"the pipeline is filled once a step, not {whole // (local * dp)} times")


def _state(reader: SettingsReader, pp: int, *, sharded: bool) -> None:
    said = reader.word(RESHARD)
    if said not in ("default", "always", "never"):
        reader.wrong(RESHARD, f"{RESHARD} is '{said}': default, always or never is expected", code="RT063")
    if not sharded:
        reader.leave(RESHARD, "with one replica a shard group, parameters are whole")
        reader.put("zero", 0, SHARD)
        reader.put("reduce", "last", SHARD)
    else:
        resharded = said == "always" or (said == "default" and pp == 1)
        reader.put("zero", 3 if resharded else 2 if pp == 1 else 1, RESHARD, SHARD)
        # in a pipeline gradients are whole until the last micro-batch; else each backward reduces
        reader.put("reduce", "last" if pp > 1 else "each-micro-batch", SHARD)
    if reader.word(STATE) not in (None, "float32"):
        reader.wrong(STATE, f"{STATE} keeps state in other types than f32, which no plan does", way_out="say float32")
    types = {}
    for name in (VIEW, REDUCE):
        word = reader.word(name)
        if word not in TYPES:
            reader.wrong(name, f"{name} is '{word}': one of {', '.join(TYPES)} is expected", code="RT063")
            return
        types[name] = TYPES[word]
    reader.put("view_dtype", types[VIEW], VIEW)
    reader.put("loss_scale", 1.0, VIEW)
    if not sharded:
        reader.put("grad_dtype", "f32", VIEW)
        reader.leave(REDUCE, "without shards gradients are f32")
    else:
        reader.put("grad_dtype", types[REDUCE if pp > 1 else VIEW], REDUCE, VIEW)
        reader.put("grad_shard_dtype", types[REDUCE], REDUCE)


def _compute_without_shards(reader: SettingsReader, *, alone: bool, old: bool) -> None:
    """Put f32 as the type if torchtitan computes in f32: only FSDP, or plain replication, casts parameters."""
    if alone and not old:
        return
    text = "parameters are cast by FSDP, which one replica a shard group does not have: torchtitan computes in f32 then"
    reader.differ(VIEW, text)
    reader.put("view_dtype", "f32", VIEW)


def _optimizer(reader: SettingsReader) -> None:
    name = reader.word("optimizer.name")
    decay = reader.number("optimizer.weight_decay")
    if name == "Adam" and decay:
        text = f"Adam adds a weight_decay of {decay} to gradients (L2), which no plan does"
        reader.wrong("optimizer.name", text, way_out="say AdamW, or weight_decay = 0")
    elif name not in ("Adam", "AdamW"):
        reader.wrong("optimizer.name", f"ratrain trains with AdamW, not with {name}", way_out="say AdamW")
    reader.carry("weight_decay", decay, "optimizer.weight_decay")
    for key in ("lr", "eps"):
        reader.carry(key, reader.number(f"optimizer.{key}"), f"optimizer.{key}")
    betas = [reader.number(f"optimizer.beta{n}") for n in (1, 2)]
    if None not in betas:
        reader.put("betas", betas, "optimizer.beta1", "optimizer.beta2")
    warm_up = reader.integer(WARM_UP)
    reader.carry("warmup_steps", warm_up, WARM_UP)
    _decay(reader, warm_up or 0)


def _decay(reader: SettingsReader, warm_up: int) -> None:
    """Put the curve along which the rate comes down, its end and its length; report a curve that no plan has.

    Each step has the rate of a plan: torchtitan counts steps from 1, and comes down over one step more than it trains
    (torchtitan/components/optimizer/lr_scheduler.py, LRSchedulersContainer.Config.build).
    """
    kind, ratio = reader.word(DECAY), reader.number(RATIO)
    if kind not in (*DECAYS, "sqrt"):
        reader.wrong(DECAY, f"{DECAY} is '{kind}': linear, sqrt or cosine is expected", code="RT063")
        return
    said = END if reader.has(END) else STEPS
    steps, factor = reader.size(said), reader.number(LEAST)
    if said == END:
        reader.leave(STEPS, "'run --steps' sets the length of a run")
    falls = None if ratio is None or steps is None else round(steps * ratio)
    if steps is not None and warm_up > steps:
        reader.put("warmup_steps", steps, WARM_UP)
        reader.differ(WARM_UP, f"it ends at the last step there: the plan has {steps}", trains=False)
    if falls is not None and falls <= 0:
        for name in (STEPS, END):
            reader.leave(name, "'run --steps' sets the length of a run")
        for name in (DECAY, LEAST):
            reader.defaults.pop(name, None)
            reader.leave(name, f"with decay_ratio {ratio:g} the learning rate stays at lr")
        reader.defaults.pop(STEPS, None)
    elif kind in DECAYS and steps is not None:
        _fall(reader, str(kind), steps, warm_up, falls)
        if factor:
            reader.put("min_lr", product(factor, reader.values.get("lr", 0.0)), LEAST)
    else:
        reader.leave(said, "'run --steps' sets the length of a run")
        reader.defaults.pop(STEPS, None)
        text = "the learning rate of a plan comes down along a line or half a cosine, or stays: it stays at lr"
        reader.differ(DECAY, text)
        for name in (RATIO, LEAST):
            reader.defaults.pop(name, None)
            reader.leave(name, text, trains=True)


def _fall(reader: SettingsReader, kind: str, steps: int, warm_up: int, falls: int | None) -> None:
    """Put end, curve and length of a rate; a longer decay than the warm-up leaves is cut as torchtitan does."""
    reader.put("total_steps", steps, END if reader.has(END) else STEPS)
    if kind != Optimizer().decay:
        reader.put("decay", kind, DECAY)
    if falls is not None and warm_up + falls <= steps:
        reader.put("decay_steps", falls, RATIO)


def _recompute(reader: SettingsReader) -> None:
    mode = reader.word("activation_checkpoint.mode")
    if mode == "full":
        reader.passes.append("recompute{policy=full}")
    elif mode == "selective":
        _recompute_selected(reader)
    elif mode == "memory_budget":
        reader.differ("activation_checkpoint.mode", RECOMPUTE, trains=False)
    elif mode != "none":
        text = f"activation_checkpoint.mode is '{mode}': full, selective, memory_budget or none is expected"
        reader.wrong("activation_checkpoint.mode", text, code="RT063")


def _recompute_selected(reader: SettingsReader) -> None:
    """Recompute by op or each N-th layer, as torchtitan does (distributed/activation_checkpoint.py).

    There a process counts the layers of its own stage, and keeps what tensor-parallel ranks reduced; no policy of
    layers or ops does that.
    """
    option = reader.word(SELECTED)
    if option is None:
        return
    if option != "op" and not option.isdecimal():
        reader.wrong(SELECTED, f"{SELECTED} is '{option}': 'op' or a whole number is expected", code="RT063")
    elif option == "op" and reader.values.get("tp", 1) > 1:
        _leave_selected(reader, "what tensor-parallel ranks reduced is kept there")
    elif option == "op":
        reader.passes.append("recompute{policy=ops}")
    elif int(option) <= 1:
        reader.passes.append("recompute{policy=full}")
    elif reader.values.get("pp", 1) > 1:
        _leave_selected(reader, "each stage counts its own layers there")
    else:
        reader.passes.append(f"recompute{{policy=full every={int(option)}}}")


def _leave_selected(reader: SettingsReader, why: str) -> None:
    for name in ("activation_checkpoint.mode", SELECTED):
        reader.differ(name, f"{why}: {RECOMPUTE}", trains=False)


TORCHTITAN = Framework(
    "torchtitan",
    "a job's TOML of torchtitan",
    _settings,
    RULES,
    _read,
    TABLES,
    STRICT,
    _stops,
    idle=IDLE,
    trains=TRAINS,
)
