"""Export of a `ModelConfig` as a Hugging Face `config.json`: the inverse of `hf_config`."""

from __future__ import annotations

from math import inf, nextafter
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.hf_keys import keys_of
from ratrain.ratrain_ir.config.rope_scaling import PARAMETERS, parse_scaling
from ratrain.ratrain_ir.config.types import Dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.ratrain_ir.config.model_config import ModelConfig

_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu-tanh": "gelu_pytorch_tanh", "relu2": "relu2"}


TORCH_DTYPES = {Dtype.F32: "float32", Dtype.BF16: "bfloat16"}
"""Dtypes in which weights can be written, with PyTorch's names."""


def hugging_face_config(model: ModelConfig, dtype: Dtype = Dtype.F32) -> dict[str, Any]:
    """Return the `config.json` of a model with weights in `dtype`, as `transformers` and `load_model` read it.

    `dtype` is one of `TORCH_DTYPES`. Keys that do not follow from the model (lengths, token numbers, ...) are those
    that it came with; none are made up.

    Baichuan's class has no `position_embedding` and no `normalised_head`. They are written because only they identify a
    model whose size differs from the published ones.
    """
    known = keys_of(model.family)
    no_keys = {"kv_heads", "head_dim"} if model.family in ("gpt2", "gpt_neox") else set()  # not in these classes
    gelu_of_gpt2 = model.family == "gpt2" and model.activation == "gelu-tanh"
    return {
        "architectures": [FAMILY[model.family].architectures[0]],
        "model_type": model.family,
        **{keys[0]: getattr(model, name) for name, keys in known.renamed.items() if name not in no_keys},
        known.activation: "gelu_new" if gelu_of_gpt2 else _ACTIVATIONS[model.activation],
        **model.inert,
        "torch_dtype": TORCH_DTYPES[dtype],
        **_rope(model),
        **_layers(model),
        **_of_family(model),
    }


def _rope(model: ModelConfig) -> dict[str, Any]:
    if model.position != "rope":
        return {}
    of_neox = model.family == "gpt_neox"
    keys: dict[str, Any] = {"rotary_emb_base" if of_neox else "rope_theta": model.rope_theta}
    if model.local_rope_theta is not None:
        keys["rope_local_base_freq"] = model.local_rope_theta
    if of_neox:
        keys["rotary_pct"] = rotary_share(model.rotary_dim or model.head_dim, model.head_dim)
    elif model.rotary_dim is not None:
        keys["partial_rotary_factor"] = rotary_share(model.rotary_dim, model.head_dim)
    scaling = parse_scaling(model.rope_scaling) if model.rope_scaling else None
    if scaling is not None:
        values = dict(zip(PARAMETERS[scaling.kind], scaling.values, strict=True))
        if scaling.kind == "dynamic":
            keys["max_position_embeddings"] = int(values.pop("original_positions"))
        if "original_positions" in values:
            values["original_max_position_embeddings"] = int(values.pop("original_positions"))
        if "truncate" in values:
            values["truncate"] = bool(values["truncate"])
        kind_key = "type" if model.family == "internlm2" else "rope_type"  # InternLM2's own class reads `type` only
        keys["rope_scaling"] = {kind_key: scaling.kind, **values}
    return keys


def rotary_share(width: int, of: int) -> float:
    """Return the share that gives `width` again when multiplied by `of` and truncated, as `transformers` does."""
    share = width / of
    return share if int(of * share) == width else nextafter(share, 1)


def _layers(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of the window, and of the layers that have it or are not rotated."""
    if model.family == "smollm3":
        kinds = model.layer_kinds or "f" * model.layers
        return {"no_rope_layers": [int(kind != "n") for kind in kinds]}
    window: dict[str, Any] = {"sliding_window": model.sliding_window}
    if model.family in ("gemma2", "gemma3_text"):
        kinds = model.layer_kinds or ("f" if model.sliding_window is None else "w") * model.layers
        return window | {"layer_types": _types(kinds)}
    if model.family in ("qwen2", "qwen3"):
        if model.sliding_window is None:
            return {}
        first = 0 if not model.layer_kinds else model.layer_kinds.find("w")
        kinds = model.layer_kinds or "w" * model.layers
        types = {} if kinds == "f" * first + "w" * (model.layers - first) else {"layer_types": _types(kinds)}
        return {"use_sliding_window": True, **window, "max_window_layers": first, **types}
    return window if model.family in ("mistral", "phi3", "mixtral") else {}


def _types(kinds: str) -> list[str]:
    return ["sliding_attention" if kind == "w" else "full_attention" for kind in kinds]


def _of_family(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of biases and scales that a family has."""
    if model.family == "baichuan":
        return {"position_embedding": model.position, "normalised_head": model.normalised_head}
    free = FAMILY[model.family].free
    keys: dict[str, Any] = {}
    if "o_bias" in free:
        keys["bias" if model.family == "internlm2" else "attention_bias"] = model.o_bias
    if "mlp_bias" in free:
        keys["mlp_bias"] = model.mlp_bias
    if model.family == "qwen2_moe":
        keys["qkv_bias"] = model.qkv_bias
    if model.mlp_kinds:
        dense = [layer for layer, kind in enumerate(model.mlp_kinds) if kind == "d"]
        keys |= {"decoder_sparse_step": 1, "mlp_only_layers": dense}
    if model.family in ("gemma2", "gemma3_text"):
        assert model.attention_scale is not None  # required in this family
        keys["query_pre_attn_scalar"] = _inverse(model.attention_scale, -2, lambda scalar: scalar**-0.5)
    if model.family in ("granite", "granitemoe"):
        keys |= {
            "attention_multiplier": model.attention_scale,
            "embedding_multiplier": model.embedding_scale,
            "residual_multiplier": model.residual_scale,
            "logits_scaling": _inverse(model.logit_scale, -1, lambda scaling: 1 / scaling),
        }
    return keys


def _inverse(value: float, power: int, read: Callable[[float], float]) -> float:
    """Return a number that `read` turns into `value` exactly, or nearly if there is none.

    Candidates are `value ** power` rounded to a whole number, unrounded, and its two neighbours, since rounding may
    separate them.
    """
    power_of = value**power
    near = [power_of, nextafter(power_of, 0), nextafter(power_of, inf)]
    return next((each for each in (round(power_of), *near) if each and read(each) == value), power_of)
