"""Reader of accelerate's configuration (`accelerate config`, `accelerate launch --config_file`).

It says how a run is shared out: devices, mixed precision and the mechanism (DDP, FSDP, DeepSpeed), nothing of the model
or the batch. It accompanies the settings of a training script; alone it makes a job whose other fields are open.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.support.text import Source, read_text, shown
from ratrain.ratrainc.bridge.jobs.hf_deepspeed import INERT_DEEPSPEED, WHAT, Arguments, engine_type, put_deepspeed
from ratrain.ratrainc.bridge.jobs.hf_fsdp import ACCELERATE_DEFAULTS, put_fsdp
from ratrain.ratrainc.bridge.jobs.hf_reader import ACCELERATE, DEEPSPEED, HfReader, Said, settings_of
from ratrain.ratrainc.bridge.jobs.hf_rules import PREPARED, put_asked_model, put_types
from ratrain.ratrainc.bridge.jobs.hf_words import phrase_of_accelerate
from ratrain.ratrainc.bridge.jobs.job import FSDP, Context, Job, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import EXCHANGES, put_context
from ratrain.ratrainc.bridge.jobs.job_reader import Asked, SettingsFormat
from ratrain.ratrainc.bridge.reasons import OF_ORDER
from ratrain.ratrainc.bridge.settings import Setting

FILE = "a configuration of accelerate"
CLUSTER = "accelerate src/accelerate/commands/config/config_args.py, ClusterConfig"
MIXED: Mapping[str, str | None] = {"no": None, "false": None, "bf16": "bf16", "fp16": "f16", "fp8": "bf16"}
"""Type of products by `mixed_precision`; fp8 casts to bf16 where it does not go below."""
_FSDP, _TABLE = f"{ACCELERATE}fsdp_config.", f"{ACCELERATE}deepspeed_config."
_RANKS = f"{ACCELERATE}parallelism_config.parallelism_config_"
_PARALLELISM = "huggingface/accelerate: src/accelerate/parallelism_config.py, ParallelismConfig"

INERT: Mapping[str, str] = {
    r"(accelerate\.)?(compute_environment|debug|downcast_bf16|enable_cpu_affinity|machine_rank|main_process_(ip|port)"
    r"|main_training_function|rdzv_(backend|conf)|same_network|tpu_.*|command_file|commands|gpu_ids|num_machines"
    r"|deepspeed_hostfile|max_restarts|mpirun_config.*)": "of the launch",
    r"accelerate\.fsdp_config\.fsdp_(backward_prefetch(_policy)?|forward_prefetch|cpu_ram_efficient_loading"
    r"|sync_module_states|use_orig_params|state_dict_type|limit_all_gathers|cpu_offload_pin_memory)": OF_ORDER,
    r"accelerate\.deepspeed_config\.(zero3_init_flag|zero3_save_16bit_model|deepspeed_multinode_launcher"
    r"|deepspeed_hostfile|deepspeed_(inclusion|exclusion)_filter|offload_(optimizer|param)_nvme_path)": "of loading, "
    "saving and the launch",
    r"accelerate\.parallelism_config\.parallelism_config_(cp|sp)_(comm_strategy|backend|seq_length.*"
    r"|attn_implementation)": "of the order of communication",
}


def bring_accelerate(reader: HfReader) -> None:
    """Add the settings of accelerate's file and of a ds_config that were given with the run.

    Report a file that is neither, unless a setting names it.
    """
    texts = {path: read_text(path, "RT063", FILE) for path in reader.asked.beside}
    for path, text in texts.items():
        if recognises(path, text):
            reader.bring(ACCELERATE, settings_of(path, text, FILE))
    named = {Path(each.value).name for each in reader.settings.values() if isinstance(each.value, str)}
    for path, text in texts.items():
        if recognises(path, text) or path.name in named or path == reader.path:
            continue
        if is_ds_config(text):
            if "deepspeed" not in reader.settings:
                reader.settings["deepspeed"] = Setting(str(path.resolve()), Source(str(path), text).top())
        else:
            message = f"{shown(path.name)} is neither {FILE} nor {WHAT}, and no setting names it"
            reader.report.error("RT063", message, Source(str(path), text).top().location, help="leave it out")


def is_ds_config(text: str) -> bool:
    """Tell whether a text looks like a ds_config: an object with a name that only DeepSpeed has."""
    return re.match(r"\s*(\{|//|/\*)", text) is not None and any(
        re.search(rf"[\"']?\b{name}\b[\"']?\s*:", text) is not None
        for name in ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
    )


def put_devices(reader: HfReader) -> None:
    """Set the number of devices: `num_processes` is the total of all machines."""
    key = f"{ACCELERATE}num_processes"
    kind = str(reader.settings[name].value if reader.has(name := f"{ACCELERATE}distributed_type") else "").upper()
    if kind == "NO" and not reader.has(key):
        reader.settle("devices", key, "--devices", 1, f"{CLUSTER}.distributed_type")
    else:
        reader.settle("devices", key, "--devices")


def mixed_precision(reader: HfReader) -> Said:
    """Return accelerate's mixed precision: the job's type, None without one."""
    key = f"{ACCELERATE}mixed_precision"
    if not reader.has(key):
        reader.taken.add(key)
        return Said(None, "mixed_precision", f"{CLUSTER}.mixed_precision")
    word = str(reader.settings[key].value).lower()  # `no` without quotation marks is false in YAML
    reader.taken.add(key)
    if word not in MIXED:
        way_out = "one of no, bf16, fp16 or fp8"
        reader.wrong(key, f"mixed_precision is {shown(word)}, which accelerate does not have", way_out=way_out)
        return Said(None, key)
    if word == "fp8":
        reader.put("fp8", True, key)
    return Said(MIXED[word], key)


def put_accelerate(reader: HfReader, arguments: Arguments) -> None:
    """Set sharding, offload and degrees by accelerate's file, unless the training arguments have set them."""
    key = f"{ACCELERATE}distributed_type"
    kind = (reader.take(key, str) or "").upper()
    if reader.truth(f"{ACCELERATE}use_cpu"):
        reader.wrong(f"{ACCELERATE}use_cpu", "the run has no devices but processors", way_out="use_cpu: false")
    compiled = f"{ACCELERATE}dynamo_config.dynamo_backend"
    if (reader.take(compiled, str) or "no").lower() != "no":
        reader.put("compiled", True, compiled)
        for name in reader.under(f"{ACCELERATE}dynamo_config."):
            reader.ignore(name, "of how torch.compile goes about it") if name != compiled else None
    if "sharding" in reader.values:
        for name in reader.under(_FSDP):
            reader.ignore(name, "the training arguments say how state is sharded")
    elif kind == "FSDP":
        put_fsdp(reader, _FSDP, ACCELERATE_DEFAULTS)
    elif kind == "DEEPSPEED":
        _put_deepspeed(reader, arguments)
    elif kind.startswith("MULTI_"):
        reader.put("sharding", Sharding.DDP, key)
    elif kind == "NO":
        reader.put("sharding", Sharding.NONE, key)
    elif kind == "MEGATRON_LM":
        text = "accelerate's Megatron-LM is not read"
        reader.wrong(key, text, way_out="give a launch script of Megatron-LM with the same sizes")
    elif kind:
        reader.wrong(key, f"distributed_type is {shown(kind)}, which is not read", way_out="MULTI_GPU, FSDP, DEEPSPEED")
    _put_degrees(reader)


def _put_deepspeed(reader: HfReader, arguments: Arguments) -> None:
    file = f"{_TABLE}deepspeed_config_file"
    reader.taken.add(file)
    if not reader.has(file) or reader.settings[file].value == "none":
        put_deepspeed(reader, arguments, inline=_TABLE)
        return
    reader.settings["deepspeed"] = reader.settings[file]
    reader.called["deepspeed"] = "deepspeed_config_file"
    reader.ignore(file, "the settings of the file that it names are read")
    if reader.open("deepspeed", WHAT):
        put_deepspeed(reader, arguments)
        for name in reader.under(_TABLE):
            reader.ignore(name, "the ds_config says it") if name not in reader.taken else None


def _put_degrees(reader: HfReader) -> None:
    """Set tensor and context ranks and the group that shares out state (accelerate's ParallelismConfig).

    Sequences may be shared out by heads between ranks (Ulysses, sp_size), in the place of context ranks.
    """
    sizes = {degree: reader.size(f"{_RANKS}{degree}") or 1 for degree in ("tp_size", "cp_size", "sp_size")}
    for name, degree in (("tp", "tp_size"), ("cp", "cp_size"), ("cp", "sp_size")):
        if sizes[degree] > 1:
            reader.put(name, sizes[degree], f"{_RANKS}{degree}")
    if sizes["sp_size"] > 1:
        reader.assume("context", Context.HEADS, f"{_RANKS}sp_size", f"{_PARALLELISM}, sp_backend")
    else:
        source = f"{_PARALLELISM}, TorchContextParallelConfig"
        put_context(reader, f"{_RANKS}cp_comm_strategy", EXCHANGES, "allgather", source)
    if sizes["cp_size"] > 1 and sizes["sp_size"] > 1:
        text = "cp_size and sp_size both share out sequences, and exclude one another"
        reader.wrong(f"{_RANKS}sp_size", text, way_out="say 1 in one of them")
    copies, share = reader.size(f"{_RANKS}dp_replicate_size") or 1, reader.take(f"{_RANKS}dp_shard_size", int)
    if copies > 1 and share is not None and share > 0:
        reader.put("shard_size", share * reader.values.get("cp", 1), f"{_RANKS}dp_shard_size")


def recognises(_path: Path, text: str) -> bool:
    """Tell whether a text is a configuration of accelerate: it names how the run is distributed, and no model."""
    kinds = r"^(distributed_type|compute_environment)\s*:|^\s*\"(distributed_type|compute_environment)\"\s*:"
    return re.search(kinds, text, re.MULTILINE) is not None and "model_name_or_path" not in text


def _read(path: Path, text: str, asked: Asked) -> Job:
    reader = HfReader("accelerate", {}, Source(str(path), text).top(), path=path, asked=asked)
    reader.bring(ACCELERATE, settings_of(path, text, FILE))
    if (
        str(reader.settings.get(f"{ACCELERATE}compute_environment", Setting("", reader.top)).value)
        == "AMAZON_SAGEMAKER"
    ):
        fail("RT063", "runs on SageMaker are not read", reader.top.location, help="give the settings of the training")
    bring_accelerate(reader)
    put_devices(reader)
    mixed = mixed_precision(reader)
    nothing = Said(None, "")
    micro = reader.settle("micro_batch_size", "micro_batch_size", "--micro-batch-size")
    reader.settle("seq_len", "seq_len", "--seq-len")
    put_accelerate(reader, Arguments(Said(micro, "--micro-batch-size"), nothing, nothing, mixed, fills=False))
    _put_engine_sizes(reader)
    mixed = (engine_type(reader) if reader.engine else None) or mixed
    put_asked_model(reader)
    put_types(reader, Said("f32", "weights", PREPARED), mixed)
    if not reader.engine and reader.values.get("sharding") not in FSDP:
        reader.doubt("weights", None, "the training script loads the model, and its type; counted as f32")
    return reader.finish({**INERT, **INERT_DEEPSPEED})


def _put_engine_sizes(reader: HfReader) -> None:
    """Set accumulation and clipping as DeepSpeed's settings say them, which no training arguments fill in here."""
    for name in (_TABLE, DEEPSPEED):
        times, norm = f"{name}gradient_accumulation_steps", f"{name}gradient_clipping"
        if reader.engine and reader.has(times) and reader.settings[times].value != "auto":
            reader.put("gradient_accumulation", reader.size(times), times)
        if reader.engine and reader.has(norm) and reader.settings[norm].value not in ("auto", "none"):
            reader.put("max_grad_norm", reader.take(norm, float), norm)


def _phrase(job: Job, name: str, value: Any) -> str | None:
    return phrase_of_accelerate(job, name, value)


FORMAT = SettingsFormat("accelerate", "accelerate", recognises, _read, _phrase)
