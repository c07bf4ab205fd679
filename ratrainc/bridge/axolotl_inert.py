"""axolotl's settings that change no byte of a training step, and those whose effect is not counted."""

from __future__ import annotations

from collections.abc import Mapping

from ratrain.ratrainc.bridge.accelerate import INERT as INERT_ACCELERATE
from ratrain.ratrainc.bridge.hf_deepspeed import INERT_DEEPSPEED

INERT: Mapping[str, str] = {
    **INERT_ACCELERATE,
    **INERT_DEEPSPEED,
    r"(datasets|test_datasets|pretraining_dataset|shuffle_.*|dataset_.*|skip_prepare_dataset|num_dataset_shards_to_save"
    r"|dataloader_.*|remove_unused_columns|push_dataset_to_hub|val_set_size|chat_template.*|eot_tokens|train_on_inputs"
    r"|default_system_message|special_tokens.*|tokens(\..*)?|added_tokens_overrides.*|bos_token|eos_token|pad_token|unk_token"
    r"|additional_special_tokens|min_sample_len|max_prompt_len|excess_length_strategy|eval_sequence_len"
    r"|eval_sample_packing|sample_packing_.*|pad_to_sequence_len|pad_to_multiple_of|group_by_length|curriculum_sampling"
    r"|multipack_real_batches|batch_flattening|pretrain_multipack_.*|pretraining_sample_concatenation|streaming.*"
    r"|total_(num|supervised)_tokens|preprocess_iterable|is_preprocess|role_boundaries|roles.*|noisy_embedding_alpha"
    r"|neftune_noise_alpha|fix_untrained_tokens)": "of the data",
    r"(output_dir|hub_.*|save_.*|saves_per_epoch|logging_steps|use_wandb|wandb_.*|use_mlflow|mlflow_.*|use_comet"
    r"|comet_.*|hf_mlflow_log_artifacts|use_tensorboard|use_trackio|trackio_.*|use_swanlab|swanlab_.*|gradio_.*|use_otel_metrics"
    r"|otel_.*|include_(tkps|tokens_per_second|num_input_tokens_seen)|profiler_steps.*|load_best_model_at_end"
    r"|metric_for_best_model|greater_is_better|resume_from_checkpoint|auto_resume_from_checkpoints|debug|strict"
    r"|dynamic_checkpoint.*|axolotl_config_path|merge_.*|loss_watchdog_.*)": "of logs and saving",
    r"(eval.*|evals_per_epoch|do_(bench|causal_lm)_eval|bench_.*|early_stopping_patience|generate_samples"
    r"|num_generation_samples|generation_.*)": "of evaluation: the answer is of a training step",
    r"(tokenizer_.*|processor_.*|model_type|trust_remote_code|base_model_config|cls_model_config|revision_of_model"
    r"|is_(falcon|llama|mistral|qwen)_derived_model|hf_use_auth_token|low_cpu_mem_usage|overrides_of_model_config.*"
    r"|resize_token_embeddings_to_32x|mean_resizing_embeddings|shrink_embeddings|device|device_map|local_rank|ddp"
    r"|world_size|experimental_skip_move_to_device|max_memory|gpu_memory_limit|lora_model_dir|lora_on_cpu"
    r"|embeddings_skip_upcast)": "of loading and the launch",
    r"(seed|tf32|gc_steps|gc_collect_steps|torch_empty_cache_steps|ddp_.*|accelerator_config.*|use_ray|ray_.*"
    r"|resources_per_worker.*|torch_compile_.*|flex_attn_compile_kwargs.*|pretrain_multipack_attn|ring_attn_func"
    r"|heads_k_stride|fp8_enable_fsdp_float8_all_gather|use_kernels)": "it holds no bytes of a step",
    r"(lr_.*|embedding_lr.*|cosine_.*|adam_(beta3|epsilon2)|optim_args.*|jagged_restart_.*|dion_.*|loraplus_.*"
    r"|label_smoothing_factor|peft_use_rslora|peft_init_lora_weights|lora_fan_in_fan_out|torchdistx_path"
    r"|bnb_config_kwargs.*|qlora_sharded_model_loading|relora_.*|lisa_.*_attribute|liger_use_token_scaling"
    r"|eaft_.*)": "of training, which memory does not depend on",
    r"fsdp_(final_state_dict_type)": "of saving",
    r"fsdp_config\.(fsdp_)?(backward_prefetch(_policy)?|forward_prefetch|cpu_ram_efficient_loading|sync_module_states"
    r"|use_orig_params|state_dict_type|limit_all_gathers|final_state_dict_type|cpu_offload_pin_memory)": "of loading, "
    "saving and the order of communication",
}
"""Settings that change no byte of a step: schemas/*.py of axolotl."""

UNCOUNTED: Mapping[str, str] = {
    "relora": "how adapters are merged on the way is not counted",
    "peft_use_dora": "what DoRA keeps is not counted",
    "peft_layers_to_transform": "adapters of some layers alone are counted for all",
    "lora_rank_pattern": "ranks by layer are not counted",
    "lora_mlp_kernel": "fused kernels of adapters keep fewer results than counted",
    "lora_qkv_kernel": "fused kernels of adapters keep fewer results than counted",
    "lora_o_kernel": "fused kernels of adapters keep fewer results than counted",
    "lora_embedding_kernel": "fused kernels of adapters keep fewer results than counted",
    "layer_offloading": "layers that wait on the host are not counted",
    "selective_checkpointing": "what selective checkpointing keeps is not counted",
    "unfrozen_parameters": "which parameters train is not counted",
    "lisa_n_layers": "which layers train is not counted",
    "tiled_mlp": "the MLP in pieces is not counted",
    "tiled_mlp_num_shards": "the MLP in pieces is not counted",
    "flash_attn_fuse_mlp": "a fused MLP is not counted",
    "auto_find_batch_size": "the batch is made smaller until it fits; counted as it is said",
    "expert_parallel_size": "experts are not counted",
    "qat": "quantisation-aware training is not counted",
    "trl": "settings of other trainers are not counted",
    "optim_target_modules": "an optimizer for some modules alone is counted for all",
    "gptq": "weights quantised by GPTQ are not counted",
    "model_quantization_config": "weights that are published quantised are not counted",
    "fp32_norms": "norms in f32 are not counted",
    "use_pose": "positions that are skipped are not counted",
    "peft_trainable_token_indices": "further trained tokens are not counted",
}
"""Settings that may change memory, with what is not counted where they are on."""
