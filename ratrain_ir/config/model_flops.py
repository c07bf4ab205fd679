"""Floating-point operations that training a model requires, however computed; a multiply-add counts as two."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig


def visible_pairs(seq_len: int, window: int | None) -> int:
    """Return the (query, key) pairs that a causal mask leaves per head in one sequence.

    A query sees at most `window` keys, itself included; None: all before it.
    """
    seen = seq_len if window is None else min(window, seq_len)
    return seen * (seen + 1) // 2 + (seq_len - seen) * seen


def visible_pairs_of_layers(model: ModelConfig, seq_len: int) -> list[int]:
    """Return the visible pairs per head of each layer of a model."""
    of_kind = {window: visible_pairs(seq_len, window) for window in {None, model.sliding_window}}
    return [of_kind[model.layer_kind(layer).window] for layer in range(model.layers)]


def visible_block_pairs(queries: int, keys: int, offset: int, window: int | None) -> int:
    """Return the visible pairs of a block of queries and a block of keys of one sequence.

    The first query is `offset` tokens behind the first key.
    """

    def behind(distance: int) -> int:
        """Count the pairs whose key is at least `distance` tokens before the query."""
        first = offset - distance
        return visible_pairs(max(0, first + queries), keys) - visible_pairs(max(0, first), keys)

    return behind(0) - (0 if window is None else behind(window))


def model_flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return the operations per trained token, forward and backward: 6 per matrix weight, plus causal attention."""
    visible = sum(visible_pairs_of_layers(model, seq_len)) / seq_len
    attention = 3 * 4 * visible * model.q_size
    return 6.0 * (model.matrix_elements + model.vocab_size * model.hidden_size) + attention
