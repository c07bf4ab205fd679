"""Arguments of Megatron-LM's command line: the number of values and the group of each.

They come from the parser that Megatron-LM builds (commit d98e8a64, 2026-08-22), and from forks whose launch scripts are
public: earlier versions, Megatron-DeepSpeed, Pai-Megatron-Patch, Megatron-LLM. ModelOpt and Kitchen add theirs to
Megatron-LM where they are installed. Names have dashes here; forks use underscores too.
"""

from __future__ import annotations

from typing import Final

_BARE = """
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split accumulate-allreduce-grads-in-fp32
    add-qkv-bias adlr-autoresume allow-ambiguous-pad-tokens apply-layernorm-1p apply-query-key-layer-scaling
    apply-residual-connection-post-layernorm apply-wd-to-qk-layernorm async-ckpt-use-cpu-shm async-save
    attention-output-gate attention-softmax-in-fp32 auto-detect-ckpt-format batch-invariant-mode bert-no-binary-head
    bf16 biencoder-shared-query-context-model cache-mla-latents calc-ft-timeouts calculate-per-token-loss
    check-for-large-grads check-for-spiky-loss checkpoint-activations ckpt-assume-constant-structure
    ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state ckpt-fully-parallel-load
    ckpt-fully-parallel-load-per-rank-objects ckpt-fully-parallel-save ckpt-pg-tensors-cache-create
    cpu-offloading-retain-pinned-cpu-buffers create-all-gather-group cross-entropy-loss-fusion
    data-parallel-random-init dataloader-defer-npy-index-mmap dataloader-fast-cache-load
    dataloader-inter-document-masking ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw
    ddp-reduce-scatter-with-fp32-accumulation decode-only-cuda-graphs decrease-batch-size-if-needed
    defer-embedding-wgrad-compute delay-offload-until-cuda-graph delay-wgrad-compute deterministic-mode
    dino-norm-last-layer disable-align-grad-reduce disable-bf16-reduced-precision-matmul disable-bias-linear
    disable-ckpt-load-validate-sharding-integrity disable-clone-scatter-output-in-embedding
    disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu disable-flight-recorder-dump-on-timeout
    disable-flight-recorder-extra-dump-on-exec disable-flight-recorder-include-only-active disable-fp8-wgrad
    disable-gloo-process-groups disable-jit-fuser disable-log-loss-scale-to-tensorboard disable-mamba-mem-eff-path
    disable-manual-gc-eval disable-msc disable-pad-vocab-size disable-save-tokenizer-assets
    disable-straggler-on-startup disable-strict-fsdp-dtensor-load disable-symmetric-registration
    disable-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
    disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs
    disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-optim-fully-reshardable dist-ckpt-save-pre-mcore-014
    distrib-optim-fully-reshardable-mem-efficient distribute-saved-activations dsa-indexer-k-norm-fp32
    dsa-indexer-rope-interleaved dsa-indexer-use-sparse-loss enable-chunked-prefill enable-cuda-graph
    enable-experimental enable-ft-package enable-full-sharding-in-hsdp enable-mhc-connections enable-msc eod-mask-loss
    ep-overlap-early-attn-memory-release exit-on-missing-checkpoint exit-signal-handler
    exit-signal-handler-for-dataloader exit-signal-handler-for-training external-cuda-graph fake-process-group
    fim-data fine-grained-activation-offloading finetune first-last-layers-bf16 flash-decode
    flight-recorder-include-stack-trace fp16 fp16-lm-cross-entropy fp32-residual-connection fp4-param-gather
    fp8-output-proj fp8-param-gather freeze-all-layers fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer
    fsdp-manual-registration full-validation fused-residual-rmsnorm gdp-cutedsl-kernel grad-reduce-in-bf16
    group-query-attention grpo-filter-groups-with-same-reward gtp-expert-remat-nccl-ub gtp-remat-nccl-ub
    gtp-remat-reduce-scatter-with-fp32-accumulation high-priority-a2a-comm-stream hybrid-context-parallel
    inference-cuda-graph-all-prefills inference-disable-ep-consensus inference-disable-triton-nvls-kernels
    inference-dynamic-batching inference-dynamic-batching-prefix-caching
    inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-track-paused-request-events
    inference-fuse-tp-communication inference-moe-disable-fused-quant-kernels inference-rng-tracker
    inference-text-gen-server-logging inference-use-synchronous-zmq-collectives inference-wandb-logging
    init-method-xavier-uniform init-model-with-meta-device inprocess-empty-cuda-cache inprocess-restart
    is-hybrid-model keep-fp8-transpose-cache lazy-mpu-init load-main-params-from-ckpt log-device-memory-used
    log-energy log-max-attention-logit log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress
    log-straggler log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard
    log-world-size-to-tensorboard logits-load-ignore-errors manual-gc megatron-fsdp-enable-fine-grained-param-gather
    megatron-fsdp-max-pool-double-buffer mla-down-proj-fusion mock-data moe-apply-probs-on-input moe-enable-deepep
    moe-enable-routing-replay moe-grouped-gemm moe-hybridep-pad-uneven-dispatch-inputs moe-layer-recompute
    moe-ncclep-zero-copy moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference moe-paged-stash
    moe-per-layer-logging moe-permute-fusion moe-permute-fusion-into-hybridep moe-router-enable-expert-bias
    moe-router-force-load-balancing moe-router-fusion moe-router-padding-for-fp8 moe-router-padding-for-quantization
    moe-router-pre-softmax moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits
    moe-routing-trace-dump-weights moe-shared-expert-gate moe-shared-expert-overlap moe-single-grouped-bias
    moe-single-grouped-weight moe-use-grouped-tensor moe-use-upcycling mtp-detach-heads mtp-hsm mtp-standalone
    mtp-use-repeated-layer multi-latent-attention multiple-validation-sets muon-nesterov muon-no-split-qkv
    muon-use-syrk nccl-all-reduce-for-prefill no-align-grad-reduce no-align-param-gather
    no-barrier-with-level-1-timing no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion
    no-check-for-nan-in-loss-and-grad no-ckpt-fully-parallel-save no-ckpt-load-validate-sharding-integrity
    no-clone-scatter-output-in-embedding no-create-attention-mask-in-dataloader no-data-sharding
    no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu no-flight-recorder-dump-on-timeout
    no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active no-fp8-wgrad
    no-gradient-accumulation-fusion no-gradient-reduce-div-fusion no-inference-disable-ep-consensus
    no-inference-dynamic-batching-prefix-caching no-inference-text-gen-server-logging
    no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging no-initialization no-load-optim
    no-load-rng no-log-loss-scale-to-tensorboard no-manual-gc-eval no-masked-softmax-fusion no-mmap-bin-files
    no-one-logger no-overlap-p2p-communication no-pad-vocab-size no-persist-layer-norm no-pin-cpu-grads
    no-pin-cpu-params no-position-embedding no-rl-inference-logprobs-is-correction
    no-rl-offload-inference-model-weights-when-idle no-rl-partial-rollouts no-rl-persist-cuda-graphs
    no-rl-skip-bos-token no-rl-training-cuda-graphs no-rl-use-sequence-packing no-rl-verify-model-weights-swap
    no-rope-fusion no-save-optim no-save-rng no-save-tokenizer-assets no-strict-fsdp-dtensor-load
    no-tokenizer-sentencepiece-ignore-extra-whitespaces no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad
    no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs no-use-layer-wise-param-layout
    no-use-tokenizer-model-from-checkpoint-args no-yarn-correction-range-round-to-int nvtx-ranges one-logger-async
    openai-gelu optimizer-cpu-offload optimizer-cuda-graph otel-enabled output-bert-embeddings
    overlap-cpu-optimizer-d2h-h2d overlap-dispatch-backward-with-experts-wgrad overlap-grad-reduce
    overlap-moe-expert-parallel-comm overlap-p2p-communication-warmup-flush overlap-param-gather
    overlap-param-gather-with-optimizer-step override-opt-param-scheduler perform-rl-step profile
    pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes qk-clip
    qk-l2-norm qk-layernorm quick-geglu recompute-activations record-memory-history record-shapes replication
    reset-attention-mask reset-position-ids retriever-score-scaling reuse-grad-buf-for-mxfp8-param-ag
    rl-durable-rollout-bank rl-inference-logprobs-is-correction rl-offload-inference-model-weights-when-idle
    rl-offload-optimizer-during-inference rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-skip-bos-token
    rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap rotary-interleaved
    run-workload-inspector-server sequence-parallel sft skip-train squared-relu swiglu te-rng-tracker test-mode
    tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-sentencepiece-legacy
    torch-fsdp2-no-reshard-after-forward tp-comm-overlap tp-comm-overlap-rs-dgrad trust-remote-code
    untie-embeddings-and-output-weights use-checkpoint-args use-checkpoint-opt-param-scheduler use-cpu-initialization
    use-dist-ckpt use-distributed-optimizer use-flash-attn use-fused-weighted-squared-relu use-gigatoken
    use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert use-kitchen-attention use-legacy-static-engine
    use-mcore-models use-megatron-fsdp use-mp-args-from-checkpoint-args use-mup use-nccl-ub use-one-sent-docs
    use-persistent-ckpt-worker use-precision-aware-optimizer use-pytorch-profiler use-ring-exchange-p2p
    use-rope-scaling use-rotary-position-embeddings use-same-sampling-seed-across-dp-ranks use-sharp
    use-te-activation-func use-torch-fsdp2 use-torch-optimizer-for-cpu-offload use-tp-pp-dp-mapping
    use-transformer-engine-op-fuser verify-integrity vision-pretraining yarn-correction-range-round-to-int
"""
_MANY = """
    cp-comm-type cuda-graph-modules cuda-graph-scope data-path ddp-param-name-patterns-for-fp32-local-accumulation
    gtp-remat-opt-in-modules hierarchical-context-parallel-sizes high-priority-stream-groups iterations-to-skip
    moe-aux-loss-coeff moe-router-load-balancing-type mrope-section offload-modules profile-ranks recompute-modules
    retriever-report-topk-accuracies rl-inference-parsers spec test-data-path tokenizer-special-tokens train-data-path
    valid-data-path validation-set-names
"""
_BY_GROUP: Final = {
    "transformer configuration": """
        account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split activation-func-clamp-value
        activation-offload-fraction add-qkv-bias apply-layernorm-1p apply-query-key-layer-scaling
        apply-residual-connection-post-layernorm attention-backend attention-dropout attention-output-gate
        batch-invariant-backend batch-invariant-mode bf16 calculate-per-token-loss config-logger-dir
        context-parallel-size cpu-offloading-num-layers cpu-offloading-retain-pinned-cpu-buffers
        cross-entropy-fusion-impl cross-entropy-loss-fusion cuda-graph-impl cuda-graph-warmup-steps
        defer-embedding-wgrad-compute delay-offload-until-cuda-graph delay-wgrad-compute
        delta-offload-bytes-across-pp-ranks deterministic-mode disable-bf16-reduced-precision-matmul
        disable-bias-linear disable-clone-scatter-output-in-embedding disable-dsa-indexer-rotate-activation
        disable-dsa-indexer-scoring-relu disable-fp8-wgrad disable-mamba-mem-eff-path disable-tp-comm-bulk-dgrad
        disable-tp-comm-bulk-wgrad disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag
        disable-tp-comm-split-rs distribute-saved-activations dsa-indexer-head-dim dsa-indexer-k-norm-epsilon
        dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff dsa-indexer-n-heads dsa-indexer-rope-interleaved
        dsa-indexer-skip-topk-offset dsa-indexer-topk dsa-indexer-topk-freq dsa-indexer-use-sparse-loss
        dsa-kernel-backend embedding-init-method-std enable-cuda-graph enable-mhc-connections
        ep-overlap-early-attn-memory-release experimental-attention-variant expert-model-parallel-size
        expert-tensor-parallel-num-weight-shards expert-tensor-parallel-size external-cuda-graph ffn-hidden-size
        fine-grained-activation-offloading fine-grained-offloading-max-inflight-offloads first-last-layers-bf16
        flash-attention-version flash-decode fp16 fp32-residual-connection fp4-format fp4-quantizer-factory fp4-recipe
        fp8-amax-compute-algo fp8-amax-history-len fp8-format fp8-interval fp8-margin fp8-output-proj
        fp8-quantizer-factory fp8-recipe fused-residual-rmsnorm gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute
        gdp-num-householder glu-linear-offset gtp-remat-opt-in-modules hidden-dropout hidden-size
        hierarchical-context-parallel-sizes high-priority-a2a-comm-stream hybrid-context-parallel
        inference-cuda-graph-scope inference-disable-triton-nvls-kernels inference-fuse-tp-communication
        inference-grouped-gemm-backend inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type
        init-method-std init-model-with-meta-device is-hybrid-model kitchen-attention-backend kv-channels
        linear-conv-kernel-dim linear-key-head-dim linear-num-key-heads linear-num-value-heads linear-value-head-dim
        mamba-head-dim mamba-num-groups mamba-num-heads mamba-state-dim max-seqlen-per-dp-cp-rank
        mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations
        microbatch-group-size-per-virtual-pipeline-stage min-offloaded-tensor-size mlp-chunks-for-prefill
        mlp-chunks-for-training moe-apply-probs-on-input moe-combine-bwd-dtype moe-deepep-num-sms
        moe-dispatch-fwd-dtype moe-enable-deepep moe-enable-routing-replay moe-expert-capacity-factor
        moe-expert-rank-capacity-factor moe-ffn-hidden-size moe-flex-dispatcher-backend moe-flex-dispatcher-num-sms
        moe-grouped-gemm moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute moe-hybridep-num-sms
        moe-hybridep-num-sms-preprocessing moe-hybridep-pad-uneven-dispatch-inputs moe-input-jitter-eps
        moe-latent-size moe-layer-recompute moe-mlp-glu-interleave-size moe-ncclep-zero-copy
        moe-pad-expert-input-to-capacity moe-pad-experts-for-cuda-graph-inference moe-paged-stash
        moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size
        moe-per-layer-logging moe-permute-fusion moe-permute-fusion-into-hybridep moe-router-bias-update-rate
        moe-router-dtype moe-router-enable-expert-bias moe-router-force-biased moe-router-force-load-balancing
        moe-router-fusion moe-router-group-topk moe-router-num-groups moe-router-padding-for-fp8
        moe-router-padding-for-quantization moe-router-pre-softmax moe-router-quantile-balancing-ema
        moe-router-score-function moe-router-topk moe-router-topk-scaling-factor moe-shared-expert-gate
        moe-shared-expert-glu-interleave-size moe-shared-expert-intermediate-size moe-shared-expert-overlap
        moe-single-grouped-bias moe-single-grouped-weight moe-token-dispatcher-type moe-token-drop-policy
        moe-use-grouped-tensor moe-z-loss-coeff mrope-section mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern
        mtp-loss-scaling-factor mtp-num-layers mtp-standalone mtp-use-repeated-layer multi-latent-attention
        mup-attn-scale-power mup-base-head-dim mup-base-hidden-size mup-embedding-mult mup-output-mult mup-width-mult
        nccl-all-reduce-for-prefill no-clone-scatter-output-in-embedding no-dsa-indexer-rotate-activation
        no-dsa-indexer-scoring-relu no-fp8-wgrad no-initialization no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad
        no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs norm-epsilon normalization
        num-attention-heads num-layers num-layers-at-end-in-bf16 num-layers-at-start-in-bf16 num-query-groups
        offload-modules overlap-dispatch-backward-with-experts-wgrad overlap-moe-expert-parallel-comm
        overlap-p2p-communication-warmup-flush pipeline-model-parallel-comm-backend pipeline-model-parallel-size
        qk-clip qk-clip-alpha qk-clip-threshold qk-l2-norm qk-layernorm recompute-granularity recompute-method
        recompute-modules recompute-num-layers rotary-interleaved sequence-parallel softmax-type symmetric-ar-type
        tensor-model-parallel-size tensor-parallel-num-weight-shards tp-comm-bootstrap-backend tp-comm-overlap
        tp-comm-overlap-rs-dgrad transformer-impl use-cpu-initialization use-fused-weighted-squared-relu
        use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert use-kitchen-attention use-mup
        use-ring-exchange-p2p use-te-activation-func use-transformer-engine-op-fuser wgrad-deferral-limit
    """,
    "network size": """
        bert-no-binary-head decoder-num-layers encoder-num-layers group-query-attention make-vocab-size-divisible-by
        max-position-embeddings no-position-embedding no-rope-freq no-yarn-correction-range-round-to-int onnx-safe
        openai-gelu position-embedding-type quick-geglu relative-attention-max-distance relative-attention-num-buckets
        rope-scaling-factor rotary-base rotary-percent rotary-seq-len-interpolation-factor squared-relu swiglu
        untie-embeddings-and-output-weights use-rope-scaling use-rotary-position-embeddings window-attn-skip-freq
        window-size yarn-beta-fast yarn-beta-slow yarn-correction-range-round-to-int
        yarn-original-max-position-embeddings
    """,
    "regularization": """
        adam-beta1 adam-beta2 adam-eps apply-wd-to-qk-layernorm clip-grad lion-beta1 lion-beta2 muon-coefficient-type
        muon-extra-scale-factor muon-fp32-matmul-prec muon-momentum muon-nesterov muon-no-split-qkv muon-num-ns-steps
        muon-scalar-optimizer muon-scale-mode muon-tp-mode muon-use-syrk no-weight-decay-cond-type sgd-momentum
        weight-decay
    """,
    "profiling": """
        memory-snapshot-path nvtx-ranges profile profile-ranks profile-step-end profile-step-start
        pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra pytorch-profiler-collect-shapes
        record-memory-history record-shapes use-pytorch-profiler
    """,
    "training": """
        batch-size check-for-large-grads check-weight-hash-across-dp-replicas-interval checkpoint-activations
        dataloader-type decrease-batch-size-if-needed disable-manual-gc-eval dump-param-to-param-group-map
        empty-unused-memory-level exit-duration-in-mins exit-interval exit-signal exit-signal-handler
        exit-signal-handler-for-dataloader exit-signal-handler-for-training global-batch-size gpu-sniff-test-interval
        iterations-to-skip manual-gc manual-gc-interval micro-batch-size no-bias-dropout-fusion no-bias-gelu-fusion
        no-bias-swiglu-fusion no-check-for-nan-in-loss-and-grad no-gradient-accumulation-fusion no-manual-gc-eval
        no-masked-softmax-fusion no-persist-layer-norm no-pin-cpu-grads no-pin-cpu-params no-rope-fusion optimizer
        optimizer-cpu-offload optimizer-cuda-graph optimizer-offload-fraction overlap-cpu-optimizer-d2h-h2d
        rampup-batch-size recompute-activations result-rejected-tracker-filename rope-type step-batch-size-schedule
        tp-comm-overlap-cfg train-iters train-samples train-sync-interval use-flash-attn use-mcore-models
        use-torch-optimizer-for-cpu-offload
    """,
    "rl": """
        grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight grpo-filter-groups-with-same-reward
        grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step langrl-env-config
        no-rl-inference-logprobs-is-correction no-rl-offload-inference-model-weights-when-idle no-rl-partial-rollouts
        no-rl-persist-cuda-graphs no-rl-skip-bos-token no-rl-training-cuda-graphs no-rl-use-sequence-packing
        no-rl-verify-model-weights-swap perform-rl-step refit-method rl-consumption-granularity rl-default-temperature
        rl-default-top-k rl-default-top-p rl-durable-rollout-bank rl-generation-lag
        rl-importance-sampling-truncation-coef rl-inference-expert-model-parallel-size
        rl-inference-expert-tensor-model-parallel-size rl-inference-logprobs-is-correction
        rl-inference-model-unified-memory-level rl-inference-parsers rl-inference-pipeline-model-parallel-size
        rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode rl-max-inflight-requests
        rl-offload-inference-model-weights-when-idle rl-offload-optimizer-during-inference rl-partial-rollouts
        rl-persist-cuda-graphs rl-profile rl-profile-dir rl-prompts-per-eval rl-rollout-bank-dir
        rl-rollout-bank-max-bytes rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token
        rl-submission-granularity rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap
    """,
    "RNG and initialization": """
        data-parallel-random-init inference-rng-tracker init-method-xavier-uniform seed te-rng-tracker
    """,
    "learning rate and weight decay": """
        decoupled-lr decoupled-min-lr end-weight-decay freeze-all-layers lr lr-decay-iters lr-decay-samples
        lr-decay-style lr-warmup-fraction lr-warmup-init lr-warmup-iters lr-warmup-samples lr-wsd-decay-iters
        lr-wsd-decay-samples lr-wsd-decay-style min-lr override-opt-param-scheduler start-weight-decay
        use-checkpoint-opt-param-scheduler warmup weight-decay-incr-style
    """,
    "checkpointing": """
        async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm async-save async-strategy
        auto-detect-ckpt-format ckpt-assume-constant-structure ckpt-convert-format ckpt-convert-save
        ckpt-convert-update-legacy-dist-opt-format ckpt-drop-redundant-extra-state ckpt-format
        ckpt-fully-parallel-load ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
        ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save ckpt-fully-parallel-save-process-group
        ckpt-pg-tensors-cache-create ckpt-pg-tensors-cache-path ckpt-step
        disable-ckpt-load-validate-sharding-integrity disable-save-tokenizer-assets disable-strict-fsdp-dtensor-load
        disable-use-tokenizer-model-from-checkpoint-args dist-ckpt-format dist-ckpt-optim-fully-reshardable
        dist-ckpt-save-pre-mcore-014 dist-ckpt-strictness dist-ckpt-workers
        distrib-optim-fully-reshardable-mem-efficient exit-on-missing-checkpoint finetune load
        load-main-params-from-ckpt no-ckpt-fully-parallel-save no-ckpt-load-validate-sharding-integrity no-load-optim
        no-load-rng no-save-optim no-save-rng no-save-tokenizer-assets no-strict-fsdp-dtensor-load
        no-use-tokenizer-model-from-checkpoint-args non-persistent-ckpt-type non-persistent-global-ckpt-dir
        non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir non-persistent-save-interval
        override-ckpt-iteration persistent-save-interval pretrained-checkpoint replication replication-factor
        replication-jump save save-activations-interval save-dgrads-interval save-interval save-params-interval
        save-retain-interval save-tokens-per-expert-interval save-wgrads-interval use-checkpoint-args use-dist-ckpt
        use-mp-args-from-checkpoint-args use-persistent-ckpt-worker verify-integrity
    """,
    "mixed precision": """
        accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 fp16-lm-cross-entropy grad-reduce-in-bf16
        hysteresis initial-loss-scale loss-scale loss-scale-window mamba-training-ssm-states-dtype min-loss-scale
        output-logit-dtype reuse-grad-buf-for-mxfp8-param-ag
    """,
    "distributed init": """
        cp-comm-type create-all-gather-group data-parallel-sharding-strategy ddp-average-in-collective ddp-bucket-size
        ddp-num-buckets ddp-pad-buckets-for-high-nccl-busbw ddp-param-name-patterns-for-fp32-local-accumulation
        ddp-reduce-scatter-with-fp32-accumulation decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers
        disable-align-grad-reduce disable-flight-recorder-dump-on-timeout disable-flight-recorder-extra-dump-on-exec
        disable-flight-recorder-include-only-active disable-gloo-process-groups disable-jit-fuser
        disable-symmetric-registration distributed-backend distributed-timeout-minutes
        distributed-timeout-seconds-after-init enable-full-sharding-in-hsdp fake-process-group
        flight-recorder-dump-path flight-recorder-include-stack-trace flight-recorder-trace-buffer-size
        fsdp-double-buffer fsdp-manual-registration gtp-expert-remat-nccl-ub gtp-remat-nccl-ub
        gtp-remat-reduce-scatter-with-fp32-accumulation high-priority-stream-groups keep-fp8-transpose-cache
        lazy-mpu-init local-rank megatron-fsdp-version model-parallel-size nccl-communicator-config-path
        no-align-grad-reduce no-align-param-gather no-flight-recorder-dump-on-timeout
        no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active no-gradient-reduce-div-fusion
        no-overlap-p2p-communication no-use-layer-wise-param-layout num-distributed-optimizer-instances
        num-layers-per-virtual-pipeline-stage num-virtual-stages-per-pipeline-rank outer-dp-sharding-strategy
        overlap-grad-reduce overlap-param-gather overlap-param-gather-with-optimizer-step
        pipeline-model-parallel-layout sharp-enabled-group suggested-communication-unit-size
        torch-fsdp2-no-reshard-after-forward use-distributed-optimizer use-megatron-fsdp use-nccl-ub use-sharp
        use-torch-fsdp2 use-tp-pp-dp-mapping
    """,
    "validation": """
        eval-global-batch-size eval-interval eval-iters eval-micro-batch-size full-validation multiple-validation-sets
        skip-train start-eval-at-iter test-mode validation-set-names
    """,
    "data and dataloader": """
        allow-ambiguous-pad-tokens data-args-path data-cache-path data-path dataloader-defer-npy-index-mmap
        dataloader-fast-cache-load dataloader-inter-document-masking decoder-seq-length encoder-seq-length
        eod-mask-loss fim-data fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token
        fim-prefix-token fim-rate fim-split-sample fim-spm-rate fim-suffix-token mask-prob mid-level-dataset-surplus
        mock-data no-create-attention-mask-in-dataloader no-mmap-bin-files num-dataset-builder-threads num-workers
        object-storage-cache-path per-dataset-sequences-path per-split-data-args-path phase-transition-iterations
        reset-attention-mask reset-position-ids sample-rate seq-length short-seq-prob split test-data-path
        train-data-path valid-data-path
    """,
    "tokenizer": """
        chat-template disable-pad-vocab-size disable-tokenizer-sentencepiece-ignore-extra-whitespaces merge-file
        no-pad-vocab-size no-tokenizer-sentencepiece-ignore-extra-whitespaces null-tokenizer-eod-id
        null-tokenizer-pad-id padded-vocab-size tiktoken-num-special-tokens tiktoken-pattern
        tokenizer-hf-no-include-special-tokens tokenizer-hf-no-use-fast tokenizer-metadata tokenizer-model
        tokenizer-sentencepiece-legacy tokenizer-special-tokens tokenizer-type trust-remote-code use-gigatoken
        vocab-extra-ids vocab-file vocab-size
    """,
    "autoresume": """
        adlr-autoresume adlr-autoresume-interval
    """,
    "biencoder": """
        bert-load biencoder-projection-dim biencoder-shared-query-context-model block-data-path embedding-path
        evidence-data-path ict-head-size ict-load indexer-batch-size indexer-log-interval query-in-block-prob
        retriever-report-topk-accuracies retriever-score-scaling titles-data-path use-one-sent-docs
    """,
    "vision": """
        classes-fraction data-per-class-fraction dino-bottleneck-size dino-freeze-last-layer dino-head-hidden-size
        dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp dino-warmup-teacher-temp
        dino-warmup-teacher-temp-epochs head-lr-mult img-h img-w iter-per-epoch mask-factor mask-type no-data-sharding
        num-channels num-classes patch-dim swin-backbone-type vision-backbone-type vision-pretraining
        vision-pretraining-type
    """,
    "moe": """
        moe-aux-loss-coeff moe-layer-freq moe-router-load-balancing-type moe-upcycling-granularity moe-use-upcycling
        num-experts
    """,
    "mla": """
        cache-mla-latents kv-lora-rank mla-down-proj-fusion mscale mscale-all-dim q-lora-rank qk-head-dim
        qk-pos-emb-head-dim rotary-scaling-factor v-head-dim
    """,
    "experimental_attention_variant": """
        linear-attention-freq
    """,
    "heterogeneous architecture": """
        heterogeneous-layers-config-encoded-json heterogeneous-layers-config-path
    """,
    "logging": """
        disable-log-loss-scale-to-tensorboard log-device-memory-used log-energy log-interval log-max-attention-logit
        log-memory-interval log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm log-progress
        log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard
        logging-level moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits
        moe-routing-trace-dump-weights moe-routing-trace-max-training-iters moe-routing-trace-path
        no-barrier-with-level-1-timing no-log-loss-scale-to-tensorboard tensorboard-dir tensorboard-log-interval
        tensorboard-queue-size timing-log-level timing-log-option wandb-entity wandb-exp-name wandb-project
        wandb-save-dir
    """,
    "opentelemetry": """
        otel-enabled otel-service-name otel-span-groups
    """,
    "Logits Distillation": """
        logits-load-decode-threads logits-load-dir logits-load-ignore-errors logits-load-kd-loss-alpha
        logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype logits-save-top-k
        logits-save-top-p logits-save-top-p-min-k
    """,
    "straggler": """
        disable-straggler-on-startup log-straggler straggler-ctrlr-port straggler-minmax-count
    """,
    "workload inspector": """
        run-workload-inspector-server
    """,
    "inference": """
        bert-embedder-type cuda-graph-modules cuda-graph-scope decode-only-cuda-graphs enable-chunked-prefill
        inference-batch-times-seqlen-threshold inference-coordinator-port inference-cuda-graph-all-prefills
        inference-cuda-graph-max-tokens inference-disable-ep-consensus inference-dynamic-batching
        inference-dynamic-batching-async-sched-mode inference-dynamic-batching-block-size
        inference-dynamic-batching-buffer-size-gb inference-dynamic-batching-cuda-graph-mixed-prefill-count
        inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode
        inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
        inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs
        inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-prefix-caching
        inference-dynamic-batching-prefix-caching-coordinator-policy
        inference-dynamic-batching-prefix-caching-eviction-policy inference-dynamic-batching-prefix-caching-mamba-gb
        inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend
        inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-track-paused-request-events
        inference-dynamic-batching-unified-memory-level inference-logging-step-interval inference-max-requests
        inference-max-seq-length inference-shards inference-text-gen-server-logging
        inference-use-synchronous-zmq-collectives inference-wandb-logging mamba-inference-conv-states-dtype
        mamba-inference-ssm-states-dtype max-tokens-to-oom no-inference-disable-ep-consensus
        no-inference-dynamic-batching-prefix-caching no-inference-text-gen-server-logging
        no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging num-speculative-tokens
        output-bert-embeddings use-legacy-static-engine use-same-sampling-seed-across-dp-ranks
    """,
    "Transformer-Engine": """
        fp4-param-gather fp8-param-gather te-precision-config-file
    """,
    "experimental": """
        enable-experimental exp-avg-dtype exp-avg-sq-dtype fsdp-db-use-persist-buf-on-alloc-fail hybrid-layer-pattern
        hybrid-override-pattern main-grads-dtype main-params-dtype megatron-fsdp-enable-fine-grained-param-gather
        megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype megatron-fsdp-main-params-dtype
        megatron-fsdp-max-pool-double-buffer spec use-precision-aware-optimizer yaml-cfg
    """,
    "one logger": """
        app-tag-run-name app-tag-run-version no-one-logger one-logger-async one-logger-project one-logger-run-name
    """,
    "In-process restart": """
        inprocess-active-world-size inprocess-barrier-timeout inprocess-completion-timeout inprocess-empty-cuda-cache
        inprocess-granularity inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout
        inprocess-last-call-wait inprocess-max-iterations inprocess-monitor-process-interval
        inprocess-monitor-thread-interval inprocess-progress-watchdog-interval inprocess-restart
        inprocess-soft-timeout inprocess-termination-grace-time
    """,
    "ft_package": """
        calc-ft-timeouts enable-ft-package ft-num-warmup-iters
    """,
    "rerun engine": """
        check-for-spiky-loss error-injection-rate error-injection-type rerun-mode
    """,
    "msc": """
        disable-msc enable-msc
    """,
    "sft": """
        sft sft-tokenizer-prompt-format
    """,
    "fault injector": """
        fault-injector-delay-start-iteration fault-injector-fault-delay fault-injector-fault-probabilities
        fault-injector-fault-types fault-injector-mtti-seconds fault-injector-num-ranks fault-injector-offset-seconds
        fault-injector-ranks fault-injector-seed
    """,
}
_BARE_OF_FORKS = """
    abort-on-unmet-fused-kernel-constraints adaptive-seq-len allow-missing-vision-projection-checkpoint
    barrier-with-L1-time checkpoint-in-cpu contigious-checkpointing convert-checkpoint-from-megatron-to-transformers
    cpu-offloading cpu-optimizer cpu-torch-adam create-moe-param-group cvcuda-image-processing
    data-efficiency-curriculum-learning deepscale deepspeed deepspeed-activation-checkpointing deepspeed-mpi
    disable-bias-attn-fc disable-bias-linear-fc disable-mem-efficient-ln disable-moe-token-dropping
    disable-moe-top2-2nd-expert-sampling disable-parallel-output disable-vision-class-token
    distribute-checkpointed-activations ds-fused-adam ds-inference ds-sequence-parallel-fpdt
    ds-sequence-parallel-fpdt-offloading embed-layernorm embedding-weights-in-fp32 enable-expert-tensor-parallelism
    enable-shared-expert enable-zbh1-exact-semantics enable-zbh1-pipeline eval-dev eval-fp32 export-kd-finalize
    export-legacy-megatron export-te-mcore-model force-ds-sequence-parallel fp8-e4m3 fp8-hybrid freeze-LM freeze-ViT
    freeze-clip-vision-tower freeze-llm goldfish-loss inference kd keep-last lima-dropout
    log-batch-size-to-tensorboard log-optimizer-states-to-tensorboard log-params-norm-per-param loss-on-targets-only
    memory-centric-tiled-linear mm-use-im-patch-token mm-use-im-start-end mmap-warmup moe moe-extended-tp
    moe-input-feature-slicing moe-use-legacy-grouped-gemm mos no-async-tensor-model-parallel-allreduce
    no-attn-layernorm no-contiguous-buffers-in-local-ddp no-final-layernorm no-load-lr-state
    no-log-learnig-rate-to-tensorboard no-mlp-layernorm no-new-tokens no-pipeline-parallel no-query-key-layer-scaling
    no-scatter-gather-tensors-in-pipeline no-tie-embed-logits overlap-p2p-communication override-lr-scheduler
    parallel-attn parallel-layernorm partition-activations plot-only position-encoding-2d post-layer-norm
    profile-backward random-ltd repeated-dataloader reset-iteration retro-add-retriever retro-no-verify-neighbor-count
    retro-return-doc-ids return-data-index reweight-loss-based-on-position-frequency scattered-embeddings skip-csv
    skip-plot split-transformers standalone-embedding-stage sync-tp-duplicated-parameters synchronize-each-layer time
    transformer-timers tune-mm-mlp-adapter universal-checkpoint use-alibi-mask use-bias use-bnb-optimizer
    use-checkpoint-lr-scheduler use-contiguous-buffers-in-ddp use-custom-fsdp use-flash-attn-builder
    use-flash-attn-triton use-flash-attn-v1 use-flash-attn-v2 use-legacy-models use-llama2-rotary-position-embeddings
    use-mistral-rotary-position-embeddings use-normhead use-pin-memory use-post-ln use-rms-norm use-sns use-te
    use-thumbnail use-tiling use-tutel variable-seq-lengths wandb-logger xielu xiprelu xiprelup
    zero-contigious-gradients zero-reduce-scatter
"""
_MANY_OF_FORKS = """
    metrics num-experts-teacher skip-iters skip-train-iteration-range special-tokens test-weighted-split-paths
    tiktoken-special-tokens train-data train-weighted-split-paths valid-data valid-weighted-split-paths
"""
_OF_FORKS = """
    DDP-impl ademamix-alpha ademamix-alpha-warmup ademamix-beta3 ademamix-beta3-warmup aml-data-download-path analyzer
    attention-head-type checkpoint-num-layers codecarbon-dir csv-dir csv-name data-dir data-impl dataloader-save
    dataloader-seq-length dataset dataset-config deepscale-config deepspeed-config
    ds-sequence-parallel-fpdt-chunk-size ds-sequence-parallel-size encoder-pipeline-model-parallel-size
    encoder-tensor-model-parallel-size epochs eval-only expert-interval export-kd-cfg export-kd-teacher-load
    export-quant-cfg extra-vocab-size generation-length glu-activation goldfish-h goldfish-k hidden-size-teacher
    hybrid-attention-ratio hybrid-mlp-ratio image-aspect-ratio image-folder image-size image-tag-type img-dim
    input-embeddings-multiplier input-len intermediate-size kd-alpha-ce kd-beta-ce kd-temp kill-switch-file
    kill-switch-path language-model-type layernorm-epsilon layernorm-init load-iters load-tag load-teacher log-level
    log-level-replica log-path lr-decay-tokens lr-warmup-tokens max-num-tiles max-padding-length
    mean-noise-span-length mlp-type mm-projector-type mm-vision-select-layer moe-eval-capacity-factor
    moe-expert-parallel-size moe-loss-coeff moe-min-capacity moe-router-topk-limited-devices moe-topk
    moe-train-capacity-factor n-head-kv noise-density num-attention-heads-kv num-attention-heads-teacher
    num-experts-switch num-fewshot num-frames num-key-value-heads num-layers-teacher num-shared-experts
    online-evaluation-config optimizer-offload-auto-threshold optimizer-offload-chunk-size optimizer-offload-policy
    out-seq-length pad-vocab-size-to patch-tokenizer-type pipeline-model-parallel-split-rank plot-name plot-title
    plot-x-label plot-y-label pp-partition-method profile-steps prompt-path qk-nope-head-dim qk-rope-head-dim
    qknorm-impl remote-device repetition-penalty retriever-seq-length retro-attention-gate retro-cyclic-train-iters
    retro-encoder-attention-dropout retro-encoder-hidden-dropout retro-encoder-layers retro-num-neighbors
    retro-num-retrieved-chunks retro-project-dir retro-workdir rope-theta rotary-position-embeddings-theta
    rotary-scale-factor router-type s3-cache-path scalar-loss-mask shared-moe-ffn-hidden-size sliding-window
    sliding-window-size source-seq-len target-seq-len task-list tb-dir tb-event-key temperature
    test-weighted-split-paths-path text-generate-gt-file text-generate-input-file text-generate-output-file
    tile-factor tokenizer-name-or-path tokenizer-prompt-format top-k top-p topk train-data-exact-num-epochs
    train-desc-path train-doc-idx-path train-idx-path train-mode train-sample-idx-path train-shuffle-idx-path
    train-tokens train-weighted-split-paths-path transformer-type trigger-path use-dataset-only valid-num-workers
    valid-weighted-split-paths-path verbosity version vision-model-type vision-tower vocab-extra-ids-list
    wandb-api-key wandb-id wandb-name wandb-resume z-loss-weight zero-allgather-bucket-size zero-reduce-bucket-size
    zero-stage
"""
_BARE_OF_MODELOPT = """
    enable-gpt-oss export-default-te-spec export-force-local-attention export-moe-apply-probs-on-input
    export-offline-model export-qk-l2-norm freeze-base-for-mtp modelopt-enabled
"""
_OF_EXTENSIONS = """
    export-kd-teacher-ckpt-format export-kd-teacher-model-config export-kv-cache-quant export-model-type
    export-real-quant-cfg finetune-data-files finetune-data-split finetune-hf-dataset kitchen-config-file
    kitchen-recipe-number qad-train-target
"""

BARE: Final = frozenset([*_BARE.split(), *_BARE_OF_FORKS.split(), *_BARE_OF_MODELOPT.split()])
"""Arguments without a value."""
MANY: Final = frozenset([*_MANY.split(), *_MANY_OF_FORKS.split(), "finetune-data-files"])
"""Arguments with any number of values."""
NONE_OR_MORE: Final = frozenset(
    ["data-path", "rl-inference-parsers", "spec", "test-data-path", "train-data-path", "valid-data-path"]
) | frozenset(_MANY_OF_FORKS.split())
"""Arguments of `MANY` that may have no value; of forks it is not known."""
COUNTS: Final = {"rampup-batch-size": 3}
"""Arguments with a fixed number of values above one."""
GROUPS: Final = {name: group for group, names in _BY_GROUP.items() for name in names.split()}
"""The group of each argument, as Megatron-LM's `--help` shows it."""
OF_FORKS: Final = frozenset([*_BARE_OF_FORKS.split(), *_MANY_OF_FORKS.split(), *_OF_FORKS.split()])
OF_EXTENSIONS: Final = frozenset([*_BARE_OF_MODELOPT.split(), *_OF_EXTENSIONS.split()])
KNOWN: Final = frozenset([*GROUPS, *OF_FORKS, *OF_EXTENSIONS])
