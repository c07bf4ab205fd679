"""Rules for settings of DeepSpeed: the plan's keys, the default, and its source in DeepSpeed 0.19.6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ratrain.ratrainc.bridge.reasons import (
    EXPERTS,
    HOMES,
    KERNELS,
    OF_LOGS,
    OF_RATE,
    ONE_EXPERT,
    OVERLAP,
    PROCESS,
    SCALER,
)
from ratrain.ratrainc.bridge.settings import Rule

WHOLE, MICRO, TIMES = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
STAGES, PEERS, SEQUENCE_RANKS = "pipeline.stages", "tensor_parallel.autotp_size", "sequence_parallel_size"
ULYSSES = "deepspeedai/DeepSpeed: deepspeed/runtime/sequence_parallel/ulysses_sp.py, UlyssesSPAttentionHF"
"""Place of the exchange of heads, which each rank has of one run of every sequence."""
REPLICAS = "data_parallel_size"
ZERO, STAGE = "zero_optimization", "zero_optimization.stage"
GROUP, VIEWS = "zero_optimization.mics_shard_size", "zero_optimization.zero_hpz_partition_size"
SUM_TYPE = "data_types.grad_accum_dtype"
CLIP = "gradient_clipping"
OPTIMIZER, PARAMS = "optimizer.type", "optimizer.params."
SCHEDULER, TIMING = "scheduler.type", "scheduler.params."
BF16, FP16, LOSS_SCALE = "bf16.enabled", "fp16.enabled", "fp16.loss_scale"
REDUCTION = "gradient_allreduce_op"
BETAS, ADAM_W, OF_TORCH, UNBIASED = (
    f"{PARAMS}{name}" for name in ("betas", "adam_w_mode", "torch_adam", "bias_correction")
)
OLD_HIGHEST = 0.001
"""Default of WarmupLR's warmup_max_lr before DeepSpeed 0.17.2."""

OPTIONS = {
    WHOLE: ("--global-batch", "global_batch"),
    MICRO: ("--micro-batch-size", "micro_batch_size"),
    CLIP: ("--max-norm", "max_norm"),
    f"{PARAMS}lr": ("--lr", "lr"),
    f"{PARAMS}weight_decay": ("--weight-decay", "weight_decay"),
    f"{TIMING}warmup_max_lr": ("--lr", "lr"),
    f"{TIMING}warmup_num_steps": ("--warmup-steps", "warmup_steps"),
    f"{TIMING}total_num_steps": ("--steps", "steps"),
}
"""Option of the command for each setting that a file may leave to DeepSpeed's caller, and its field of `Asked`."""
MAY_BE_AUTO = {*OPTIONS, TIMES, STAGES, BETAS, f"{PARAMS}eps", BF16, FP16, LOSS_SCALE, f"{TIMING}warmup_min_lr"}
"""Settings whose "auto" an option, the other sizes or the plan's file can replace."""

_FUSED_ADAM = "deepspeed/ops/adam/fused_adam.py, FusedAdam.__init__"
_TORCH_ADAM = "torch/optim/adam.py, Adam.__init__"
_TORCH_ADAMW = "torch/optim/adamw.py, AdamW.__init__"
_SCHEDULES = "deepspeed/runtime/lr_schedules.py"
_PRECISION = "deepspeed/runtime/precision_config.py"
ENGINE_ADAM = "deepspeed/runtime/engine.py, DeepSpeedEngine._configure_basic_optimizer"
CLIP_SOURCE = "deepspeed/runtime/constants.py, GRADIENT_CLIPPING_DEFAULT; 0 before 0.19.3"
SUMS_SOURCE = "deepspeed/runtime/engine.py, DeepSpeedEngine.get_data_types"

DECAY_OF_TORCH = {True: (0.01, _TORCH_ADAMW), False: (0.0, _TORCH_ADAM)}
"""Default weight decay of PyTorch's own optimizers (torch_adam), for AdamW (True) and Adam, with its source."""

SCHEDULER_PARAMS: dict[str, dict[str, object]] = {
    "WarmupLR": {"warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 1000, "warmup_type": "log"},
    "WarmupDecayLR": {
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.001,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "WarmupCosineLR": {
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
    },
}
"""Parameters, with defaults, of the schedulers that a plan can follow at least to the end of their warm-up."""


def scheduler_source(kind: str) -> str:
    """Return the place in DeepSpeed's code that gives a scheduler's defaults."""
    return f"{_SCHEDULES}, {kind}.__init__"


FORBIDDEN: dict[str, str] = {
    "expert_parallel.enabled": ONE_EXPERT,
    "amp.enabled": "a plan has no types by operation (apex amp)",
    "torch_autocast.enabled": "a plan has no types by operation (autocast)",
    "bf16.bf16_master_weights_and_grads": "master weights of a plan are f32",
    "bf16.bf16_optimizer_states": "moments of a plan are f32",
    "bf16.immediate_grad_update": "a plan updates once a step",
    "fp16.fp16_master_weights_and_grads": "master weights of a plan are f32",
    "fp16.auto_cast": "a plan has no types by operation",
    "elasticity.enabled": "it takes the place of the three batch sizes: write those that it comes to",
    "progressive_layer_drop.enabled": "layers are not dropped",
    "curriculum_learning.enabled": "sequences are of one length",
    "data_efficiency.enabled": "sequences are of one length, and no token is dropped",
    "sparse_gradients": "gradients are dense",
    "optimizer.legacy_fusion": "it is for optimizers that ratrain does not have",
    "zero_optimization.legacy_stage1": "DeepSpeed refuses it since 0.5.9",
    "zero_optimization.zero_quantized_weights": "views are gathered in their own type",
    "zero_optimization.zero_quantized_nontrainable_weights": "views are gathered in their own type",
    "zero_optimization.zero_quantized_gradients": "gradients are reduced in their own type",
    "optimizer.params.amsgrad": "the optimizer of a plan has no such variant",
    "optimizer.params.maximize": "the optimizer of a plan lowers the loss",
}
"""Settings that are refused if they are on, since no plan can express their effect; with the reason."""


def _all(why: str, prefix: str, names: str) -> dict[str, Rule]:
    return {prefix + name: Rule("", why) for name in names.split()}


OFF = "it is off"
"""Reason for settings of a table that is switched off: they agree with any plan."""
_COMPRESSED = "models are not compressed"
_FLOAT8 = "float8 is no type of a plan, and no table of DeepSpeed"
_AUTO = "; where it is 'auto', --"

RULES: dict[str, Rule] = {
    WHOLE: Rule("micro_batches", f"with the two below: of the three, two say the third{_AUTO}global-batch says it"),
    MICRO: Rule("micro_batch_size", f"unchanged{_AUTO}micro-batch-size says it"),
    TIMES: Rule("micro_batches", "unchanged; where it is 'auto', by the two above"),
    STAGES: Rule("pp", "a number; else --pp says it, as the model's code does"),
    PEERS: Rule("tp", "unchanged; 0 is 1"),
    SEQUENCE_RANKS: Rule("cp, context_exchange", "unchanged; with several, heads"),
    REPLICAS: Rule("dp", "the replicas, which it must be"),
    CLIP: Rule("clip, max_norm", f"global; none where 0{_AUTO}max-norm says it", 1.0, CLIP_SOURCE),
    ZERO: Rule("zero, reduce", "of old versions: true is stage 1, false 0"),
    STAGE: Rule(
        "zero, reduce",
        "unchanged; each-micro-batch from 2 on",
        0,
        "deepspeed/runtime/zero/config.py, DeepSpeedZeroConfig.stage",
    ),
    GROUP: Rule("shard_group", "with stage 3"),
    VIEWS: Rule("view_group", "with stage 3"),
    BF16: Rule("view_dtype", f"bf16{_AUTO}dtype says it", False, f"{_PRECISION}, DeepSpeedBF16Config.enabled"),
    "bfloat16.enabled": Rule("view_dtype", "the old name of bf16.enabled, which takes its place where both are said"),
    FP16: Rule(
        "view_dtype",
        f"f16; f32 without either{_AUTO}dtype says it",
        False,
        f"{_PRECISION}, DeepSpeedFP16Config.enabled",
    ),
    LOSS_SCALE: Rule(
        "loss_scale", "dynamic where 0, or left out", 0.0, f"{_PRECISION}, DeepSpeedFP16Config.loss_scale"
    ),
    REDUCTION: Rule("reduce", "mean; sum is refused"),
    SUM_TYPE: Rule(
        "grad_shard_dtype, grad_dtype", "of shards; without ZeRO of whole gradients; left out: as the views"
    ),
    OPTIMIZER: Rule(
        "optimizer", "Adam and AdamW; others are refused; without any, keys of the optimizer are left out of the plan"
    ),
    "optimizer.params.lr": Rule("lr", f"unchanged, if no scheduler sets it{_AUTO}lr says it", 0.001, _FUSED_ADAM),
    BETAS: Rule("betas", "unchanged", [0.9, 0.999], _FUSED_ADAM),
    "optimizer.params.eps": Rule("eps", "unchanged", 1e-8, _FUSED_ADAM),
    "optimizer.params.weight_decay": Rule(
        "weight_decay", f"unchanged, decoupled; of L2 nothing: 0{_AUTO}weight-decay says it", 0.0, _FUSED_ADAM
    ),
    ADAM_W: Rule("weight_decay", "of Adam: false is L2, which a plan does not have", True, ENGINE_ADAM),
    OF_TORCH: Rule("weight_decay", "with it PyTorch's default: 0.01 of AdamW, 0 of L2"),
    UNBIASED: Rule("optimizer", "true; false is refused"),
    SCHEDULER: Rule(
        "lr, warmup_steps, total_steps, min_lr, decay",
        "WarmupLR, WarmupCosineLR; WarmupDecayLR: linear, each rate a step earlier; others are refused",
    ),
    "scheduler.params.warmup_num_steps": Rule("warmup_steps", f"unchanged, at least 2{_AUTO}warmup-steps says it"),
    "scheduler.params.total_num_steps": Rule(
        "total_steps", f"with WarmupCosineLR and WarmupDecayLR{_AUTO}steps says it"
    ),
    "scheduler.params.cos_min_ratio": Rule("min_lr", "with WarmupCosineLR: of lr"),
    "scheduler.params.warmup_max_lr": Rule(
        "lr", f"with WarmupLR and WarmupDecayLR, whatever the optimizer's lr is{_AUTO}lr says it"
    ),
    "scheduler.params.warmup_type": Rule(
        "warmup_steps", "linear; of log the warm-up is linear here, and that is named"
    ),
    "scheduler.params.warmup_min_lr": Rule(
        "warmup_steps", "0; others are named: the warm-up begins at the first step's share"
    ),
    "scheduler.params.warmup_min_ratio": Rule("warmup_steps", "as warmup_min_lr, with WarmupCosineLR"),
    **_all("how far a run has come is known of its checkpoint", "scheduler.params.", "last_batch_iteration"),
    **_all(
        KERNELS,
        "optimizer.params.",
        "foreach capturable differentiable fused set_grad_none",
    ),
    **_all("moments are f32", "optimizer.params.", "fp32_optimizer_states"),
    **_all(
        OVERLAP,
        "",
        "zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.reduce_scatter "
        "tensor_parallel.tp_overlap_comm",
    ),
    **_all(
        "pieces and look-ahead of communication are the compiler's choice",
        "zero_optimization.",
        "allgather_partitions allgather_bucket_size reduce_bucket_size use_multi_rank_bucket_allreduce "
        "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
        "max_reuse_distance stage3_prefetch_bucket_size stage3_param_persistence_threshold "
        "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance sub_group_size "
        "round_robin_gradients module_granularity_threshold stage3_module_granularity_threshold "
        "use_all_reduce_for_fetch_params stage3_use_all_reduce_for_fetch_params allgather_sequential "
        "stage3_allgather_sequential mics_hierarchical_params_gather zeropp_loco_param leaf_module",
    ),
    **_all("of the old form of zero_optimization: a piece of communication", "", "allgather_size"),
    **_all(
        HOMES,
        "zero_optimization.",
        "offload_optimizer offload_param cpu_offload cpu_offload_param cpu_offload_params "
        "cpu_offload_use_pin_memory zenflow",
    ),
    **_all(
        "'export-weights' writes weights of a checkpoint",
        "zero_optimization.",
        "stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
    ),
    **_all(
        "how DeepSpeed goes about it changes no plan",
        "zero_optimization.",
        "ignore_unused_parameters load_from_fp32_weights elastic_checkpoint memory_efficient_linear "
        "pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings enable_sanity_checks "
        "save_muon_momentum_buffer_in_memory",
    ),
    **_all(
        SCALER,
        "fp16.",
        "initial_scale_power loss_scale_window hysteresis min_loss_scale consecutive_hysteresis",
    ),
    **_all(
        "an update of numbers that are not finite is skipped in any case", "bf16.", "check_grad_overflow check_overflow"
    ),
    **_all(
        "'recompute{policy=...}' among the passes chooses what to recompute",
        "",
        "activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing "
        "activation_checkpointing.contiguous_memory_optimization activation_checkpointing.number_checkpoints "
        "activation_checkpointing.synchronize_checkpoint_boundary activation_checkpointing.profile "
        "pipeline.activation_checkpoint_interval",
    ),
    **_all('cuts = "auto" shares layers out', "pipeline.", "partition seed_layers"),
    **_all("what stages send is the compiler's choice", "pipeline.", "pipe_partitioned grad_partitioned use_reentrant"),
    **_all(
        "how the model is shared out over tensor-parallel ranks is the compiler's choice",
        "tensor_parallel.",
        "dtype tp tensor_parallel injection_policy_tuple keep_module_on_host replace_with_kernel_inject kernel_inject "
        "preset_model partition_config",
    ),
    **_all("master weights are f32, and buffers as the model has them", "data_types.", "param_dtype buffer_dtype"),
    **_all(
        "of logs and measurements: 'run' is given places for them",
        "",
        "steps_per_print wall_clock_breakdown dump_state memory_breakdown log_level",
    ),
    **_all(
        "gradients are reduced in the type that they have",
        "",
        "communication_data_type seq_parallel_communication_data_type prescale_gradients gradient_predivide_factor "
        "disable_allgather",
    ),
    **_all("gradients are summed once a micro-batch in any case", "", "managed_gradient_accumulation"),
    **_all(
        "which optimizers DeepSpeed lets through changes no plan",
        "",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    ),
    **_all("of the data: 'run' is given it", "", "dataloader_drop_last vocabulary_size"),
    **_all(EXPERTS, "", "use_data_before_expert_parallelism"),
    **_all(PROCESS, "", "graph_harvesting"),
    **{name: Rule("", f"off; where it is on it is refused: {why}") for name, why in FORBIDDEN.items()},
}

TABLES: dict[str, str] = {
    **dict.fromkeys(
        ["flops_profiler", "comms_logger", "comms_config", "tensorboard", "wandb", "csv_monitor", "comet", "timers"],
        "of logs and measurements: 'run' is given places for them",
    ),
    **dict.fromkeys(
        ["checkpoint", "nebula", "datastates_ckpt", "aio"], "of files and checkpoints: 'run' is given places"
    ),
    **dict.fromkeys(["autotuning", "compile", "hybrid_engine"], PROCESS),
    **dict.fromkeys(["compression_training", "weight_quantization", "eigenvalue"], _COMPRESSED),
    **dict.fromkeys(["amp", "torch_autocast", "expert_parallel"], OFF),
    **dict.fromkeys(["elasticity", "curriculum_learning", "data_efficiency", "progressive_layer_drop"], OFF),
    "sparse_attention": "the model's config.json says its attention (--model)",
    **dict.fromkeys(["fp8", "float8"], _FLOAT8),
}
"""Tables that are not carried over, with the reason."""

TRAINS = frozenset([_COMPRESSED, _FLOAT8])
"""Reasons of settings without which something else is trained."""

OF_PYDANTIC = tuple(
    f"{table}."
    for table in ("zero_optimization", "fp16", "bf16", "bfloat16", "tensor_parallel", "data_types", "expert_parallel")
)
"""Tables that DeepSpeed reads by pydantic's models (deepspeed/runtime/config_utils.py, DeepSpeedConfigModel).

There the text "2" is the number; elsewhere a text goes on as it is, and the first comparison with a number stops.
"""
STRICT = (
    "zero_optimization",
    "fp16",
    "bf16",
    "bfloat16",
    "optimizer",
    "scheduler",
    "tensor_parallel",
    "pipeline",
    "data_types",
)
"""Tables that decide what is trained: an unknown name in them stops the import, as it mostly does in DeepSpeed."""

IDLE: dict[str, str] = {
    LOSS_SCALE: f"a plan scales the loss of f16 alone: {FP16} is not true",
    **{
        name: f"DeepSpeed reads it only where {kind} is said"
        for prefix, kind in ((PARAMS, OPTIMIZER), (TIMING, SCHEDULER))
        for name in RULES
        if name.startswith(prefix)
    },
}
"""Reasons why settings have no effect where nothing reads them."""

# jobs: what "auto" stands for, sizes of ZeRO's buffers, and settings that change no byte of a device

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

ARGUMENTS = (
    *("deepspeed", "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "bf16", "fp16", "adam_beta1"),
    *("adam_beta2", "adam_betas", "adam_epsilon", "per_device_train_batch_size", "gradient_accumulation_steps"),
)
"""Training arguments that the ds_config takes over, or that change no byte."""

_FILES = "of files and checkpoints: no byte of a device"
_SENT = "how gradients are sent"
INERT = {
    r"steps_per_print|wall_clock_breakdown|dump_state|memory_breakdown|log_level": OF_LOGS,
    r"(flops_profiler|comms_logger)\..*": OF_LOGS,
    r"(tensorboard|wandb|csv_monitor|comet|timers|monitor_config|comms_config)(\..*)?": OF_LOGS,
    r"activation_checkpointing\..*": "read only by models that call DeepSpeed's own checkpointing",
    r"zero_optimization\.stage3_(model_persistence|module_granularity)_threshold|compile\..*": "of communication",
    r"(checkpoint|nebula|datastates_ckpt|aio)(\..*)?": _FILES,
    r"scheduler\..*|optimizer\.params\..*": OF_RATE,
    r"fp16\.(loss_scale\w*|initial_scale_power|hysteresis|min_loss_scale|consecutive_hysteresis|auto_cast)": OF_RATE,
    r"bf16\.(check_grad_overflow|check_overflow|immediate_grad_update)": OF_RATE,
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
