"""Tables for DeepSpeed's jobs: what "auto" stands for, sizes of ZeRO's buffers, and settings that change no byte.

Read in deepspeedai/DeepSpeed 0.19.6 and huggingface/transformers (stored versions).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ratrain.ratrainc.bridge.deepspeed_rules import BF16, CLIP, FP16, MICRO, PARAMS, TIMES, TIMING

ZERO_CONFIG = "deepspeedai/DeepSpeed: deepspeed/runtime/zero/config.py, DeepSpeedZeroConfig"
TYPES = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}

FILLED: dict[str, tuple[str, Any]] = {
    MICRO: ("per_device_train_batch_size", 8),
    TIMES: ("gradient_accumulation_steps", 1),
    CLIP: ("max_grad_norm", 1.0),
    f"{PARAMS}lr": ("learning_rate", 5e-5),
    f"{PARAMS}eps": ("adam_epsilon", 1e-8),
    f"{PARAMS}weight_decay": ("weight_decay", 0.0),
    f"{PARAMS}betas": ("adam_betas", [0.9, 0.999]),
    f"{TIMING}warmup_max_lr": ("learning_rate", 5e-5),
    f"{TIMING}warmup_num_steps": ("warmup_steps", 0),
    BF16: ("bf16", False),
    FP16: ("fp16", False),
}
"""Training argument that fills "auto" in, and its default (TrainingArguments; trainer_config_process).

Betas are two arguments, adam_beta1 and adam_beta2; where a file has them, it has no `adam_betas`.
"""
CHECKED = frozenset((MICRO, TIMES, CLIP, f"{PARAMS}lr", f"{PARAMS}weight_decay"))
"""Settings that must agree with the argument (fill_match)."""

_Z = "zero_optimization."
SIZES: dict[str, tuple[int, int, Callable[[int], int] | None]] = {
    f"{_Z}reduce_bucket_size": (1, 500_000_000, lambda width: width * width),
    f"{_Z}allgather_bucket_size": (1, 500_000_000, None),
    f"{_Z}overlap_comm": (1, 0, None),
    f"{_Z}sub_group_size": (3, 1_000_000_000, None),
    f"{_Z}stage3_prefetch_bucket_size": (3, 50_000_000, lambda width: int(0.9 * width * width)),
    f"{_Z}stage3_param_persistence_threshold": (3, 100_000, lambda width: 10 * width),
    f"{_Z}stage3_max_live_parameters": (3, 1_000_000_000, None),
    f"{_Z}stage3_max_reuse_distance": (3, 1_000_000_000, None),
}
"""Sizes of ZeRO's buffers: the stage that has them, the default, and what "auto" is by the model's width."""

OPTIMIZERS = {"adam": "adamw-fused", "adamw": "adamw-fused", "lion": "lion", "muon": "muon"}
"""Optimizers that DeepSpeed builds (_configure_basic_optimizer): FusedAdam, and DeepSpeedCPUAdam offloaded."""
TRAINER_OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw-fused",
    "adamw_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit",
    "paged_adamw_32bit": "adamw-paged",
    "paged_adamw_8bit": "adamw-8bit-paged",
    "adafactor": "adafactor",
    "sgd": "sgd",
    "lion_32bit": "lion",
    "lion_8bit": "lion-8bit",
}
"""Words of TrainingArguments.optim (training_args.py, OptimizerNames)."""

ARGUMENTS = (
    *("deepspeed", "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "bf16", "fp16", "adam_beta1"),
    *("adam_beta2", "adam_betas", "adam_epsilon", "per_device_train_batch_size", "gradient_accumulation_steps"),
)
"""Training arguments that the ds_config takes over, or that change no byte."""

_LOGS = "of logs and measurements: no byte of a device"
_FILES = "of files and checkpoints: no byte of a device"
_RATE = "of the learning rate: no byte of a device"
_SENT = "how gradients are sent"
INERT = {
    r"steps_per_print|wall_clock_breakdown|dump_state|memory_breakdown|log_level": _LOGS,
    r"(flops_profiler|comms_logger)\..*": _LOGS,
    r"(tensorboard|wandb|csv_monitor|comet|timers|monitor_config|comms_config)(\..*)?": _LOGS,
    r"activation_checkpointing\..*": "read only by models that call DeepSpeed's own checkpointing",
    r"zero_optimization\.stage3_(model_persistence|module_granularity)_threshold|compile\..*": "of communication",
    r"(checkpoint|nebula|datastates_ckpt|aio)(\..*)?": _FILES,
    r"scheduler\..*|optimizer\.params\..*": _RATE,
    r"fp16\.(loss_scale\w*|initial_scale_power|hysteresis|min_loss_scale|consecutive_hysteresis|auto_cast)": _RATE,
    r"bf16\.(check_grad_overflow|check_overflow|immediate_grad_update)": _RATE,
    r"prescale_gradients|gradient_predivide_factor|gradient_allreduce_op|disable_allgather": _SENT,
    r"zero_optimization\.(contiguous_gradients|reduce_scatter|allgather_partitions|round_robin_gradients)": _SENT,
    r"zero_optimization\.(use_multi_rank_bucket_allreduce|ignore_unused_parameters|elastic_checkpoint)": _SENT,
    r"zero_optimization\.\w*gather_(16bit|fp16)_weights_on_model_save": _FILES,
    r"zero_optimization\.\w*(load_from_fp32_weights|log_trace_cache_warnings|enable_sanity_checks)": _FILES,
    r"zero_optimization\.offload_\w+\.(pin_memory|nvme_path|buffer_\w+|fast_init|pipeline\w*)": "of the host",
    r"zero_optimization\.offload_\w+\.max_in_cpu|allgather_size": "of the host, or of communication",
    r"zero_allow_untested_optimizer|zero_force_ds_cpu_optimizer|dataloader_drop_last": "which optimizers are let in",
    r"arguments\.(output_dir|logging_\w+|save_\w+|eval_\w+|evaluation_strategy|report_to|run_name|seed)": _FILES,
    r"arguments\.(do_train|do_eval|overwrite_output_dir|lr_scheduler_type\w*|dataloader_\w+|ddp_\w+)": _FILES,
    r"arguments\.(remove_unused_columns|push_to_hub\w*|hub_\w+|tf32|group_by_length|load_best_\w+)": _FILES,
}
