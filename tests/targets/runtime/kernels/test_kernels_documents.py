"""What kernels do with sequences that several documents are packed into, beside what their own tests hold against float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ratrain.targets.program.attention_spec import AttentionSpec
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    SETS,
    attention_inputs,
    call,
    close,
    f64,
    packed_starts,
    same_bits,
)

Values = npt.NDArray[Any]

SPEC = AttentionSpec(batch=2, seq_len=300, heads=4, kv_heads=2, head_dim=8)
ROPES: dict[str, dict[str, Any]] = {
    "whole": {},
    "partial": {"rotary_dim": 4},
    "interleaved": {"interleaved": True},
    "scaled": {"scaling": "linear 2"},
}


def attention(name: str, x: dict[str, Values], documents: Values | None) -> dict[str, Values]:
    """Every result of a forward and a backward."""
    o, lse = np.empty_like(x["q"]), np.empty((SPEC.heads, len(x["q"])), np.float32)
    out = {"dq": np.empty_like(x["q"]), "dk": np.empty_like(x["k"]), "dv": np.empty_like(x["v"])}
    told: dict[str, Any] = {"documents": documents, "spec": SPEC}
    call(name, "attention_forward", q=x["q"], k=x["k"], v=x["v"], o=o, lse=lse, **told)
    call(name, "attention_backward", **x, o=o, lse=lse, **out, delta=np.empty_like(lse), **told)
    return {"o": o, "lse": lse, **out}


@pytest.mark.parametrize("name", SETS)
def test_one_document_a_sequence_is_the_causal_mask_bit_for_bit(name: str) -> None:
    x, starts = attention_inputs(SPEC, np.float16), np.zeros(SPEC.batch * SPEC.seq_len, np.int32)
    found = attention(name, x, starts)
    for key, expected in attention(name, x, None).items():
        same_bits(found[key], expected)


@pytest.mark.parametrize("name", SETS)
def test_other_documents_are_not_read(name: str) -> None:
    """Whatever stands in the keys and queries of the others: what a document has stays as it is."""
    starts = np.tile(np.repeat(np.array([0, 130], np.int32), [130, 170]), 2)
    x = attention_inputs(SPEC, np.float32)
    expected = attention(name, x, starts)
    for value in x.values():
        value[:130] = 50.0
    found = attention(name, x, starts)
    for key, value in expected.items():
        rows, cells = (value.T, found[key].T) if key == "lse" else (value, found[key])
        np.testing.assert_array_equal(cells[130:], rows[130:], err_msg=key)
        assert not np.array_equal(cells[:130], rows[:130])


def rotated(name: str, x: Values, **options: Any) -> Values:
    out = x.copy()
    call(name, "rope", x=out, heads=3, head_dim=8, theta=1e4, **options)
    return out


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("options", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_rotation_is_that_of_each_document_alone(name: str, dtype: Any, options: dict[str, Any], inverse: bool) -> None:
    x = np.random.default_rng(1).normal(size=(2 * 70, 24)).astype(dtype)
    starts = packed_starts(AttentionSpec(batch=2, seq_len=70, heads=1, kv_heads=1, head_dim=1), seed=5)
    found = rotated(name, x, seq_len=70, documents=starts, inverse=inverse, **options)
    begins = [*np.flatnonzero(starts == np.arange(140) % 70), 140]
    for low, high in pairwise(begins):
        same_bits(found[low:high], rotated(name, x[low:high], seq_len=int(high - low), inverse=inverse, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_what_counts_positions_does_so_in_slices_too(name: str, dtype: Any) -> None:
    rng = np.random.default_rng(2)
    x, table = rng.normal(size=(2, 70, 24)).astype(dtype), rng.normal(size=(80, 24)).astype(dtype)
    starts = packed_starts(AttentionSpec(batch=2, seq_len=70, heads=1, kv_heads=1, head_dim=1), seed=6)
    turned, added = (
        rotated(name, x.reshape(-1, 24), seq_len=70, documents=starts, inverse=False),
        x.reshape(-1, 24).copy(),
    )
    call(name, "position_forward", positions=table, y=added, seq_len=70, documents=starts)
    for low, high in ((0, 9), (9, 50), (50, 70)):
        part = x[:, low:high].reshape(-1, 24).copy()
        told = {
            "seq_len": high - low,
            "first_position": low,
            "documents": starts.reshape(2, 70)[:, low:high].reshape(-1),
        }
        same_bits(rotated(name, part, inverse=False, **told), turned.reshape(2, 70, 24)[:, low:high].reshape(-1, 24))
        call(name, "position_forward", positions=table, y=part, **told)
        same_bits(part, added.reshape(2, 70, 24)[:, low:high].reshape(-1, 24))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_learned_positions_and_their_gradients(name: str, dtype: Any, table_dtype: Any, accumulate: bool) -> None:
    rng = np.random.default_rng(3)
    y, start = rng.normal(size=(5 * 12, 33)).astype(dtype), rng.normal(size=(20, 33)).astype(table_dtype)
    positions = start.astype(dtype)
    starts = packed_starts(AttentionSpec(batch=5, seq_len=12, heads=1, kv_heads=1, head_dim=1), seed=8)
    at = np.arange(60) % 12 - starts
    found = y.copy()
    call(name, "position_forward", positions=positions, y=found, seq_len=12, documents=starts)
    same_bits(found, (y.astype(np.float32) + positions[at].astype(np.float32)).astype(dtype))
    table = start.copy() if accumulate else np.full_like(start, np.nan)
    call(name, "position_backward", dy=y, dpositions=table, seq_len=12, documents=starts, accumulate=accumulate)
    wide, base = f64(y, start)
    total, size = (np.array(base if accumulate else np.zeros_like(base)) for _ in range(2))
    np.add.at(total, at, wide)
    np.add.at(np.abs(size, out=size), at, np.abs(wide))
    close(table, total, size, 60)
    never = np.setdiff1d(np.arange(20), at)
    same_bits(table[never], start[never] if accumulate else np.zeros_like(start[never]))


WRONG = {"behind its row": 5, "before the sequence": -1}


@pytest.mark.parametrize("start", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("name", SETS)
def test_starts_that_no_document_has_are_refused(name: str, start: int) -> None:
    """They would be read as places in a table, or leave a query without a key."""
    starts = np.zeros(SPEC.batch * SPEC.seq_len, np.int32)
    starts[SPEC.seq_len + 4] = start
    x = attention_inputs(SPEC, np.float32)
    y, told = x["q"].copy(), {"seq_len": SPEC.seq_len, "documents": starts}
    probs = np.zeros((SPEC.heads * len(y), SPEC.seq_len), np.float32)
    block, line = SPEC.block, np.zeros((SPEC.heads, len(y)), np.float32)
    state = {"acc": y.copy(), "peak": line, "total": line.copy()}
    read = {key: x[key] for key in ("q", "k", "v")}
    with pytest.raises(IndexError, match="starts behind one of its rows, or before"):
        attention(name, x, starts)
    for kernel, operands in {
        "rope": {"x": y, **told, "heads": 4, "head_dim": 8, "theta": 1e4, "inverse": False},
        "position_forward": {"positions": np.zeros((300, 32), np.float32), "y": y, **told},
        "position_backward": {"dy": y, "dpositions": np.zeros((300, 32), np.float32), **told, "accumulate": False},
        "attention_softmax_forward": {"scores": probs, "probs": probs, "documents": starts, "spec": SPEC},
        "attention_softmax_backward": {
            "probs": probs,
            "dprobs": probs.copy(),
            "dscores": probs.copy(),
            "documents": starts,
            "spec": SPEC,
        },
        "attention_partial_forward": {**read, **state, "documents": starts, "spec": block, "accumulate": False},
    }.items():
        with pytest.raises(IndexError, match="starts behind one of its rows, or before"):
            call(name, kernel, **operands)
