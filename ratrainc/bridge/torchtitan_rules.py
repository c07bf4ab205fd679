"""Rules for settings of torchtitan: names of all releases that read TOML, and defaults with their source in v0.2.2."""

from __future__ import annotations

from ratrain.ratrainc.bridge.reasons import (
    EXPERTS,
    FILES,
    FLOAT8,
    HOMES,
    KERNELS,
    KEYS_TRAVEL,
    MODEL,
    ONE_EXPERT,
    OVERLAP,
    PROCESS,
    RECOMPUTE,
    UPDATES,
    VALIDATION,
)
from ratrain.ratrainc.bridge.settings import Rule

PP = "parallelism.pipeline_parallel_"
TP = "parallelism.tensor_parallel_degree"
SHARD, REPLICATE = (f"parallelism.data_parallel_{what}_degree" for what in ("shard", "replicate"))
ONE_DEGREE, KIND = "training.data_parallel_degree", "training.data_parallel_type"
RESHARD, PARTS, POINTS = (
    "parallelism.fsdp_reshard_after_forward",
    "parallelism.module_fqns_per_model_part",
    f"{PP}split_points",
)
SCHEDULE, EACH, COUNT, LAYERS_EACH, TABLE = (
    f"{PP}{name}" for name in ("schedule", "microbatch_size", "microbatches", "layers_per_stage", "schedule_csv")
)
CONTEXT, BALANCER = "parallelism.context_parallel_degree", "parallelism.context_parallel_load_balancer"
LOCAL, WHOLE = "training.local_batch_size", "training.global_batch_size"
VIEW, REDUCE, STATE = "training.mixed_precision_param", "training.mixed_precision_reduce", "training.dtype"
SEEDS = ("debug.seed", "training.seed")
WARM_UP, RATIO, DECAY, LEAST, END = (
    f"lr_scheduler.{name}" for name in ("warmup_steps", "decay_ratio", "decay_type", "min_lr_factor", "total_steps")
)
STEPS = "training.steps"
SELECTED = "activation_checkpoint.selective_ac_option"

SCHEDULES = {
    "1F1B": "1f1b",
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "breadth-first",
    "ZBVZeroBubble": "zb-v",
    "DualPipeV": "dualpipe-v",
}
"""Names of torch.distributed.pipelining's schedules, and the same schedules' names in a plan."""
OLD_SCHEDULES = {"interleaved_1f1b": "Interleaved1F1B"}
"""Names of schedules before October 2024, and the later ones."""
OTHER_SCHEDULES = ("FlexibleInterleaved1F1B", "flexible_interleaved_1f1b", "InterleavedZeroBubble")
"""Schedules of torch.distributed.pipelining that no plan can have."""
TYPES = {"float32": "f32", "bfloat16": "bf16"}
"""Types of mixed_precision_param and of mixed_precision_reduce; some versions take float32 alone for the latter."""

RENAMED = {
    "training.batch_size": LOCAL,
    "training.warmup_steps": WARM_UP,
    "training.tensor_parallel_degree": TP,
    "training.sequence_parallel_degree": TP,
    "training.pipeline_parallel_degree": f"{PP}degree",
    "training.data_parallel_replicate_degree": REPLICATE,
    "training.data_parallel_shard_degree": SHARD,
    "training.fsdp_reshard_after_forward": RESHARD,
    "lr_scheduler.lr_min": LEAST,
    "experimental.context_parallel_degree": CONTEXT,
    **{
        f"experimental.pipeline_parallel_{name}": f"{PP}{name}"
        for name in ("degree", "schedule", "schedule_csv", "split_points", "microbatches")
    },
}
"""Names of settings in older versions, and the names in the rules below."""
BEFORE_AMP = {name for name in RENAMED if name != "lr_scheduler.lr_min"} | {ONE_DEGREE, KIND, COUNT}
"""Names that only versions before June 2025 have, which compute in f32 without FSDP."""

_CONFIG = "torchtitan/config/job_config.py"
SPLIT = "torchtitan/distributed/pipeline_parallel.py, pipeline_llm; two of a schedule with several stages a rank"


def _all(why: str, section: str, names: str) -> dict[str, Rule]:
    return {f"{section}.{name}": Rule("", why) for name in names.split()}


_CONVERTED = "float8 and other types that layers are converted to are no types of a plan"

RULES: dict[str, Rule] = {
    f"{PP}degree": Rule("pp", "unchanged", 1, f"{_CONFIG}, Parallelism.pipeline_parallel_degree"),
    TP: Rule("tp", "unchanged, with sequence_sharding", 1, f"{_CONFIG}, Parallelism.tensor_parallel_degree"),
    REPLICATE: Rule(
        "dp, shard_group",
        "replicas of groups that share out state; -1 is refused",
        1,
        f"{_CONFIG}, Parallelism.data_parallel_replicate_degree",
    ),
    SHARD: Rule(
        "dp, zero, shard_group",
        "1: ZeRO 0; -1: of all ranks, which --clusters says",
        -1,
        f"{_CONFIG}, Parallelism.data_parallel_shard_degree",
    ),
    ONE_DEGREE: Rule("dp, zero", "before September 2024: as data_parallel_shard_degree, or with ddp the replicas"),
    KIND: Rule("zero", "before September 2024: fsdp, or ddp: ZeRO 0"),
    RESHARD: Rule(
        "zero",
        "always: 3; never: 2, and 1 in a pipeline; default: never in a pipeline, else always",
        "default",
        f"{_CONFIG}, Parallelism.fsdp_reshard_after_forward",
    ),
    CONTEXT: Rule("cp", "unchanged", 1, f"{_CONFIG}, Parallelism.context_parallel_degree"),
    BALANCER: Rule(
        "context_layout",
        "headtail: zigzag; ptrr, which follows a mask, is named: zigzag",
        "headtail",
        f"{_CONFIG}, Parallelism.context_parallel_load_balancer",
    ),
    SCHEDULE: Rule(
        "schedule, chunks",
        f"{', '.join(SCHEDULES)}; {' and '.join(OTHER_SCHEDULES[::2])} are named; others are refused",
        "1F1B",
        f"{_CONFIG}, Parallelism.pipeline_parallel_schedule",
    ),
    EACH: Rule("micro_batch_size", "in a pipeline", 1, f"{_CONFIG}, Parallelism.pipeline_parallel_microbatch_size"),
    COUNT: Rule("micro_batch_size", "before April 2025: of the local batch; left out: as many as stages"),
    LAYERS_EACH: Rule("chunks", "named with one stage a rank; refused with several, whose number the model says"),
    PARTS: Rule(
        "cuts, chunks", "where its layers begin; left out: two chunks of a schedule with several stages a rank"
    ),
    POINTS: Rule("cuts, chunks", "of older versions: where its layers begin"),
    LOCAL: Rule(
        "micro_batch_size",
        "without a pipeline; in one, of a step of a replica",
        8,
        f"{_CONFIG}, Training.local_batch_size",
    ),
    WHOLE: Rule(
        "micro_batches",
        "by micro_batch_size and dp; -1: one local batch of each replica",
        -1,
        f"{_CONFIG}, Training.global_batch_size",
    ),
    "training.seq_len": Rule("seq_len", "unchanged", 2048, f"{_CONFIG}, Training.seq_len"),
    "training.max_norm": Rule(
        "clip, max_norm", "global; none where inf, refused where 0", 1.0, f"{_CONFIG}, Training.max_norm"
    ),
    STEPS: Rule("total_steps", "where the rate comes down; else 'run --steps'", 10000, f"{_CONFIG}, Training.steps"),
    SEEDS[0]: Rule("seed", "unchanged"),
    SEEDS[1]: Rule("seed", "of older versions: unchanged"),
    VIEW: Rule(
        "view_dtype",
        "unchanged; without shards only if there are no stages and no tensor-parallel ranks either, else f32",
        "bfloat16",
        f"{_CONFIG}, Training.mixed_precision_param",
    ),
    REDUCE: Rule(
        "grad_dtype, grad_shard_dtype",
        "of shards, and in a pipeline of whole gradients; with ZeRO 0 it is f32",
        "float32",
        f"{_CONFIG}, Training.mixed_precision_reduce",
    ),
    STATE: Rule("optimizer", "float32; others are refused: master weights are f32"),
    "optimizer.name": Rule(
        "optimizer", "AdamW, and Adam without decay; others are refused", "AdamW", f"{_CONFIG}, Optimizer.name"
    ),
    "optimizer.lr": Rule("lr", "unchanged", 8e-4, f"{_CONFIG}, Optimizer.lr"),
    "optimizer.beta1": Rule("betas", "the first", 0.9, f"{_CONFIG}, Optimizer.beta1"),
    "optimizer.beta2": Rule("betas", "the second", 0.95, f"{_CONFIG}, Optimizer.beta2"),
    "optimizer.eps": Rule("eps", "unchanged", 1e-8, f"{_CONFIG}, Optimizer.eps"),
    "optimizer.weight_decay": Rule("weight_decay", "unchanged", 0.1, f"{_CONFIG}, Optimizer.weight_decay"),
    WARM_UP: Rule("warmup_steps", "unchanged", 200, f"{_CONFIG}, LRScheduler.warmup_steps"),
    RATIO: Rule(
        "decay_steps",
        "of the steps; left out, or too much for the steps after the warm-up: all of these; 0: a constant rate",
    ),
    DECAY: Rule(
        "decay, total_steps",
        "linear, cosine; sqrt is named, and the rate stays at lr",
        "linear",
        f"{_CONFIG}, LRScheduler.decay_type",
    ),
    LEAST: Rule("min_lr", "of lr, where the rate comes down", 0.0, f"{_CONFIG}, LRScheduler.min_lr_factor"),
    END: Rule("total_steps", "of the rate, in the place of training.steps"),
    "activation_checkpoint.mode": Rule(
        "passes",
        "full: recompute{policy=full}; selective: as its option says; others are named",
        "selective",
        f"{_CONFIG}, ActivationCheckpoint.mode",
    ),
    SELECTED: Rule(
        "passes",
        "op: recompute{policy=ops}, named with tensor-parallel ranks; N: recompute{policy=full every=N}, named on "
        "several stages",
        "2",
        f"{_CONFIG}, ActivationCheckpoint.selective_ac_option",
    ),
    **{old: Rule("as that", f"the older name of `{new}`") for old, new in RENAMED.items()},
    "training.warmup_pct": Rule(
        "warmup_steps", "refused: of February 2024, a share of all steps; warmup_steps says it"
    ),
    f"{PP}first_stage_less_layers": Rule("", 'cuts = "auto" weighs the embedding'),
    f"{PP}last_stage_less_layers": Rule("", 'cuts = "auto" weighs the head'),
    TABLE: Rule("schedule", "refused where it names a file: 'compile --schedule-file' takes it"),
    **_all(
        MODEL,
        "model",
        "name flavor hf_assets_path tokenizer_path norm_type attn_mask_type use_flex_attn",
    ),
    **_all(_CONVERTED, "model", "converters"),
    **_all(PROCESS, "model", "print_after_conversion"),
    **_all("of the data: 'run' is given it", "training", "dataset dataset_path dataloader"),
    **_all(PROCESS, "training", "gc_freq gc_debug deterministic"),
    **_all(PROCESS, "debug", "deterministic deterministic_warn_only"),
    **_all(EXPERTS, "training", "debug_moe_force_load_balance"),
    **_all(EXPERTS, "debug", "moe_force_load_balance"),
    **_all(HOMES, "training", "enable_cpu_offload"),
    **_all(KERNELS, "training", "compile"),
    **_all(
        FLOAT8,
        "training",
        "fp8_linear enable_fp8_linear enable_float8_linear enable_fsdp_fp8_all_gather enable_fsdp_float8_all_gather "
        "precompute_float8_dynamic_scale_for_fsdp float8_scaling_type_input float8_scaling_type_weight "
        "float8_scaling_type_grad_output",
    ),
    **_all(RECOMPUTE, "training", "enable_selective_ac"),
    **_all(FILES, "training", "checkpoint_folder checkpoint_interval checkpoint_interval_type"),
    **_all(
        "the head of tensor-parallel ranks is shared out in any case",
        "training",
        "enable_loss_parallel disable_loss_parallel",
    ),
    **_all(
        "of the job: it changes no plan",
        "job",
        "dump_folder description print_args print_config config_file custom_config_module use_for_integration_test "
        "save_config_file save_config_folder",
    ),
    **_all(OVERLAP, "parallelism", "enable_async_tensor_parallel"),
    **_all(OVERLAP, "experimental", "enable_async_tensor_parallel"),
    **_all(KERNELS, "parallelism", "enable_compiled_autograd"),
    **_all(KERNELS, "experimental", "enable_compiled_autograd torch_spmd"),
    **_all(KEYS_TRAVEL, "parallelism", "context_parallel_rotate_method"),
    **_all(KEYS_TRAVEL, "experimental", "context_parallel_rotate_method"),
    **_all("how the model is taken apart changes no plan", "experimental", "pipeline_parallel_split_mode"),
    **_all("of the job: it changes no plan", "experimental", "custom_args_module custom_import custom_model_path"),
    **_all("the head of tensor-parallel ranks is shared out in any case", "parallelism", "disable_loss_parallel"),
    **_all(
        EXPERTS,
        "parallelism",
        "expert_tensor_parallel_degree expert_parallel_comm_backend pipeline_parallel_expert_parallel_overlap",
    ),
    "parallelism.expert_parallel_degree": Rule("", ONE_EXPERT, refused=True),
    **_all(KERNELS, "optimizer", "implementation fused"),
    **_all(UPDATES, "optimizer", "early_step_in_backward"),
    **_all(KERNELS, "compile", "enable components backend"),
    **_all(
        RECOMPUTE,
        "activation_checkpoint",
        "per_op_sac_force_recompute_mm_shapes_by_fqns early_stop memory_budget "
        "visualize_memory_budget_pareto preserve_rng_state determinism_check debug",
    ),
}

TABLES: dict[str, str] = {
    **dict.fromkeys(("checkpoint", "metrics", "profiling", "comm"), FILES),
    **dict.fromkeys(("float8", "mx", "quantize"), FLOAT8),
    "validation": VALIDATION,
    "fault_tolerance": "of the launcher: 'launch' starts processes",
    **dict.fromkeys(("memory_estimation", "estimate"), "'alloc' and 'explain' say the memory of a module"),
}
"""Sections that are not carried over, with the reason."""
TRAINS = frozenset([FLOAT8, _CONVERTED])
"""Reasons of settings without which something else is trained."""
FLOAT8_SECTIONS = ("float8.", "mx.", "quantize.")
CONVERTERS = "model.converters"

STRICT = (
    "training",
    "parallelism",
    "experimental",
    "optimizer",
    "lr_scheduler",
    "model",
    "activation_checkpoint",
    "debug",
)
"""Sections that decide what is trained: a name in them that is not known stops the import, as it does in torchtitan."""

IDLE: dict[str, str] = {
    **dict.fromkeys(
        (SCHEDULE, EACH, COUNT, LAYERS_EACH, PARTS, POINTS, TABLE), f"there is no pipeline: {PP}degree is 1"
    ),
    SELECTED: "only activation_checkpoint.mode selective reads it",
    BALANCER: f"there is one context rank: {CONTEXT} is 1",
}
"""Reasons why settings have no effect where nothing reads them."""
