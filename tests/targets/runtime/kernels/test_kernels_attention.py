"""Attention of both kernel sets against the full score matrix in float64."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tracemalloc
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ratrain.targets.program.attention_spec import AttentionSpec, alibi_slopes
from ratrain.targets.runtime.kernels import Scratch, kernel_set
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    EPS,
    HOST_SETS,
    SETS,
    Attention,
    at_other_addresses,
    attention_grid,
    attention_inputs,
    call,
    close,
    f64,
    nan_is_visible,
    numeric_gradient,
    packed_starts,
    published_slopes,
    same_bits,
)

CASES = {
    "one-token": AttentionSpec(batch=1, seq_len=1, heads=2, kv_heads=1, head_dim=8),
    "one-tile": AttentionSpec(batch=1, seq_len=64, heads=1, kv_heads=1, head_dim=16),
    "batch": AttentionSpec(batch=3, seq_len=130, heads=2, kv_heads=2, head_dim=8),
    "grouped": AttentionSpec(batch=2, seq_len=137, heads=6, kv_heads=2, head_dim=16),
    "alibi-12": AttentionSpec(batch=1, seq_len=150, heads=12, kv_heads=12, head_dim=4, alibi=True),
    "window": AttentionSpec(batch=2, seq_len=300, heads=2, kv_heads=1, head_dim=8, window=37),
    "window-1": AttentionSpec(batch=1, seq_len=140, heads=1, kv_heads=1, head_dim=8, window=1),
    "window-wide": AttentionSpec(batch=1, seq_len=130, heads=2, kv_heads=2, head_dim=8, window=500),
    "everything": AttentionSpec(batch=2, seq_len=261, heads=6, kv_heads=3, head_dim=8, window=129, alibi=True),
    "scaled": AttentionSpec(batch=1, seq_len=150, heads=4, kv_heads=2, head_dim=16, scale=0.0625),
    "capped": AttentionSpec(batch=2, seq_len=300, heads=4, kv_heads=2, head_dim=16, scale=0.3, softcap=2.5),
    "capped-all": AttentionSpec(
        batch=2, seq_len=261, heads=6, kv_heads=3, head_dim=8, window=129, alibi=True, scale=0.5, softcap=1.5
    ),
}
GRID = attention_grid({case: spec.softcap is not None for case, spec in CASES.items()})


def forward(
    name: str, spec: AttentionSpec, x: dict[str, np.ndarray], documents: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    o, lse = np.empty_like(x["q"]), np.empty((spec.heads, len(x["q"])), np.float32)
    call(name, "attention_forward", q=x["q"], k=x["k"], v=x["v"], o=o, lse=lse, documents=documents, spec=spec)
    return o, lse


def backward(
    name: str, spec: AttentionSpec, x: dict[str, np.ndarray], o, lse, documents: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    out = {"dq": np.empty_like(x["q"]), "dk": np.empty_like(x["k"]), "dv": np.empty_like(x["v"])}
    out["delta"] = np.empty_like(lse)
    call(name, "attention_backward", **x, o=o, lse=lse, **out, documents=documents, spec=spec)
    return out


def digests() -> str:
    """One word for each result of a forward and a backward with float16."""
    x = attention_inputs(CASES["batch"], np.float16)
    o, lse = forward("fast", CASES["batch"], x)
    results = {"o": o, "lse": lse, **backward("fast", CASES["batch"], x, o, lse)}
    return " ".join(f"{name}:{hashlib.sha256(found.tobytes()).hexdigest()[:8]}" for name, found in results.items())


@pytest.mark.full
def test_loops_just_compiled_give_the_bits_of_those_from_the_cache(tmp_path: Path) -> None:
    """Otherwise the first run on a machine, or one process of a job, would have losses of its own."""
    root = Path(__file__).resolve().parents[4]
    code = "from tests.targets.runtime.kernels.test_kernels_attention import digests; print(digests())"

    def run() -> str:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(root)}
        return subprocess.check_output([sys.executable, "-c", code], env=environment, text=True, cwd=root)

    compiled = run()
    assert any((tmp_path / "cache").rglob("*.nbc"))
    assert run() == compiled


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("name", "dtype", "case"), GRID)
def test_forward_matches_the_full_score_matrix(name, dtype, case, packed):
    spec = CASES[case]
    x, documents = attention_inputs(spec, dtype), packed_starts(spec) if packed else None
    exact = Attention(spec, *f64(x["q"], x["k"], x["v"]), documents)
    o, lse = forward(name, spec, x, documents)
    roundings = 2 * exact.score_error / EPS + spec.seq_len + 8
    close(o, exact.join(exact.o), exact.join(exact.prob @ np.abs(exact.v)), roundings)
    close(lse, exact.rows(exact.lse), 1.0, roundings)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize(("name", "dtype", "case"), GRID)
def test_backward_matches_the_full_score_matrix(name, dtype, case, packed):
    spec = CASES[case]
    x, documents = attention_inputs(spec, dtype, seed=1), packed_starts(spec, seed=1) if packed else None
    exact = Attention(spec, *f64(x["q"], x["k"], x["v"]), documents)
    o, lse = exact.join(exact.o).astype(dtype), exact.rows(exact.lse).astype(np.float32)
    values, bounds = exact.gradient(*f64(x["do"], o, lse))
    for key, actual in backward(name, spec, x, o, lse, documents).items():
        close(actual, values[key], bounds[key] / EPS, 1)


@pytest.mark.parametrize("softcap", [None, 0.75])
def test_oracle_gradient_matches_finite_differences(softcap):
    spec = AttentionSpec(2, 5, heads=4, kv_heads=2, head_dim=2, window=3, alibi=True, scale=0.9, softcap=softcap)
    q, k, v, do = f64(*attention_inputs(spec, np.float32).values())
    exact = Attention(spec, q, k, v)
    values, _ = exact.gradient(do, exact.join(exact.o), exact.rows(exact.lse))

    def loss() -> float:
        now = Attention(spec, q, k, v)
        return float((now.join(now.o) * do).sum())

    for key, x in {"dq": q, "dk": k, "dv": v}.items():
        np.testing.assert_allclose(values[key], numeric_gradient(loss, x), atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 12, 20, 40, 64])
def test_alibi_slopes_are_the_published_ones(heads):
    np.testing.assert_allclose(alibi_slopes(heads), published_slopes(heads), rtol=1e-14)
    assert len(alibi_slopes(heads)) == heads


@pytest.mark.parametrize("name", SETS)
def test_large_scores_do_not_overflow(name):
    spec = AttentionSpec(batch=1, seq_len=70, heads=1, kv_heads=1, head_dim=16)
    x = attention_inputs(spec, np.float16)
    x["q"] *= np.float16(1000)
    x["k"] *= np.float16(1000)
    o, lse = forward(name, spec, x)
    assert np.isfinite(o).all()
    assert lse.max() > 1e6
    # each row's softmax is one-hot here: the output is the value of the key with the largest score
    score = np.where(np.tri(70, dtype=bool), x["q"].astype(np.float64) @ x["k"].astype(np.float64).T, -np.inf)
    same_bits(o, x["v"][score.argmax(axis=1)])


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("name", SETS)
def test_overflow_and_nan_are_visible(name, softcap):
    spec = AttentionSpec(batch=2, seq_len=130, heads=1, kv_heads=1, head_dim=8, softcap=softcap)
    x = attention_inputs(spec, np.float16)
    o, lse = forward(name, spec, x)
    x["do"][:] = np.float16(60000)  # the first value is seen by all queries: their sum is over 65504
    assert np.isinf(backward(name, spec, x, o, lse)["dv"]).any()
    nan_is_visible(spec, partial(forward, name, spec), partial(backward, name, spec))


@pytest.mark.parametrize("name", SETS)
def test_subnormal_values_are_kept(name):
    spec = AttentionSpec(batch=1, seq_len=65, heads=1, kv_heads=1, head_dim=8)
    x = attention_inputs(spec, np.float16)
    x["v"][:] = np.float16(3 * 2.0**-24)
    o, _ = forward(name, spec, x)
    same_bits(o, x["v"])


@pytest.mark.parametrize("name", SETS)
def test_capped_scores_are_no_larger_than_the_cap(name):
    spec = AttentionSpec(batch=1, seq_len=70, heads=1, kv_heads=1, head_dim=16, softcap=3.0)
    x = attention_inputs(spec, np.float16)
    x["q"] *= np.float16(1000)
    x["k"] *= np.float16(1000)
    o, lse = forward(name, spec, x)
    assert lse[0, 0] == pytest.approx(3, abs=1e-6) or lse[0, 0] == pytest.approx(-3, abs=1e-6)
    assert np.abs(lse).max() <= 3 + np.log(70)
    gradient = backward(name, spec, x, o, lse)
    assert gradient["dq"].any(axis=1).sum() <= 2  # scores at the cap move no more; one in 20000 here is not at it
    assert gradient["dv"].any()


@pytest.mark.parametrize("case", ["everything", "capped-all"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_agrees_with_reference(dtype, case):
    spec = CASES[case]
    x = attention_inputs(spec, dtype, seed=2)
    exact = Attention(spec, *f64(x["q"], x["k"], x["v"]))
    (o, lse), (o_fast, _) = forward("reference", spec, x), forward("fast", spec, x)
    slack = 2 * float(ml_dtypes.finfo(dtype).eps)
    # each is within half a unit of storage of float32 values that are that close: so they are a unit apart at most
    bound = (exact.score_error + 300 * EPS) * exact.join(exact.prob @ np.abs(exact.v))
    found, expected = f64(o_fast, o)
    assert (np.abs(found - expected) <= bound + slack / 2 * np.abs(expected) + 2.0**-24).all()
    _, bounds = exact.gradient(*f64(x["do"], o, lse))
    other = backward("reference", spec, x, o, lse)
    for key, actual in backward("fast", spec, x, o, lse).items():
        expected = other[key].astype(np.float64)
        assert (np.abs(actual - expected) <= 2 * bounds[key] + slack * np.abs(expected) + 2.0**-24).all()


@pytest.mark.parametrize("name", SETS)
def test_result_does_not_depend_on_the_address(name):
    spec = CASES["grouped"]
    x = attention_inputs(spec, np.float16, seed=3)
    o, lse = forward(name, spec, x)
    expected = backward(name, spec, x, o, lse)
    for moved in at_other_addresses(x):
        same_bits(forward(name, spec, moved)[0], o)
        for key, value in backward(name, spec, moved, o, lse).items():
            same_bits(value, expected[key])


@pytest.mark.parametrize("name", HOST_SETS)
def test_memory_is_linear_in_the_sequence_length(name):
    kernels = kernel_set(name)
    spec = AttentionSpec(batch=1, seq_len=2048, heads=1, kv_heads=1, head_dim=8)
    square = spec.seq_len**2 * 4
    x = attention_inputs(spec, np.float16)
    o, lse, delta = np.empty_like(x["q"]), np.empty((1, 2048), np.float32), np.empty((1, 2048), np.float32)
    out = {key: np.empty_like(x["q"]) for key in ("dq", "dk", "dv")}
    small = CASES["one-token"]
    warm = attention_inputs(small, np.float16)
    backward(name, small, warm, *forward(name, small, warm))  # compiled before it is measured
    scratch = Scratch(kernels.scratch_bytes("attention_backward", spec=spec))
    assert scratch.capacity <= square / 6
    tracemalloc.start()
    try:
        kernels.attention_forward(x["q"], x["k"], x["v"], o, lse, scratch=scratch, spec=spec)
        scratch.reset()
        kernels.attention_backward(**x, o=o, lse=lse, **out, delta=delta, scratch=scratch, spec=spec)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < square / 32
    longer = AttentionSpec(batch=1, seq_len=4096, heads=1, kv_heads=1, head_dim=8)
    assert kernels.scratch_bytes("attention_backward", spec=longer) <= 2 * scratch.capacity


def test_spec_refuses_uneven_groups():
    with pytest.raises(ValueError, match="6 query heads cannot share 4"):
        AttentionSpec(batch=1, seq_len=1, heads=6, kv_heads=4, head_dim=8)
