"""Tensors that weight files carry beside the parameters: buffers that a model's class fills from its configuration.

Old versions of `transformers` stored them; the current one passes over them. A tensor that is neither a parameter nor one of these is refused.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.model_config import ModelConfig

_MASKS: Mapping[str, tuple[str, ...]] = {
    "gpt2": (r"h\.(?P<layer>\d+)\.attn\.(bias|masked_bias)",),
    "gpt_neox": (r"layers\.(?P<layer>\d+)\.attention\.(bias|masked_bias)",),
}
"""By family: the causal mask, and what scores become behind it."""
_TABLES: Mapping[str, tuple[str, ...]] = {
    "rope": (
        r"layers\.(?P<layer>\d+)\.(self_attn|attention)\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",
        r"rotary_emb(_local)?\.((sliding|full)_attention_)?(original_)?inv_freq",
    ),
    "alibi": ("alibi_mask", "future_mask"),
    "learned": (),
}
"""By kind of positions: frequencies of the rotary embedding and what they give, or ALiBi's bias."""
_SCALES: Mapping[str, tuple[str, ...]] = dict.fromkeys(("gemma2", "gemma3_text"), (r"embed_tokens\.embed_scale",))
"""By family: what embedded tokens are multiplied by."""


def follows_from(model: ModelConfig, name: str) -> bool:
    """Tell whether a tensor of that name is a buffer that follows from a model's configuration."""
    known = (_MASKS.get(model.family, ()), _TABLES[model.position], _SCALES.get(model.family, ()))
    for pattern in (pattern for patterns in known for pattern in patterns):
        found = re.fullmatch(rf"(\w+\.)?{pattern}", name)
        if found is not None:
            return int(found.groupdict().get("layer", 0)) < model.layers
    return False
