"""Megatron-LM: its arguments, as of 2025, in a launch script or a file of them."""

from __future__ import annotations

import re
from itertools import accumulate

from ratrain.ratrainc.bridge.settings import (
    Framework,
    Rule,
    SettingsReader,
    put_batch,
    put_clip,
    put_ranks,
    put_seq_len,
)
from ratrain.ratrainc.bridge.shell_flags import WORLD, shell_flags

_MODEL = "of the model: its config.json says it (--model)"
_DATA = "of the data: 'run' is given it"
_FILES = "of checkpoints and logs: 'run' is given places for them"
_ALWAYS = "communication beside compute is what the compiler's placement is about: there is nothing to switch on"
_SCALER = "a dynamic loss scale starts and adapts by rules of ratrain"
_LAUNCH = "of the launcher: 'launch' starts processes"
_KERNELS = "which kernels compute is said to 'run' (--kernels), and changes no plan"


def _all(why: str, names: str) -> dict[str, Rule]:
    return {name: Rule("", why) for name in names.split()}


RULES: dict[str, Rule] = {
    "tensor-model-parallel-size": Rule("tp", "as it is", 1),
    "pipeline-model-parallel-size": Rule("pp", "as it is", 1),
    "num-virtual-stages-per-pipeline-rank": Rule("chunks, schedule", "interleaved where above 1"),
    "num-layers-per-virtual-pipeline-stage": Rule(
        "chunks, schedule", "with num-layers: layers of a stage by it; interleaved"
    ),
    "num-layers": Rule(
        "chunks, cuts", "with num-layers-per-virtual-pipeline-stage and the first or last stage's layers"
    ),
    "decoder-first-pipeline-num-layers": Rule("cuts", "with num-layers; the other stages share the rest evenly"),
    "decoder-last-pipeline-num-layers": Rule("cuts", "with num-layers; the other stages share the rest evenly"),
    "pipeline-model-parallel-layout": Rule("cuts, chunks, schedule", "its transformer layers (t), stage by stage"),
    "sequence-parallel": Rule("sequence_sharding", "true with it, false without; nothing with tp = 1"),
    "nproc-per-node": Rule("dp", "of the launcher: with nnodes the ranks, of which tp and pp take their part"),
    "nnodes": Rule("dp", "of the launcher: as above", 1),
    WORLD: Rule("dp", "the variable of the script, where the launcher's flags do not say the ranks"),
    "context-parallel-size": Rule(
        "dp", "1; with more, its ranks are left out: sequences are not shared out over ranks", 1
    ),
    "micro-batch-size": Rule("micro_batch_size", "as it is"),
    "global-batch-size": Rule("micro_batches", "by micro-batch-size and dp; 1 without"),
    "seq-length": Rule("seq_len", "as it is"),
    "seed": Rule("seed", "as it is", 1234),
    "use-distributed-optimizer": Rule("zero", "1 with it, 0 without"),
    "use-torch-fsdp2": Rule("zero, reduce", "3, each-micro-batch"),
    "use-megatron-fsdp": Rule("zero, reduce", "by data-parallel-sharding-strategy"),
    "data-parallel-sharding-strategy": Rule(
        "zero, reduce",
        "with use-megatron-fsdp: no_shard 0, optim 1, optim_grads 2, optim_grads_params 3; each-micro-batch from 2 on",
        "no_shard",
    ),
    "bf16": Rule("view_dtype, grad_dtype", "bf16, and gradients in f32 (see grad-reduce-in-bf16)"),
    "fp16": Rule("view_dtype, grad_dtype", "f16, and f32 without bf16 or fp16"),
    "accumulate-allreduce-grads-in-fp32": Rule("grad_dtype", "f32"),
    "grad-reduce-in-bf16": Rule("grad_dtype", "bf16, with bf16"),
    "loss-scale": Rule("loss_scale", "with fp16; dynamic without it"),
    "clip-grad": Rule("clip, max_norm", "global; none where 0", 1.0),
    "lr": Rule("lr", "as it is"),
    "min-lr": Rule("min_lr", "with a cosine"),
    "adam-beta1": Rule("betas", "the first", 0.9),
    "adam-beta2": Rule("betas", "the second", 0.999),
    "adam-eps": Rule("eps", "as it is", 1e-8),
    "weight-decay": Rule("weight_decay", "as it is", 0.01),
    "lr-warmup-iters": Rule("warmup_steps", "as it is"),
    "lr-warmup-samples": Rule("warmup_steps", "by global-batch-size"),
    "lr-warmup-fraction": Rule("warmup_steps", "of the steps of decay"),
    "lr-decay-style": Rule(
        "total_steps, min_lr", "cosine, or constant: neither; others are named, and the rate stays at lr", "linear"
    ),
    "lr-decay-iters": Rule("total_steps", "with a cosine"),
    "lr-decay-samples": Rule("total_steps", "with a cosine, by global-batch-size"),
    "train-iters": Rule("total_steps", "with a cosine, where no lr-decay-iters are said; else 'run --steps'"),
    "train-samples": Rule("total_steps", "as train-iters, by global-batch-size"),
    "optimizer": Rule("optimizer", "adam; others are named", "adam"),
    "attention-backend": Rule("attention", "flash, fused, auto: fused; unfused, local: scores-kept"),
    "use-flash-attn": Rule("attention", "fused"),
    "reset-position-ids": Rule("attention_mask", "document, with reset-attention-mask; one alone is named"),
    "reset-attention-mask": Rule("attention_mask", "document, with reset-position-ids; one alone is named"),
    "recompute-granularity": Rule(
        "passes, attention", "full: recompute{policy=full}; selective: scores-recomputed, with unfused attention"
    ),
    "recompute-activations": Rule("passes, attention", "as recompute-granularity selective"),
    "recompute-method": Rule(
        "passes", "uniform with recompute-num-layers 1, with recompute-granularity full; others are named"
    ),
    "recompute-num-layers": Rule("passes", "with recompute-method"),
    **_all(
        _MODEL,
        "hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels max-position-embeddings "
        "position-embedding-type rotary-base rotary-percent use-rotary-position-embeddings no-position-embedding normalization norm-epsilon "
        "swiglu disable-bias-linear add-qkv-bias untie-embeddings-and-output-weights qk-layernorm make-vocab-size-divisible-by "
        "vocab-size squared-relu init-method-std",
    ),
    **_all("ratrain trains without dropout", "attention-dropout hidden-dropout"),
    **_all(
        _DATA,
        "data-path data-cache-path split train-data-path valid-data-path test-data-path tokenizer-type tokenizer-model vocab-file "
        "merge-file mock-data num-workers eod-mask-loss dataloader-type",
    ),
    **_all(
        _FILES,
        "save load save-interval log-interval eval-interval eval-iters tensorboard-dir wandb-project wandb-exp-name wandb-save-dir "
        "ckpt-format no-save-optim no-load-optim no-load-rng log-throughput exit-interval exit-duration-in-mins use-dist-ckpt",
    ),
    **_all(
        _ALWAYS,
        "overlap-grad-reduce overlap-param-gather tp-comm-overlap overlap-p2p-communication no-overlap-p2p-communication",
    ),
    **_all(_SCALER, "initial-loss-scale min-loss-scale loss-scale-window hysteresis"),
    **_all(
        _LAUNCH,
        "node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint distributed-backend distributed-timeout-minutes",
    ),
    **_all(
        _KERNELS,
        "use-mcore-models transformer-impl no-masked-softmax-fusion no-gradient-accumulation-fusion no-rope-fusion "
        "no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl",
    ),
    **_all("the global batch of a run is the same at every step", "rampup-batch-size"),
    **_all("experts, which the models here do not have", "num-experts expert-model-parallel-size moe-router-topk"),
    **_all("float8 is no type of a plan", "fp8-format fp8-recipe fp8-param-gather"),
    **_all(
        "state has the homes that the compiler gives it",
        "optimizer-cpu-offload cpu-offloading cpu-offloading-num-layers",
    ),
}


def _read(reader: SettingsReader) -> None:
    tp, pp = (reader.size(f"{name}-model-parallel-size") or 1 for name in ("tensor", "pipeline"))
    reader.put("pp", pp, "pipeline-model-parallel-size")
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
    put_seq_len(reader, "seq-length")
    reader.carry("seed", reader.integer("seed"), "seed")
    _state(reader)
    _optimizer(reader, batch if batch is not None else (micro or 1) * (dp or 1))
    _attention(reader)


def _replicas(reader: SettingsReader, tp: int, pp: int) -> int | None:
    a_node, nodes, variable = (reader.size(name) for name in ("nproc-per-node", "nnodes", WORLD))
    world = variable if a_node is None else a_node * (nodes or 1)
    if a_node is not None and variable is not None and world != variable:
        reader.wrong(WORLD, f"WORLD_SIZE is {variable}, but the launcher starts {world} ranks")
    if a_node is None:
        reader.leave("nnodes", "how many processes a node has is not said (nproc-per-node)")
    context = reader.size("context-parallel-size") or 1
    if context > 1:
        reader.leave(
            "context-parallel-size", f"sequences are not shared out over ranks: of {context} ranks the plan has one"
        )
    return put_ranks(
        reader, world, "nproc-per-node", ("tensor peers", tp), ("stages", pp), ("context-parallel ranks", context)
    )


def _chunks_and_cuts(reader: SettingsReader, pp: int) -> None:
    virtual, layers_each = (
        reader.size(name) for name in ("num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage")
    )
    layers = reader.size("num-layers")
    layout = reader.word("pipeline-model-parallel-layout")
    if layout is not None:
        if layers_each is not None:
            name = "num-layers-per-virtual-pipeline-stage"
            reader.wrong(name, f"{name} and pipeline-model-parallel-layout exclude one another")
        reader.leave("num-layers", _MODEL)
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
    _put_chunks(
        reader, pp, virtual or 1, "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage"
    )
    _uneven_ends(reader, pp, virtual or 1, layers)
    if layers is not None:
        used = layers_each is not None or "cuts" in reader.values
        if not used:
            reader.leave("num-layers", _MODEL)


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
        return
    between = pp - len(said)
    if (
        layers is None
        or chunks > 1
        or between < 0
        or (layers - sum(said)) % max(1, between)
        or layers - sum(said) < between
    ):
        for name in names:
            reader.leave(
                name, "the layers between cannot be shared out evenly here: 'cuts' of the plan says where stages start"
            )
        return
    each = (layers - sum(said)) // between if between else 0
    counts = [first if first is not None else each, *[each] * (pp - 2), last if last is not None else each][:pp]
    reader.put("cuts", list(accumulate(counts[:-1])), *names)


_REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,4})|([EtmL])\*(\d{1,4})")
_MOST_LAYOUT = 1 << 16


def _lay_out(reader: SettingsReader, layout: str, pp: int, virtual: int | None) -> None:
    """Cuts and chunks of a layout like `Et*3|(tt|)*6tL`; anything else in it than layers and the ends is refused."""
    name = "pipeline-model-parallel-layout"
    text = re.sub(r"[\s\\]", "", layout)
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
    zero, by = int(sharded), "use-distributed-optimizer"
    if torch_fsdp and fsdp:
        reader.wrong("use-torch-fsdp2", "use-torch-fsdp2 and use-megatron-fsdp exclude one another")
    if torch_fsdp:
        zero, by = 3, "use-torch-fsdp2"
    elif fsdp:
        by = "data-parallel-sharding-strategy"
        word = reader.word(by) or "no_shard"
        if word not in _SHARDED:
            reader.wrong(by, f"{by} is '{word}': one of {', '.join(_SHARDED)} is expected", code="RT063")
        zero = _SHARDED.get(word, 0)
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
    view = "bf16" if bf16 else "f16" if fp16 else "f32"
    reader.put("view_dtype", view, "bf16", "fp16")
    whole = "bf16" if in_bf16 else "f16" if fp16 and not in_f32 else "f32"
    reader.put("grad_dtype", whole, "grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32", "bf16", "fp16")
    if fp16:
        reader.put("loss_scale", reader.number("loss-scale") if reader.has("loss-scale") else "dynamic", "loss-scale")


def _optimizer(reader: SettingsReader, batch: int) -> None:
    reader.carry("lr", reader.number("lr"), "lr")
    betas = [reader.number(f"adam-beta{n}") for n in (1, 2)]
    if None not in betas:
        reader.put("betas", betas, "adam-beta1", "adam-beta2")
    reader.carry("eps", reader.number("adam-eps"), "adam-eps")
    reader.carry("weight_decay", reader.number("weight-decay"), "weight-decay")
    put_clip(reader, "clip-grad")
    if reader.word("optimizer") != "adam":
        reader.leave("optimizer", "ratrain trains with AdamW")
    total = _steps(reader, "lr-decay", batch)
    trained = _steps(reader, "train", batch)
    style = reader.word("lr-decay-style")
    decay = total if total is not None else trained
    _warm_up(reader, decay, batch)
    minimum = reader.number("min-lr")
    if style == "cosine" and decay is not None:
        reader.put("total_steps", decay, "lr-decay-iters", "lr-decay-samples", "train-iters", "train-samples")
        reader.carry("min_lr", minimum, "min-lr")
        if total is not None:
            _leave_length(reader, "train")
        return
    if style != "constant":
        reader.leave("lr-decay-style", "the learning rate of a plan is constant or a cosine: it stays at lr")
    for name in ("min-lr", "lr-decay-iters", "lr-decay-samples"):
        reader.leave(name, "without a cosine the learning rate stays at lr")
    _leave_length(reader, "train")


def _leave_length(reader: SettingsReader, what: str) -> None:
    for unit in ("iters", "samples"):
        reader.leave(f"{what}-{unit}", "how long a run is, is said to 'run --steps'")


def _steps(reader: SettingsReader, what: str, batch: int) -> int | None:
    steps, samples = reader.size(f"{what}-iters"), reader.size(f"{what}-samples")
    if steps is not None and samples is not None:
        reader.wrong(f"{what}-samples", f"{what}-iters and {what}-samples exclude one another")
    return steps if samples is None else max(1, samples // batch)


def _warm_up(reader: SettingsReader, decay: int | None, batch: int) -> None:
    names = [f"lr-warmup-{unit}" for unit in ("iters", "samples", "fraction")]
    said = [name for name in names if reader.has(name)]
    steps, samples, fraction = reader.integer(names[0]), reader.integer(names[1]), reader.number(names[2])
    if len([name for name in said if reader.settings[name].value not in ("0", "0.0")]) > 1:
        reader.wrong(said[1], f"{' and '.join(said)} exclude one another")
    elif samples:
        steps = samples // batch
    elif fraction and decay is None:
        reader.leave(names[2], "of how many steps it is a fraction is not said")
    elif fraction and decay is not None:
        steps = int(fraction * decay)
    if steps is not None:
        reader.put("warmup_steps", steps, *said)


def _attention(reader: SettingsReader) -> None:
    backend = reader.word("attention-backend") if reader.has("attention-backend") else None
    flash = reader.flag("use-flash-attn")
    whole = backend in ("unfused", "local")
    if backend not in (None, "flash", "fused", "auto") and not whole:
        reader.leave("attention-backend", "no backend that is known here")
    if flash and whole:
        reader.wrong("attention-backend", f"attention-backend {backend} contradicts use-flash-attn")
    granularity = reader.word("recompute-granularity")
    by_flag = reader.flag("recompute-activations")
    name = "recompute-granularity" if granularity is not None else "recompute-activations"
    if by_flag and granularity not in (None, "selective"):
        reader.wrong("recompute-activations", f"recompute-activations contradicts recompute-granularity {granularity}")
    selective = by_flag or granularity == "selective"
    if whole:
        reader.put("attention", "scores-recomputed" if selective else "scores-kept", name, "attention-backend")
    elif selective:
        why = "with fused attention there are no scores to compute again: 'recompute{policy=auto}' chooses what is"
        for each in ("recompute-granularity", "recompute-activations"):
            reader.leave(each, why)
    if granularity == "full":
        _full_recompute(reader)
    elif granularity not in (None, "selective"):
        reader.leave(name, "no granularity that is known here")
    reset = [each for each in ("reset-position-ids", "reset-attention-mask") if reader.flag(each)]
    if len(reset) == 2:
        reader.put("attention_mask", "document", *reset)
    for each in reset:
        if len(reset) == 1:
            reader.leave(each, "documents are kept apart with their positions, or not at all: reset both")


def _full_recompute(reader: SettingsReader) -> None:
    reader.passes.append("recompute{policy=full}")
    method, count = reader.word("recompute-method"), reader.size("recompute-num-layers")
    if method not in (None, "uniform") or count not in (None, 1):
        why = "every layer is computed again from its own input: 'recompute{policy=auto}' chooses by bytes and time"
        for name in ("recompute-method", "recompute-num-layers"):
            reader.leave(name, why)


MEGATRON = Framework("Megatron-LM", "a launch script or file of arguments of Megatron-LM", shell_flags, RULES, _read)
