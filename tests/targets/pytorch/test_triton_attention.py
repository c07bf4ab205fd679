"""Fused attention, interpreted, against the full score matrix in float64: with probabilities of the type of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.targets.program.attention_spec import AttentionSpec
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    EPS,
    FUSED,
    Attention,
    attention_inputs,
    close,
    f64,
    factor_rounding,
    packed_starts,
)
from tests.targets.runtime.kernels.test_kernels_attention import CASES, backward, forward

pytestmark = [pytest.mark.parity, pytest.mark.full]
pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from ratrain.targets.pytorch.triton import triton_attention  # noqa: E402

WIDER = {
    "head-of-80": AttentionSpec(batch=1, seq_len=70, heads=2, kv_heads=1, head_dim=80),
    "head-of-200": AttentionSpec(batch=1, seq_len=40, heads=1, kv_heads=1, head_dim=200),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *WIDER])
@pytest.mark.sampled(2)
def test_outputs_and_gradients_are_those_of_the_full_score_matrix(case: str, dtype: Any, packed: bool) -> None:
    """Beside the bounds of the other sets, one rounding of each probability and of each gradient of a score."""
    spec = {**CASES, **WIDER}[case]
    check(spec, attention_inputs(spec, dtype), packed_starts(spec) if packed else None, dtype)


def test_probabilities_may_be_less_than_any_number_of_the_type() -> None:
    """Scores of up to 60: most probabilities are 0 in float16, and keys have gradients of nothing else."""
    spec = AttentionSpec(batch=1, seq_len=40, heads=2, kv_heads=2, head_dim=16, scale=1.0)
    x = attention_inputs(spec, np.float16)
    x["k"] *= 4
    check(spec, x, None, np.float16)


def check(spec: AttentionSpec, x: dict[str, Any], documents: Any, dtype: Any) -> None:
    oracle = Attention(spec, *f64(x["q"], x["k"], x["v"]), documents)
    o, lse = forward(FUSED, spec, x, documents)
    of_values = oracle.join(oracle.prob @ np.abs(oracle.v))
    rounding = factor_rounding(FUSED, dtype)
    sums = (oracle.score_error + (spec.seq_len + spec.head_dim + 8) * EPS) * of_values + oracle.output_error(rounding)
    close(o, oracle.join(oracle.o), 2 * sums, 1 / EPS)
    np.testing.assert_allclose(lse, oracle.rows(oracle.lse), atol=2 * oracle.score_error + 8 * EPS)
    found = backward(FUSED, spec, x, o, lse, documents)
    values, bounds = oracle.gradient(*f64(x["do"], o, lse), rounding)
    for name, value in values.items():
        close(found[name], value, 2 * bounds[name], 1 / EPS)


def test_the_bound_notices_what_is_wrong() -> None:
    """A window one token wider fails it."""
    spec = CASES["window"]
    x = attention_inputs(spec, np.float16)
    oracle = Attention(spec, *f64(x["q"], x["k"], x["v"]))
    o, _ = forward(FUSED, evolve(spec, window=(spec.window or 0) + 1), x)
    with pytest.raises(AssertionError, match="of the bound"):
        close(
            o,
            oracle.join(oracle.o),
            2 * oracle.output_error(factor_rounding(FUSED, np.float16)),
            1 / EPS,
        )


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
def test_tiles_are_powers_of_two_that_products_take(width: int, halves: bool) -> None:
    for tile in triton_attention.tiles_of(width, halves=halves):
        assert min(tile.rows, tile.columns) >= 16
        assert tile.rows & (tile.rows - 1) == tile.columns & (tile.columns - 1) == 0


def test_wide_heads_are_the_device_sets() -> None:
    """Their tiles do not fit a multiprocessor."""
    spec = AttentionSpec(batch=1, seq_len=20, heads=1, kv_heads=1, head_dim=300)
    x = attention_inputs(spec, np.float16)
    for ours, theirs in zip(forward(FUSED, spec, x), forward("torch-device", spec, x), strict=True):
        np.testing.assert_array_equal(ours, theirs)
