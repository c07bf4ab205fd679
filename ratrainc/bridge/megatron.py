"""Import of a plan from Megatron-LM's arguments, in a launch script or in a file of arguments."""

from __future__ import annotations

import re
from itertools import accumulate

from ratrain.ratrain_ir.config.optimizer import DECAYS, Optimizer
from ratrain.ratrainc.bridge.launchers import WORLD, NotSaid
from ratrain.ratrainc.bridge.megatron_arguments import arguments_of
from ratrain.ratrainc.bridge.megatron_reasons import AGREES, DROPOUT, TRAINS, reason
from ratrain.ratrainc.bridge.megatron_rules import CHOICES, IDLE, RULES
from ratrain.ratrainc.bridge.reasons import MODEL, ONE_EXPERT
from ratrain.ratrainc.bridge.settings import (
    Asked,
    Framework,
    Setting,
    SettingsReader,
    put_batch,
    put_clip,
    put_context_ranks,
    put_ranks,
    put_seq_len,
    replicas_of,
)

_EXPERTS = frozenset(name for name, rule in RULES.items() if rule.says == ONE_EXPERT)
_DECIDE = (frozenset(name for name, rule in RULES.items() if rule.keys) | _EXPERTS) - {"train-iters", "train-samples"}
"""Arguments whose values must be known. The length of a run is needed only if the learning rate depends on it."""


def _settings(file: str, text: str, asked: Asked | None = None) -> dict[str, Setting]:
    return arguments_of(file, text, Asked() if asked is None else asked, _DECIDE)


def _read(reader: SettingsReader) -> None:
    _variables(reader)
    _not_needed(reader)
    _refusals(reader)
    tp, pp = (reader.size(f"{name}-model-parallel-size") or 1 for name in ("tensor", "pipeline"))
    reader.put("pp", pp, "pipeline-model-parallel-size")
    name = "tensor-parallel-num-weight-shards"
    if (shards := reader.size(name)) not in (None, tp):
        text = f"{name} is {shards}, for {tp} tensor-parallel ranks: a plan shares weights out over those alone"
        reader.wrong(name, text, way_out="leave it out, or say as many as tensor-model-parallel-size")
    if tp > 1:
        reader.put("tp", tp, "tensor-model-parallel-size")
        reader.put(
            "sequence_sharding", reader.flag("sequence-parallel"), "sequence-parallel", "tensor-model-parallel-size"
        )
    dp = _replicas(reader, tp, pp)
    reader.carry("dp", dp, WORLD if reader.has(WORLD) else "nproc-per-node")
    _chunks_and_cuts(reader, pp)
    batch = reader.size("global-batch-size")
    put_batch(reader, ("micro-batch-size", micro := reader.size("micro-batch-size")), ("global-batch-size", batch), dp)
    if micro is None and not reader.has("micro-batch-size"):
        reader.wrong("", "micro-batch-size is missing")
    _seq_len(reader)
    reader.carry("seed", reader.integer("seed"), "seed")
    _state(reader)
    _optimizer(reader, batch if batch is not None else (micro or 1) * (dp or 1))
    _attention(reader)
    _overlap(reader)
    for name in ("attention-dropout", "hidden-dropout"):
        if reader.number(name):
            reader.differ(name, DROPOUT)
        reader.taken.add(name)
        reader.defaults.pop(name, None)


def _seq_len(reader: SettingsReader) -> None:
    name, other = "seq-length", "encoder-seq-length"
    if reader.has(name) and reader.has(other):
        reader.wrong(other, f"{name} and {other} exclude one another: Megatron-LM stops")
        reader.taken.add(other)
    put_seq_len(reader, other if reader.has(other) else name)


def _variables(reader: SettingsReader) -> None:
    """Report the variables that the script is taken to lack."""
    for name in [each for each in reader.settings if each.startswith("$")]:
        value = reader.settings[name].value
        if isinstance(value, NotSaid):
            reader.leave(
                name, f"it is not set in the file, and expands to nothing: else --set {name[1:]}=VALUE", trains=True
            )
        else:
            reader.taken.add(name)
            reader.unset[name[1:]] = value


def _not_needed(reader: SettingsReader) -> None:
    """Report unknown values that an option of the command gives, or that no key needs."""
    ranks = ("nproc-per-node", "nnodes", WORLD)
    reasons = {**dict.fromkeys(ranks, "--clusters says the ranks"), "seq-length": "--seq-len says it"}
    reasons |= dict.fromkeys(("num-layers", "encoder-num-layers"), MODEL)
    open_ = {name for name in reasons if isinstance(getattr(reader.settings.get(name), "value", None), NotSaid)}
    if open_ & {*ranks}:  # one of them alone is no number of ranks
        open_ |= {name for name in ranks if name in reader.settings}
    for name in [each for each in reasons if each in open_]:
        reader.leave(name, reasons[name])
        del reader.settings[name]


_WAYS_OUT = {
    **dict.fromkeys(("deepspeed", "deepspeed-config"), "leave it out, and say zero and clip in the plan"),
    **dict.fromkeys(
        _EXPERTS,
        "take the experts out of the file to have a dense model's plan; 'ratrainc plan' makes those with experts",
    ),
}


def _refusals(reader: SettingsReader) -> None:
    for name in reader.settings:
        if name in RULES and RULES[name].refused:
            reader.refuse(name, _WAYS_OUT.get(name))
    for name, words in CHOICES.items():
        value = reader.settings[name].value if name in reader.settings else words[0]
        if value not in words:
            reader.wrong(name, f"{name} is {value}: one of {', '.join(words)} is expected", code="RT063")


def _replicas(reader: SettingsReader, tp: int, pp: int) -> int | None:
    a_node, variable = reader.size("nproc-per-node"), reader.size(WORLD)
    nodes = reader.size("nnodes") if a_node is not None or reader.has("nnodes") else None
    world = variable if a_node is None else a_node * (nodes or 1)
    if a_node is not None and variable is not None and world != variable:
        reader.wrong(WORLD, f"WORLD_SIZE is {variable}, but the launcher starts {world} ranks")
    if a_node is None:
        reader.leave("nnodes", "how many processes a node has is not said (nproc-per-node)")
    context = put_context_ranks(reader, "context-parallel-size")
    return put_ranks(
        reader,
        world,
        "nproc-per-node",
        ("tensor-parallel ranks", tp),
        ("stages", pp),
        ("context-parallel ranks", context),
    )


def _overlap(reader: SettingsReader) -> None:
    sharded = ("use-distributed-optimizer", "use-megatron-fsdp", "use-custom-fsdp")
    name = "overlap-param-gather"
    if (
        reader.has(name)
        and not any(map(reader.has, sharded))
        and not (reader.word("optimizer") or "").startswith("dist")
    ):
        reader.wrong(name, f"{name} goes with use-distributed-optimizer: Megatron-LM stops without")


def _chunks_and_cuts(reader: SettingsReader, pp: int) -> None:
    virtual, layers_each = (
        reader.size(name) for name in ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage")
    )
    layers = reader.size("num-layers") or reader.size("encoder-num-layers")
    layout = reader.word("pipeline-model-parallel-layout")
    if layout is not None:
        if layers_each is not None:
            name = "num-layers-per-virtual-pipeline-stage"
            reader.wrong(name, f"{name} and pipeline-model-parallel-layout exclude one another")
        _leave_layers(reader)
        _lay_out(reader, layout, pp, virtual)
        return
    if layers_each is not None:
        if layers is None or layers % (pp * layers_each):
            text = f"{layers_each} layers of a virtual stage do not make up num-layers {layers} on {pp} stages"
            reader.wrong("num-layers-per-virtual-pipeline-stage", text)
        elif virtual is not None and virtual != layers // (pp * layers_each):
            reader.wrong("num-virtual-stages-per-pipeline-rank", "it contradicts num-layers-per-virtual-pipeline-stage")
        else:
            virtual = layers // (pp * layers_each)
    if virtual is not None and virtual > 1 and pp == 1:
        name = (
            "num-virtual-stages-per-pipeline-rank" if layers_each is None else "num-layers-per-virtual-pipeline-stage"
        )
        reader.wrong(name, f"{name} goes with a pipeline: pipeline-model-parallel-size is 1")
    _put_chunks(
        reader, pp, virtual or 1, "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"
    )
    _uneven_ends(reader, pp, virtual or 1, layers)
    if layers is not None:
        used = layers_each is not None or "cuts" in reader.values
        if not used:
            _leave_layers(reader)


def _leave_layers(reader: SettingsReader) -> None:
    for name in ("num-layers", "encoder-num-layers"):
        reader.leave(name, MODEL)


def _put_chunks(reader: SettingsReader, pp: int, chunks: int, *names: str) -> None:
    if chunks > 1:
        reader.put("chunks", chunks, *names)
    if pp > 1:
        reader.put("schedule", "interleaved" if chunks > 1 else "1f1b", *names)


def _uneven_ends(reader: SettingsReader, pp: int, chunks: int, layers: int | None) -> None:
    names = [f"decoder-{end}-pipeline-num-layers" for end in ("first", "last")]
    first, last = (reader.size(name) for name in names)
    said = [count for count in (first, last) if count is not None]
    if not said:
        extra = sum(reader.has(f"account-for-{each}-in-pipeline-split") for each in ("embedding", "loss"))
        if layers is not None and (layers + extra) % pp:
            reader.wrong("num-layers", f"num-layers {layers} are not a multiple of pipeline-model-parallel-size {pp}")
        return
    between = pp - len(said)
    if (
        layers is None
        or chunks > 1
        or between < 0
        or (layers - sum(said)) % max(1, between)
        or layers - sum(said) < between
    ):
        name = next(name for name in names if reader.has(name))
        reader.wrong(
            name,
            "the layers of the other stages cannot be shared out evenly",
            way_out="leave it out, and say cuts in the plan",
        )
        return
    each = (layers - sum(said)) // between if between else 0
    counts = [first if first is not None else each, *[each] * (pp - 2), last if last is not None else each][:pp]
    reader.put("cuts", list(accumulate(counts[:-1])), *names)


_REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,4})|([EtmL])\*(\d{1,4})")
_MOST_LAYOUT = 1 << 16


def _lay_out(reader: SettingsReader, layout: str, pp: int, virtual: int | None) -> None:
    """Put cuts and chunks of a layout such as `Et*3|(tt|)*6tL`: E, layers (t) and L, with `|` between parts.

    A layout with anything else is refused.
    """
    name = "pipeline-model-parallel-layout"
    text = re.sub(r"[\s\\]", "", layout)
    # Expand repetitions from the inside out. The limit on length ends a layout that would grow without end.
    while (match := _REPEATED.search(text)) is not None and len(text) < _MOST_LAYOUT:
        text = text[: match.start()] + (match[1] or match[3]) * int(match[2] or match[4]) + text[match.end() :]
    if not re.fullmatch(r"Et*(\|t*)*L\|?", text) or len(text) >= _MOST_LAYOUT:
        reader.wrong(
            name,
            f"the layout {layout!r} is not one of E, layers (t) and L",
            way_out="leave it out, and say cuts in the plan",
        )
        return
    counts = [part.count("t") for part in text.rstrip("|").split("|")]
    if len(counts) % pp:
        reader.wrong(name, f"the layout has {len(counts)} parts, which {pp} stages do not share out evenly")
        return
    chunks = len(counts) // pp
    if virtual is not None and virtual != chunks:
        reader.wrong(
            name, f"the layout has {chunks} parts a stage, but num-virtual-stages-per-pipeline-rank says {virtual}"
        )
    _put_chunks(reader, pp, chunks, name)
    reader.put("cuts", [sum(counts[: n + 1]) for n in range(len(counts) - 1)], name)


_SHARDED = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


def _state(reader: SettingsReader) -> None:
    names = ("use-torch-fsdp2", "use-megatron-fsdp", "use-distributed-optimizer")
    torch_fsdp, fsdp, sharded = (reader.flag(name) for name in names)
    fsdp = reader.flag("use-custom-fsdp") or fsdp
    zero, by = int(sharded), "use-distributed-optimizer"
    if torch_fsdp and fsdp:
        reader.wrong("use-torch-fsdp2", "use-torch-fsdp2 and use-megatron-fsdp exclude one another")
    if torch_fsdp:
        zero, by = 2 if reader.flag("torch-fsdp2-no-reshard-after-forward") else 3, "use-torch-fsdp2"
    elif fsdp:
        by = "data-parallel-sharding-strategy"
        zero = _SHARDED.get(reader.word(by) or "", 0)
    reader.put("zero", zero, by)
    reader.put("reduce", "each-micro-batch" if zero > 1 else "last", by)
    bf16, fp16 = reader.flag("bf16"), reader.flag("fp16")
    in_f32, in_bf16 = reader.flag("accumulate-allreduce-grads-in-fp32"), reader.flag("grad-reduce-in-bf16")
    if bf16 and fp16:
        reader.wrong("fp16", "bf16 and fp16 exclude one another")
    if in_bf16 and (in_f32 or not bf16):
        reader.wrong(
            "grad-reduce-in-bf16", "grad-reduce-in-bf16 goes with bf16, and without accumulate-allreduce-grads-in-fp32"
        )
    narrow = reader.word("main-grads-dtype") == "bf16"
    decides = narrow and bf16 and not in_f32 and not in_bf16
    in_bf16 = in_bf16 or decides
    view = "bf16" if bf16 else "f16" if fp16 else "f32"
    reader.put("view_dtype", view, "bf16", "fp16")
    whole = "bf16" if in_bf16 else "f16" if fp16 and not in_f32 else "f32"
    if narrow and not decides:
        reader.leave("main-grads-dtype", f"by the other types gradients of the plan are {whole}", trains=True)
    reader.put("grad_dtype", whole, "grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32", "bf16", "fp16")
    if fp16:
        scale = reader.number("loss-scale") if reader.has("loss-scale") else 0
        reader.put("loss_scale", scale or "dynamic", "loss-scale")
    elif bf16:
        reader.leave("loss-scale", "a plan scales the loss of f16 alone; Megatron-LM scales it with bf16 as well")
    _shard_group(reader, zero)


def _shard_group(reader: SettingsReader, zero: int) -> None:
    """Put `shard_group`: each instance of the distributed optimizer shards the state over its own replicas.

    Context ranks count as replicas there (megatron/core/parallel_state.py, initialize_model_parallel:
    intra_partial_data_parallel_size).
    """
    name = "num-distributed-optimizer-instances"
    instances, dp = reader.size(name), replicas_of(reader)
    if instances is None or instances == 1 or dp is None:
        return
    if zero == 0:
        reader.wrong(name, f"{name} goes with use-distributed-optimizer")
    elif dp % instances:
        reader.wrong(name, f"{dp} replicas are not a multiple of {name} {instances}")
    elif instances < dp:
        reader.put("shard_group", dp // instances, name)
    elif zero == 1:
        reader.put("zero", 0, name)  # each replica has the whole state
    else:
        reader.wrong(name, f"with {name} {instances} nothing is sharded over {dp} replicas: leave sharding out")


def _optimizer(reader: SettingsReader, batch: int) -> None:
    if not reader.has("lr"):
        reader.wrong("", "lr is missing")
    reader.carry("lr", reader.number("lr"), "lr")
    betas = [reader.number(f"adam-beta{n}") for n in (1, 2)]
    if None not in betas:
        reader.put("betas", betas, "adam-beta1", "adam-beta2")
    reader.carry("eps", reader.number("adam-eps"), "adam-eps")
    reader.carry("weight_decay", reader.number("weight-decay"), "weight-decay")
    put_clip(reader, "clip-grad")
    kind = reader.word("optimizer")
    if kind != "adam":
        reader.leave("optimizer", f"ratrain trains with AdamW, here at the lr and weight-decay of {kind}", trains=True)
    _one_unit(reader)
    total = _steps(reader, "lr-decay", batch)
    trained = _steps(reader, "train", batch)
    decay = total if total is not None else trained
    _warm_up(reader, decay, batch)
    _decay(reader, decay, batch, by_training=total is None)


def _decay(reader: SettingsReader, steps: int | None, batch: int, *, by_training: bool) -> None:
    """Put the curve along which the rate comes down until step `steps`, which is that of the training or its own.

    Step s, counted from 0, has the rate of a plan after the warm-up: the scheduler counts samples from 0 too
    (megatron/core/optimizer_param_scheduler.py, OptimizerParamScheduler.get_lr).
    """
    curve, style = _curve(reader), reader.word("lr-decay-style")
    minimum = reader.number("min-lr")
    if style == "WSD" and curve is not None:
        _last_steps(reader, batch)
    if curve is not None and steps is not None:
        reader.put("total_steps", steps, "lr-decay-iters", "lr-decay-samples", "train-iters", "train-samples")
        if curve != Optimizer().decay:
            reader.put("decay", curve, "lr-wsd-decay-style" if style == "WSD" else "lr-decay-style")
        reader.carry("min_lr", minimum, "min-lr")
        if not by_training:
            _leave_length(reader)
        return
    if curve is not None:
        text = "over how many steps the learning rate comes down is not said: lr-decay-iters, or train-iters"
        reader.wrong("lr-decay-style", text)
    elif style == "WSD":
        reader.differ("lr-wsd-decay-style", _NO_CURVE)
        for unit in ("iters", "samples"):
            reader.leave(f"lr-wsd-decay-{unit}", _NO_CURVE, trains=True)
    elif style != "constant":
        reader.differ("lr-decay-style", _NO_CURVE)
    for name in ("min-lr", "lr-decay-iters", "lr-decay-samples"):
        reader.leave(name, "the learning rate of the plan stays at lr")
    _leave_length(reader)


_NO_CURVE = "the learning rate of a plan comes down along a line or half a cosine, or stays: it stays at lr"


def _curve(reader: SettingsReader) -> str | None:
    """Return the curve along which the rate comes down; None if it stays level, or no plan follows its curve."""
    style = reader.word("lr-decay-style")
    word = reader.word("lr-wsd-decay-style") if style == "WSD" else style
    return word if word in DECAYS else None


def _last_steps(reader: SettingsReader, batch: int) -> None:
    """Put `decay_steps`; report their lack: Megatron-LM reads them in the unit of the training's length, and stops."""
    for unit, other in (("iters", "samples"), ("samples", "iters")):
        name = f"lr-wsd-decay-{other}"
        if reader.has(f"train-{unit}") and reader.has(name):
            reader.leave(name, f"with train-{unit} only lr-wsd-decay-{unit} acts")
            del reader.settings[name]
    falls = _steps(reader, "lr-wsd-decay", batch)
    if falls is not None:
        reader.put("decay_steps", falls, "lr-wsd-decay-iters", "lr-wsd-decay-samples")
    elif not any(reader.has(f"lr-wsd-decay-{unit}") for unit in ("iters", "samples")):
        text = "in how many steps the rate of WSD comes down is not said: Megatron-LM stops"
        reader.wrong("lr-decay-style", text, way_out="say lr-wsd-decay-iters")


def _one_unit(reader: SettingsReader) -> None:
    """Refuse lengths in iterations together with lengths in samples, as Megatron-LM's `validate_args` does."""
    for unit, other in (("iters", "samples"), ("samples", "iters")):
        for name in (f"lr-decay-{other}", f"lr-warmup-{other}"):
            if reader.has(f"train-{unit}") and reader.has(name) and reader.settings[name].value != "0":
                reader.wrong(name, f"train-{unit} and {name} exclude one another: Megatron-LM stops")


def _leave_length(reader: SettingsReader) -> None:
    for name in _LENGTHS:
        reader.leave(name, "'run --steps' sets the length of a run")


def _steps(reader: SettingsReader, what: str, batch: int) -> int | None:
    if what == "train" and any(
        isinstance(reader.settings[name].value, NotSaid) for name in _LENGTHS if reader.has(name)
    ):
        _not_said(reader)
        return None
    steps, samples = reader.size(f"{what}-iters"), reader.size(f"{what}-samples")
    if steps is not None and samples is not None:
        reader.wrong(f"{what}-samples", f"{what}-iters and {what}-samples exclude one another")
    return steps if samples is None else max(1, samples // batch)


_LENGTHS = ("train-iters", "train-samples")


def _not_said(reader: SettingsReader) -> None:
    """Report an unknown length of the training if the learning rate depends on it."""
    decays = reader.has("lr-decay-iters") or reader.has("lr-decay-samples")
    hangs = not decays and (_curve(reader) is not None or reader.has("lr-warmup-fraction"))
    for name in _LENGTHS:
        value = reader.settings[name].value if reader.has(name) else None
        if hangs and isinstance(value, NotSaid):
            reader.wrong(name, f"{name} is {value.told()}", way_out=value.unknown.help())


def _warm_up(reader: SettingsReader, decay: int | None, batch: int) -> None:
    names = [f"lr-warmup-{unit}" for unit in ("iters", "samples", "fraction")]
    said = [name for name in names if reader.has(name)]
    samples, fraction = reader.integer(names[1]), reader.number(names[2])
    steps = reader.integer(names[0]) if reader.has(names[0]) or not (samples or fraction) else None
    if len([name for name in said if reader.settings[name].value not in ("0", "0.0")]) > 1:
        reader.wrong(said[1], f"{' and '.join(said)} exclude one another")
    elif samples:
        steps = samples // batch
    elif fraction and decay is None:
        reader.leave(names[2], "of how many steps it is a fraction is not said", trains=True)
    elif fraction and decay is not None:
        steps = int(fraction * decay)
    if steps is not None:
        reader.put("warmup_steps", steps, *said)
        if decay is not None and steps >= decay:
            text = f"a warm-up of {steps} steps is no shorter than the {decay} steps of decay: Megatron-LM stops"
            reader.wrong(said[0] if said else "", text)


def _attention(reader: SettingsReader) -> None:
    backend = reader.word("attention-backend") if reader.has("attention-backend") else None
    flash = reader.flag("use-flash-attn")
    whole = backend in ("unfused", "local")
    if flash and whole:
        reader.wrong("attention-backend", f"attention-backend {backend} contradicts use-flash-attn")
    granularity = reader.word("recompute-granularity")
    by_flag = reader.flag("recompute-activations")
    name = "recompute-granularity" if granularity is not None else "recompute-activations"
    if by_flag and granularity not in (None, "selective"):
        reader.wrong("recompute-activations", f"recompute-activations contradicts recompute-granularity {granularity}")
    selective = by_flag or granularity == "selective"
    modules = (reader.word("recompute-modules") or "core_attn").split() if selective else []
    others = "which other parts are computed again, 'recompute{policy=auto}' chooses by bytes and time"
    of_norms = "layernorm" in modules and not set(modules) - {"core_attn", "layernorm"}
    if of_norms:
        reader.passes.append("recompute{policy=norms}")
    elif modules and set(modules) - {"core_attn"}:
        reader.leave("recompute-modules", others)
    of_scores = "core_attn" in modules
    if whole:
        reader.put("attention", "scores-recomputed" if of_scores else "scores-kept", name, "attention-backend")
        if selective and not of_scores and not of_norms:
            reader.leave(name, others)
    elif selective and (of_scores or not of_norms):
        why = "with fused attention there are no scores to recompute: 'recompute{policy=auto}' chooses"
        for each in ("recompute-granularity", "recompute-activations"):
            reader.leave(each, why)
    if reader.flag("checkpoint-activations") or granularity == "full":
        if granularity == "full" and not reader.has("recompute-method"):
            text = "recompute-granularity full goes with recompute-method uniform or block: Megatron-LM stops without"
            reader.wrong("recompute-granularity", text)
        _full_recompute(reader)
    reset = [each for each in ("reset-position-ids", "reset-attention-mask") if reader.flag(each)]
    if len(reset) == 2:
        reader.put("attention_mask", "document", *reset)
    for each in reset:
        if len(reset) == 1:
            reader.leave(each, "documents are kept apart with their positions, or not at all: reset both", trains=True)


def _full_recompute(reader: SettingsReader) -> None:
    reader.passes.append("recompute{policy=full}")
    method, count = reader.word("recompute-method"), reader.size("recompute-num-layers")
    if method == "block" and count is not None and _are_all_layers(reader, count):
        return
    if method not in (None, "uniform") or count not in (None, 1):
        why = "every layer is computed again from its own input: 'recompute{policy=auto}' chooses by bytes and time"
        for name in ("recompute-method", "recompute-num-layers"):
            reader.leave(name, why)


def _are_all_layers(reader: SettingsReader, count: int) -> bool:
    """Tell whether the first `count` layers of each stage, which the method `block` recomputes, are all of them."""
    layers = reader.size("num-layers") or reader.size("encoder-num-layers")
    ends = any(reader.has(f"account-for-{each}-in-pipeline-split") for each in ("embedding", "loss"))
    uneven = ends or "cuts" in reader.values
    stages = 1 if uneven else int(reader.values.get("pp", 1)) * int(reader.values.get("chunks", 1))
    return layers is not None and count * stages >= layers


MEGATRON = Framework(
    "Megatron-LM",
    "a launch script or file of arguments of Megatron-LM",
    _settings,
    RULES,
    _read,
    takes_text=lambda _name: True,
    script=True,
    others=reason,
    idle=IDLE,
    trains=TRAINS,
    agrees=AGREES,
)
