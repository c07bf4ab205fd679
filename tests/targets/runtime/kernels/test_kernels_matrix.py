"""Products, column sums, RMSNorm and embedding of both kernel sets against float64."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.quantised import nf4_bytes, packed_bytes
from ratrain.targets.program.attention_spec import AttentionSpec
from ratrain.targets.program.kernels import KERNELS, OTHER_RANKS
from ratrain.targets.runtime.kernels import Scratch, kernel_set
from ratrain.targets.runtime.kernels.shared import number_within
from tests.targets.runtime.kernels.expert_calls import expert_calls
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    HOST_SETS,
    SETS,
    call,
    close,
    f64,
    numeric_gradient,
    rmsnorm,
    rmsnorm_gradient,
    same_bits,
)

DTYPE = st.sampled_from(DTYPES)


def gemm_case(draw_dtypes, m, n, k, trans_a, trans_b, seed):
    rng = np.random.default_rng(seed)
    shapes = {
        "a": (k, m) if trans_a else (m, k),
        "b": (n, k) if trans_b else (k, n),
        "out": (m, n),
        "bias": (n,),
        "residual": (m, n),
    }
    return {key: rng.normal(size=shape).astype(draw_dtypes[key]) for key, shape in shapes.items()}


@settings(max_examples=20)
@given(
    dtypes=st.fixed_dictionaries(dict.fromkeys(("a", "b", "out", "bias", "residual"), DTYPE)),
    shape=st.tuples(*[st.integers(1, 40)] * 3),
    flags=st.tuples(*[st.booleans()] * 5),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("name", SETS)
def test_gemm(name, dtypes, shape, flags, seed):
    trans_a, trans_b, accumulate, with_bias, with_residual = flags
    x = gemm_case(dtypes, *shape, trans_a, trans_b, seed)
    a, b, out, bias, residual = f64(*x.values())
    a, b = a.T if trans_a else a, b.T if trans_b else b
    expected, size = a @ b, np.abs(a) @ np.abs(b)
    for used, term in ((accumulate, out), (with_bias, bias), (with_residual, residual)):
        if used:
            expected, size = expected + term, size + np.abs(term)
    call(
        name,
        "gemm",
        a=x["a"],
        b=x["b"],
        out=x["out"],
        trans_a=trans_a,
        trans_b=trans_b,
        accumulate=accumulate,
        bias=x["bias"] if with_bias else None,
        residual=x["residual"] if with_residual else None,
    )
    close(x["out"], expected, size, shape[2] + 3)


@pytest.mark.parametrize("name", SETS)
def test_gemm_adds_a_residual_in_place(name):
    x = gemm_case(dict.fromkeys(("a", "b", "out", "bias", "residual"), np.float16), 30, 20, 10, False, False, 1)
    apart = np.empty_like(x["out"])
    call(name, "gemm", a=x["a"], b=x["b"], out=apart, residual=x["out"])
    call(name, "gemm", a=x["a"], b=x["b"], out=x["out"], residual=x["out"])
    same_bits(apart, x["out"])


@pytest.mark.parametrize("name", SETS)
def test_gemm_accumulates_wider_than_it_stores(name):
    a, b = np.ones((2, 4096), np.float16), np.ones((4096, 2), np.float16)
    out = np.empty((2, 2), np.float16)
    call(name, "gemm", a=a, b=b, out=out)
    assert (out == 4096).all()  # a float16 sum of ones stops at 2048
    big = np.full((2, 1), 300, np.float16)
    call(name, "gemm", a=big, b=big, out=out, trans_b=True)
    assert np.isinf(out).all()
    back = np.empty((2, 2), np.float16)
    residual = np.full((2, 2), -60000, np.float16)
    call(name, "gemm", a=big, b=big, out=back, trans_b=True, residual=residual)
    assert (back == 30000).all()  # the sum is rounded, not the product


@pytest.mark.parametrize("name", SETS)
def test_gemm_keeps_subnormals_and_shows_nan(name):
    tiny = np.full((1, 1), 2.0**-24, np.float16)
    out = np.empty((1, 1), np.float16)
    call(name, "gemm", a=tiny, b=np.full((1, 1), 3, np.float16), out=out)
    assert out[0, 0] == np.float16(3 * 2.0**-24)
    a = np.ones((3, 3), np.float16)
    a[1, 1] = np.nan
    out = np.zeros((3, 3), np.float16)
    call(name, "gemm", a=a, b=np.ones((3, 3), np.float16), out=out)
    np.testing.assert_array_equal(np.isnan(out), np.array([[0, 0, 0], [1, 1, 1], [0, 0, 0]], bool))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_column_sum(name, out_dtype, dtype, accumulate):
    rng = np.random.default_rng(2)
    a, out = rng.normal(size=(301, 77)).astype(dtype), rng.normal(size=77).astype(out_dtype)
    wide, start = f64(a, out)
    expected = wide.sum(axis=0) + (start if accumulate else 0)
    call(name, "column_sum", a=a, out=out, accumulate=accumulate)
    close(out, expected, np.abs(wide).sum(axis=0) + np.abs(start), 302)


def norm_inputs(dtype, tokens=23, hidden=200, seed=3):
    rng = np.random.default_rng(seed)
    x, dxn, residual = rng.normal(size=(3, tokens, hidden)).astype(dtype)
    gamma = (1 + rng.normal(size=hidden) / 4).astype(dtype)
    return x, gamma, dxn, residual


@pytest.mark.parametrize("scale", [1.0, 3e-5, 2000.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_rmsnorm_forward(name, dtype, scale):
    x, gamma, _, _ = norm_inputs(dtype)
    x *= dtype(scale)  # 3e-5 makes subnormal halves, 2000 squares that are no halves
    xn, rstd = np.empty_like(x), np.empty(len(x), np.float32)
    call(name, "rmsnorm_forward", x=x, gamma=gamma, xn=xn, rstd=rstd, eps=1e-6)
    expected, rstd_exact = rmsnorm(*f64(x, gamma), 1e-6)
    close(rstd, rstd_exact, rstd_exact, x.shape[1] + 4)
    close(xn, expected, np.abs(expected), x.shape[1] + 8)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("alias", ["none", "dxn", "residual"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_rmsnorm_backward(name, dtype, alias, accumulate):
    x, gamma, dxn, residual = norm_inputs(dtype, seed=4)
    rstd = rmsnorm(*f64(x, gamma), 1e-5)[1].astype(np.float32)
    dgamma = np.full_like(gamma, 2)
    wide = f64(dxn, x, gamma, rstd)
    dx_exact, dgamma_exact = rmsnorm_gradient(*wide)
    size, gamma_size = rmsnorm_gradient(*(np.abs(value) for value in wide))
    size = np.abs(size) + 2 * np.abs(wide[0] * wide[2]) * wide[3][:, None] + np.abs(residual.astype(np.float64))
    used = None if alias == "none" else residual
    dx = {"none": np.empty_like(x), "dxn": dxn, "residual": residual}[alias]
    expected = dx_exact + (residual.astype(np.float64) if used is not None else 0)
    arguments = {"dxn": dxn, "x": x, "gamma": gamma, "rstd": rstd, "dx": dx, "dgamma": dgamma, "residual": used}
    call(name, "rmsnorm_backward", **arguments, accumulate=accumulate)
    # the inner product is bounded by the sum of magnitudes, which `size` has once with the sign of its x term
    inner = (np.abs(wide[0] * wide[2] * wide[1])).sum(axis=1, keepdims=True) / x.shape[1]
    close(dx, expected, size + 2 * wide[3][:, None] ** 3 * np.abs(wide[1]) * inner, x.shape[1] + 8)
    close(dgamma, dgamma_exact + (2 if accumulate else 0), gamma_size + 2, len(x) + 4)


def test_rmsnorm_oracle_gradient_matches_finite_differences():
    rng = np.random.default_rng(5)
    x, dxn = rng.normal(size=(2, 3, 6))
    gamma = rng.normal(size=6)
    dx, dgamma = rmsnorm_gradient(dxn, x, gamma, rmsnorm(x, gamma, 1e-2)[1])

    def loss() -> float:
        return float((rmsnorm(x, gamma, 1e-2)[0] * dxn).sum())

    np.testing.assert_allclose(dx, numeric_gradient(loss, x), atol=1e-8)
    np.testing.assert_allclose(dgamma, numeric_gradient(loss, gamma), atol=1e-8)


@pytest.mark.parametrize("name", SETS)
def test_rmsnorm_shows_overflow_and_nan(name):
    x, gamma, dxn, _ = norm_inputs(np.float16, seed=6)
    x[3, 5] = np.nan
    x[4, 6] = np.inf
    xn, rstd = np.empty_like(x), np.empty(len(x), np.float32)
    call(name, "rmsnorm_forward", x=x, gamma=gamma, xn=xn, rstd=rstd, eps=1e-6)
    assert np.isnan(xn[3]).all()
    assert np.isnan(xn[4, 6])
    assert np.isfinite(np.delete(xn, [3, 4], axis=0)).all()
    x[3:5] = 1e-3
    rstd[:] = 1000
    dxn *= np.float16(1000)
    dx, dgamma = np.empty_like(x), np.empty_like(gamma)
    call(name, "rmsnorm_backward", dxn=dxn, x=x, gamma=gamma, rstd=rstd, dx=dx, dgamma=dgamma, accumulate=False)
    assert np.isinf(dx).any()
    assert np.isinf(dgamma).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_embedding_forward_copies_rows(name, dtype):
    rng = np.random.default_rng(7)
    table = rng.normal(size=(50, 33)).astype(dtype)
    table[3, :3] = np.inf, np.nan, ml_dtypes.finfo(dtype).smallest_subnormal
    tokens = rng.integers(0, 50, 70).astype(np.int32)
    tokens[:3] = 0, 49, 3
    y = np.empty((70, 33), dtype)
    call(name, "embedding_forward", tokens=tokens, table=table, y=y)
    np.testing.assert_array_equal(*f64(y, table[tokens]))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_embedding_backward(name, dtype, table_dtype, accumulate):
    rng = np.random.default_rng(8)
    tokens = rng.integers(0, 20, 70).astype(np.int32)
    dy = rng.normal(size=(70, 33)).astype(dtype)
    start = rng.normal(size=(30, 33)).astype(table_dtype)
    dtable = start.copy() if accumulate else np.full_like(start, np.nan)
    call(name, "embedding_backward", tokens=tokens, dy=dy, dtable=dtable, accumulate=accumulate)
    wide, base = f64(dy, start)
    expected, size = (base, np.abs(base)) if accumulate else (np.zeros_like(base), np.zeros_like(base))
    expected, size = expected.copy(), size.copy()
    np.add.at(expected, tokens, wide)
    np.add.at(size, tokens, np.abs(wide))
    close(dtable, expected, size, np.bincount(tokens).max() + 1)
    unused = np.setdiff1d(np.arange(30), tokens)
    same_bits(dtable[unused], start[unused] if accumulate else np.zeros_like(start[unused]))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("padding", [0, 7, 19, 29, -3, 30])  # the last three: nobody's token, or another peer's
@pytest.mark.parametrize("name", SETS)
def test_the_row_of_the_padding_token_gets_nothing(name, padding, accumulate):
    rng = np.random.default_rng(8)
    tokens = rng.integers(0, 20, 70).astype(np.int32)
    tokens[:3] = -2, 0, 19
    dy = rng.normal(size=(70, 33)).astype(np.float32)
    start = rng.normal(size=(30, 33)).astype(np.float16)
    padded, plain, others = (start.copy() for _ in range(3))
    dy[tokens == padding] = np.inf
    call(name, "embedding_backward", tokens=tokens, dy=dy, dtable=padded, accumulate=accumulate, padding_token=padding)
    call(name, "embedding_backward", tokens=tokens, dy=dy, dtable=plain, accumulate=accumulate)
    call(
        "reference",
        "embedding_backward",
        tokens=tokens,
        dy=dy,
        dtable=others,
        accumulate=accumulate,
        padding_token=padding,
    )
    close(padded, *f64(others, np.abs(others)), 8)
    rest = np.arange(30) != padding
    same_bits(padded[rest], plain[rest])
    if 0 <= padding < 30:
        same_bits(padded[padding], start[padding] if accumulate else np.zeros_like(start[0]))
        assert padding == 29 or np.isinf(plain[padding].astype(float)).all()


@pytest.mark.parametrize("name", SETS)
def test_embedding_backward_sums_in_float32_in_token_order(name):
    tokens = np.array([1, 0, 1, 1, 1], np.int32)
    dtable = np.empty((2, 4), np.float16)
    dy = np.repeat(np.array([2048, 7, 1, 1, 1], np.float16)[:, None], 4, axis=1)
    call(name, "embedding_backward", tokens=tokens, dy=dy, dtable=dtable, accumulate=False)
    assert (dtable[0] == 7).all()
    assert (dtable[1] == np.float16(2051)).all()  # rounded after each row it would stay at 2048
    wide = np.empty((2, 4), np.float32)
    rows = np.repeat(np.array([1e8, 7, 1, -1e8, 1], np.float32)[:, None], 4, axis=1)
    call(name, "embedding_backward", tokens=tokens, dy=rows, dtable=wide, accumulate=False)
    # ((1e8 + 1) - 1e8) + 1, or on a device, which may go pair by pair, (1e8 + 1) + (-1e8 + 1)
    assert {*wide[1].tolist()} <= ({1.0} if name in HOST_SETS else {0.0, 1.0})


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("name", SETS)
def test_tensor_peers_embed_the_words_that_they_have(name, accumulate):
    """Sums of whole numbers, which are exact in any order: y of all peers adds up, and rows of the table are those of one of them."""
    rng = np.random.default_rng(11)
    tokens = rng.integers(0, 30, 70).astype(np.int32)
    table, dy, start = (rng.integers(-9, 9, (rows, 33)).astype(np.float32) for rows in (30, 70, 30))
    dy[3], tokens[3] = np.inf, 29
    whole, dtable, y = np.full_like(dy, np.nan), start.copy(), np.zeros_like(dy)
    call(name, "embedding_forward", tokens=tokens, table=table, y=whole, scale=2.0)
    call(name, "embedding_backward", tokens=tokens, dy=dy, dtable=dtable, accumulate=accumulate)
    for words in (range(20), range(20, 30)):
        mine, part = tokens.copy(), np.full_like(dy, np.nan)
        number_within(mine, words)
        assert -2 in mine
        call(name, "embedding_forward", tokens=mine, table=table[words.start : words.stop], y=part, scale=2.0)
        y += part
        own = start[words.start : words.stop].copy()
        call(name, "embedding_backward", tokens=mine, dy=dy, dtable=own, accumulate=accumulate)
        np.testing.assert_array_equal(own, dtable[words.start : words.stop])
    np.testing.assert_array_equal(y, whole)


@pytest.mark.parametrize("token", [-1, 30])
@pytest.mark.parametrize("name", SETS)
def test_a_token_outside_the_table_is_refused(name, token):
    tokens, table, y = np.array([3, token], np.int32), np.zeros((30, 4), np.float16), np.zeros((2, 4), np.float16)
    with pytest.raises(IndexError, match=f"token {token} is outside a table of 30 rows"):
        call(name, "embedding_forward", tokens=tokens, table=table, y=y)
    with pytest.raises(IndexError, match=f"token {token} is outside a table of 30 rows"):
        call(name, "embedding_backward", tokens=tokens, dy=y, dtable=table, accumulate=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fast_and_reference_round_alike(dtype):
    """Where no sum is involved, or the same BLAS call makes it, the sets agree to the bit."""
    x = gemm_case(dict.fromkeys(("a", "b", "out", "bias", "residual"), dtype), 33, 47, 29, True, True, 9)
    results = []
    for name in HOST_SETS:
        out = x["out"].copy()
        options = {"trans_a": True, "trans_b": True, "accumulate": True, "bias": x["bias"], "residual": x["residual"]}
        call(name, "gemm", a=x["a"], b=x["b"], out=out, **options)
        turned = out[:, :40].copy()
        call(name, "rope", x=turned, heads=2, head_dim=20, seq_len=11, theta=1e4, inverse=False)
        results.append((out, turned))
    for one, other in zip(*results, strict=True):
        same_bits(one, other)


def big_calls() -> dict[str, dict]:
    rng = np.random.default_rng(10)

    def matrix(rows, columns):
        return rng.normal(size=(rows, columns)).astype(np.float16)

    x, y, z, u, w = (matrix(512, 1024) for _ in range(5))
    row, rstd = x[0].copy(), np.ones(512, np.float32)
    flat = [np.ones(1 << 19, np.float32) for _ in range(3)]
    tokens = rng.integers(0, 512, 512).astype(np.int32)
    spec = AttentionSpec(batch=2, seq_len=256, heads=8, kv_heads=8, head_dim=128)
    scores, probs = matrix(8 * 512, 256), matrix(8 * 512, 256)
    sums = [np.ones((512, 1024), np.float32) for _ in range(3)]
    state = {"acc": sums[0], "peak": np.ones((8, 512), np.float32), "total": np.ones((8, 512), np.float32)}
    lines = {"lse": np.ones((8, 512), np.float32), "delta": np.ones((8, 512), np.float32)}
    whole = [np.zeros((512, 512), np.float32) for _ in range(2)]
    head = {"xn": x, "table": y, "labels": tokens, "lse": rstd, "logits": np.empty((128, 512), np.float32)}
    adam = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.1, "decay": [(0, 1 << 19)]}
    packed = np.zeros(packed_bytes(512 * 1024, 4), np.uint8)
    return {
        "gemm": {"a": x, "b": y, "out": matrix(512, 512), "trans_b": True, "residual": matrix(512, 512)},
        "column_sum": {"a": x, "out": row, "accumulate": True},
        "rmsnorm_forward": {"x": x, "gamma": row, "xn": y, "rstd": rstd, "eps": 1e-5},
        "rmsnorm_backward": {
            "dxn": x,
            "x": y,
            "gamma": row,
            "rstd": rstd,
            "dx": z,
            "dgamma": row.copy(),
            "accumulate": True,
        },
        "rope": {"x": x, "heads": 8, "head_dim": 128, "seq_len": 256, "theta": 1e4, "inverse": False},
        "layernorm_forward": {
            "x": x,
            "gamma": row,
            "beta": row,
            "xn": y,
            "mean": rstd,
            "rstd": rstd.copy(),
            "eps": 1e-5,
        },
        "layernorm_backward": {
            "dxn": x,
            "x": y,
            "gamma": row,
            "mean": rstd,
            "rstd": rstd,
            "dx": z,
            "dgamma": row.copy(),
            "dbeta": row.copy(),
            "accumulate": True,
        },
        "head_norm_forward": {
            "x": x,
            "gamma": row[:128],
            "xn": y,
            "rstd": np.ones(8 * 512, np.float32),
            "heads": 8,
            "head_dim": 128,
            "eps": 1e-5,
        },
        "head_norm_backward": {
            "dxn": x,
            "x": y,
            "gamma": row[:128],
            "rstd": np.ones(8 * 512, np.float32),
            "dx": z,
            "dgamma": row[128:256],
            "heads": 8,
            "head_dim": 128,
            "accumulate": True,
        },
        "row_squares": {"x": x, "squares": rstd, "share": 0.5},
        "row_products": {"dxn": x, "x": y, "gamma": row, "products": rstd},
        "summed_norm_forward": {"x": x, "gamma": row, "squares": rstd, "xn": y, "width": 2048, "eps": 1e-5},
        "summed_norm_backward": {
            "dxn": x,
            "x": y,
            "gamma": row,
            "squares": rstd,
            "products": rstd.copy(),
            "dx": z,
            "dgamma": row.copy(),
            "width": 2048,
            "eps": 1e-5,
            "share": 0.5,
            "accumulate": True,
        },
        "geglu_forward": {"gate": x, "up": y, "prod": z},
        "geglu_backward": {"gate": x, "up": y, "dprod": z, "dgate": u, "dup": w},
        "relu2_forward": {"up": x, "act": y},
        "relu2_backward": {"up": x, "dact": y, "dup": z},
        "gelu_forward": {"up": x, "act": y},
        "gelu_backward": {"up": x, "dact": y, "dup": z},
        "position_forward": {"positions": x, "y": y, "seq_len": 256},
        "position_backward": {"dy": x, "dpositions": y, "seq_len": 256, "accumulate": False},
        "swiglu_forward": {"gate": x, "up": y, "prod": z},
        "swiglu_backward": {"gate": x, "up": y, "dprod": z, "dgate": u, "dup": w},
        "embedding_forward": {"tokens": tokens, "table": x, "y": y},
        "embedding_backward": {"tokens": tokens, "dy": x, "dtable": y, "accumulate": True},
        "head_forward": {**head, "loss": np.zeros(1), "normalise": True, "accumulate": True},
        "head_backward": {
            **head,
            "scale": np.ones(1, np.float32),
            "dxn": z,
            "dtable": u[:512],
            "denominator": 512.0,
            "normalise": True,
            "accumulate": True,
        },
        "head_backward_from_logits": {
            **head,
            "logits": whole[0],
            "dlogits": whole[1],
            "scale": np.ones(1, np.float32),
            "dxn": z,
            "dtable": u[:512],
            "denominator": 512.0,
            "normalise": True,
            "accumulate": True,
        },
        "attention_partial_forward": {"q": x, "k": y, "v": z, **state, "spec": spec.block, "accumulate": True},
        "attention_partial_finish": {**state, "o": x, "lse": lines["lse"], "heads": 8, "head_dim": 128},
        "attention_delta": {"o": x, "do": y, "delta": lines["delta"], "heads": 8, "head_dim": 128},
        "attention_partial_backward": {
            "q": x,
            "k": y,
            "v": z,
            "do": u,
            **lines,
            **dict(zip(("dq", "dk", "dv"), sums, strict=True)),
            "spec": spec.block,
            "accumulate": True,
        },
        "attention_scores_forward": {"q": x, "k": y, "scores": scores, "spec": spec},
        "attention_softmax_forward": {"scores": scores, "probs": probs, "spec": spec},
        "attention_values_forward": {"probs": probs, "v": z, "o": u, "spec": spec},
        "attention_values_backward": {"probs": probs, "v": z, "do": u, "dprobs": scores, "dv": w, "spec": spec},
        "attention_softmax_backward": {"probs": probs, "dprobs": scores, "dscores": scores, "spec": spec},
        "attention_scores_backward": {"q": x, "k": y, "dscores": scores, "dq": z, "dk": w, "spec": spec},
        "adamw": {
            **dict(zip(("master", "m", "v"), flat, strict=True)),
            "grad": x.reshape(-1),
            "view": y.reshape(-1),
            "step": 1,
            "grad_multiplier": 1.0,
            **adam,
        },
        "mean_of_replicas": {"parts": [x, y, z], "out": x, "accumulate": False, "divisor": 3.0},
        "quantise": {"a": x, "packed": packed, "bits": 4},
        "dequantise": {"packed": packed, "out": y, "bits": 4},
        "dequantise_nf4": {"packed": np.zeros(nf4_bytes(y.size), np.uint8), "out": y},
        "mean_of_quantised": {"parts": [packed] * 2, "out": z, "accumulate": True, "divisor": 2.0, "bits": 4},
        "all_finite": {"a": x},
        "cast": {"src": x.reshape(-1), "dst": flat[0]},
        "group_columns": {"src": x, "dst": y.reshape(4 * len(x), -1), "groups": 4, "inverse": False},
        "add": {"a": x, "b": y, "out": z},
        "scale": {"a": x, "out": y, "scale": 0.5},
        "zero": {"a": x},
        **expert_calls(512, 8, 2, hidden=1024, width=512),
    }


@pytest.mark.parametrize("kernel", sorted(KERNELS.keys() - {"attention_forward", "attention_backward"}))
@pytest.mark.sampled(2)
def test_fast_allocates_nothing_of_tensor_size(kernel):
    arguments = big_calls()[kernel]
    kernels = kernel_set("fast")
    kernels.prepare_rope(256, 128, 1e4)
    scratch = Scratch(kernels.scratch_bytes(kernel, **arguments))
    getattr(kernels, kernel)(**arguments, scratch=scratch)  # compiled before it is measured
    scratch.reset()
    tracemalloc.start()
    try:
        getattr(kernels, kernel)(**arguments, scratch=scratch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 16  # the arrays above are 1 MiB and more


@pytest.mark.parametrize("name", HOST_SETS)
def test_a_rank_with_one_row_of_the_table_gives_zeros_for_the_words_of_others(name):
    y = np.empty((2, 3), np.float16)
    call(name, "embedding_forward", tokens=np.array([OTHER_RANKS, 0], np.int32), table=np.ones((1, 3), np.float16), y=y)
    assert y.tolist() == [[0, 0, 0], [1, 1, 1]]
