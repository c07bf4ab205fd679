"""Published configurations (tests/data/configs), and what they are in small: every key kept, sizes apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

CONFIGS = Path(__file__).parent / "data" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
LONGROPE = "phi-4-mini"  # refused
TINY: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "original_max_position_embeddings": 64,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "max_window_layers": 2,
    "query_pre_attn_scalar": 16,
    "attention_multiplier": 0.3,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 2.0,
    "rotary_pct": 0.5,
    "initializer_range": 0.1,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "n_embd": 32,
    "n_head": 4,
    "n_layer": 4,
    "n_positions": 64,
    "n_ctx": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""Sizes of tiny models: for those keys that a configuration has."""


def published(name: str) -> dict[str, Any]:
    """Return a configuration as it was published."""
    data: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    return data


def tiny(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A published configuration with small sizes, with some keys changed."""
    data = published(name)
    data |= {key: value for key, value in TINY.items() if data.get(key) is not None}
    for key in ("layer_types", "no_rope_layers"):
        if key in data:
            data[key] = data[key][-4:]  # the published patterns end in what is rare
    if "original_max_position_embeddings" in (data.get("rope_scaling") or {}):
        data["rope_scaling"]["original_max_position_embeddings"] = 16
    if data["model_type"] == "baichuan":  # what is otherwise known by the sizes
        data |= {"position_embedding": "alibi" if name.endswith("13b") else "rope", "normalised_head": True}
    del data["torch_dtype" if "torch_dtype" in data else "architectures"]  # AutoModel makes f32 weights
    return {**data, **changes}
