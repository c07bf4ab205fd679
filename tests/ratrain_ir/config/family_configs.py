"""A `config.json` of a tiny model of every family, and what reads or refuses one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ratrain.ratrain_ir.config.model_files import parse_config
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 176,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.45.0",
    "use_cache": True,
    "vocab_size": 256,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 32}
QWEN2 = {
    **{key: value for key, value in LLAMA.items() if key != "attention_bias"},
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 32,
    "max_window_layers": 3,
}


def like_llama(family: str, architecture: str, **changes: object) -> dict[str, object]:
    """LLaMA's keys in another family; those that are None are left out."""
    data = {**LLAMA, "model_type": family, "architectures": [architecture], **changes}
    return {key: value for key, value in data.items() if value is not None or key == "rope_scaling"}


ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, ORIGINAL: 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}
QWEN3 = like_llama("qwen3", "Qwen3ForCausalLM", head_dim=32, mlp_bias=None)
GEMMA2 = like_llama("gemma2", "Gemma2ForCausalLM", sliding_window=32, head_dim=32, mlp_bias=None)
GEMMA3 = like_llama("gemma3_text", "Gemma3ForCausalLM", sliding_window=32, head_dim=32, mlp_bias=None, rope_theta=None)
PHI3 = like_llama("phi3", "Phi3ForCausalLM", attention_bias=None, mlp_bias=None)
OLMO2 = like_llama("olmo2", "Olmo2ForCausalLM", mlp_bias=None)
GRANITE = like_llama("granite", "GraniteForCausalLM", attention_multiplier=0.25)
INTERNLM2 = like_llama("internlm2", "InternLM2ForCausalLM", attention_bias=None, mlp_bias=None, bias=False)
SMOLLM3 = like_llama("smollm3", "SmolLM3ForCausalLM", num_hidden_layers=5)
MIXTRAL = like_llama(
    *("mixtral", "MixtralForCausalLM"),
    attention_bias=None,
    mlp_bias=None,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=32,
    output_router_logits=False,
    router_aux_loss_coef=0.02,
)
_QWEN_EXPERTS: dict[str, object] = {
    "mlp_bias": None,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
    "sliding_window": 32,
    "max_window_layers": 3,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
QWEN2_MOE = like_llama(
    *("qwen2_moe", "Qwen2MoeForCausalLM"),
    **{**_QWEN_EXPERTS, "attention_bias": None, "shared_expert_intermediate_size": 40, "qkv_bias": True},
)
QWEN3_MOE = like_llama("qwen3_moe", "Qwen3MoeForCausalLM", **_QWEN_EXPERTS, head_dim=32)
OLMOE = like_llama(
    *("olmoe", "OlmoeForCausalLM"),
    mlp_bias=None,
    num_experts=4,
    num_experts_per_tok=2,
    norm_topk_prob=False,
    clip_qkv=None,
)
GRANITEMOE = like_llama(
    *("granitemoe", "GraniteMoeForCausalLM"),
    mlp_bias=None,
    num_local_experts=4,
    num_experts_per_tok=2,
    attention_multiplier=0.25,
    logits_scaling=6.0,
)
BAICHUAN = {
    "model_type": "baichuan",
    "architectures": ["BaichuanForCausalLM"],
    "vocab_size": 125696,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "z_loss_weight": 0,
}
# As it is published, but for the number of layers.
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 3,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
# As Pythia's are published, but for the sizes.
NEOX = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 256,
}


def parse(data: object) -> ModelConfig:
    return parse_config(data, name="test", file="config.json")


def without(data: dict, *keys: str) -> dict:
    return {key: value for key, value in data.items() if key not in keys}


def refusal(action, *arguments, **options) -> list:
    with pytest.raises(DiagnosticError) as caught:
        action(*arguments, **options)
    assert caught.value.diagnostics
    return caught.value.diagnostics
