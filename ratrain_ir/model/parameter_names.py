"""Names of block parameters in the checkpoints of each model family, in the layout of `transformers`.

A matrix that a family packs together with others is named here as if it stood alone, with the packed one's position.
The matrices of all experts are one parameter, named as one expert's without its number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.model_config import ModelConfig


ROUTER = "router_proj"
"""Short name of the matrix of a router of experts."""


def _linear(weight: str, name: str) -> dict[str, str]:
    return {f"{weight}_proj": f"{name}.weight", f"{weight}_bias": f"{name}.bias"}


def _norm(weight: str, name: str) -> dict[str, str]:
    return {weight: f"{name}.weight", f"{weight}_bias": f"{name}.bias"}


_LLAMA_ATTENTION = {
    **{key: name for part in "qkvo" for key, name in _linear(part, f"self_attn.{part}_proj").items()},
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    **_norm("norm", "input_layernorm"),
    **_norm("post_norm", "post_attention_layernorm"),
}
_LLAMA_MLP = {
    **{key: name for part in ("gate", "up", "down") for key, name in _linear(part, f"mlp.{part}_proj").items()},
    **_norm("post_norm", "post_feedforward_layernorm"),
}
_EXPERTS: Mapping[str, Mapping[str, str]] = {
    "mixtral": {
        ROUTER: "block_sparse_moe.gate.weight",
        "gate_experts": "block_sparse_moe.experts.w1.weight",
        "up_experts": "block_sparse_moe.experts.w3.weight",
        "down_experts": "block_sparse_moe.experts.w2.weight",
    },
    "granitemoe": {
        ROUTER: "block_sparse_moe.router.layer.weight",
        "gate_experts": "block_sparse_moe.experts.gate_proj.weight",
        "up_experts": "block_sparse_moe.experts.up_proj.weight",
        "down_experts": "block_sparse_moe.output_linear.weight",
    },
}
"""Names of the router and the experts, for the families that differ from Qwen's."""
_QWEN_EXPERTS = {
    ROUTER: "mlp.gate.weight",
    **{f"{part}_experts": f"mlp.experts.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"shared_{part}_proj": f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")},
    "shared_router_proj": "mlp.shared_expert_gate.weight",
}
_LLAMA_ENDS = {
    "embed": {"table": "model.embed_tokens.weight"},
    "head": {"table": "lm_head.weight", **_norm("norm", "model.norm")},
}

_GPT2 = {
    "embed": {"table": "transformer.wte.weight", "positions": "transformer.wpe.weight"},
    "attention": {
        **_norm("norm", "ln_1"),
        **{key: name for part in "qkv" for key, name in _linear(part, f"attn.{part}_proj").items()},
        **_linear("o", "attn.c_proj"),
    },
    "mlp": {**_norm("norm", "ln_2"), **_linear("up", "mlp.c_fc"), **_linear("down", "mlp.c_proj")},
    "head": {"table": "lm_head.weight", **_norm("norm", "transformer.ln_f")},
}
_GPT_NEOX = {
    "embed": {"table": "gpt_neox.embed_in.weight"},
    "attention": {
        **_norm("norm", "input_layernorm"),
        **{key: name for part in "qkv" for key, name in _linear(part, f"attention.{part}_proj").items()},
        **_linear("o", "attention.dense"),
    },
    "mlp": {
        **_norm("norm", "post_attention_layernorm"),
        **_linear("up", "mlp.dense_h_to_4h"),
        **_linear("down", "mlp.dense_4h_to_h"),
    },
    "head": {"table": "embed_out.weight", **_norm("norm", "gpt_neox.final_layer_norm")},
}
_INTERNLM2 = {
    "embed": {"table": "model.tok_embeddings.weight"},
    "attention": {
        **_norm("norm", "attention_norm"),
        **{key: name for part in "qkv" for key, name in _linear(part, f"attention.w{part}").items()},
        **_linear("o", "attention.wo"),
    },
    "mlp": {
        **_norm("norm", "ffn_norm"),
        **_linear("gate", "feed_forward.w1"),
        **_linear("up", "feed_forward.w3"),
        **_linear("down", "feed_forward.w2"),
    },
    "head": {"table": "output.weight", **_norm("norm", "model.norm")},
}


def parameter_name(model: ModelConfig, kind: str, layer: int | None, weight: str) -> str:
    """Return a parameter's checkpoint name from the kind of its block, its layer (None at the ends) and its short name.

    The head's table has the embedding's name if embeddings are tied. An adapter's matrices are named below the linear
    layer that it stands beside; the A of a packed layer (`qkv_lora_a`) below that layer.
    """
    stem, _, matrix = weight.rpartition("_lora_")
    if stem.endswith("_experts"):
        return f"{experts_module(model, layer)}.{stem.removesuffix('_experts')}_proj.lora_{matrix.upper()}.weight"
    if stem:
        first, *others = JOINT.get(stem, (stem,))
        module = module_name(model, kind, layer, f"{first}_proj")
        return f"{packed_module(model, module) if others else module}.lora_{matrix.upper()}.weight"
    names = _names(model)
    if kind == "head" and weight == "table" and model.tied_embeddings:
        return names["embed"]["table"]
    name = names[kind][weight]
    return name if layer is None else f"{_layer_module(model, layer)}.{name}"


def module_name(model: ModelConfig, kind: str, layer: int | None, weight: str) -> str:
    """Return the name of the linear layer, or router, of a matrix in the classes of `transformers` 5."""
    if weight == ROUTER:
        return f"{_experts_parent(model, layer)}.{_ROUTERS.get(model.family, 'gate')}"
    return parameter_name(model, kind, layer, weight).removesuffix(".weight")


def _names(model: ModelConfig) -> Mapping[str, Mapping[str, str]]:
    if model.family in _OWN:
        return _OWN[model.family]
    before_mlp = "pre_feedforward_layernorm" if model.has_post_norm else "post_attention_layernorm"
    return {
        **_LLAMA_ENDS,
        "attention": _LLAMA_ATTENTION,
        "mlp": {**_LLAMA_MLP, **_EXPERTS.get(model.family, _QWEN_EXPERTS), **_norm("norm", before_mlp)},
    }


_OWN: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "internlm2": _INTERNLM2,
}
"""Names of the families that differ from LLaMA."""

_LAYERS = {"gpt2": "transformer.h", "gpt_neox": "gpt_neox.layers"}
"""Prefix before the number of a layer, for the families that differ from LLaMA."""

PACKED: Mapping[str, Mapping[str, str]] = {
    "gpt2": {f"attn.{part}_proj": "attn.c_attn" for part in "qkv"},
    "baichuan": {f"self_attn.{part}_proj": "self_attn.W_pack" for part in "qkv"},
    "gpt_neox": {f"attention.{part}_proj": "attention.query_key_value" for part in "qkv"},
    "internlm2": {f"attention.w{part}": "attention.wqkv" for part in "qkv"},
    "phi3": {
        **{f"self_attn.{part}_proj": "self_attn.qkv_proj" for part in "qkv"},
        **{f"mlp.{part}_proj": "mlp.gate_up_proj" for part in ("gate", "up")},
    },
    "granitemoe": {f"experts.{part}_proj": "input_linear" for part in ("gate", "up")},
}
"""Linear layers that are stored together, each with the tensor that holds it, by family."""

JOINT: Mapping[str, tuple[str, ...]] = {
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
    "gate_up_experts": ("gate_experts", "up_experts"),
}
"""Short names of packed layers, with those of their parts in the order of their rows.

Stacks of experts are packed in the classes of `transformers` 5, whatever files hold."""


def head_module(model: ModelConfig) -> str:
    """Return the name of the output head's module, which it has in the classes with tied embeddings too."""
    return _names(model)["head"]["table"].removesuffix(".weight")


def experts_module(model: ModelConfig, layer: int | None) -> str:
    """Return the name of a layer's experts in the classes of `transformers` 5, whose parameters are their stacks."""
    return f"{_experts_parent(model, layer)}.experts"


def is_router_module(module: str) -> bool:
    """Tell whether the name of a module is that of a router of experts."""
    return module.endswith((".mlp.gate", ".block_sparse_moe.router"))


def _experts_parent(model: ModelConfig, layer: int | None) -> str:
    assert layer is not None
    return f"{_layer_module(model, layer)}.{'block_sparse_moe' if model.family == 'granitemoe' else 'mlp'}"


def _layer_module(model: ModelConfig, layer: int) -> str:
    number = model.layer_numbers[layer] if model.layer_numbers else layer
    return f"{_LAYERS.get(model.family, 'model.layers')}.{number}"


_ROUTERS: Mapping[str, str] = {"granitemoe": "router"}
"""Names of routers in the classes of `transformers` 5, for the families that differ from Qwen's."""


def packed_module(model: ModelConfig, module: str) -> str | None:
    """Return the name of the layer that a family's files pack a linear layer in; None if it stands alone."""
    packed = PACKED.get(model.family, {})
    return next((f"{module.removesuffix(end)}{to}" for end, to in packed.items() if module.endswith(f".{end}")), None)
