"""Reasons why arguments of Megatron-LM without a rule are not carried over: by argument, else by their group."""

from __future__ import annotations

from typing import Final

from ratrain.ratrainc.bridge.megatron_flags import GROUPS, KNOWN, OF_EXTENSIONS
from ratrain.ratrainc.bridge.reasons import (
    EXPERTS,
    FILES,
    FLOAT8,
    HOMES,
    KEYS_TRAVEL,
    MODEL,
    PROCESS,
    RECOMPUTE,
    VALIDATION,
)

DATA = "of the data: 'run' is given it"
COMMUNICATION = "the passes decide which communication overlaps with compute: there is nothing to switch on"
LAUNCH = "of the launcher: 'launch' starts processes"
KERNELS = "kernels are chosen by 'run --kernels', and change no plan"
DROPOUT = "ratrain trains without dropout"
_EXCHANGE = "the compiler chooses pieces, groups and buffers of communication"
_OFFLOAD = "passes choose which activations are stored in other memories"
_PARTS = "the model is of parts that the models here do not have"
_SUMS = "gradients are summed in grad_dtype, and are the mean over replicas"
_MOMENTS = "master weights and moments of a plan are f32"
_SEQUENCES = "as many context ranks share each sequence of a plan, and all have the same length"
_DECAY = "matrices decay in a plan, and norms and biases do not"
_RESUMED = "a resumed run goes on with the learning rate of its plan"
_GROUPS = "state is sharded within a shard group, and not again over groups"
_TEACHER = "a plan trains on the data alone: it has no teacher's logits"
_INITIAL = "initializer_range of the model's config.json says how initial weights are drawn"
_INFERENCE = "of inference"
_OTHER_TASKS = "of models and tasks other than language models that only decode"
_STEP = "of another optimizer: ratrain trains with AdamW"
RAMP = "the global batch of a run is the same at every step"
_LENGTHS = "sequences of a run are all of one length"
_ONE_RATE = "all parameters have the same learning rate in a plan"
_FIRST_RATE = "the warm-up of a plan begins at the first step's share of lr"
_ONE_DECAY = "weight decay of a plan is the same at every step"
_DOCUMENTS = "documents are kept apart with their positions: reset-position-ids with reset-attention-mask"
_MODELOPT = "of ModelOpt, which exports models and trains quantised ones"
_FORK = "of a fork or an earlier version of Megatron-LM, and no key of a plan"

TRAINS: Final = frozenset(
    [
        *(FLOAT8, DROPOUT, RAMP, _PARTS, _MOMENTS, _LENGTHS, _DECAY, _ONE_RATE, _FIRST_RATE, _ONE_DECAY, _DOCUMENTS),
        *(_TEACHER, _OTHER_TASKS, _MODELOPT, _FORK),
    ]
)
"""Reasons of arguments without which something else is trained."""
AGREES: Final = {"weight-decay-incr-style": ("constant",)}
"""Values of such arguments that a plan agrees with."""

_NAMES: dict[str, str] = {
    EXPERTS: """
        expert-tensor-parallel-size expert-tensor-parallel-num-weight-shards ep-overlap-early-attn-memory-release
        overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm gtp-expert-remat-nccl-ub
        gtp-remat-opt-in-modules high-priority-a2a-comm-stream inference-moe-disable-fused-quant-kernels
        save-tokens-per-expert-interval use-grouped-gemm-for-shared-expert create-moe-param-group
        disable-moe-token-dropping disable-moe-top2-2nd-expert-sampling enable-expert-tensor-parallelism
        enable-shared-expert expert-interval num-experts-teacher num-shared-experts router-type
        shared-moe-ffn-hidden-size topk use-tutel
    """,
    FLOAT8: """
        disable-fp8-wgrad first-last-layers-bf16 fp4-format fp4-param-gather fp4-quantizer-factory fp4-recipe
        fp8-amax-compute-algo fp8-amax-history-len fp8-e4m3 fp8-hybrid fp8-interval fp8-margin fp8-output-proj
        fp8-quantizer-factory kitchen-config-file kitchen-recipe-number keep-fp8-transpose-cache no-fp8-wgrad
        num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 reuse-grad-buf-for-mxfp8-param-ag te-precision-config-file
    """,
    KERNELS: """
        apply-query-key-layer-scaling attention-softmax-in-fp32 batch-invariant-backend batch-invariant-mode
        cuda-graph-impl cuda-graph-modules cuda-graph-scope cuda-graph-warmup-steps deterministic-mode
        disable-bf16-reduced-precision-matmul disable-jit-fuser disable-mamba-mem-eff-path dsa-kernel-backend
        enable-cuda-graph external-cuda-graph flash-attention-version fp16-lm-cross-entropy fp32-residual-connection
        fused-residual-rmsnorm gdp-cutedsl-kernel kitchen-attention-backend mlp-chunks-for-prefill
        mlp-chunks-for-training mla-down-proj-fusion no-persist-layer-norm no-query-key-layer-scaling onnx-safe
        optimizer-cuda-graph output-logit-dtype te-rng-tracker use-flash-attn-builder use-flash-attn-triton
        use-flash-attn-v1 use-flash-attn-v2 use-fused-weighted-squared-relu use-grouped-gemm-for-dense-mlp
        use-kitchen-attention use-legacy-models use-te use-te-activation-func use-transformer-engine-op-fuser
    """,
    COMMUNICATION: """
        defer-embedding-wgrad-compute delay-wgrad-compute disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
        disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs
        no-async-tensor-model-parallel-allreduce no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad no-tp-comm-overlap-ag
        no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs overlap-p2p-communication-warmup-flush
        overlap-param-gather-with-optimizer-step tp-comm-overlap-cfg tp-comm-overlap-rs-dgrad wgrad-deferral-limit
    """,
    _EXCHANGE: """
        create-all-gather-group ddp-bucket-size ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw
        disable-align-grad-reduce disable-clone-scatter-output-in-embedding disable-symmetric-registration
        fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration gtp-remat-nccl-ub
        high-priority-stream-groups megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-max-pool-double-buffer
        megatron-fsdp-version nccl-communicator-config-path no-align-grad-reduce no-align-param-gather
        no-clone-scatter-output-in-embedding no-contiguous-buffers-in-local-ddp no-scatter-gather-tensors-in-pipeline
        no-use-layer-wise-param-layout pipeline-model-parallel-comm-backend sharp-enabled-group
        suggested-communication-unit-size symmetric-ar-type tp-comm-bootstrap-backend
        use-contiguous-buffers-in-ddp use-nccl-ub use-ring-exchange-p2p use-sharp zero-allgather-bucket-size
        zero-contigious-gradients zero-reduce-bucket-size zero-reduce-scatter
    """,
    HOMES: """
        cpu-optimizer cpu-torch-adam no-pin-cpu-grads no-pin-cpu-params optimizer-offload-auto-threshold
        optimizer-offload-chunk-size optimizer-offload-fraction optimizer-offload-policy overlap-cpu-optimizer-d2h-h2d
        remote-device use-torch-optimizer-for-cpu-offload
    """,
    _OFFLOAD: """
        activation-offload-fraction checkpoint-in-cpu cpu-offloading-retain-pinned-cpu-buffers
        delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks fine-grained-activation-offloading
        fine-grained-offloading-max-inflight-offloads min-offloaded-tensor-size offload-modules
    """,
    RECOMPUTE: """
        checkpoint-num-layers contigious-checkpointing deepspeed-activation-checkpointing
        distribute-checkpointed-activations distribute-saved-activations gdp-num-chunk-states-to-recompute
        mhc-recompute-layer-num partition-activations profile-backward split-transformers synchronize-each-layer
    """,
    _PARTS: """
        activation-func-clamp-value apply-residual-connection-post-layernorm attention-output-gate bert-no-binary-head
        cache-mla-latents disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu enable-mhc-connections
        experimental-attention-variant glu-linear-offset heterogeneous-layers-config-encoded-json
        heterogeneous-layers-config-path hybrid-layer-pattern hybrid-override-pattern is-hybrid-model kv-lora-rank
        mrope-section multi-latent-attention no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu q-lora-rank
        qk-clip qk-clip-alpha qk-clip-threshold qk-head-dim qk-l2-norm qk-pos-emb-head-dim quick-geglu
        relative-attention-max-distance relative-attention-num-buckets softmax-type spec v-head-dim
    """,
    _SUMS: """
        ddp-average-in-collective ddp-param-name-patterns-for-fp32-local-accumulation
        ddp-reduce-scatter-with-fp32-accumulation gtp-remat-reduce-scatter-with-fp32-accumulation
        megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype no-gradient-reduce-div-fusion
    """,
    _MOMENTS: """
        exp-avg-dtype exp-avg-sq-dtype main-params-dtype megatron-fsdp-main-params-dtype use-bnb-optimizer
        use-precision-aware-optimizer
    """,
    KEYS_TRAVEL: "cp-comm-type force-ds-sequence-parallel hierarchical-context-parallel-sizes",
    _SEQUENCES: "hybrid-context-parallel max-seqlen-per-dp-cp-rank",
    _LENGTHS: "data-efficiency-curriculum-learning random-ltd variable-seq-lengths",
    "mapping of the plan says which ranks are neighbours": "use-tp-pp-dp-mapping",
    "the schedule of the plan says the order of its micro-batches": """
        enable-zbh1-exact-semantics enable-zbh1-pipeline microbatch-group-size-per-virtual-pipeline-stage
        standalone-embedding-stage
    """,
    'cuts = "auto" weighs embedding and head': """
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split
    """,
    _GROUPS: "enable-full-sharding-in-hsdp outer-dp-sharding-strategy",
    _STEP: """
        ademamix-alpha ademamix-alpha-warmup ademamix-beta3 ademamix-beta3-warmup lion-beta1 lion-beta2
        muon-coefficient-type muon-extra-scale-factor muon-fp32-matmul-prec muon-momentum muon-nesterov
        muon-no-split-qkv muon-num-ns-steps muon-scalar-optimizer muon-scale-mode muon-tp-mode muon-use-syrk
        sgd-momentum
    """,
    _DECAY: "apply-wd-to-qk-layernorm no-weight-decay-cond-type",
    _ONE_RATE: """
        decoupled-lr decoupled-min-lr head-lr-mult mup-attn-scale-power mup-base-head-dim mup-base-hidden-size
        mup-embedding-mult mup-output-mult mup-width-mult use-mup
    """,
    _FIRST_RATE: "lr-warmup-init",
    _ONE_DECAY: "weight-decay-incr-style",
    _RESUMED: """
        no-load-lr-state override-lr-scheduler override-opt-param-scheduler use-checkpoint-lr-scheduler
        use-checkpoint-opt-param-scheduler
    """,
    "the global batch of a plan is what it says, with any number of replicas": "decrease-batch-size-if-needed",
    "a run trains on all its steps, and skips an update of numbers that are not finite": """
        check-for-large-grads check-for-spiky-loss iterations-to-skip no-check-for-nan-in-loss-and-grad skip-iters
        skip-train-iteration-range
    """,
    VALIDATION: """
        eval-global-batch-size eval-micro-batch-size full-validation multiple-validation-sets start-eval-at-iter
        validation-set-names
    """,
    _DOCUMENTS: """
        dataloader-inter-document-masking
    """,
    _INITIAL: """
        data-parallel-random-init embedding-init-method-std init-method-xavier-uniform init-model-with-meta-device
        layernorm-init no-initialization use-cpu-initialization
    """,
    _TEACHER: """
        kd kd-alpha-ce kd-beta-ce kd-temp load-teacher logits-load-decode-threads logits-load-dir
        logits-load-ignore-errors logits-load-kd-loss-alpha logits-load-msc-prefetch-depth logits-load-prefetch-factor
        logits-save-dir logits-save-dtype logits-save-top-k logits-save-top-p logits-save-top-p-min-k
        export-kd-cfg export-kd-finalize export-kd-teacher-load
    """,
    LAUNCH: """
        disable-gloo-process-groups distributed-timeout-seconds-after-init fake-process-group lazy-mpu-init local-rank
    """,
    PROCESS: """
        check-weight-hash-across-dp-replicas-interval config-logger-dir disable-manual-gc-eval
        disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
        disable-flight-recorder-include-only-active dump-param-to-param-group-map empty-unused-memory-level
        enable-experimental error-injection-rate error-injection-type exit-signal exit-signal-handler
        exit-signal-handler-for-dataloader exit-signal-handler-for-training flight-recorder-dump-path
        flight-recorder-include-stack-trace flight-recorder-trace-buffer-size gpu-sniff-test-interval
        inference-rng-tracker manual-gc manual-gc-interval no-flight-recorder-dump-on-timeout
        no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active no-manual-gc-eval rerun-mode
        result-rejected-tracker-filename skip-train test-mode train-sync-interval
    """,
    DROPOUT: """
        lima-dropout retro-encoder-attention-dropout retro-encoder-hidden-dropout
    """,
    "only DeepSpeed reads it": """
        deepscale deepscale-config deepspeed-mpi ds-fused-adam ds-inference ds-sequence-parallel-fpdt
        ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-fpdt-offloading memory-centric-tiled-linear
        no-pipeline-parallel zero-stage
    """,
    MODEL: "disable-pad-vocab-size no-pad-vocab-size padded-vocab-size rope-type vocab-extra-ids",
    _INFERENCE: "flash-decode nccl-all-reduce-for-prefill",
    _OTHER_TASKS: "decoder-num-layers decoder-seq-length",
    "Megatron-LM reads it nowhere": "openai-gelu",
}
_BY_NAME: Final = {name: why for why, names in _NAMES.items() for name in names.split()}

_BEGINNINGS: Final = {
    "moe-": EXPERTS,
    "inference-": _INFERENCE,
    **dict.fromkeys(("retro-", "dino-"), _OTHER_TASKS),
    **dict.fromkeys(("dsa-indexer-", "gdp-", "linear-", "mamba-", "mhc-", "mtp-"), _PARTS),
}
"""Reasons for arguments that begin alike."""
_BY_GROUP: Final = {
    **dict.fromkeys(("transformer configuration", "network size", "mla"), MODEL),
    **dict.fromkeys(("Transformer-Engine", "heterogeneous architecture", "experimental_attention_variant"), MODEL),
    **dict.fromkeys(("vision", "biencoder"), _OTHER_TASKS),
    **dict.fromkeys(("data and dataloader", "tokenizer", "sft"), DATA),
    "validation": VALIDATION,
    **dict.fromkeys(("checkpointing", "logging", "profiling", "one logger", "opentelemetry", "straggler"), FILES),
    **dict.fromkeys(("autoresume", "workload inspector", "In-process restart", "ft_package"), PROCESS),
    **dict.fromkeys(("rerun engine", "msc", "fault injector"), PROCESS),
    "inference": _INFERENCE,
    "rl": "of reinforcement learning",
    "moe": EXPERTS,
}


def reason(name: str) -> str | None:
    """Return why an argument without a rule is not carried over; None for an unknown argument."""
    if name not in KNOWN:
        return None
    if name in _BY_NAME:
        return _BY_NAME[name]
    begins = next((why for begin, why in _BEGINNINGS.items() if name.startswith(begin)), None)
    if begins is not None:
        return begins
    if name in GROUPS:
        return _BY_GROUP.get(GROUPS[name])
    if name in OF_EXTENSIONS:
        return _MODELOPT
    return _FORK
