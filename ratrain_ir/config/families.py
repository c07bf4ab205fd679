"""Model families: the fields that each one fixes, and those that a model of it may choose.

Fields that a family neither fixes nor leaves open are as in LLaMA (the defaults of `ModelConfig`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import field, frozen

from ratrain.ratrain_ir.config.rope_scaling import PARAMETERS


def _frozen(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@frozen
class Family:
    """Family of models, as defined by `transformers` or by the models' own code."""

    architectures: tuple[str, ...]
    """class names of its language models in `config.json`"""
    implied: Mapping[str, object] = field(factory=dict)
    """fields of a `ModelConfig` that differ from LLaMA"""
    free: frozenset[str] = field(factory=frozenset, converter=_frozen)
    """fields that each model of the family chooses"""
    layer_letters: str = "fw"
    """letters allowed in `layer_kinds`"""
    scalings: tuple[str, ...] = tuple(PARAMETERS)
    """kinds of `rope_scaling` that its class implements"""
    normed_widths: bool = False
    """whether queries together must be as wide as the model, because its class sizes a norm of them so"""
    equal_widths: bool = False
    """whether queries, keys and values must each be as wide as the model, because one matrix packs all three"""


_PADS = "padding_token"
_BIASED_ATTENTION = ("qkv_bias", "o_bias")
_LAYERS = ("sliding_window", "layer_kinds")
_SCALES = ("embedding_scale", "residual_scale", "logit_scale", "attention_scale")
_EXPERTS = ("experts", "experts_per_token")
_SIZED_EXPERTS = ("expert_size", "router_normalised")
_GEMMA = {
    "norm_placement": "both",
    "norm_unit_offset": True,
    "activation": "gelu-tanh",
}
_GEMMA_FREE = (_PADS, "activation", "attention_scale", "embedding_scale", "logit_softcap", "rope_scaling")

FAMILY: Mapping[str, Family] = {
    "llama": Family(
        ("LlamaForCausalLM", "LLaMAForCausalLM"),
        free=(*_BIASED_ATTENTION, "mlp_bias", _PADS, "activation", "rope_scaling"),
    ),
    "mistral": Family(("MistralForCausalLM",), free=("sliding_window", _PADS, "activation", "rope_scaling")),
    "qwen2": Family(("Qwen2ForCausalLM",), {"qkv_bias": True}, (*_LAYERS, _PADS, "activation", "rope_scaling")),
    "qwen3": Family(
        ("Qwen3ForCausalLM",),
        {"qk_norm": "head"},
        (*_BIASED_ATTENTION, *_LAYERS, _PADS, "activation", "rope_scaling"),
    ),
    "baichuan": Family(
        ("BaichuanForCausalLM", "BaiChuanForCausalLM"),
        {"packed_qkv": True},
        ("position", "normalised_head", _PADS),
        scalings=(),
        equal_widths=True,
    ),
    "gemma2": Family(("Gemma2ForCausalLM",), _GEMMA, (*_BIASED_ATTENTION, *_LAYERS, *_GEMMA_FREE, "attention_softcap")),
    "gemma3_text": Family(
        ("Gemma3ForCausalLM",),
        {**_GEMMA, "qk_norm": "head"},
        (*_BIASED_ATTENTION, *_LAYERS, *_GEMMA_FREE, "local_rope_theta"),
    ),
    "phi3": Family(
        ("Phi3ForCausalLM",), {"packed_qkv": True}, ("sliding_window", _PADS, "activation", "rotary_dim"), scalings=()
    ),
    "olmo2": Family(
        ("Olmo2ForCausalLM",),
        {"norm_placement": "post", "qk_norm": "whole"},
        (*_BIASED_ATTENTION, _PADS, "activation", "rope_scaling"),
    ),
    "granite": Family(
        ("GraniteForCausalLM",), free=(*_BIASED_ATTENTION, "mlp_bias", *_SCALES, _PADS, "activation", "rope_scaling")
    ),
    "internlm2": Family(
        ("InternLM2ForCausalLM",),
        {"packed_qkv": True},
        (*_BIASED_ATTENTION, _PADS, "activation", "rope_scaling"),
        scalings=("linear", "dynamic"),
    ),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        free=(*_BIASED_ATTENTION, "mlp_bias", "layer_kinds", _PADS, "activation", "rope_scaling"),
        layer_letters="fn",
    ),
    "mixtral": Family(("MixtralForCausalLM",), free=("sliding_window", _PADS, *_EXPERTS, "rope_scaling")),
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",),
        free=("qkv_bias", *_EXPERTS, *_SIZED_EXPERTS, "mlp_kinds", "shared_expert_size", _PADS, "rope_scaling"),
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",),
        {"qk_norm": "head"},
        (*_BIASED_ATTENTION, *_EXPERTS, *_SIZED_EXPERTS, "mlp_kinds", _PADS, "rope_scaling"),
    ),
    "olmoe": Family(
        ("OlmoeForCausalLM",),
        {"qk_norm": "whole"},
        (*_BIASED_ATTENTION, *_EXPERTS, "router_normalised", _PADS, "rope_scaling"),
        normed_widths=True,
    ),
    "granitemoe": Family(
        ("GraniteMoeForCausalLM",), free=(*_BIASED_ATTENTION, *_SCALES, *_EXPERTS, _PADS, "rope_scaling")
    ),
    "gpt2": Family(
        ("GPT2LMHeadModel",),
        {
            "norm": "layer",
            "position": "learned",
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "activation": "gelu-tanh",
            "gated_mlp": False,
            "packed_qkv": True,
        },
        ("activation", "learned_positions"),
        equal_widths=True,
    ),
    "gpt_neox": Family(
        ("GPTNeoXForCausalLM",),
        {
            "norm": "layer",
            "parallel_residual": True,
            "qkv_bias": True,
            "o_bias": True,
            "mlp_bias": True,
            "activation": "gelu",
            "gated_mlp": False,
            "packed_qkv": True,
        },
        ("parallel_residual", *_BIASED_ATTENTION, "activation", "rotary_dim", "rope_scaling"),
        equal_widths=True,
    ),
}
"""Supported families by their Hugging Face `model_type`."""

FAMILIES = tuple(FAMILY)

ARCHITECTURES = {name: family for family, known in FAMILY.items() for name in known.architectures}
"""Family of each class of language models."""

UNBUILT_EXPERTS = frozenset(
    {
        *("afmoe", "bailing_moe", "dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1"),
        *("ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "gpt_oss", "granitemoehybrid"),
        *("granitemoeshared", "hunyuan_v1_moe", "jamba", "jetmoe", "kimi_k2", "lfm2_moe", "llama4", "llama4_text"),
        *("longcat_flash", "minimax", "minimax_m2", "phimoe", "qwen3_5_moe", "qwen3_next", "solar_open"),
    }
)
"""Names (`model_type`) of known families with experts whose routers or attention are of other kinds."""


def where(name: str) -> str:
    """Describe in words the families in which a field differs from LLaMA always or by choice."""
    some = [family for family, known in FAMILY.items() if name in known.free]
    always = [family for family, known in FAMILY.items() if name in known.implied and name not in known.free]
    words = [f"always in {_listed(always)}"] if always else []
    words += [f"by choice in {_listed(some)}"] if some else []
    return ", ".join(words) + ", else never" if words else "in no family"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
