"""Reader of Megatron-Bridge's override files: YAML and `key=value` words that change a recipe.

    # base recipe: llama3_8b_peft_1gpu_h100_bf16_config          override.yaml: over the recipe
    torchrun --nproc_per_node=8 finetune_with_yaml.py --config-file override.yaml train.global_batch_size=64

The command line goes before the file, and the file before the recipe. Most of a run is in the recipe: if no recipe is
named, or one that is not in the table below, what it says stays unknown. The file that is read may be
the YAML (with the script as a further file) or the script (which names the YAML).
Read in NVIDIA-NeMo/Megatron-Bridge, commit 067f987d (2026-08-22).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.text import Source, read_text, shown
from ratrain.ratrainc.bridge.jobs.job import Adapter, Attention, Checkpointing, Job, Loss, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import (
    check_devices,
    model_of_name,
    put_accumulation,
    put_model,
    take_options,
    yaml_said,
)
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, JobReader, SettingsFormat
from ratrain.ratrainc.bridge.jobs.megatron_job import put_exchange, put_recomputation
from ratrain.ratrainc.bridge.jobs.yaml_text import yaml_settings
from ratrain.ratrainc.bridge.launchers import NotSaid, started
from ratrain.ratrainc.bridge.reasons import OF_FILES, OF_RATE
from ratrain.ratrainc.bridge.settings import Setting
from ratrain.ratrainc.bridge.shell.following import follow

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.shell.shell_text import Text

SOURCE = "NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/recipes/llama/h100/llama3.py"

_ROWS = """
    llama32_1b_pretrain_1gpu_h100_bf16 meta-llama/Llama-3.2-1B 1 1 1 1 8192 512
    llama32_3b_pretrain_1gpu_h100_bf16 meta-llama/Llama-3.2-3B 1 1 1 1 8192 512
    llama3_8b_pretrain_2gpu_h100_bf16 meta-llama/Meta-Llama-3-8B 1 1 1 2 8192 512
    llama3_8b_pretrain_16gpu_h100_bf16_16k meta-llama/Meta-Llama-3-8B 4 2 1 2 16384 512 rows
    llama3_8b_pretrain_32gpu_h100_bf16_64k meta-llama/Meta-Llama-3-8B 4 2 1 4 65536 512 rows
    llama3_8b_pretrain_64gpu_h100_bf16_128k meta-llama/Meta-Llama-3-8B 4 2 1 8 131072 512 rows
    llama3_70b_pretrain_32gpu_h100_bf16 meta-llama/Meta-Llama-3-70B 4 4 5 2 8192 512 rows
    llama3_70b_pretrain_32gpu_h100_bf16_deterministic meta-llama/Meta-Llama-3-70B 4 4 5 2 8192 512 rows
    llama3_70b_pretrain_32gpu_h100_bf16_16k meta-llama/Meta-Llama-3-70B 8 2 1 2 16384 512 rows
    llama3_70b_pretrain_256gpu_h100_bf16_64k meta-llama/Meta-Llama-3-70B 8 4 1 8 65536 512 rows
    llama31_8b_pretrain_2gpu_h100_bf16 meta-llama/Meta-Llama-3.1-8B 1 1 1 2 8192 512
    llama31_70b_pretrain_32gpu_h100_bf16 meta-llama/Meta-Llama-3.1-70B 4 4 5 2 131072 512 rows
    llama31_405b_pretrain_256gpu_h100_bf16 meta-llama/Meta-Llama-3.1-405B 8 8 2 4 131072 512 rows
    llama31_405b_pretrain_256gpu_h100_bf16_deterministic meta-llama/Meta-Llama-3.1-405B 8 8 2 4 131072 512 rows
    llama32_1b_sft_1gpu_h100_bf16 meta-llama/Llama-3.2-1B 1 1 1 1 4096 8
    llama32_3b_sft_1gpu_h100_bf16 meta-llama/Llama-3.2-3B 1 1 1 1 4096 8
    llama3_8b_sft_2gpu_h100_bf16 meta-llama/Meta-Llama-3-8B 2 1 1 1 4096 8
    llama31_8b_sft_2gpu_h100_bf16 meta-llama/Meta-Llama-3.1-8B 2 1 1 1 4096 8
    llama3_70b_sft_32gpu_h100_bf16 meta-llama/Meta-Llama-3-70B 8 4 1 1 4096 8
    llama31_70b_sft_32gpu_h100_bf16 meta-llama/Meta-Llama-3.1-70B 8 4 1 1 4096 8
    llama31_405b_sft_128gpu_h100_bf16 meta-llama/Meta-Llama-3.1-405B 8 16 1 1 2048 16 rows
    llama32_1b_peft_1gpu_h100_bf16 meta-llama/Llama-3.2-1B 1 1 1 1 4096 8 lora 32 32
    llama32_3b_peft_1gpu_h100_bf16 meta-llama/Llama-3.2-3B 1 1 1 1 4096 8 lora 32 32
    llama3_8b_peft_1gpu_h100_bf16 meta-llama/Meta-Llama-3-8B 1 1 1 1 4096 8 lora 8 16
    llama31_8b_peft_1gpu_h100_bf16 meta-llama/Meta-Llama-3.1-8B 1 1 1 1 4096 8 lora 8 16
    llama3_70b_peft_8gpu_h100_bf16 meta-llama/Meta-Llama-3-70B 8 1 1 1 4096 8 lora 16 32
    llama31_70b_peft_8gpu_h100_bf16 meta-llama/Meta-Llama-3.1-70B 8 1 1 1 4096 8 lora 16 32
    llama31_405b_peft_32gpu_h100_bf16 meta-llama/Meta-Llama-3.1-405B 4 8 8 1 2048 32 rows lora 16 32 linear_qkv
"""
"""Recipes: name without `_config`, model, tensor and pipeline ranks, chunks a rank, context ranks, length of sequences,
sequences of a step; `rows` with sequence parallelism; `lora` with rank, alpha and targets. A micro-batch is 1 sequence.
"""
_NAME = re.compile(r"\b([a-z]+\d*\w*_(?:pretrain|sft|peft|finetune)\w*_config)\b")
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@frozen
class Recipe:
    """A recipe, before a file overrides it."""

    name: str
    model: str
    """hub name"""
    tp: int
    pp: int
    virtual_stages: int
    cp: int
    seq_len: int
    batch: int
    sequence_sharding: bool
    lora: tuple[int, float, tuple[str, ...]] | None
    """rank, alpha and targets"""

    @property
    def method(self) -> str:
        """Return `pretrain`, `full` or `lora`, as a job has it."""
        return "pretrain" if "_pretrain_" in self.name else "full" if self.lora is None else "lora"

    @property
    def distributed_optimizer(self) -> bool:
        """Return true if masters and moments are shared out.

        Recipes with adapters switch it off for ddp and optimizer; elsewhere the optimizer's own switch is on, and the
        two are made equal (training/config.py, _validate_and_sync_distributed_optimizer_settings).
        """
        return self.lora is None

    @property
    def rate(self) -> Rate:
        """Return the learning rate, by the kind of training: no recipe of the table has one of its own."""
        return _RATES[self.method]


@frozen
class Rate:
    """Learning rate of a recipe: a cosine from `lr` to `least` over `steps`, after `warm_up` steps."""

    lr: float
    least: float
    warm_up: int
    steps: int


_RATES = {
    "pretrain": Rate(3e-4, 3e-5, 2000, 1168251),
    "full": Rate(5e-6, 0.0, 50, 1000),
    "lora": Rate(1e-4, 0.0, 50, 1000),
}
"""Rates by `Recipe.method`: src/megatron/bridge/recipes/common.py, _pretrain_common, _sft_common and _peft_common, with
the warm-up and steps that the functions in `SOURCE` set."""


def recipe_named(text: str) -> str | None:
    """Return the name of the first recipe that a text names; None if it names none."""
    found = _NAME.search(text)
    return None if found is None else found[1]


def recipe(name: str) -> Recipe | None:
    """Return a recipe by its function's name; None if it is not known here."""
    row = next(
        (line.split() for line in _ROWS.splitlines() if line.split()[:1] == [name.removesuffix("_config")]), None
    )
    if row is None:
        return None
    numbers, rest = [int(each) for each in row[2:8]], row[8:]
    lora = None
    if "lora" in rest:
        rank, alpha, *targets = rest[rest.index("lora") + 1 :]
        lora = (int(rank), float(alpha), tuple(targets) or TARGETS)
    tp, pp, chunks, cp, seq_len, batch = numbers
    return Recipe(name, row[1], tp, pp, chunks, cp, seq_len, batch, "rows" in rest, lora)


_PRECISION = "NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/training/mixed_precision.py"
_OPTIMIZER = "NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/recipes/utils/optimizer_utils.py"
_DECAY = f"{_OPTIMIZER}, distributed_fused_adam_with_cosine_annealing: start_weight_decay, which acts at every step"
_TABLES = frozenset(
    (
        *("model", "train", "validation", "optimizer", "scheduler", "ddp", "peft"),
        *("dataset", "checkpoint", "logger", "mixed_precision", "rng", "tokenizer", "dist"),
        *("comm_overlap", "profiling", "straggler", "nvrx_straggler", "ft", "inprocess_restart", "rerun_state_machine"),
        *("env_vars"),
    )
)
"""Fields of ConfigContainer (src/megatron/bridge/training/config.py)."""
_TELLING = frozenset(("train", "ddp", "peft", "mixed_precision"))
_PARTS = re.compile(r"^([A-Za-z_]\w*):", re.MULTILINE)
_SCRIPT = re.compile(r"(?<!\S)--(config[-_]file|recipe)[= ]\s*\S+")
_OVERRIDE = re.compile(r"\+{0,2}([a-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)
_RANKS = ("nproc-per-node", "nnodes", "WORLD_SIZE")
_SHORT = {
    **dict.fromkeys(("ms", "max_steps"), "train.train_iters"),
    **dict.fromkeys(("gb", "global_batch_size"), "train.global_batch_size"),
    **dict.fromkeys(("mb", "micro_batch_size"), "train.micro_batch_size"),
    **dict.fromkeys(("sl", "seq_length"), "dataset.seq_length"),
    **dict.fromkeys(("tp", "tensor_model_parallel_size"), "model.tensor_model_parallel_size"),
    **dict.fromkeys(("pp", "pipeline_model_parallel_size"), "model.pipeline_model_parallel_size"),
    **dict.fromkeys(("cp", "context_parallel_size"), "model.context_parallel_size"),
    **dict.fromkeys(("vp", "virtual_pipeline_model_parallel_size"), "model.virtual_pipeline_model_parallel_size"),
    **dict.fromkeys(("ep", "expert_model_parallel_size"), "model.expert_model_parallel_size"),
    "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "warmup_iters": "scheduler.lr_warmup_iters",
    "pretrained_checkpoint": "checkpoint.pretrained_checkpoint",
    "save_dir": "checkpoint.save",
    "load_dir": "checkpoint.load",
    "save_interval": "checkpoint.save_interval",
}
"""Options of scripts/training/run_recipe.py that stand for a field of ConfigContainer."""
_SWITCHES = frozenset(("dry_run", "deterministic", "dump_env"))
_OF_THE_RUNNER = _SWITCHES | {"config_file", "recipe", "mode", "step_func", "dataset"}
"""Options of the runner itself; they change no byte, or are read elsewhere."""
_PRECISIONS = {"bf16_mixed": "bf16", "fp16_mixed": "f16"}

INERT = {
    r"checkpoint\..*|logger\..*|profiling\..*|straggler\..*|nvrx_straggler\..*|ft\..*|env_vars\..*": OF_FILES,
    r"validation\..*|train\.eval_\w+": "of validation, which keeps no gradient",
    r"rng\..*|dist\..*|rerun_state_machine\..*|inprocess_restart\..*|tokenizer\..*": "of the process and the tokenizer",
    r"scheduler\..*|optimizer\.(lr|min_lr|adam_\w+|clip_grad|weight_decay)": OF_RATE,
    r"dataset\.(?!seq_length|offline_packing_specs).*": "of the data, whose sequences are counted by seq_length",
    r"train\.(train_iters|manual_gc\w*|exit_\w+)": "of the process",
    r"ddp\.(overlap_\w+|check_for_nan_in_grad|average_in_collective|bucket_size)": "of communication",
    r"comm_overlap\..*|model\.(gradient_accumulation_fusion|cross_entropy_\w+|transformer_impl)": "of kernels",
    r"model\.(attention_backend|cuda_graph_impl|apply_rope_fusion|account_for_\w+)": "of kernels",
}


def _recognises(path: Path, text: str) -> bool:
    """Tell whether a text is YAML with tables of ConfigContainer alone, or a script that starts a recipe."""
    if path.suffix in (".yaml", ".yml"):
        tables = set(_PARTS.findall(text))
        return bool(tables & _TELLING) and len(tables) > 1 and tables <= _TABLES
    script = path.suffix in (".sh", ".sbatch", ".bash", "")
    return script and _SCRIPT.search(text) is not None and ("_with_yaml" in text or recipe_named(text) is not None)


def _read(path: Path, text: str, asked: Asked) -> Job:
    yaml_path, scripts = _files(path, text, asked)
    settings: dict[str, Setting] = {}
    texts = [*scripts.values()]
    top = Source(str(path), text).top()
    if yaml_path is not None:
        own = text if yaml_path == path else read_text(yaml_path, "RT063", "an override file of Megatron-Bridge")
        texts.append(own)
        settings = yaml_settings(Source(str(yaml_path), own), "an override file of Megatron-Bridge")
    report = Diagnostics()
    for file, script in scripts.items():
        settings |= _overrides(file, script, asked, report)
    report.check()
    name = next((found for each in texts if (found := recipe_named(each)) is not None), None)
    settings["recipe"] = Setting(name, top)
    reader = JobReader("megatron-bridge", settings, top)
    base = None if name is None else recipe(name)
    if base is None:
        _without_recipe(reader, name)
    else:
        reader.taken.add("recipe")
    _degrees(reader, base)
    hub = None if base is None else base.model
    put_model(reader, asked, hub, "recipe", model_of_name(hub))
    _batch(reader, base)
    _types(reader, base)
    _sharding(reader, base)
    _method(reader, base)
    _optimizer(reader, base)
    put_recomputation(reader, lambda each: f"model.{each.replace('-', '_')}")
    if base is not None:
        _kernels(reader)
    take_options(reader, asked)
    replicas = check_devices(reader)
    batch = reader.take("train.global_batch_size", int)
    if batch is not None:
        put_accumulation(reader, batch, "train.global_batch_size", replicas)
    elif base is not None and replicas is not None:
        reader.assume("gradient_accumulation", max(1, base.batch // replicas), "train.global_batch_size", SOURCE)
    return reader.finish(INERT)


def _files(path: Path, text: str, asked: Asked) -> tuple[Path | None, dict[str, str]]:
    """Return the YAML file, if any, and the launch scripts with their texts."""
    if path.suffix in (".yaml", ".yml"):
        scripts = [each for each in asked.beside if each.suffix not in (".yaml", ".yml")]
        return path, {str(each): read_text(each, "RT063", "a launch script") for each in scripts}
    named = next((each for each in asked.beside if each.suffix in (".yaml", ".yml")), None)
    if named is None and (match := re.search(r"--config[-_]file[= ]\s*['\"]?([^\s'\"]+)", text)) is not None:
        there = path.parent / match[1]
        named = there if "$" not in match[1] and there.is_file() else None
    return named, {str(path): text}


def _overrides(file: str, text: str, asked: Asked, report: Diagnostics) -> dict[str, Setting]:
    """Read the overrides of a launch script, and the processes that its launcher starts.

    Report a script that starts trainings with different ones.
    """
    found: list[dict[str, Setting]] = []
    for launch in follow(file, text, asked.given).launches:
        begun = started(launch, report)
        overrides = _words(begun.arguments)
        if overrides or any(each.shown.startswith(("--config", "--recipe")) for each in begun.arguments):
            ranks = {name: begun.settings[name] for name in _RANKS if name in begun.settings}
            found.append(ranks | overrides)
    said = [{name: str(each.value) for name, each in settings.items()} for settings in found]
    if any(each != said[0] for each in said):
        top = Source(file, text).top()
        message = "the script starts more than one training, with different settings"
        report.error("RT064", message, top.location, source=top.source, help="leave one of them in the script")
    return found[0] if found else {}


def _words(words: tuple[Text, ...]) -> dict[str, Setting]:
    """Read words `a.b=value`, and options of run_recipe.py, before which those words go."""
    found: dict[str, Setting] = {}
    overrides: dict[str, Setting] = {}
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if (match := _OVERRIDE.fullmatch(word.shown)) is not None:
            # a number cannot be read from an unknown variable, and a path need not be
            value = match[2] if word.unknown is not None else _plain(match[2])
            overrides[match[1]] = Setting(value, word.place())
        elif word.shown.startswith("-"):
            spelled, sign, said = word.shown.partition("=")
            name = spelled.lstrip("-").replace("-", "_")
            if not sign and at < len(words) and not words[at].shown.startswith("-") and name not in _SWITCHES:
                said, at = words[at].shown, at + 1
            if name not in _OF_THE_RUNNER:
                found[_SHORT.get(name, spelled)] = Setting(_plain(said) if said else True, word.place())
    return found | overrides


def _plain(text: str) -> Any:
    """Return a text as YAML reads it; as it is if it is no YAML."""
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _without_recipe(reader: JobReader, name: str | None) -> None:
    why = "no recipe is named, and most of a run is in it" if name is None else f"the recipe {name} is not known here"
    reader.unknown("recipe", f"{why}: what it says of ranks, types and batches is not known")


def _put(reader: JobReader, field: str, key: str, base: Any) -> Any:
    """Set a whole number from the files, else from the recipe; return it, None without either."""
    value = reader.take(key, int)
    if value is not None and value < 1:
        reader.wrong(key, f"{key} is {value}: at least 1 is expected")
        return None
    if value is not None:
        reader.put(field, value, key)
    elif base is not None:
        reader.assume(field, base, key, SOURCE)
        value = base
    return value


def _degrees(reader: JobReader, base: Recipe | None) -> None:
    for field, key in (
        ("tp", "tensor_model_parallel_size"),
        ("pp", "pipeline_model_parallel_size"),
        ("cp", "context_parallel_size"),
    ):
        _put(reader, field, f"model.{key}", None if base is None else getattr(base, field))
    put_exchange(reader, "model.cp_comm_type")
    chunks = _put(reader, "virtual_stages", "model.virtual_pipeline_model_parallel_size", base and base.virtual_stages)
    if (chunks or 1) > 1:
        reader.values["schedule"] = "interleaved"
    said = reader.take("model.sequence_parallel", bool)
    split = said if said is not None else None if base is None else base.sequence_sharding
    if said is not None:
        reader.put("sequence_sharding", said and (reader.values.get("tp") or 1) > 1, "model.sequence_parallel")
    elif split is not None:
        reader.assume("sequence_sharding", split, "model.sequence_parallel", SOURCE)
    reader.unknown("model.expert_model_parallel_size", "experts are not counted")
    counts = {}
    for name in _RANKS:
        if reader.has(name) and isinstance(reader.settings[name].value, NotSaid):
            reader.ignore(name, "its value is not known")
            reader.settings[name] = Setting(None, reader.settings[name].place)
        counts[name] = reader.take(name, int)
    if counts["nproc-per-node"] is not None:
        reader.put("devices", counts["nproc-per-node"] * (counts["nnodes"] or 1), "nproc-per-node")
    elif counts["WORLD_SIZE"] is not None:
        reader.put("devices", counts["WORLD_SIZE"], "WORLD_SIZE")


def _batch(reader: JobReader, base: Recipe | None) -> None:
    _put(reader, "micro_batch_size", "train.micro_batch_size", None if base is None else 1)
    # the data's length goes before the model's (scripts/training/run_recipe.py, sync_model_dataset_sequence_length)
    key = next((key for key in ("dataset.seq_length", "model.seq_length") if reader.has(key)), "dataset.seq_length")
    _put(reader, "seq_len", key, None if base is None else base.seq_len)
    reader.taken.update(("dataset.seq_length", "model.seq_length"))
    packed = "dataset.offline_packing_specs.packed_sequence_size"
    length = reader.take(packed, int)
    if length is not None and length > 0:
        reader.put("packing", True, packed)
        if length != reader.values.get("seq_len"):
            reader.put("seq_len", length, packed)
    elif length is None and base is not None and base.method != "pretrain":
        reader.assume("packing", True, packed, SOURCE)
    if reader.take("dataset.enable_offline_packing", bool) is False:
        reader.put("packing", False, "dataset.enable_offline_packing")
    resets = ("dataset.reset_attention_mask", "dataset.reset_position_ids")
    of_documents = [reader.take(key, bool) for key in resets]
    if all(of_documents):
        reader.put("packing", True, resets[0])
    elif any(of_documents):
        for key in resets:
            reader.ignore(key, "of the data: documents of a stream are kept apart by both")


def _types(reader: JobReader, base: Recipe | None) -> None:
    """Set types by the mixed precision, which goes before what optimizer and ddp say (MixedPrecisionConfig.setup).

    Nothing is set if neither a file nor a known recipe names one.
    """
    key = "mixed_precision"
    said = reader.take(key, str)
    reader.ignore("ddp.grad_reduce_in_fp32", "the mixed precision says it, after the file")
    if said is None and base is None:
        return
    name = (said or "bf16_mixed").replace("-", "_")
    own = next((kind for begins, kind in (("bf16", "bf16"), ("fp16", "f16")) if name.startswith(begins)), None)
    if own is None:
        reader.wrong(key, f"{key} is {shown(said)}: one of {', '.join(_PRECISIONS)} is expected, with or without fp8")
        own = "bf16"
    source = f"{_PRECISION}, {name}"
    f32 = reader.take("mixed_precision.grad_reduce_in_fp32", bool)
    f32 = own == "bf16" if f32 is None else f32
    for field in ("weight_dtype", "compute_dtype"):
        reader.assume(field, own, key, source)
    for field in ("gradient_dtype", "reduce_dtype"):
        reader.assume(field, "f32" if f32 else own, key, f"{source}: grad_reduce_in_fp32")
    reader.assume("master_dtype", "f32", key, source)
    if said is not None:
        reader.put("weight_dtype", own, key)
    fp8: str | None = reader.take("mixed_precision.fp8", str)
    if "fp8" in name or fp8 is not None:
        reader.put("fp8", True, key)
    elif name not in _PRECISIONS:
        reader.unknown(key, "a precision that is not known here is counted as its first part says")


def _sharding(reader: JobReader, base: Recipe | None) -> None:
    keys = ("ddp.use_distributed_optimizer", "optimizer.use_distributed_optimizer")
    said = [reader.take(key, bool) for key in keys]
    fsdp = reader.take("ddp.use_megatron_fsdp", bool)
    strategy = reader.take("ddp.data_parallel_sharding_strategy", str)
    if fsdp:
        kinds = {"no_shard": Sharding.DDP, "optim": Sharding.ZERO1, "optim_grads": Sharding.ZERO2}
        reader.put("sharding", kinds.get(strategy or "", Sharding.ZERO3), "ddp.use_megatron_fsdp")
        reader.unknown("ddp.use_megatron_fsdp", "its buffers are counted as ZeRO's of the same stage")
    elif any(said):
        reader.put("sharding", Sharding.DISTRIBUTED_OPTIMIZER, keys[said.index(True)])
    elif base is not None and (None not in said or not base.distributed_optimizer):
        reader.assume("sharding", Sharding.DDP, keys[0], SOURCE)
    elif base is not None:
        reader.assume("sharding", Sharding.DISTRIBUTED_OPTIMIZER, keys[0], SOURCE)


def _method(reader: JobReader, base: Recipe | None) -> None:
    keys = [key for key in reader.settings if key.startswith("peft.")]
    rank, alpha, targets = (base.lora if base is not None else None) or (32, 32.0, TARGETS)
    rank_said, alpha_said = reader.take("peft.dim", int), reader.take("peft.alpha", float)
    targets_said, dropout = reader.take("peft.target_modules", list), reader.take("peft.dropout", float)
    if rank_said is not None and rank_said < 1:
        reader.wrong("peft.dim", f"peft.dim is {rank_said}: at least 1 is expected")
    if keys or (base is not None and base.lora is not None):
        adapter = Adapter(
            rank if rank_said is None else rank_said,
            alpha if alpha_said is None else alpha_said,
            targets if targets_said is None else tuple(map(str, targets_said)),
            dropout or 0.0,
        )
        for part, name in (("rank", "dim"), ("alpha", "alpha"), ("targets", "target_modules"), ("dropout", "dropout")):
            reader.trace(part, f"peft.{name}")
        reader.put("method", "lora", keys[0] if keys else "recipe")
        if keys:
            reader.put("adapter", adapter, keys[0])
        else:
            reader.assume("adapter", adapter, "peft", SOURCE)
    elif base is not None:
        reader.assume("method", base.method, "recipe", SOURCE)


def _optimizer(reader: JobReader, base: Recipe | None) -> None:
    kinds = {"adam": "adamw-fused", "sgd": "sgd-momentum"}
    said = reader.take("optimizer.optimizer", str)
    if said is not None and said not in kinds:
        reader.wrong("optimizer.optimizer", f"optimizer.optimizer is {shown(said)}: adam or sgd is expected")
    elif said is not None:
        reader.put("optimizer", kinds[said], "optimizer.optimizer")
    elif base is not None:
        reader.assume("optimizer", "adamw-fused", "optimizer.optimizer", _OPTIMIZER)
    _rate(reader, base)
    decay = reader.take("scheduler.start_weight_decay", float)
    if base is not None:
        betas = (0.9, 0.95 if base.method == "pretrain" else 0.98)
        given = reader.take("optimizer.adam_beta1", float), reader.take("optimizer.adam_beta2", float)
        acting = tuple(ours if theirs is None else theirs for ours, theirs in zip(betas, given, strict=True))
        source = f"{SOURCE}: adam_beta2 of recipes/common.py"
        reader.put_or_assume("betas", acting, "optimizer.adam_beta2", source, says=given != (None, None))
        reader.assume("eps", 1e-8, "optimizer.adam_eps", f"{_OPTIMIZER}: adam_eps")
        reader.assume("weight_decay", 0.033, "scheduler.start_weight_decay", _DECAY)
    reader.put("eps", reader.take("optimizer.adam_eps", float), "optimizer.adam_eps")
    reader.put("weight_decay", decay, "scheduler.start_weight_decay")
    reader.ignore("optimizer.weight_decay", "the scheduler's start_weight_decay goes before it")
    norm = reader.take("optimizer.clip_grad", float)
    if norm is None and base is not None:
        reader.assume("max_grad_norm", 1.0, "optimizer.clip_grad", _OPTIMIZER)
    reader.put("max_grad_norm", norm, "optimizer.clip_grad")
    if reader.take("optimizer.optimizer_cpu_offload", bool):
        reader.put("offload_optimizer", True, "optimizer.optimizer_cpu_offload")
    for name in ("cpu_offloading", "fine_grained_activation_offloading"):
        if reader.take(f"model.{name}", bool):
            reader.ignore(
                f"model.{name}", "activations are offloaded in part: all are counted on the device", less=True
            )


def _rate(reader: JobReader, base: Recipe | None) -> None:
    """Set learning rate, its shape, and `steps`, over which it decays.

    `scheduler.max_steps` goes before `lr_decay_iters`, and that before the length of the training; a warm-up that is
    longer ends there (src/megatron/bridge/training/config.py, ConfigContainer._calculate_scheduler_steps).
    """
    if base is not None:
        common = "src/megatron/bridge/recipes/common.py"
        reader.assume("lr", base.rate.lr, "optimizer.lr", f"{SOURCE}; {common}")
        reader.assume("min_lr", base.rate.least, "optimizer.min_lr", f"{SOURCE}; {common}")
        reader.assume("scheduler", "cosine", "scheduler.lr_decay_style", _OPTIMIZER)
        reader.assume("steps", base.rate.steps, "train.train_iters", SOURCE)
        reader.assume("warmup_steps", base.rate.warm_up, "scheduler.lr_warmup_iters", SOURCE)
    for field, key in (("lr", "optimizer.lr"), ("min_lr", "optimizer.min_lr")):
        reader.put(field, reader.take(key, float), key)
    reader.put("scheduler", reader.take("scheduler.lr_decay_style", str), "scheduler.lr_decay_style")
    if (reader.training.get("scheduler") or "").lower() == "wsd":
        falls = "scheduler.lr_wsd_decay_iters"
        reader.put("decay_steps", reader.size(falls), falls)
        source = "NVIDIA/Megatron-LM: megatron/training/config/training_config.py, SchedulerConfig.lr_wsd_decay_style"
        reader.choose("decay_style", "scheduler.lr_wsd_decay_style", str, "exponential", source)
    for key in ("train.train_iters", "scheduler.lr_decay_iters", "scheduler.max_steps"):
        reader.put("steps", reader.size(key), key)
    warm, share = reader.take("scheduler.lr_warmup_iters", int), reader.take("scheduler.lr_warmup_fraction", float)
    reader.put("warmup_steps", warm, "scheduler.lr_warmup_iters")
    if share is not None and reader.training.pop("warmup_steps", 0):
        text = f"scheduler.lr_warmup_fraction {share:g} is refused there unless scheduler.lr_warmup_iters is 0"
        reader.wrong("scheduler.lr_warmup_fraction", text, way_out="say one of them, and lr_warmup_iters: 0")
    reader.put("warmup_ratio", share, "scheduler.lr_warmup_fraction")
    length, begins = reader.training.get("steps"), reader.training.get("warmup_steps")
    if length is not None and begins is not None and begins > length:
        reader.training["warmup_steps"] = length


def _kernels(reader: JobReader) -> None:
    reader.assume("attention", Attention.FLASH, "model.attention_backend", f"{SOURCE}: attention_backend None is auto")
    loss = "NVIDIA/Megatron-LM: megatron/core/tensor_parallel/cross_entropy.py, VocabParallelCrossEntropy"
    reader.assume("loss", Loss.VOCAB_PARALLEL, "model.cross_entropy_fusion_impl", loss)
    provider = "NVIDIA-NeMo/Megatron-Bridge: src/megatron/bridge/models/llama/llama_bridge.py"
    fused = reader.take("model.bias_activation_fusion", bool)
    rate = reader.take("model.hidden_dropout", float)
    if fused is None:
        reader.assume("compiled", True, "model.bias_activation_fusion", provider)
    if rate is None:
        reader.assume("dropout", 0.0, "model.hidden_dropout", provider)
    reader.put("compiled", fused, "model.bias_activation_fusion")
    reader.put("dropout", rate, "model.hidden_dropout")


# phrases

_SIMPLE = {
    "micro_batch_size": "train.micro_batch_size",
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "sequence_sharding": "model.sequence_parallel",
    "offload_optimizer": "optimizer.optimizer_cpu_offload",
}


def _phrase(job: Job, field: str, value: Any) -> str | None:
    if field in _SIMPLE:
        return yaml_said((_SIMPLE[field], value))
    if field == "seq_len":
        packed = "dataset.offline_packing_specs.packed_sequence_size"
        more = ((packed, value),) if job.training.packing and job.origins["packing"].key == packed else ()
        return yaml_said(("dataset.seq_length", value), ("model.seq_length", value), *more)
    if field == "gradient_accumulation" and job.dp is not None and job.micro_batch_size is not None:
        return yaml_said(("train.global_batch_size", job.micro_batch_size * value * job.dp))
    if field == "checkpointing":
        full = (("model.recompute_method", "uniform"), ("model.recompute_num_layers", 1))
        less = tuple((key, None) for key, _ in full)
        return {
            Checkpointing.FULL: yaml_said(("model.recompute_granularity", "full"), *full),
            Checkpointing.ATTENTION: yaml_said(("model.recompute_granularity", "selective"), *less),
            Checkpointing.NONE: yaml_said(("model.recompute_granularity", None)),
        }.get(value)
    if field == "sharding" and value in (Sharding.DDP, Sharding.DISTRIBUTED_OPTIMIZER):
        on = value is Sharding.DISTRIBUTED_OPTIMIZER
        return yaml_said(("ddp.use_distributed_optimizer", on), ("optimizer.use_distributed_optimizer", on))
    if field == "optimizer" and value in ("adamw-fused", "sgd-momentum"):
        return yaml_said(("optimizer.optimizer", "adam" if value == "adamw-fused" else "sgd"))
    return None


MEGATRON_BRIDGE = SettingsFormat("megatron-bridge", "Megatron-Bridge", _recognises, _read, _phrase, reads_script=True)
