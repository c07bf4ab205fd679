"""Rules for Megatron-LM's arguments: which keys of a plan each one sets, or why it sets none.

Defaults are from commit d98e8a64 (2026-08-22).
"""

from __future__ import annotations

from ratrain.ratrainc.bridge.launchers import WORLD
from ratrain.ratrainc.bridge.megatron_reasons import (
    COMMUNICATION,
    DATA,
    DROPOUT,
    KERNELS,
    LAUNCH,
    RAMP,
)
from ratrain.ratrainc.bridge.reasons import EXPERTS, FILES, FLOAT8, HOMES, MODEL, ONE_EXPERT, SCALER
from ratrain.ratrainc.bridge.settings import Rule

_OLD = "no longer valid: Megatron-LM stops there"
_ARGUMENTS = "megatron/training/arguments.py"
_SCHEDULER = "megatron/training/config/training_config.py, SchedulerConfig"
_PARALLEL_DATA = "megatron/core/distributed/distributed_data_parallel_config.py, DistributedDataParallelConfig"
_TRANSFORMER = "megatron/core/transformer/transformer_config.py, TransformerConfig"
_PARALLEL = "megatron/core/model_parallel_config.py, ModelParallelConfig"


def _all(why: str, names: str) -> dict[str, Rule]:
    return {name: Rule("", why) for name in names.split()}


def _refused(why: str, names: str) -> dict[str, Rule]:
    return {name: Rule("", why, refused=True) for name in names.split()}


RULES: dict[str, Rule] = {
    "tensor-model-parallel-size": Rule("tp", "unchanged", 1, f"{_PARALLEL}.tensor_model_parallel_size"),
    "tensor-parallel-num-weight-shards": Rule("tp", "as many as tensor-parallel ranks; others are refused"),
    "pipeline-model-parallel-size": Rule("pp", "unchanged", 1, f"{_ARGUMENTS}, --pipeline-model-parallel-size"),
    "num-virtual-stages-per-pipeline-rank": Rule("chunks, schedule", "interleaved where above 1"),
    "encoder-num-layers": Rule("chunks, cuts", "as num-layers"),
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
    "nproc-per-node": Rule("dp", "of the launcher: with nnodes the ranks, of which tp, pp and cp take their part"),
    "nnodes": Rule("dp", "of the launcher: as above", 1, "torch/distributed/run.py, --nnodes"),
    WORLD: Rule("dp", "the variable of the script, or the ranks of mpirun and srun, where no torchrun says them"),
    "context-parallel-size": Rule(
        "cp",
        "unchanged; they have an early and a late run of tokens there too (zigzag)",
        1,
        f"{_PARALLEL}.context_parallel_size",
    ),
    "micro-batch-size": Rule("micro_batch_size", "unchanged"),
    "global-batch-size": Rule("micro_batches", "by micro-batch-size and dp; 1 without"),
    "seq-length": Rule("seq_len", "unchanged"),
    "encoder-seq-length": Rule("seq_len", "as seq-length, which it excludes"),
    "seed": Rule("seed", "unchanged", 1234, "megatron/training/config/common_config.py, RNGConfig.seed"),
    "use-distributed-optimizer": Rule("zero", "1 with it, 0 without"),
    "use-torch-fsdp2": Rule("zero, reduce", "3, each-micro-batch"),
    "torch-fsdp2-no-reshard-after-forward": Rule("zero", "2, with use-torch-fsdp2"),
    "use-megatron-fsdp": Rule("zero, reduce", "by data-parallel-sharding-strategy"),
    "use-custom-fsdp": Rule("zero, reduce", "of earlier versions: as use-megatron-fsdp"),
    "data-parallel-sharding-strategy": Rule(
        "zero, reduce",
        "with use-megatron-fsdp: no_shard 0, optim 1, optim_grads 2, optim_grads_params 3; each-micro-batch from 2 on",
        "optim_grads_params",
        f"{_ARGUMENTS}, --data-parallel-sharding-strategy",
    ),
    "bf16": Rule(
        "view_dtype, grad_dtype",
        "bf16, and gradients in f32 (validate_args sets accumulate_allreduce_grads_in_fp32; see grad-reduce-in-bf16)",
    ),
    "fp16": Rule("view_dtype, grad_dtype", "f16, and f32 without bf16 or fp16"),
    "accumulate-allreduce-grads-in-fp32": Rule("grad_dtype", "f32"),
    "grad-reduce-in-bf16": Rule("grad_dtype", "bf16, with bf16"),
    "main-grads-dtype": Rule("grad_dtype", "bf16, with bf16 and use-precision-aware-optimizer; else it is named"),
    "loss-scale": Rule("loss_scale", "with fp16; dynamic without it, and where 0"),
    "clip-grad": Rule("clip, max_norm", "global; none where 0", 1.0, f"{_ARGUMENTS}, --clip-grad"),
    "lr": Rule("lr", "unchanged"),
    "min-lr": Rule("min_lr", "where the rate comes down", 0.0, f"{_ARGUMENTS}, --min-lr"),
    "adam-beta1": Rule("betas", "the first", 0.9, f"{_ARGUMENTS}, --adam-beta1"),
    "adam-beta2": Rule("betas", "the second", 0.999, f"{_ARGUMENTS}, --adam-beta2"),
    "adam-eps": Rule("eps", "unchanged", 1e-8, f"{_ARGUMENTS}, --adam-eps"),
    "weight-decay": Rule("weight_decay", "unchanged", 0.01, f"{_ARGUMENTS}, --weight-decay"),
    "lr-warmup-iters": Rule("warmup_steps", "unchanged", 0, f"{_SCHEDULER}.lr_warmup_iters"),
    "lr-warmup-samples": Rule("warmup_steps", "by global-batch-size"),
    "lr-warmup-fraction": Rule("warmup_steps", "of the steps of decay"),
    "lr-decay-style": Rule(
        "decay, total_steps, min_lr",
        "cosine, linear; WSD: decay_steps too; constant: none; others are named, and the rate stays at lr",
        "linear",
        f"{_SCHEDULER}.lr_decay_style",
    ),
    "lr-wsd-decay-style": Rule(
        "decay",
        "of WSD: linear, cosine; others are named, and the rate stays at lr",
        "exponential",
        f"{_SCHEDULER}.lr_wsd_decay_style",
    ),
    "lr-wsd-decay-iters": Rule("decay_steps", "of WSD: unchanged"),
    "lr-wsd-decay-samples": Rule("decay_steps", "of WSD, by global-batch-size"),
    "lr-decay-iters": Rule(
        "total_steps", "where the rate comes down; train-iters without it (get_optimizer_param_scheduler)"
    ),
    "lr-decay-samples": Rule("total_steps", "where the rate comes down, by global-batch-size"),
    "train-iters": Rule("total_steps", "where the rate comes down and no lr-decay-iters are said; else 'run --steps'"),
    "train-samples": Rule("total_steps", "as train-iters, by global-batch-size"),
    "optimizer": Rule(
        "optimizer", "adam, with decoupled weight decay; others are named", "adam", f"{_ARGUMENTS}, --optimizer"
    ),
    "attention-backend": Rule("attention", "flash, fused, auto: fused; unfused, local: scores-kept"),
    "use-flash-attn": Rule("attention", "fused"),
    "reset-position-ids": Rule("attention_mask", "document, with reset-attention-mask; one alone is named"),
    "reset-attention-mask": Rule("attention_mask", "document, with reset-position-ids; one alone is named"),
    "recompute-granularity": Rule(
        "passes, attention", "full: recompute{policy=full}; selective: scores-recomputed, with unfused attention"
    ),
    "recompute-modules": Rule(
        "passes, attention",
        "with recompute-granularity selective: scores-kept unless core_attn, its default, is among them; "
        "recompute{policy=norms} if layernorm is, alone or beside it",
    ),
    "num-distributed-optimizer-instances": Rule(
        "shard_group",
        "the replicas by it, where state is sharded",
        1,
        f"{_PARALLEL_DATA}.num_distributed_optimizer_instances",
    ),
    "recompute-activations": Rule("passes, attention", "as recompute-granularity selective"),
    "recompute-method": Rule(
        "passes",
        "with recompute-granularity full: uniform with recompute-num-layers 1, or block with all layers of a stage; "
        "others are named",
    ),
    "recompute-num-layers": Rule("passes", "with recompute-method"),
    "checkpoint-activations": Rule("passes", "of earlier versions: recompute{policy=full}"),
    **_all(
        MODEL,
        "hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels "
        "max-position-embeddings "
        "position-embedding-type rotary-base rotary-percent use-rotary-position-embeddings "
        "no-position-embedding normalization norm-epsilon "
        "swiglu disable-bias-linear add-qkv-bias untie-embeddings-and-output-weights qk-layernorm "
        "make-vocab-size-divisible-by "
        "vocab-size squared-relu init-method-std",
    ),
    "calculate-per-token-loss": Rule("", "the loss of a step is a mean over the tokens that count, with it or without"),
    **{
        f"{where}-dropout": Rule("", DROPOUT, 0.1, f"{_TRANSFORMER}.{where}_dropout")
        for where in ("attention", "hidden")
    },
    **_all(
        DATA,
        "data-path data-cache-path split train-data-path valid-data-path test-data-path tokenizer-type "
        "tokenizer-model vocab-file "
        "merge-file mock-data num-workers eod-mask-loss dataloader-type",
    ),
    **_all(
        FILES,
        "save load save-interval log-interval eval-interval eval-iters tensorboard-dir wandb-project "
        "wandb-exp-name wandb-save-dir "
        "ckpt-format no-save-optim no-load-optim no-load-rng log-throughput exit-interval exit-duration-in-mins "
        "use-dist-ckpt",
    ),
    **_all(
        COMMUNICATION,
        "overlap-grad-reduce overlap-param-gather tp-comm-overlap overlap-p2p-communication "
        "no-overlap-p2p-communication",
    ),
    **_all(SCALER, "initial-loss-scale min-loss-scale loss-scale-window hysteresis"),
    **_all(
        LAUNCH,
        "node-rank master-addr master-port rdzv-id rdzv-backend rdzv-endpoint distributed-backend "
        "distributed-timeout-minutes",
    ),
    **_all(
        KERNELS,
        "use-mcore-models transformer-impl no-masked-softmax-fusion no-gradient-accumulation-fusion no-rope-fusion "
        "no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion cross-entropy-loss-fusion "
        "cross-entropy-fusion-impl",
    ),
    **_all(RAMP, "rampup-batch-size"),
    **_all(EXPERTS, "moe-router-topk"),
    **_refused(ONE_EXPERT, "num-experts num-experts-switch expert-model-parallel-size moe"),
    **_all(FLOAT8, "fp8-format fp8-recipe fp8-param-gather"),
    **_refused(_OLD, "model-parallel-size batch-size warmup"),
    **_refused(
        "sizes and the model are in another file then, which is not read", "yaml-cfg use-mp-args-from-checkpoint-args"
    ),
    **_refused("how many sequences a step has changes as it runs", "step-batch-size-schedule adaptive-seq-len"),
    **_refused(
        "steps are counted in tokens: say lr-decay-iters and lr-warmup-iters",
        "train-tokens lr-decay-tokens lr-warmup-tokens",
    ),
    **_refused("its ds_config decides ZeRO, the type of gradients and clipping", "deepspeed deepspeed-config"),
    **_refused(
        "of a fork that trains with DeepSpeed: say context-parallel-size in its place",
        "ds-sequence-parallel-size",
    ),
    **_refused(
        "a model of two halves, which the models here are not",
        "pipeline-model-parallel-split-rank encoder-tensor-model-parallel-size encoder-pipeline-model-parallel-size",
    ),
    **_refused("a plan trains all parameters of its model", "freeze-all-layers"),
    **_refused("it trains by reinforcement, which ratrain does not", "perform-rl-step"),
    **_refused("stages are cut by rules of its own: say cuts in the plan", "pp-partition-method"),
    **_refused("weight decay of a plan is the same at every step", "start-weight-decay end-weight-decay"),
    **_all(
        HOMES,
        "optimizer-cpu-offload cpu-offloading cpu-offloading-num-layers",
    ),
}

CHOICES: dict[str, tuple[str, ...]] = {
    "lr-decay-style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    "lr-wsd-decay-style": ("exponential", "linear", "cosine", "minus_sqrt"),
    "optimizer": ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon", "ademamix"),
    "attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "recompute-granularity": ("full", "selective"),
    "recompute-method": ("uniform", "block"),
    "data-parallel-sharding-strategy": ("no_shard", "optim", "optim_grads", "optim_grads_params"),
    "main-grads-dtype": ("fp32", "bf16"),
    "weight-decay-incr-style": ("constant", "linear", "cosine"),
}
"""Words that argparse accepts for arguments that determine the plan."""

IDLE: dict[str, str] = {
    "data-parallel-sharding-strategy": "only use-megatron-fsdp reads it",
    "torch-fsdp2-no-reshard-after-forward": "only use-torch-fsdp2 reads it",
    "loss-scale": "a plan scales the loss of f16 alone: --fp16 is not said",
    "sequence-parallel": "only tensor-parallel ranks share sequences out: there is one",
    "recompute-modules": "only recompute-granularity selective reads it",
    **dict.fromkeys(
        (f"lr-wsd-decay-{name}" for name in ("style", "iters", "samples")), "only lr-decay-style WSD reads it"
    ),
    **dict.fromkeys(("recompute-method", "recompute-num-layers"), "only recompute-granularity full reads it"),
}
"""Reasons why arguments have no effect where nothing reads them."""
