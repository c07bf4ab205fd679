"""Keys of Hugging Face's `config.json`, in three kinds: read, neutral, harmless.

A *read* key becomes a field of the model, or decides one by the rules of its family. A *neutral* key would change the
mathematics unless it has a value that switches it off. A *harmless* key does not change the mathematics of training.
Any other key is refused: an ignored key could have meant another model.

The keys come from `PretrainedConfig` and the configuration classes in `transformers`, from Baichuan's own class, and
from a few files that state what a family implies (`position_embedding`, `normalised_head`, `attention_bias_qkv`,
`norm_eps`, ...). GPT-2 has other names for most keys, and keys of its own; `keys_of` returns a family's keys.
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import evolve, frozen

ROPE_THETA = 10000.0
"""Default rotary base of the model classes."""

RMS_NORM_EPS = 1e-6
"""Default epsilon of the model classes with RMSNorm."""

LAYER_NORM_EPS = 1e-5
"""Default epsilon of GPT-2's model class."""

INITIALIZER_RANGE = 0.02
"""Default standard deviation of initial weights in all model classes."""

PADDING_TOKEN_KEY = "pad_token_id"  # noqa: S105  no password
"""Key of the padding token. Its embedding row gets no gradient, except in GPT-2 and GPT-NeoX."""

CLASS_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "gpt2": {"tied_embeddings": True},
    "qwen3": {"head_dim": 128},
    "gemma2": {
        "head_dim": 256,
        "tied_embeddings": True,
        "attention_softcap": 50.0,
        "logit_softcap": 30.0,
        "padding_token": 0,
    },
    "gemma3_text": {"head_dim": 256, "tied_embeddings": True, "padding_token": 0},
    "olmo2": {"norm_eps": 1e-5, "padding_token": 1},
    "phi3": {"norm_eps": 1e-5, "padding_token": 32000},
    "smollm3": {"tied_embeddings": True, "padding_token": 128004},
    "gpt_neox": {"norm_eps": 1e-5, "parallel_residual": True},
    "mixtral": {"norm_eps": 1e-5, "experts": 8, "experts_per_token": 2},
    "qwen2_moe": {
        "experts": 60,
        "experts_per_token": 4,
        "expert_size": 1408,
        "shared_expert_size": 5632,
        "router_normalised": False,
    },
    "qwen3_moe": {"experts": 128, "experts_per_token": 8, "expert_size": 768, "router_normalised": False},
    "olmoe": {
        "norm_eps": 1e-5,
        "experts": 64,
        "experts_per_token": 8,
        "router_normalised": False,
        "padding_token": 1,
    },
    "granitemoe": {"experts": 8, "experts_per_token": 2},
}
"""Defaults of model classes for absent keys, where they differ from LLaMA."""

_RENAMED: dict[str, tuple[str, ...]] = {
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
    "padding_token": (PADDING_TOKEN_KEY,),
}

READ_BY_RULE = (
    "model_type",
    "architectures",
    "attention_bias",
    "attention_bias_qkv",
    "hidden_act",
    "hidden_activation",
    "layer_types",
    "max_window_layers",
    "normalised_head",
    "parameters_expected",
    "partial_rotary_factor",
    "position_embedding",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
)

# Key: the values that switch it off, and its meaning. Null switches off every number, flag and table.
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
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
    "rotary_pct": ((None, 1), "rotating a part of each head only"),
    "no_rope_layers": ((None,), "layers without rotary embedding"),
    "logit_softcapping": ((None,), "soft-capped logits"),
    "attn_logit_softcapping": ((None,), "soft-capped attention scores"),
    "final_logit_softcapping": ((None,), "soft-capped logits"),
    "use_bidirectional_attention": ((None, False), "attention to later tokens"),
    "use_mrope": ((None, False), "rotary embedding of several sections"),
    "rope_interleaved": ((None, False), "rotation of neighbouring elements"),
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
    "lm_head_bias": ((None, False), "a bias of the head"),
    "full_attn_mod": ((None, 1), "full attention in some layers only"),
    "interpolate_factor": ((None, 1), "interpolated positions"),
    "pruned_heads": ((None, {}), "pruned heads"),
    "is_encoder_decoder": ((None, False), "an encoder and a decoder"),
    "add_cross_attention": ((None, False), "cross attention"),
    "cross_attention_hidden_size": ((None,), "cross attention"),
    "tie_encoder_decoder": ((None, False), "an encoder and a decoder"),
}

_HARMLESS = frozenset(
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
        "xla_device",
        "torchscript",
        "tf_legacy_loss",
        "tokenizer_class",
        "is_llama_config",
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
        "use_return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "is_decoder",
        # bounds of input lengths; the plan's seq_len decides here
        "max_position_embeddings",
        "max_sequence_length",
        "model_max_length",
        # tokens, labels and tasks
        "bos_token_id",
        "eos_token_id",
        PADDING_TOKEN_KEY,
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "eos_token_ids",
        "add_bos_token",
        "add_eos_token",
        "add_prefix_space",
        "unk_token_id",
        "decoder_start_token_id",
        "id2label",
        "label2id",
        "num_labels",
        "_num_labels",
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

_GPT2_RENAMED: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("n_embd", "hidden_size"),
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn_size": ("n_inner", "intermediate_size"),
    "norm_eps": ("layer_norm_epsilon", "norm_eps"),
    "learned_positions": ("n_positions", "n_ctx", "max_position_embeddings", "learned_position_embeddings"),
    "tied_embeddings": ("tie_word_embeddings",),
    "initializer_range": ("initializer_range",),
}
"""Keys of `GPT2Config`, then keys of other families with the same meaning."""

DROPOUT: Mapping[str, tuple[str, ...]] = {
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    "granite": ("attention_dropout",),
    "granitemoe": ("attention_dropout",),
}
"""Keys of dropout probabilities by family, 0.1 in the published files of GPT-2 and Granite. Training here has no
dropout."""

_GPT2_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "mlp_type": (("gelu",), "the kind of MLP"),
    "norm_type": (("layernorm",), "the kind of norm"),
    "attention_bias_out": ((None, True), "an output projection without a bias"),
    "mlp_bias": ((None, True), "an MLP without biases"),
    "scale_attn_weights": ((None, True), "attention whose scores are not scaled"),
    "n_special": ((None, 0), "special tokens behind the vocabulary"),
    "scale_attn_by_inverse_layer_idx": (
        (None, False),
        "attention whose scores are scaled by the number of their layer",
    ),
}
_GPT_NEOX_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "mlp_type": (("gelu",), "the kind of MLP"),
    "norm_type": (("layernorm",), "the kind of norm"),
    "mlp_bias": ((None, True), "an MLP without biases"),
    "attention_probs_dropout_prob": ((None, 0), "dropout"),
    "hidden_dropout_prob": ((None, 0), "dropout"),
}
_GPT2_HARMLESS = (
    *DROPOUT["gpt2"],
    # how the original code computes the same values
    "reorder_and_upcast_attn",
    # about special tokens behind the vocabulary; there are none
    "predict_special_tokens",
    # the head of another task
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)

_WRITTEN_HERE = frozenset({"torch_dtype", "dtype"})
"""Keys of the weights' dtype, which an export writes anew."""


@frozen
class Keys:
    """Treatment of each key of a family's `config.json`."""

    renamed: Mapping[str, tuple[str, ...]]
    """fields of a model with the keys that hold them unchanged; an export writes the first key"""
    neutral: Mapping[str, tuple[tuple[object, ...], str]]
    """key: the values that switch it off, and its meaning in words"""
    harmless: frozenset[str]
    activation: str = "hidden_act"
    """key of the activation that the family's class reads"""
    by_rule: tuple[str, ...] = ()
    """further keys that rules of the family read (`hf_rules`)"""

    @property
    def read(self) -> frozenset[str]:
        """Keys that become a field of the model, or decide one."""
        return frozenset((*READ_BY_RULE, *self.by_rule, self.activation)) | {
            key for keys in self.renamed.values() for key in keys
        }

    @property
    def inert(self) -> frozenset[str]:
        """Keys that change nothing as long as they are accepted; an export writes them back unchanged."""
        return (self.harmless | self.neutral.keys()) - _WRITTEN_HERE


CALLED_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("num_layers", "n_layers", "n_layer"), "layers"),
    **dict.fromkeys(("num_heads", "n_heads", "n_head"), "heads"),
    **dict.fromkeys(("num_kv_heads", "n_kv_heads", "num_query_groups"), "kv_heads"),
    **dict.fromkeys(("d_model", "dim", "n_embd"), "hidden_size"),
    **dict.fromkeys(("d_ff", "ffn_dim", "ffn_hidden_size", "n_inner"), "ffn_size"),
    **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "rms_norm_epsilon"), "norm_eps"),
    **dict.fromkeys(("n_vocab", "padded_vocab_size"), "vocab_size"),
    **dict.fromkeys(("rotary_theta", "rotary_base", "rope_base", "rotary_emb_base"), "rope_theta"),
}
"""Keys of other programs and families, with the field that they mean."""

_GPT2_READ = {key for keys in _GPT2_RENAMED.values() for key in keys}
_GPT2 = Keys(
    _GPT2_RENAMED,
    {key: entry for key, entry in _NEUTRAL.items() if key not in {*_GPT2_READ, *_GPT2_HARMLESS}} | _GPT2_NEUTRAL,
    _HARMLESS - _GPT2_READ | {*_GPT2_HARMLESS},
    "activation_function",
)


def _like_llama(
    *by_rule: str,
    renamed: Mapping[str, str] | None = None,
    activation: str = "hidden_act",
    harmless: tuple[str, ...] = (),
) -> Keys:
    """Return the keys of a family that has LLaMA's and some others."""
    fields = _RENAMED | {name: (key,) for name, key in (renamed or {}).items()}
    others = {*by_rule, *(renamed or {}).values(), *harmless}
    neutral = {key: entry for key, entry in _NEUTRAL.items() if key not in others}
    return Keys(fields, neutral, _HARMLESS - {PADDING_TOKEN_KEY} | {*harmless}, activation, by_rule)


def _gpt_neox() -> Keys:
    """Return the keys of GPT-NeoX, whose class has no key-value heads and other names for its rotary embedding."""
    keys = _like_llama(
        *("rotary_emb_base", "rotary_pct"),
        renamed={"norm_eps": "layer_norm_eps", "parallel_residual": "use_parallel_residual"},
        harmless=("classifier_dropout",),  # of the head of another task
    )
    renamed = {name: names for name, names in keys.renamed.items() if name != "padding_token"}
    harmless = keys.harmless | {PADDING_TOKEN_KEY}
    return evolve(keys, renamed=renamed, neutral={**keys.neutral, **_GPT_NEOX_NEUTRAL}, harmless=harmless)


_EXPERT_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    "num_experts": ((None, 0), "another number of experts"),
    "num_local_experts": ((None, 0), "another number of experts"),
    "n_routed_experts": ((None, 0), "another number of experts"),
    "n_shared_experts": ((None, 0), "an expert that all tokens share"),
    "moe_intermediate_size": ((None, 0), "another width of the experts"),
    "shared_expert_intermediate_size": ((None, 0), "an expert that all tokens share"),
    "norm_topk_prob": ((None, True), "a router whose weights do not sum to 1"),
    "decoder_sparse_step": ((None, 1), "a dense MLP in some of the layers"),
    "mlp_only_layers": ((None, []), "a dense MLP in some of the layers"),
    "router_jitter_noise": ((None, 0), "noise at the input of the router"),
    "output_router_logits": ((None, False), "a router's loss that is one over all layers"),
}


def _with_experts(
    number: str, *by_rule: str, renamed: Mapping[str, str] | None = None, harmless: tuple[str, ...] = ()
) -> Keys:
    """Return the keys of a family with experts; `number` is the key that its class writes for their number.

    The coefficient of the router's loss changes nothing while `output_router_logits` is false, as it must be.
    """
    other = "num_experts" if number == "num_local_experts" else "num_local_experts"
    names = {"experts": number, "experts_per_token": "num_experts_per_tok", **(renamed or {})}
    keys = _like_llama(*by_rule, renamed=names, harmless=("router_aux_loss_coef", *harmless))
    neutral = {key: entry for key, entry in _EXPERT_NEUTRAL.items() if key not in (other, *names.values())}
    return evolve(
        keys,
        renamed={**keys.renamed, "experts": (number, other)},
        neutral={**{key: entry for key, entry in keys.neutral.items() if key != other}, **neutral},
    )


DENSE_LAYERS = ("mlp_only_layers", "decoder_sparse_step")
"""Keys of Qwen's layers with a dense MLP among those with experts."""
_NORMALISED = {"router_normalised": "norm_topk_prob"}
_SIZED = {"expert_size": "moe_intermediate_size", **_NORMALISED}
_LOGIT_SOFTCAP = {"logit_softcap": "final_logit_softcapping"}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_LLAMA = _like_llama("mlp_bias")
_KEYS = {
    "llama": _LLAMA,
    "gpt2": _GPT2,
    "gemma2": _like_llama(
        "query_pre_attn_scalar",
        renamed={"attention_softcap": "attn_logit_softcapping", **_LOGIT_SOFTCAP},
        activation="hidden_activation",
        harmless=("cache_implementation", "sliding_window_size"),  # the size is checked against the window
    ),
    "gemma3_text": _like_llama(
        *("query_pre_attn_scalar", "sliding_window_pattern", "rope_local_base_freq"),
        renamed=_LOGIT_SOFTCAP,  # files also have the softcap of scores, but the class does not use it
        activation="hidden_activation",
        harmless=("_sliding_window_pattern", "cache_implementation"),
    ),
    "granite": _like_llama("mlp_bias", *_MULTIPLIERS, harmless=DROPOUT["granite"]),
    "internlm2": _like_llama("bias"),
    "phi3": _like_llama(harmless=("original_max_position_embeddings",)),
    "smollm3": _like_llama("mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
    "gpt_neox": _gpt_neox(),
    "mixtral": _with_experts("num_local_experts"),
    "qwen2_moe": _with_experts(
        "num_experts",
        "qkv_bias",
        *DENSE_LAYERS,
        renamed={**_SIZED, "shared_expert_size": "shared_expert_intermediate_size"},
    ),
    # versions below 5 of `transformers` read this key of the number of experts only
    "qwen3_moe": _with_experts("num_experts", *DENSE_LAYERS, renamed=_SIZED),
    "olmoe": _with_experts("num_experts", renamed=_NORMALISED),
    "granitemoe": _with_experts("num_local_experts", *_MULTIPLIERS, harmless=DROPOUT["granitemoe"]),
}


def keys_of(family: str) -> Keys:
    """Return the keys of a family's `config.json`."""
    return _KEYS.get(family, _PLAIN)


_PLAIN = _like_llama()
