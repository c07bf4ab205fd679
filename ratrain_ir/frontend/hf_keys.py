"""The keys of Hugging Face's `config.json`: which are read, which must be switched off, which say nothing.

A key that is *read* becomes a field of the model, or decides one by the rules of its family. A *neutral* key would
change the mathematics unless it has a value that switches it off. A *harmless* key does not change the mathematics of
training. There is no fourth kind: any other key is refused, because a key that is ignored might have meant another
model. The keys are those of `PretrainedConfig` and the configuration classes in `transformers`, of Baichuan's own
configuration class, and a few that say outright what a family implies (`position_embedding`, `normalised_head`,
`attention_bias_qkv`, `norm_eps`, ...).
"""

from __future__ import annotations

FAMILIES = ("llama", "mistral", "qwen2", "baichuan")
"""The model families that are supported, by their Hugging Face `model_type`."""

ROPE_THETA = 10000.0
"""The rotary base of a model class whose file names none."""

RMS_NORM_EPS = 1e-6
"""The norm's epsilon of all four model classes whose file names none."""

INITIALIZER_RANGE = 0.02
"""The deviation of initial weights of all four model classes whose file names none."""

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "LLaMAForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "BaichuanForCausalLM": "baichuan",
    "BaiChuanForCausalLM": "baichuan",
}

RENAMED: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "layers": ("num_hidden_layers",),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn_size": ("intermediate_size",),
    "norm_eps": ("rms_norm_eps", "norm_eps"),
    "tied_embeddings": ("tie_word_embeddings",),
    "initializer_range": ("initializer_range",),
}

READ_BY_RULE = (
    "model_type",
    "architectures",
    "attention_bias",
    "attention_bias_qkv",
    "layer_types",
    "max_window_layers",
    "normalised_head",
    "parameters_expected",
    "position_embedding",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
)

READ = frozenset(READ_BY_RULE) | {key for keys in RENAMED.values() for key in keys}

# Key: the values that switch it off, and what it is. Null switches off everything that is a number, flag or table.
NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "hidden_act": (("silu", "swish"), "the activation of the MLP"),
    "hidden_activation": ((None, "silu", "swish"), "the activation of the MLP"),
    "mlp_type": (("swiglu",), "the kind of MLP"),
    "norm_type": (("rmsnorm",), "the kind of norm"),
    "learned_position_embeddings": ((None, 0), "learned position embeddings"),
    "alibi": ((None, False), "ALiBi outside the Baichuan family (there, write position_embedding)"),
    "attention_bias_out": ((None, False), "a bias of the attention's output projection"),
    "mlp_bias": ((None, False), "biases in the MLP"),
    "attention_dropout": ((None, 0), "dropout"),
    "hidden_dropout": ((None, 0), "dropout"),
    "attn_pdrop": ((None, 0), "dropout"),
    "embd_pdrop": ((None, 0), "dropout"),
    "resid_pdrop": ((None, 0), "dropout"),
    "partial_rotary_factor": ((None, 1), "rotating a part of each head only"),
    "rotary_pct": ((None, 1), "rotating a part of each head only"),
    "no_rope_layers": ((None,), "layers without rotary embedding"),
    "logit_softcapping": ((None,), "soft-capped logits"),
    "attn_logit_softcapping": ((None,), "soft-capped attention scores"),
    "final_logit_softcapping": ((None,), "soft-capped logits"),
    "query_pre_attn_scalar": ((None,), "another scale of the attention scores"),
    "attention_multiplier": ((None,), "another scale of the attention scores"),
    "embedding_multiplier": ((None, 1), "scaled embeddings"),
    "residual_multiplier": ((None, 1), "scaled residuals"),
    "logits_scaling": ((None, 1), "scaled logits"),
    "logit_scale": ((None, 1), "scaled logits"),
    "qk_norm": ((None, False), "norms of queries and keys"),
    "use_qk_norm": ((None, False), "norms of queries and keys"),
    "qk_layernorm": ((None, False), "norms of queries and keys"),
    "clip_qkv": ((None,), "clipped queries, keys and values"),
    "num_local_experts": ((None, 0), "a mixture of experts"),
    "num_experts": ((None, 0), "a mixture of experts"),
    "num_experts_per_tok": ((None, 0), "a mixture of experts"),
    "n_routed_experts": ((None, 0), "a mixture of experts"),
    "n_shared_experts": ((None, 0), "a mixture of experts"),
    "moe_intermediate_size": ((None, 0), "a mixture of experts"),
    "router_aux_loss_coef": ((None, 0), "the router loss of a mixture of experts"),
    "num_nextn_predict_layers": ((None, 0), "prediction of more than the next token"),
    "quantization_config": ((None,), "quantised weights"),
    "z_loss_weight": ((None, 0), "a z-loss"),
    "pruned_heads": ((None, {}), "pruned heads"),
    "is_encoder_decoder": ((None, False), "an encoder and a decoder"),
    "add_cross_attention": ((None, False), "cross attention"),
    "cross_attention_hidden_size": ((None,), "cross attention"),
    "tie_encoder_decoder": ((None, False), "an encoder and a decoder"),
}

HARMLESS = frozenset(
    {
        # where the file comes from, and which code and storage it was written for
        "name",
        "_name_or_path",
        "_commit_hash",
        "_from_model_config",
        "transformers_version",
        "auto_map",
        "torch_dtype",
        "dtype",
        "use_bfloat16",
        "torchscript",
        "tf_legacy_loss",
        "tokenizer_class",
        "unsloth_version",
        "unsloth_fixed",
        "parameters_breakdown",
        # how the original code computes the same values, or how it stores weights
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_flash_attn_2_enabled",
        "use_flash_attn",
        "pretraining_tp",
        "gradient_checkpointing",
        "use_cache",
        "chunk_size_feed_forward",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "is_decoder",
        # lengths that bound inputs; the plan's seq_len decides here
        "max_position_embeddings",
        "max_sequence_length",
        "model_max_length",
        # tokens, labels and tasks
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "id2label",
        "label2id",
        "finetuning_task",
        "task_specific_params",
        "problem_type",
        "prefix",
        # text generation
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "num_return_sequences",
        "output_scores",
        "return_dict_in_generate",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    }
)

INERT = (HARMLESS | NEUTRAL.keys()) - {"torch_dtype", "dtype", "hidden_act"}
"""Keys that change nothing here as long as they are accepted, and are exported as they came in. The type of weights and the activation are
written as they are here."""
