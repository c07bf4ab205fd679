"""Tensors in weight files that are not parameters: buffers that a model's class fills from its configuration.

Old versions of `transformers` stored them; the current one ignores them. Any other tensor that is no parameter is
refused.
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
"""Causal mask and score of masked positions, by family."""
_TABLES: Mapping[str, tuple[str, ...]] = {
    "rope": (
        r"layers\.(?P<layer>\d+)\.(self_attn|attention)\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",
        r"rotary_emb(_local)?\.((sliding|full)_attention_)?(original_)?inv_freq",
    ),
    "alibi": ("alibi_mask", "future_mask"),
    "learned": (),
}
"""Rotary frequencies and tables of them, or ALiBi's bias, by kind of positions."""
_SCALES: Mapping[str, tuple[str, ...]] = dict.fromkeys(("gemma2", "gemma3_text"), (r"embed_tokens\.embed_scale",))
"""Factor of the embedded tokens, by family."""


def follows_from(model: ModelConfig, name: str) -> bool:
    """Tell whether a tensor of that name is a buffer that follows from a model's configuration."""
    known = (_MASKS.get(model.family, ()), _TABLES[model.position], _SCALES.get(model.family, ()))
    for pattern in (pattern for patterns in known for pattern in patterns):
        found = re.fullmatch(rf"(\w+\.)?{pattern}", name)
        if found is not None:
            return int(found.groupdict().get("layer", 0)) < model.layers
    return False
