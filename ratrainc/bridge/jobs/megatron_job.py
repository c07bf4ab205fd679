"""Reader of launch scripts of Megatron-LM as jobs: the arguments that the script gives, on every path through it.

What the arguments do was read in NVIDIA/Megatron-LM, commit d98e8a64 (2026-08-22).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ratrain.ratrain_ir.support.text import Source, shown
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Context, Job, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import check_devices, put_accumulation, put_model, take_options
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, JobReader, SettingsFormat
from ratrain.ratrainc.bridge.jobs.megatron_shape import described_model
from ratrain.ratrainc.bridge.launchers import WORLD, NotSaid
from ratrain.ratrainc.bridge.megatron_arguments import arguments_of, named_flags
from ratrain.ratrainc.bridge.megatron_reasons import reason
from ratrain.ratrainc.bridge.megatron_rules import CHOICES
from ratrain.ratrainc.bridge.reasons import OF_OVERLAP, OF_VALUES
from ratrain.ratrainc.bridge.settings import Asked as PlanAsked
from ratrain.ratrainc.bridge.settings import Setting

_ARGUMENTS = "NVIDIA/Megatron-LM: megatron/training/arguments.py"
_TRANSFORMER = "NVIDIA/Megatron-LM: megatron/core/transformer/transformer_config.py, TransformerConfig"
_PARALLEL = "NVIDIA/Megatron-LM: megatron/core/model_parallel_config.py, ModelParallelConfig"
_OPTIMIZER = "NVIDIA/Megatron-LM: megatron/core/optimizer/__init__.py, _get_megatron_optimizer_based_on_param_groups"
_LOSS = "NVIDIA/Megatron-LM: megatron/core/tensor_parallel/cross_entropy.py, VocabParallelCrossEntropy"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_TELLING = _words(
    """
    tensor-model-parallel-size pipeline-model-parallel-size micro-batch-size global-batch-size num-layers
    hidden-size num-attention-heads seq-length use-distributed-optimizer train-iters use-mcore-models
    """
)
_OTHER_FILES = (".yaml", ".yml", ".json", ".toml", ".py", ".hjson", ".md")

_DECIDE = _words(
    """
    tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size expert-model-parallel-size
    micro-batch-size global-batch-size seq-length encoder-seq-length num-layers encoder-num-layers hidden-size
    ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size nproc-per-node nnodes WORLD_SIZE
    recompute-granularity recompute-method recompute-num-layers recompute-modules optimizer attention-backend
    num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank hidden-dropout attention-dropout
    data-parallel-sharding-strategy main-grads-dtype main-params-dtype exp-avg-dtype exp-avg-sq-dtype num-experts
    optimizer-offload-fraction num-distributed-optimizer-instances make-vocab-size-divisible-by
    """
)
"""Arguments whose values must be known."""

_ALIKE = {
    "of files and logs": "save log-interval",
    "of the data": "data-path",
    "of the launcher": "node-rank master-addr",
    "how the process is run": "manual-gc skip-iters",
    "of validation, which keeps no gradient": "eval-global-batch-size",
    "of the learning rate and decay": "weight-decay-incr-style lr-wsd-decay-style lr-warmup-init decoupled-lr "
    "apply-wd-to-qk-layernorm override-opt-param-scheduler",
    "of initial weights": "init-method-xavier-uniform",
    OF_OVERLAP: "overlap-grad-reduce",
    "of the order of ranks": "use-tp-pp-dp-mapping",
    "Megatron-LM reads it nowhere": "openai-gelu",
    "of inference": "flash-decode inference-rng-tracker",
}
"""Arguments that change no byte, by one of each group of `megatron_reasons.py`."""
_RATES = _words(
    """
    lr min-lr lr-warmup-iters lr-warmup-samples lr-warmup-fraction lr-decay-iters lr-decay-samples lr-decay-style
    train-iters train-samples train-tokens adam-beta1 adam-beta2 adam-eps weight-decay clip-grad seed loss-scale
    initial-loss-scale min-loss-scale loss-scale-window hysteresis start-weight-decay end-weight-decay norm-epsilon
    init-method-std rotary-base rotary-percent use-rope-scaling rope-scaling-factor reset-position-ids
    reset-attention-mask rotary-interleaved apply-layernorm-1p accumulate-allreduce-grads-in-fp32
    calculate-per-token-loss use-mcore-models no-rope-fusion no-masked-softmax-fusion no-persist-layer-norm
    attention-softmax-in-fp32 apply-query-key-layer-scaling deterministic-mode te-rng-tracker
    overlap-cpu-optimizer-d2h-h2d vocab-file merge-file no-async-tensor-model-parallel-allreduce
    distributed-backend
    """
)
"""Arguments that change values, and no size."""


def _recognises(path: Path, text: str) -> bool:
    """Tell whether a text is a script with arguments that Megatron-LM has, and no other program."""
    if path.suffix in _OTHER_FILES:
        return False
    return len(named_flags(text) & _TELLING) > 1


def _read(path: Path, text: str, asked: Asked) -> Job:
    top = Source(str(path), text).top()
    plan = PlanAsked(clusters=asked.devices, seq_len=asked.seq_len, given=asked.given)
    reader = JobReader("megatron-lm", arguments_of(str(path), text, plan, _DECIDE), top, mark="--")
    _open_values(reader)
    _choices(reader)
    _degrees(reader)
    put_model(reader, asked, None, "num-layers", described_model(reader, reader.values["tp"], asked.model))
    _devices(reader)
    _batch(reader)
    _types(reader)
    _sharding(reader)
    _optimizer(reader)
    put_recomputation(reader)
    _kernels(reader)
    _training(reader)
    take_options(reader, asked)
    replicas = check_devices(reader)
    whole = reader.take("global-batch-size", int)
    if whole is not None:
        put_accumulation(reader, whole, "global-batch-size", replicas)
    elif "micro_batch_size" in reader.values:
        reader.assume("gradient_accumulation", 1, "global-batch-size", f"{_ARGUMENTS}, validate_args")
    return reader.finish(_inert(reader), method="pretrain")


def _open_values(reader: JobReader) -> None:
    """Note variables that the script is taken to lack, and drop values that nothing needs to know."""
    for name in list(reader.settings):
        value = reader.settings[name].value
        if name.startswith("$"):
            if isinstance(value, NotSaid):
                text = f"it is not set in the file, and expands to nothing: else give {name[1:]}=VALUE"
                reader.unknown(name, text)
            else:
                reader.ignore(name, "it is not set in the file: the text that the script uses instead")
        elif isinstance(value, NotSaid):
            reader.ignore(name, f"its value is not known ({value.unknown.why}), and no size follows from it")
            reader.settings[name] = Setting(None, reader.settings[name].place)


def _choices(reader: JobReader) -> None:
    """Report words that argparse refuses, and drop them."""
    for name, words in CHOICES.items():
        said = reader.settings[name].value if reader.has(name) else None
        if isinstance(said, str) and said not in words:
            reader.wrong(name, f"--{name} is {said}: one of {', '.join(words)} is expected")
            reader.settings.pop(name)


_FORMS = {"p2p": Context.RING, "all_gather": Context.GATHER, "a2a": Context.HEADS}


def put_exchange(reader: JobReader, key: str) -> None:
    """Set the form of context ranks: one for all layers, or one of each."""
    said = reader.settings[key].value if reader.has(key) else "p2p"
    found = {str(each) for each in said} if isinstance(said, list | tuple) else set(str(said).split())
    known = [each for each in _FORMS if each in found]
    reader.values["context"] = form = _FORMS[known[0]] if known else Context.RING
    if (reader.values.get("cp") or 1) == 1:
        reader.ignore(key, "there is one context rank")
        return
    reader.put_or_assume("context", form, key, f"{_TRANSFORMER}.cp_comm_type", says=reader.has(key))
    reader.taken.add(key)
    if len(found) > 1 or not known:
        reader.unknown(key, "only one of p2p, all_gather and a2a for all layers was read")


def _degrees(reader: JobReader) -> None:
    tp = reader.choose_size("tp", "tensor-model-parallel-size", 1, f"{_PARALLEL}.tensor_model_parallel_size")
    pp = reader.choose_size("pp", "pipeline-model-parallel-size", 1, f"{_ARGUMENTS}, --pipeline-model-parallel-size")
    reader.choose_size("cp", "context-parallel-size", 1, f"{_PARALLEL}.context_parallel_size")
    put_exchange(reader, "cp-comm-type")
    reader.choose_size("ep", "expert-model-parallel-size", 1, f"{_PARALLEL}.expert_model_parallel_size")
    sequence = reader.take("sequence-parallel", bool)
    if sequence is not None:
        reader.put("sequence_sharding", sequence and tp > 1, "sequence-parallel")
    each = reader.take("num-layers-per-virtual-pipeline-stage", int)
    chunks = reader.take("num-virtual-stages-per-pipeline-rank", int)
    layers = reader.take("num-layers", int)
    key = "num-virtual-stages-per-pipeline-rank"
    if each is not None and layers is not None:
        key = "num-layers-per-virtual-pipeline-stage"
        if each < 1 or layers % (pp * each):
            reader.wrong(key, f"--{key} {each} does not share {layers} layers out over {pp} stages", code="RT064")
        else:
            chunks = layers // (pp * each)
    if chunks is not None and chunks > 1 and pp == 1:
        reader.wrong(key, f"--{key} goes with a pipeline: pipeline-model-parallel-size is 1", code="RT064")
    elif chunks is not None and chunks > 1:
        reader.put("virtual_stages", chunks, key)
        reader.put("schedule", "interleaved", key)
    reader.unknown("pipeline-model-parallel-layout", "stages are counted as equal shares of the layers")
    _sizes(reader)


def _sizes(reader: JobReader) -> None:
    """Set what decides how layers and vocabulary are shared out, by Megatron-LM's names with underscores."""
    sizes: dict[str, int] = {}
    for name in ("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"):
        if (count := reader.size(name)) is not None:
            sizes[name] = count
    for name in ("account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"):
        if reader.take(name, bool):
            sizes[name] = 1
    divisor = "make-vocab-size-divisible-by"
    unpadded = [name for name in ("disable-pad-vocab-size", "no-pad-vocab-size") if reader.take(name, bool)]
    if (said := reader.take(divisor, int)) is not None:
        sizes[divisor] = said
    elif unpadded or reader.has("padded-vocab-size"):
        sizes[divisor] = 1
    if sizes:
        key = next((name for name in sizes if reader.has(name)), (*unpadded, "padded-vocab-size")[0])
        reader.put("sizes", {name.replace("-", "_"): each for name, each in sizes.items()}, key)


def _devices(reader: JobReader) -> None:
    a_node, nodes, world = (reader.take(name, int) for name in ("nproc-per-node", "nnodes", WORLD))
    if a_node is not None:
        reader.put("devices", a_node * (nodes or 1), "nproc-per-node")
    elif world is not None:
        reader.put("devices", world, WORLD)


def _batch(reader: JobReader) -> None:
    if not reader.has("micro-batch-size"):
        reader.wrong("", "micro-batch-size is missing: Megatron-LM stops there", way_out="say --micro-batch-size 1")
    reader.put("micro_batch_size", reader.size("micro-batch-size"), "micro-batch-size")
    key = "encoder-seq-length" if reader.has("encoder-seq-length") else "seq-length"
    reader.put("seq_len", reader.size(key), key)
    reader.unknown("rampup-batch-size", "the batch grows to the global one, which is counted")


def _types(reader: JobReader) -> None:
    """Set types: weights as --bf16 or --fp16 say, masters f32, and gradients as they are summed."""
    bf16, fp16 = (bool(reader.take(name, bool)) for name in ("bf16", "fp16"))
    if bf16 and fp16:
        reader.wrong("fp16", "bf16 and fp16 exclude one another", code="RT064")
    key = "bf16" if bf16 else "fp16"
    own = "bf16" if bf16 else "f16" if fp16 else "f32"
    in_f32 = reader.take("accumulate-allreduce-grads-in-fp32", bool)
    in_bf16 = bool(reader.take("grad-reduce-in-bf16", bool))
    narrow = reader.take("main-grads-dtype", str) == "bf16" and bf16 and not in_f32
    sums = "bf16" if in_bf16 or narrow else "f16" if fp16 and not in_f32 else "f32"
    says = next((name for name in ("grad-reduce-in-bf16", "main-grads-dtype") if reader.has(name)), None)
    for name in ("weight_dtype", "compute_dtype"):
        if own == "f32":
            reader.assume(name, own, "bf16", f"{_ARGUMENTS}, validate_args: params_dtype")
        else:
            reader.put(name, own, key)
    for name in ("gradient_dtype", "reduce_dtype"):
        if says is not None:
            reader.put(name, sums, says)
        else:
            text = "accumulate_allreduce_grads_in_fp32 with bf16"
            reader.assume(name, sums, "accumulate-allreduce-grads-in-fp32", f"{_ARGUMENTS}, validate_args: {text}")
    if own != "f32":
        _masters(reader)
    if reader.take("fp8-format", str) is not None or reader.take("fp8-hybrid", bool) or reader.take("fp8-e4m3", bool):
        reader.put("fp8", True, next(name for name in ("fp8-format", "fp8-hybrid", "fp8-e4m3") if reader.has(name)))
        reader.ignore("fp8-amax-history-len", "a few numbers a linear")
        reader.ignore("fp8-amax-compute-algo", OF_VALUES)


def _masters(reader: JobReader) -> None:
    """Set the types of masters and moments, which the precision-aware optimizer alone can narrow."""
    aware = reader.take("use-precision-aware-optimizer", bool)
    words = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "fp8": "fp8"}
    main = reader.take("main-params-dtype", str)
    moments = [reader.take(name, str) for name in ("exp-avg-dtype", "exp-avg-sq-dtype")]
    if aware and main is not None:
        reader.put("master_dtype", words.get(main, "f32"), "main-params-dtype")
    else:
        source = "NVIDIA/Megatron-LM: megatron/core/optimizer/optimizer_config.py, OptimizerConfig.main_params_dtype"
        reader.assume("master_dtype", "f32", "main-params-dtype", source)
    if aware:
        text = "masters are kept as what bf16 weights lack (store_param_remainders): 2 bytes less than is counted"
        reader.ignore("use-precision-aware-optimizer", text, less=True)
    if aware and any(moments):
        first, second = (words.get(each or "fp32", "f32") for each in moments)
        reader.put("state_dtype", first if first == second else "f32", "exp-avg-dtype")
        if first != second:
            for name in ("exp-avg-dtype", "exp-avg-sq-dtype"):
                reader.ignore(name, "moments of two types are both counted as f32", less=True)


def _sharding(reader: JobReader) -> None:
    torch_fsdp, distributed = (reader.take(name, bool) for name in ("use-torch-fsdp2", "use-distributed-optimizer"))
    own = next((name for name in ("use-megatron-fsdp", "use-custom-fsdp") if reader.take(name, bool)), None)
    strategy = reader.take("data-parallel-sharding-strategy", str) or "optim_grads_params"
    if torch_fsdp and own is not None:
        reader.wrong("use-torch-fsdp2", "use-torch-fsdp2 and use-megatron-fsdp exclude one another", code="RT064")
    elif torch_fsdp:
        reader.put("sharding", Sharding.FSDP2, "use-torch-fsdp2")
        gathered = bool(reader.take("torch-fsdp2-no-reshard-after-forward", bool))
        reader.put("reshard_after_forward", not gathered, "use-torch-fsdp2")
    elif own is not None:
        kinds = {"no_shard": Sharding.DDP, "optim": Sharding.ZERO1, "optim_grads": Sharding.ZERO2}
        reader.put("sharding", kinds.get(strategy, Sharding.ZERO3), own)
        reader.unknown(own, "its buffers are counted as ZeRO's of the same stage")
    elif distributed:
        reader.put("sharding", Sharding.DISTRIBUTED_OPTIMIZER, "use-distributed-optimizer")
    else:
        text = "NVIDIA/Megatron-LM: megatron/core/distributed/distributed_data_parallel.py, DistributedDataParallel"
        reader.assume("sharding", Sharding.DDP, "use-distributed-optimizer", text)
    instances = reader.take("num-distributed-optimizer-instances", int)
    devices, model = reader.values.get("devices"), reader.values["tp"] * reader.values["pp"]
    if instances is not None and instances > 1 and devices is not None and devices % (model * instances) == 0:
        # with context parallelism its ranks share state too
        reader.put("shard_size", devices // (model * instances), "num-distributed-optimizer-instances")
    elif instances is not None and instances > 1:
        text = f"devices are not a multiple of {instances} instances" if devices else "how many devices is not said"
        reader.unknown("num-distributed-optimizer-instances", text)
    elif reader.values["cp"] > 1 and devices is not None and devices % model == 0:
        text = "NVIDIA/Megatron-LM: megatron/core/parallel_state.py, get_data_parallel_group(with_context_parallel)"
        reader.assume("shard_size", devices // model, "context-parallel-size", text)
    for name in ("deepspeed", "deepspeed-config", "zero-stage"):
        reader.unknown(name, "DeepSpeed's file decides what is sharded")


def _optimizer(reader: JobReader) -> None:
    kinds = {"adam": "adamw-fused", "sgd": "sgd-momentum", "lion": "lion", "muon": "muon", "dist_muon": "muon"}
    said = reader.take("optimizer", str)
    if said is None:
        reader.assume("optimizer", "adamw-fused", "optimizer", f"{_ARGUMENTS}, --optimizer; {_OPTIMIZER}")
    elif said in kinds:
        reader.put("optimizer", kinds[said], "optimizer")
    else:
        reader.put("optimizer", "adamw-fused", "optimizer")
        reader.unknown("optimizer", f"the moments of {said} are counted as Adam's")
    fraction = reader.take("optimizer-offload-fraction", float)
    if reader.take("optimizer-cpu-offload", bool):
        reader.put("offload_optimizer", True, "optimizer-cpu-offload")
        if not reader.has("use-precision-aware-optimizer"):
            text = "optimizer-cpu-offload goes with use-precision-aware-optimizer: Megatron-LM stops without"
            reader.wrong("optimizer-cpu-offload", text, code="RT064")
        if fraction not in (None, 1.0):
            reader.put("offload_optimizer", False, "optimizer-offload-fraction")
            text = f"a part of {fraction} of the moments is offloaded: all are counted on the device"
            reader.ignore("optimizer-offload-fraction", text, less=True)
    layers = reader.take("cpu-offloading-num-layers", int)
    if layers or reader.take("cpu-offloading", bool):
        key = "cpu-offloading-num-layers" if layers else "cpu-offloading"
        reader.ignore(key, "activations of some layers are offloaded: all are counted on the device", less=True)
    name = "fine-grained-activation-offloading"
    if reader.take(name, bool):
        reader.ignore(name, "activations of some modules are offloaded: all are counted on the device", less=True)
    reader.ignore(
        "offload-modules", "activations of some modules are offloaded: all are counted on the device", less=True
    )


def put_recomputation(reader: JobReader, named: Callable[[str], str] = str) -> None:
    """Set what is recomputed; `named` gives the file's name of an argument of Megatron-LM."""
    by_flag, old = (reader.take(named(name), bool) for name in ("recompute-activations", "checkpoint-activations"))
    keys = [named(f"recompute-{name}") for name in ("granularity", "method", "num-layers", "modules")]
    granularity, method = reader.take(keys[0], str), reader.take(keys[1], str)
    count, modules = reader.take(keys[2], int), _modules(reader, keys[3])
    if granularity not in (None, "full", "selective") or method not in (None, "uniform", "block"):
        key, words = (keys[1], "uniform or block") if granularity in (None, "full") else (keys[0], "full or selective")
        reader.wrong(key, f"{key} is {shown(reader.settings[key].value)}: {words} is expected")
    if by_flag and granularity not in (None, "selective"):
        text = f"recompute-activations contradicts {keys[0]} {granularity}"
        reader.wrong(named("recompute-activations"), text, code="RT064")
    key = named("recompute-activations") if by_flag else named("checkpoint-activations") if old else keys[0]
    if granularity == "full" and method is None:
        text = f"{keys[0]} full goes with {keys[1]}: Megatron-LM stops without"
        reader.wrong(keys[0], text, code="RT064", way_out=f"say {keys[1]} uniform")
    if old or granularity == "full":
        reader.put("checkpointing", Checkpointing.FULL, key)
        if method == "uniform" and count is not None and count > 0:
            reader.put("checkpoint_every", count, keys[2])
        elif method == "block" and count is not None:
            stages = reader.values.get("pp", 1) * reader.values.get("virtual_stages", 1)
            reader.put("checkpoint_layers", count * stages, keys[2])
    elif by_flag or granularity == "selective":
        attention = "core_attn" in modules
        reader.put("checkpointing", Checkpointing.ATTENTION if attention else Checkpointing.NONE, key)
        if others := ", ".join(sorted(modules - {"core_attn"})):
            reader.ignore(keys[3], f"{others}: recomputed too, which is not counted as saved")
    else:
        reader.assume("checkpointing", Checkpointing.NONE, key, f"{_TRANSFORMER}.recompute_granularity")
    reader.ignore(named("distribute-saved-activations"), "kept inputs are shared out, which is not counted as saved")


def _modules(reader: JobReader, key: str) -> set[str]:
    """Take the modules that `selective` recomputes, as words or a list; attention's core without any."""
    reader.taken.add(key)
    value = reader.settings[key].value if reader.has(key) else None
    return set(value.split()) if isinstance(value, str) else set(map(str, value or ["core_attn"]))


def _kernels(reader: JobReader) -> None:
    backend, impl = reader.take("attention-backend", str), reader.take("transformer-impl", str)
    flash = reader.take("use-flash-attn", bool)
    if backend is not None:
        eager = backend in ("unfused", "local")
        reader.put("attention", Attention.EAGER if eager else Attention.FLASH, "attention-backend")
    elif flash:
        reader.put("attention", Attention.FLASH, "use-flash-attn")
    elif impl == "local":
        reader.put("attention", Attention.EAGER, "transformer-impl")
    else:
        reader.assume("attention", Attention.FLASH, "attention-backend", f"{_TRANSFORMER}.attention_backend")
    reader.assume("loss", Loss.VOCAB_PARALLEL, "vocab_parallel_cross_entropy", _LOSS)
    for name in ("cross-entropy-loss-fusion", "cross-entropy-fusion-impl"):
        reader.ignore(name, "a fused loss keeps no more than is counted", less=True)
    off = next((name for name in ("no-bias-swiglu-fusion", "no-bias-gelu-fusion") if reader.take(name, bool)), None)
    if off is not None:
        reader.put("compiled", False, off)
    else:
        source = "NVIDIA/Megatron-LM: megatron/training/argument_utils.py, core_transformer_config_from_args"
        reader.assume("compiled", True, "bias_activation_fusion", source)
    rates: dict[str, float] = {}
    for name in ("hidden-dropout", "attention-dropout"):
        rate = reader.take(name, float)
        rates[name] = 0.1 if rate is None else rate
    largest = max(rates, key=lambda name: rates[name])
    source = f"{_TRANSFORMER}.{largest.replace('-', '_')}"
    reader.put_or_assume("dropout", rates[largest], largest, source, says=reader.has(largest))


def _training(reader: JobReader) -> None:
    for field, name, kind, default in (
        ("lr", "lr", float, None),
        ("min_lr", "min-lr", float, None),
        ("eps", "adam-eps", float, 1e-8),
        ("weight_decay", "weight-decay", float, 0.01),
        ("max_grad_norm", "clip-grad", float, 1.0),
        ("scheduler", "lr-decay-style", str, "linear"),
        ("warmup_steps", "lr-warmup-iters", int, 0),
        ("warmup_ratio", "lr-warmup-fraction", float, None),
        ("steps", "train-iters", int, None),
    ):
        value: Any = reader.take(name, kind)
        if value is not None:
            reader.put(field, value or None if field == "max_grad_norm" else value, name)
        elif default is not None:
            reader.assume(field, default, name, f"{_ARGUMENTS}, --{name}")
    betas = tuple(reader.take(f"adam-beta{n}", float) for n in (1, 2))
    pair = tuple(default if each is None else each for each, default in zip(betas, (0.9, 0.999), strict=True))
    said = next((f"adam-beta{n}" for n, each in enumerate(betas, 1) if each is not None), None)
    if said is None:
        reader.assume("betas", pair, "adam-beta1", f"{_ARGUMENTS}, --adam-beta1")
    else:
        reader.put("betas", pair, said)


def _inert(reader: JobReader) -> dict[str, str]:
    """Return the arguments of this script that change no byte of a device, with the reason."""
    groups = {reason(each): why for why, names in _ALIKE.items() for each in names.split() if reason(each) is not None}
    found = {re.escape(name): OF_VALUES for name in _RATES}
    files = ("save", "load", "log-", "eval-", "exit-", "tensorboard", "wandb", "data-", "split", "ckpt-", "rdzv-")
    for name in reader.settings:
        why = groups.get(reason(name))
        if why is None and name.startswith((*files, "no-save", "no-load", "tokenizer", "dataloader", "num-workers")):
            why = "of files, data and logs"
        elif why is None and name.startswith(("master-", "node-", "overlap-", "no-overlap-", "tp-comm-", "mock-data")):
            why = "of the launcher, or of communication"
        elif why is None and name.startswith(("distributed-timeout", "eod-mask", "use-dist-ckpt", "train-data-path")):
            why = "how the process is run, or of the data"
        if why is not None:
            found[re.escape(name)] = why
    return found


# phrases

_SIMPLE = {
    "micro_batch_size": "micro-batch-size",
    "seq_len": "seq-length",
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
}
_FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_WHOLE = "without --recompute-method --recompute-num-layers"


def _phrase(job: Job, field: str, value: Any) -> str | None:
    if field == "seq_len" and job.seq_len is not None and value > job.seq_len:
        return f"--seq-length {value} --max-position-embeddings {value}"
    if field in _SIMPLE:
        return f"--{_SIMPLE[field]} {value}"
    if field == "gradient_accumulation" and job.dp is not None and job.micro_batch_size is not None:
        return f"--global-batch-size {job.micro_batch_size * value * job.dp}"
    if field == "checkpointing":
        return _say_checkpointing(job, value)
    if field == "optimizer":
        word = {"adamw-fused": "adam", "sgd-momentum": "sgd", "lion": "lion", "muon": "muon"}.get(value)
        return None if word is None else f"--optimizer {word}"
    if field == "offload_optimizer":
        on = "--optimizer-cpu-offload --use-precision-aware-optimizer"
        return on if value else "without --optimizer-cpu-offload"
    if field == "sharding":
        return _say_sharding(value)
    if field == "sequence_sharding":
        return "--sequence-parallel" if value else "without --sequence-parallel"
    if field == "gradient_dtype" and job.weight_dtype == "bf16":
        return {"bf16": "--grad-reduce-in-bf16", "f32": "without --grad-reduce-in-bf16"}.get(value)
    if field == "attention":
        return {Attention.FLASH: "--attention-backend flash", Attention.EAGER: "--attention-backend unfused"}.get(value)
    return None


def _say_checkpointing(job: Job, value: Checkpointing) -> str | None:
    key = getattr(job.origins.get("checkpointing"), "key", "")
    short = key == "recompute-activations"
    if value is Checkpointing.FULL:
        return f"{_FULL} without --recompute-activations" if short else _FULL
    if value is Checkpointing.ATTENTION:
        full = job.checkpointing is Checkpointing.FULL
        return f"--recompute-granularity selective {_WHOLE}" if full else "--recompute-activations"
    return f"without --{key}" if value is Checkpointing.NONE and key else None


def _say_sharding(value: Sharding) -> str | None:
    return {
        Sharding.DISTRIBUTED_OPTIMIZER: "--use-distributed-optimizer",
        Sharding.DDP: "without --use-distributed-optimizer",
        Sharding.FSDP2: "--use-torch-fsdp2 without --use-distributed-optimizer",
        Sharding.ZERO3: "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        Sharding.ZERO2: "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads",
        Sharding.ZERO1: "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
    }.get(value)


MEGATRON_JOB = SettingsFormat("megatron-lm", "Megatron-LM", _recognises, _read, _phrase, reads_script=True)
