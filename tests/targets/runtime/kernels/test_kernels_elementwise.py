"""Casts, sums, replicas, the optimiser, SwiGLU and rotation of both kernel sets against float64."""

from __future__ import annotations

import math

import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ratrain.targets.runtime.arena.dtypes import BFLOAT16
from ratrain.targets.runtime.kernels.fast import fast_flat, fast_numba
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    EPS,
    HOST_SETS,
    SETS,
    call,
    close,
    f64,
    numeric_gradient,
    same_bits,
    sigmoid,
    swiglu,
    swiglu_gradient,
)

LONG = 2 * 32768 + 777  # over two blocks of every kernel that works by blocks
BITS32 = hnp.arrays(np.uint32, st.integers(1, 70), elements=st.integers(0, 2**32 - 1))


def half(x: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return x.astype(np.float16)


@pytest.mark.parametrize("name", SETS)
def test_cast_of_every_half(name):
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide, back = np.empty(1 << 16, np.float32), np.empty(1 << 16, np.float16)
    call(name, "cast", src=halves, dst=wide)
    np.testing.assert_array_equal(wide, half(halves).astype(np.float32))
    call(name, "cast", src=wide, dst=back)
    np.testing.assert_array_equal(back, halves)
    same_bits(back[~np.isnan(back)], halves[~np.isnan(halves)])


@pytest.mark.parametrize("name", SETS)
@given(bits=BITS32)
def test_cast_to_half_rounds_as_ieee(name, bits):
    src = bits.view(np.float32)
    dst = np.empty(src.shape, np.float16)
    call(name, "cast", src=src, dst=dst)
    np.testing.assert_array_equal(dst, half(src))


@pytest.mark.parametrize("name", SETS)
def test_cast_of_every_bfloat(name):
    every = np.arange(1 << 16, dtype=np.uint16).view(BFLOAT16)
    wide, back = np.empty(1 << 16, np.float32), np.empty(1 << 16, BFLOAT16)
    call(name, "cast", src=every, dst=wide)
    same_bits(wide, (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32))
    call(name, "cast", src=wide, dst=back)
    nan = np.isnan(wide)
    same_bits(back[~nan], every[~nan])
    assert np.isnan(back[nan]).all()
    if name in HOST_SETS:  # that of PyTorch is a NaN of its own
        same_bits(back[nan], np.copysign(np.float32(np.nan), wide[nan]).astype(BFLOAT16))


@pytest.mark.parametrize("name", SETS)
@given(bits=BITS32)
def test_cast_to_bfloat_takes_the_nearest(name, bits):
    """Of the two neighbours with the upper half of the bits and one more; of equally near ones the even."""
    src = bits.view(np.float32)
    dst = np.empty(src.shape, BFLOAT16)
    call(name, "cast", src=src, dst=dst)
    number = ~np.isnan(src)
    rest = bits & 0xFFFF
    up = (rest > 0x8000) | ((rest == 0x8000) & (bits >> 16 & 1 == 1))
    same_bits(dst[number], ((bits >> 16) + up).astype(np.uint16)[number].view(BFLOAT16))
    assert np.isnan(dst[~number]).all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@given(rows=st.integers(1, 5), width=st.integers(1, 4), groups=st.integers(1, 4))
def test_runs_of_columns_lie_below_one_another_and_come_back(name, dtype, rows, width, groups):
    src = np.arange(rows * groups * width).reshape(rows, -1).astype(dtype)
    below, back = np.empty((groups * rows, width), dtype), np.empty_like(src)
    call(name, "group_columns", src=src, dst=below, groups=groups, inverse=False)
    np.testing.assert_array_equal(below, np.concatenate(np.hsplit(src, groups)))
    call(name, "group_columns", src=below, dst=back, groups=groups, inverse=True)
    np.testing.assert_array_equal(back, src)


@pytest.mark.parametrize("name", SETS)
def test_a_signalling_nan_is_not_finite(name):
    a = np.full(5, 0x7F81, np.uint16).view(BFLOAT16)
    assert call(name, "all_finite", a=a) is False


@pytest.mark.parametrize("name", SETS)
def test_cast_at_the_edges(name):
    src = np.array([65519.996, 65520, -7e4, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, -0.0, 1e-8, np.inf], np.float32)
    dst = np.empty(src.shape, np.float16)
    call(name, "cast", src=src, dst=dst)
    tiny = 2.0**-24
    np.testing.assert_array_equal(dst, np.array([65504, np.inf, -np.inf, tiny, 0, tiny, -0.0, 0, np.inf], np.float16))
    assert np.signbit(dst[6])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("alias", ["none", "a", "b", "both"])
def test_add(name, dtype, alias):
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(7, 1001)).astype(dtype) * dtype(2e-6 if n % 2 else 1) for n in range(2))
    if alias == "both":
        b = a
    expected = (a.astype(np.float32) + b.astype(np.float32)).astype(dtype)
    out = {"none": np.empty_like(a), "a": a, "b": b, "both": a}[alias]
    call(name, "add", a=a, b=b, out=out)
    same_bits(out, expected)


@pytest.mark.parametrize("name", SETS)
def test_add_overflows_to_infinity(name):
    a = np.array([6e4, -6e4, np.inf, np.inf, np.nan], np.float16)
    b = np.array([6e4, -6e4, 1, -np.inf, 0], np.float16)
    out = np.empty_like(a)
    call(name, "add", a=a, b=b, out=out)
    np.testing.assert_array_equal(out, np.array([np.inf, -np.inf, np.inf, np.nan, np.nan], np.float16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_zero(name, dtype):
    a = np.full((3, 100), np.nan, dtype)
    call(name, "zero", a=a)
    same_bits(a, np.zeros_like(a))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_all_finite_finds_one_bad_element_anywhere(name, dtype, bad):
    a = np.full(LONG, ml_dtypes.finfo(dtype).max, dtype)
    a[::3] = -ml_dtypes.finfo(dtype).smallest_subnormal
    assert call(name, "all_finite", a=a) is True
    for place in (0, 1, fast_flat.BLOCK - 1, fast_flat.BLOCK, 40000, LONG - 1):
        kept = a[place]
        a[place] = bad
        assert call(name, "all_finite", a=a) is False
        a[place] = kept


def mean_oracle(parts, out, divisor, accumulate):
    total = np.zeros(out.shape, np.float32)
    for part in parts:
        total += part.astype(np.float32)
    total *= np.float32(1 / divisor)
    return (total + out.astype(np.float32) if accumulate else total).astype(out.dtype)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("alias", [None, 0, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_mean_of_replicas(name, dtype, alias, accumulate):
    rng = np.random.default_rng(1)
    parts = [rng.normal(size=LONG).astype(dtype) for _ in range(3)]
    out = rng.normal(size=LONG).astype(dtype) if alias is None else parts[alias]
    exact = sum(part.astype(np.float64) for part in parts) / 3 + (out.astype(np.float64) if accumulate else 0)
    size = sum(np.abs(part.astype(np.float64)) for part in [*parts, out])
    expected = mean_oracle(parts, out, 3.0, accumulate)
    assert call(name, "mean_of_replicas", parts=parts, out=out, accumulate=accumulate, divisor=3.0) is True
    close(out, exact, size, 6)
    same_bits(out, expected)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_the_mean_of_one_replica_is_a_sum_from_zero(name, dtype, alias, accumulate):
    part = np.random.default_rng(1).normal(size=LONG).astype(dtype)
    part[::7] = -0.0
    out = part if alias else np.zeros(LONG, dtype)
    expected = mean_oracle([part], out, 4.0, accumulate)
    assert call(name, "mean_of_replicas", parts=[part], out=out, accumulate=accumulate, divisor=4.0) is True
    same_bits(out, expected)
    assert not np.signbit(out[::7]).any()


@pytest.mark.parametrize("name", SETS)
def test_mean_of_replicas_sums_in_order_and_wider_than_it_stores(name):
    parts = [np.full(5, value, np.float16) for value in (2048, 1, 1, 1)]
    out = np.empty(5, np.float32)
    assert call(name, "mean_of_replicas", parts=parts, out=out, accumulate=False, divisor=1.0)
    assert (out == 2051).all()  # each addition alone would stay at 2048 in float16
    big = [np.full(5, value, np.float16) for value in (60000, 60000, -60000)]
    narrow = np.empty(5, np.float16)
    assert call(name, "mean_of_replicas", parts=big, out=narrow, accumulate=False, divisor=1.0)
    assert (narrow == 60000).all()
    three = [np.full(5, value, np.float32) for value in (1e8, 1, -1e8)]
    call(name, "mean_of_replicas", parts=three, out=out, accumulate=False, divisor=1.0)
    assert (out == 0).all()  # (1e8 + 1) - 1e8: another order gives 1


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("name", SETS)
def test_mean_of_replicas_reports_what_is_not_finite(name, bad):
    clean, broken = np.ones(LONG, np.float16), np.ones(LONG, np.float16)
    out = np.empty_like(clean)
    for place in (0, 32768, LONG - 1):
        broken[:] = 1
        broken[place] = bad
        assert call(name, "mean_of_replicas", parts=[clean, broken], out=out, accumulate=False, divisor=2.0) is False
        assert not np.isfinite(out[place])
        assert np.isfinite(np.delete(out, place)).all()
    large = np.full(LONG, 60000, np.float16)
    assert call(name, "mean_of_replicas", parts=[large, large], out=out, accumulate=False, divisor=1.0) is False
    assert call(name, "mean_of_replicas", parts=[broken], out=clean, accumulate=False, divisor=2.0) is False
    assert np.isinf(out).all()


def adamw_oracle(p, m, v, g, *, step, lr, beta1, beta2, eps, weight_decay, decayed):
    """`torch.optim.AdamW`, single tensor, in float64."""
    p = np.where(decayed, p * (1 - lr * weight_decay), p)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denominator = np.sqrt(v) / math.sqrt(1 - beta2**step) + eps
    return p - lr / (1 - beta1**step) * m / denominator, m, v


@pytest.mark.parametrize("view_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_adamw_follows_torch(name, dtype, view_dtype):
    rng = np.random.default_rng(2)
    decay = [(0, 100), (5000, LONG - 64)]
    decayed = np.zeros(LONG, bool)
    for start, stop in decay:
        decayed[start:stop] = True
    options = {"lr": 3e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    p, m, v = rng.normal(size=LONG).astype(np.float32), np.zeros(LONG, np.float32), np.zeros(LONG, np.float32)
    view = None if view_dtype is None else np.full(LONG, np.nan, view_dtype)
    exact = f64(p, m, v)
    for step in range(1, 5):
        grad = (rng.normal(size=LONG) * 256).astype(dtype)
        size = np.abs(exact[0]) + 10 * options["lr"]
        before = f64(p, m, v)
        exact = adamw_oracle(*before, grad.astype(np.float64) / 256, step=step, decayed=decayed, **options)
        arguments = {"master": p, "m": m, "v": v, "grad": grad, "view": view}
        call(name, "adamw", **arguments, step=step, grad_multiplier=1 / 256, decay=decay, **options)
        close(m, exact[1], np.abs(before[1]) + np.abs(grad.astype(np.float64)) / 256, 4)
        close(v, exact[2], exact[2], 6)
        # |m| / sqrt(v) is at most 10 here, so its share of p, and of the error, is at most 10 * lr * 16 roundings
        close(p, exact[0], size + 160 * options["lr"], 4)
        if view is not None:
            same_bits(view, p.astype(view_dtype))


def test_adamw_is_the_same_in_both_sets_and_at_any_place():
    rng = np.random.default_rng(3)
    options = {"step": 7, "grad_multiplier": 0.5, "lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-6}
    state = [rng.normal(size=1000).astype(np.float32) for _ in range(2)] + [rng.random(1000, np.float32)]
    grad = rng.normal(size=1000).astype(np.float16)
    results = []
    for name, cut in (("reference", 0), ("fast", 0), ("fast", 192), ("fast", 333)):
        arrays = [x.copy() for x in state]
        for part in (slice(0, cut), slice(cut, 1000)):
            p, m, v = (x[part] for x in arrays)
            call(name, "adamw", master=p, m=m, v=v, grad=grad[part], view=None, weight_decay=0.1, decay=[], **options)
        results.append(arrays)
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            same_bits(x, y)


@pytest.mark.parametrize("name", SETS)
def test_adamw_shows_an_infinite_gradient(name):
    p, m, v = np.ones((3, 10), np.float32)
    view = np.empty(10, np.float16)
    grad = np.array([np.inf, np.nan] + [0] * 8, np.float16)
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decay": []}
    call(name, "adamw", master=p, m=m, v=v, grad=grad, view=view, step=1, grad_multiplier=1.0, **options)
    assert np.isnan(p[:2]).all()
    assert np.isnan(view[:2]).all()
    assert np.isfinite(p[2:]).all()


def gates(dtype, seed=4):
    rng = np.random.default_rng(seed)
    gate, up, dprod = (rng.normal(size=(9, 1000)).astype(dtype) * dtype(3) for _ in range(3))
    gate[0, :9] = 0, 50, -50, 90, -90, 1e4, -1e4, 6e-8, -6e-8
    return gate, up, dprod


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_swiglu(name, dtype):
    gate, up, dprod = gates(dtype)
    prod = np.empty_like(gate)
    call(name, "swiglu_forward", gate=gate, up=up, prod=prod)
    g, u, d = f64(gate, up, dprod)
    # exp(-g) has the rounding error of its argument, so |g| roundings; where it overflows, above 88.7, the sigmoid
    # is 0 instead of less than 3e-39
    roundings = 12 + np.minimum(np.abs(g), 90)
    lost = 3e-39 / EPS * (1 + np.abs(g))
    exact = swiglu(g, u)
    close(prod, exact, np.abs(exact) * roundings + np.abs(u) * lost, 1)
    dgate, dup = np.empty_like(gate), np.empty_like(gate)
    call(name, "swiglu_backward", gate=gate, up=up, dprod=dprod, dgate=dgate, dup=dup)
    dgate_exact, dup_exact = swiglu_gradient(g, u, d)
    # 1 + g * (1 - sigmoid) cancels: its error is that of a sum of magnitudes
    close(dgate, dgate_exact, np.abs(d * u) * (sigmoid(g) * (1 + np.abs(g)) * roundings + lost), 1)
    close(dup, dup_exact, np.abs(dup_exact) * roundings + np.abs(d) * lost, 1)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_backward_in_place(name, dtype):
    gate, up, dprod = gates(dtype, seed=5)
    dgate, dup = np.empty_like(gate), np.empty_like(gate)
    call(name, "swiglu_backward", gate=gate, up=up, dprod=dprod, dgate=dgate, dup=dup)
    for a, b in ((0, 1), (2, 0), (1, 2)):
        arrays = [gate.copy(), up.copy(), dprod.copy()]
        g, u, d = arrays
        call(name, "swiglu_backward", gate=g, up=u, dprod=d, dgate=arrays[a], dup=arrays[b])
        same_bits(arrays[a], dgate)
        same_bits(arrays[b], dup)


def test_swiglu_oracle_gradient_matches_finite_differences():
    rng = np.random.default_rng(6)
    gate, up, dprod = rng.normal(size=(3, 4, 5)) * 2
    dgate, dup = swiglu_gradient(gate, up, dprod)

    def loss() -> float:
        return float((swiglu(gate, up) * dprod).sum())

    np.testing.assert_allclose(dgate, numeric_gradient(loss, gate), atol=1e-8)
    np.testing.assert_allclose(dup, numeric_gradient(loss, up), atol=1e-8)


@pytest.mark.parametrize("name", SETS)
def test_swiglu_shows_overflow_and_nan(name):
    gate, up = np.array([[300, np.nan, np.inf, 1, -np.inf]], np.float16), np.array([[300, 1, 1, np.nan, 1]], np.float16)
    prod = np.empty_like(gate)
    call(name, "swiglu_forward", gate=gate, up=up, prod=prod)
    np.testing.assert_array_equal(prod, np.array([[np.inf, np.nan, np.inf, np.nan, np.nan]], np.float16))


def test_fast_swiglu_does_not_depend_on_the_place():
    gate, up, _ = gates(np.float16, seed=7)
    whole = np.empty_like(gate)
    call("fast", "swiglu_forward", gate=gate, up=up, prod=whole)
    for row, width in ((3, 1), (4, 17), (5, 999)):
        part = np.empty((1, width), np.float16)
        call("fast", "swiglu_forward", gate=gate[row, -width:][None], up=up[row, -width:][None], prod=part)
        same_bits(part[0], whole[row, -width:])


def rope_oracle(x, heads, head_dim, seq_len, theta, inverse):
    """Hugging Face's formulas, with its float32 angles: x cos + rotate_half(x) sin."""
    inv_freq = np.float32(1) / np.float32(theta) ** (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    angle = np.arange(seq_len, dtype=np.float32)[:, None] * inv_freq
    angle = np.concatenate([angle, angle], axis=1).astype(np.float64)[None, :, None]
    x = x.reshape(-1, seq_len, heads, head_dim)
    low, high = np.split(x, 2, axis=-1)
    turned = np.concatenate([-high, low], axis=-1)
    out = x * np.cos(angle) + turned * np.sin(angle) * (-1 if inverse else 1)
    return out.reshape(-1, heads * head_dim)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "seq_len", "batch"), [(1, 2, 5, 1), (3, 64, 33, 2), (2, 20, 300, 1)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_rope(name, dtype, heads, head_dim, seq_len, batch, inverse):
    x = np.random.default_rng(8).normal(size=(batch * seq_len, heads * head_dim)).astype(dtype)
    shape = {"heads": heads, "head_dim": head_dim, "seq_len": seq_len, "theta": 10000.0, "inverse": inverse}
    exact = rope_oracle(x.astype(np.float64), **shape)
    size = np.abs(rope_oracle(np.abs(x).astype(np.float64), **shape)) + np.abs(exact)
    call(name, "rope", x=x, **shape)
    close(x, exact, size + np.abs(exact).max(), 4)


@pytest.mark.parametrize("name", SETS)
def test_rope_inverse_undoes_it(name):
    x = np.random.default_rng(9).normal(size=(64, 48)).astype(np.float32)
    turned = x.copy()
    for inverse in (False, True):
        call(name, "rope", x=turned, heads=3, head_dim=16, seq_len=32, theta=5e5, inverse=inverse)
    close(turned, x.astype(np.float64), np.abs(x).max(), 12)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_rope_of_slices_is_that_of_the_sequences(name, dtype, inverse):
    x = np.random.default_rng(10).normal(size=(2, 70, 24)).astype(dtype)
    shape = {"heads": 3, "head_dim": 8, "theta": 1e4, "inverse": inverse}
    whole, slices = x.copy(), x.copy()
    call(name, "rope", x=whole.reshape(140, 24), seq_len=70, **shape)
    for low, high in ((0, 9), (9, 50), (50, 70)):
        part = slices[:, low:high].reshape(-1, 24).copy()
        call(name, "rope", x=part, seq_len=high - low, first_position=low, **shape)
        slices[:, low:high] = part.reshape(2, -1, 24)
    same_bits(slices, whole)


def test_fast_refuses_strided_arrays():
    a = np.zeros((4, 8), np.float16)
    with pytest.raises(ValueError, match="not C-contiguous"):
        call("fast", "cast", src=a[:, ::2], dst=np.zeros((4, 4), np.float32))


def test_fast_exponential():
    @numba.njit
    def exponentials(x, out):
        for i in range(x.size):
            out[i] = fast_numba.exp32(x[i])

    x = np.concatenate([np.linspace(-86.5, 88.722, 200001), np.linspace(-1, 1, 100001)]).astype(np.float32)
    out = np.empty_like(x)
    exponentials(x, out)
    assert (np.abs(out / np.exp(x.astype(np.float64)) - 1) <= EPS).all()
    edges = np.array([np.nan, np.inf, -np.inf, -86.6, 88.73, 0, -0.0], np.float32)
    out = np.empty_like(edges)
    exponentials(edges, out)
    np.testing.assert_array_equal(out, np.array([np.nan, np.inf, 0, 0, np.inf, 1, 1], np.float32))
