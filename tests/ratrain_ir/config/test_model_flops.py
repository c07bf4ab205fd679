"""Operations of a model: what a causal mask leaves, and what a token takes."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.model_flops import model_flops_per_token, visible_block_pairs, visible_pairs
from tests.end_to_end.toys import UNEVEN


@given(st.integers(1, 40), st.none() | st.integers(1, 50))
def test_visible_pairs_are_those_of_the_mask(seq_len: int, window: int | None) -> None:
    mask = [
        (query, key) for query in range(seq_len) for key in range(query + 1) if window is None or key > query - window
    ]
    assert visible_pairs(seq_len, window) == len(mask)


@given(st.integers(1, 30), st.integers(1, 30), st.integers(-35, 60), st.none() | st.integers(1, 50))
def test_visible_pairs_of_a_block_are_those_of_the_mask(
    queries: int, keys: int, offset: int, window: int | None
) -> None:
    distances = [offset + query - key for query in range(queries) for key in range(keys)]
    seen = [distance for distance in distances if distance >= 0 and (window is None or distance < window)]
    assert visible_block_pairs(queries, keys, offset, window) == len(seen)


@pytest.mark.parametrize(("window", "seen"), [(None, 2), (2, 5 / 3), (9, 2)])
def test_a_token_takes_six_operations_a_weight_and_its_attention(window: int | None, seen: float) -> None:
    model = evolve(UNEVEN, sliding_window=window)
    width = model.heads * model.head_dim
    kv_width = model.kv_heads * model.head_dim
    layer = model.hidden_size * (2 * width + 2 * kv_width + 3 * model.ffn_size)
    weights = model.layers * layer + model.vocab_size * model.hidden_size
    assert model_flops_per_token(model, 3) == pytest.approx(6 * weights + 12 * seen * width * model.layers, rel=1e-15)
