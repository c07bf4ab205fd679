"""Training arguments of transformers, as TRL, LLaMA-Factory and plain scripts take them (names of version 5)."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrainc.bridge.jobs.accelerate import INERT as INERT_ACCELERATE
from ratrain.ratrainc.bridge.jobs.accelerate import bring_accelerate, mixed_precision, put_accelerate, put_devices
from ratrain.ratrainc.bridge.jobs.hf_deepspeed import INERT_DEEPSPEED, WHAT, Arguments, put_deepspeed
from ratrain.ratrainc.bridge.jobs.hf_fsdp import ARGUMENTS_DEFAULTS, INERT_FSDP, STRATEGIES, put_fsdp
from ratrain.ratrainc.bridge.jobs.hf_reader import HfReader, Said
from ratrain.ratrainc.bridge.jobs.hf_rules import (
    ARGUMENTS,
    LOSS_SOURCE,
    OF_TRANSFORMERS,
    TrainingDefaults,
    put_checkpointing,
    put_optimizer,
    put_training,
    put_whole_or_ddp,
)
from ratrain.ratrainc.bridge.jobs.job import FSDP, Checkpointing, Loss
from ratrain.ratrainc.bridge.reasons import OF_TRAINING
from ratrain.ratrainc.bridge.settings import Setting

MICRO_KEY, TIMES_KEY = "per_device_train_batch_size", "gradient_accumulation_steps"
NEW_CHECKPOINTING, OLD_CHECKPOINTING = "activation_checkpointing", "gradient_checkpointing"
EACH = "accelerator_config"
_EACH_SOURCE = "accelerate src/accelerate/utils/dataclasses.py, GradientAccumulationPlugin"
_DDP = r"ddp_(find_unused_parameters|bucket_cap_mb|broadcast_buffers|static_graph|backend|timeout)"

INERT: Mapping[str, str] = {
    **INERT_ACCELERATE,
    **INERT_DEEPSPEED,
    r"(output_dir|run_name|project|log.*|report_to|disable_tqdm|include_num_input_tokens_seen|trackio_.*|wandb_.*"
    r"|plot_loss|skip_memory_metrics|debug|swanlab_.*|use_swanlab)": "of logs",
    r"(save_.*|overwrite_output_dir|push_to_hub.*|hub_.*|load_best_model_at_end|resume_from_checkpoint|metric_for.*"
    r"|enable_jit_checkpoint|restore_callback_states_from_checkpoint|greater_is_better)": "of saving",
    r"(eval_.*|evaluation_strategy|do_(train|eval|predict)|per_device_eval_batch_size|prediction_loss_only"
    r"|include_for_metrics|batch_eval_metrics|(bf16|fp16)_full_eval|early_stopping_.*|predict_with_generate"
    r"|generation_.*)": "of evaluation: the answer is of a training step",
    r"(dataset.*|data_.*|dataloader_.*|remove_unused_columns|label_names|group_by_length|length_column_name"
    r"|train_sampling_strategy|ignore_data_skip|preprocessing_.*|tokenizer_.*|streaming)": "of the data",
    r"(seed|data_seed|full_determinism|torch_empty_cache_steps|tf32|use_cache|accelerator_config.*|local_rank"
    r"|average_tokens_across_devices|env\..*|env|trust_remote_code|model_revision|torch_compile_(backend|mode)"
    r"|label_smoothing_factor|neftune_noise_alpha|optim_args)": "it holds no bytes of a step",
    _DDP: "of the order of communication",
    r"lr_scheduler_kwargs(\..*)?": OF_TRAINING,
    r"(xla|fsdp_config\.xla.*)": "of TPUs",
    **INERT_FSDP,
}
"""Training arguments that change no byte of a step."""


@frozen
class Defaults:
    """Defaults that differ from transformers' own: value and source each."""

    bf16: tuple[bool, str] = (False, f"{ARGUMENTS}.bf16")
    checkpointing: tuple[bool, str] = (False, f"{ARGUMENTS}.activation_checkpointing")
    training: TrainingDefaults = OF_TRANSFORMERS
    reads_checkpointing: bool = True
    """false if the format has a switch of its own, and does not read the arguments'"""


def take_arguments(reader: HfReader, defaults: Defaults = Defaults()) -> Arguments:
    """Set what training arguments say: batch, types, sharding, checkpointing, optimizer and loss.

    The model must be set before: layers and buffers follow from it.
    """
    bring_accelerate(reader)
    put_devices(reader)
    micro = reader.settle("micro_batch_size", MICRO_KEY, "--micro-batch-size", 8, f"{ARGUMENTS}.{MICRO_KEY}")
    times = reader.settle("gradient_accumulation", TIMES_KEY, "", 1, f"{ARGUMENTS}.{TIMES_KEY}")
    mixed = _mixed(reader, defaults)
    put_training(reader, defaults=defaults.training)
    put_optimizer(reader)
    norm = Said(reader.training.get("max_grad_norm"), "max_grad_norm")
    arguments = Arguments(Said(micro, MICRO_KEY), Said(times, TIMES_KEY), norm, mixed)
    if defaults.reads_checkpointing:
        new = reader.has(NEW_CHECKPOINTING)
        key = NEW_CHECKPOINTING if new else OLD_CHECKPOINTING
        if new:
            reader.ignore(OLD_CHECKPOINTING, f"{NEW_CHECKPOINTING}, its newer name, is read where both are there")
        put_checkpointing(reader, key, reader.first(*_kwargs(reader)), defaults.checkpointing)
    before = reader.origins.get("checkpointing") if reader.values.get("checkpointing") is Checkpointing.FULL else None
    put_sharding(reader, arguments)
    if defaults.reads_checkpointing and before is not None:
        _refuse_twice(reader, before.key)
    if reader.truth("use_cpu"):
        reader.wrong("use_cpu", "the run has no devices but processors", way_out="use_cpu: false")
    if reader.truth("auto_find_batch_size"):
        reader.unknown("auto_find_batch_size", "the batch is made smaller until it fits; counted as it is said")
    compiled = reader.first("torch_compile", "torch_compile_backend", "torch_compile_mode")
    if reader.has(compiled) and (compiled != "torch_compile" or reader.truth(compiled)):
        reader.put("compiled", True, compiled)
    reader.taken.add(compiled)
    return arguments


def _kwargs(reader: HfReader) -> tuple[str, ...]:
    """Return the names of checkpointing's own arguments, one of which stands for a table, in the order of reading."""
    names = (f"{NEW_CHECKPOINTING}_kwargs", f"{OLD_CHECKPOINTING}_kwargs")
    return tuple(sorted(names, key=lambda name: not any(True for _ in reader.under(f"{name}."))))


def _mixed(reader: HfReader, defaults: Defaults) -> Said:
    """Return the type of mixed precision; training arguments go before accelerate's file."""
    half = reader.take("fp16", bool)
    brain = reader.take("bf16", bool)
    given = mixed_precision(reader)
    if half and brain:
        reader.wrong("fp16", "fp16 and bf16 are both on, and exclude one another", way_out="leave one of them out")
    if half:
        return Said("f16", "fp16")
    origin = "" if brain is not None else defaults.bf16[1]
    if defaults.bf16[0] if brain is None and not half else brain:
        return Said("bf16", "bf16", origin)
    return given if given.value else Said(None, "bf16", origin)


def put_sharding(reader: HfReader, arguments: Arguments, *, fsdp: bool = True) -> None:
    """Set how ranks share out state: by DeepSpeed, by FSDP, by accelerate's file, or by DDP.

    `fsdp` is false if a format has read the settings of FSDP by rules of its own.
    """
    if reader.open("deepspeed", WHAT):
        put_deepspeed(reader, arguments)
    elif fsdp and _takes_fsdp(reader):
        put_fsdp(reader, "fsdp_config.", ARGUMENTS_DEFAULTS)
    put_accelerate(reader, arguments)
    if "sharding" not in reader.values:
        put_whole_or_ddp(reader)
    _put_reductions(reader)


def _put_reductions(reader: HfReader) -> None:
    """Set whether FSDP reduces gradients after each micro-batch; other mechanisms hold the same bytes either way."""
    table = f"{EACH}.gradient_accumulation_kwargs"
    reader.open(EACH, "an accelerator_config")
    steps, key = f"{table}.num_steps", f"{table}.sync_each_batch"
    if reader.has(steps):
        reader.unknown(steps, f"another word for {TIMES_KEY}, which alone is read")
    if reader.values.get("sharding") not in FSDP:
        reader.glance(key, bool)
        return
    reader.choose("reduces_each", key, bool, False, f"{_EACH_SOURCE}.sync_each_batch")


def _refuse_twice(reader: HfReader, key: str) -> None:
    """Report checkpointing that FSDP and the training arguments (`key`) both do, which transformers refuses."""
    if "fsdp_config" in reader.origins["checkpointing"].key:
        text = "FSDP's activation checkpointing and the training arguments' are both on, which transformers refuses"
        reader.wrong(key, text, way_out=f"{key}: false")


def _takes_fsdp(reader: HfReader) -> bool:
    """Tell whether training arguments ask for FSDP; older words of `fsdp` become settings of `fsdp_config`."""
    said = reader.settings["fsdp"].value if reader.has("fsdp") else None
    reader.taken.add("fsdp")
    reader.open("fsdp_config", "an fsdp_config")
    if said in (None, "", False, []) or str(said).lower() == "false":
        for name in reader.under("fsdp_config."):
            reader.ignore(name, "fsdp is off: it says whether the table is read")
        return False
    words = said.split() if isinstance(said, str) else list(said) if isinstance(said, list) else []
    place = reader.settings["fsdp"].place
    version = reader.first("fsdp_config.version", "fsdp_config.fsdp_version")
    old = reader.has(version) and str(reader.settings[version].value) == "1"
    for word in (str(each) for each in words if str(each).lower() != "true"):
        if word.upper() in STRATEGIES:
            if not old and word.upper() not in STRATEGIES[:2]:
                text = f"fsdp is {shown(said)}: {word} is a strategy of version 1 alone"
                reader.wrong("fsdp", text, way_out="fsdp_config: {version: 1}")
                continue
            value = word if old else word.upper() == STRATEGIES[0]
            reader.settings.setdefault("fsdp_config.reshard_after_forward", Setting(value, place))
        elif word == "offload":
            reader.settings.setdefault("fsdp_config.cpu_offload", Setting(True, place))
        elif word != "auto_wrap":
            way_out = "full_shard, shard_grad_op, offload, auto_wrap"
            reader.wrong("fsdp", f"fsdp is {shown(said)}: {word} is none of its words", way_out=way_out)
    return True


def put_loss(reader: HfReader, key: str = "use_liger_kernel") -> None:
    """Set the loss: upcast logits, or Liger's fused linear cross-entropy, which is on where the kernels are."""
    on = reader.truth(key)
    fused = reader.take("liger_kernel_config.fused_linear_cross_entropy", bool)
    for name in reader.under("liger_kernel_config."):
        reader.ignore(name, "which of Liger's kernels are on; all but the loss are counted as being on")
    reader.taken.add("liger_kernel_config")
    if on:
        reader.put("loss", Loss.FUSED if fused is not False else Loss.WHOLE, key)
        if "compiled" not in reader.values:  # norms, rotary positions and gated products are fused: fewer results kept
            reader.put("compiled", True, key)
    else:
        reader.assume("loss", Loss.UPCAST, key, LOSS_SOURCE)
