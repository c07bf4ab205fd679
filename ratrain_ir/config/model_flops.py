"""Floating-point operations that training a model needs, whatever computes them; a multiply-add counts as two."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


def visible_pairs(seq_len: int, window: int | None) -> int:
    """Pairs of a query and a key that a causal mask leaves in one sequence, for one head; a query sees `window` keys at most."""
    seen = seq_len if window is None else min(window, seq_len)
    return seen * (seen + 1) // 2 + (seq_len - seen) * seen


def visible_pairs_of_layers(model: ModelConfig, seq_len: int) -> list[int]:
    """Those of each layer of a model."""
    of_kind = {window: visible_pairs(seq_len, window) for window in {None, model.sliding_window}}
    return [of_kind[model.layer_kind(layer).window] for layer in range(model.layers)]


def visible_block_pairs(queries: int, keys: int, offset: int, window: int | None) -> int:
    """Those of a block of queries and a block of keys of one sequence; the first query is `offset` keys after the first key."""

    def behind(distance: int) -> int:
        """Pairs whose key is at least `distance` before the query."""
        first = offset - distance
        return visible_pairs(max(0, first + queries), keys) - visible_pairs(max(0, first), keys)

    return behind(0) - (0 if window is None else behind(window))


def model_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Operations training needs for one token, forward and backward: 6 a matrix weight, and causal attention."""
    visible = sum(visible_pairs_of_layers(model, seq_len)) / seq_len
    attention = 3 * 4 * visible * model.q_size
    return 6.0 * (model.layers * model.matrix_elements_per_layer + model.vocab_size * model.hidden_size) + attention
