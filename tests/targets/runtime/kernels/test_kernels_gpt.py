"""Layer norm, GELU and learned positions of both kernel sets against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    EPS,
    SETS,
    call,
    close,
    f64,
    numeric_gradient,
    same_bits,
)

Wide = npt.NDArray[np.float64]


def layernorm(x: Wide, gamma: Wide, beta: Wide, eps: float) -> tuple[Wide, Wide, Wide]:
    """xn, mean, rstd."""
    mean = x.mean(axis=1)
    rstd = 1 / np.sqrt(x.var(axis=1) + eps)
    return (x - mean[:, None]) * rstd[:, None] * gamma + beta, mean, rstd


def layernorm_gradient(dxn: Wide, x: Wide, gamma: Wide, mean: Wide, rstd: Wide) -> tuple[Wide, Wide, Wide]:
    """dx, dgamma, dbeta."""
    normed = (x - mean[:, None]) * rstd[:, None]
    weighted = dxn * gamma
    dx = weighted - weighted.mean(axis=1, keepdims=True) - normed * (weighted * normed).mean(axis=1, keepdims=True)
    return dx * rstd[:, None], (dxn * normed).sum(axis=0), dxn.sum(axis=0)


def gelu(up: Wide) -> Wide:
    """`gelu_new` as it is written in Hugging Face's `NewGELUActivation`."""
    return 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))


def gelu_gradient(up: Wide) -> Wide:
    z = np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)
    slope = np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * up**2)
    return 0.5 * (1 + np.tanh(z)) + 0.5 * up * (1 - np.tanh(z) ** 2) * slope


def inputs(dtype: Any, seed: int, tokens: int = 300, hidden: int = 200) -> tuple[npt.NDArray[Any], ...]:
    """x (off centre), gamma, beta, dxn, residual."""
    rng = np.random.default_rng(seed)
    x, dxn, residual = rng.normal(size=(3, tokens, hidden))
    gamma, beta = 1 + rng.normal(size=(2, hidden)) / 4
    return tuple(value.astype(dtype) for value in (x + 0.5, gamma, beta, dxn, residual))


@pytest.mark.parametrize("scale", [1.0, 3e-5, 2000.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_layernorm_forward(name: str, dtype: Any, scale: float) -> None:
    x, gamma, beta, _, _ = inputs(dtype, seed=3)
    x *= dtype(scale)
    xn, mean, rstd = np.empty_like(x), *np.empty((2, len(x)), np.float32)
    call(name, "layernorm_forward", x=x, gamma=gamma, beta=beta, xn=xn, mean=mean, rstd=rstd, eps=1e-6)
    wide = f64(x, gamma, beta)
    expected, mean_exact, rstd_exact = layernorm(*wide, 1e-6)
    width = x.shape[1]
    largest = np.abs(wide[0]).mean(axis=1)
    close(mean, mean_exact, largest, width + 2)
    # the deviations carry the rounding of the mean, so the magnitude of a term is |x| + |mean|
    spread = np.maximum(1, largest * rstd_exact)
    close(rstd, rstd_exact, rstd_exact * spread, width + 8)
    size = (np.abs(wide[0]) + largest[:, None]) * (rstd_exact * spread)[:, None] * np.abs(wide[1]) + np.abs(wide[2])
    close(xn, expected, size, width + 12)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("alias", ["none", "dxn", "residual"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_layernorm_backward(name: str, dtype: Any, alias: str, accumulate: bool) -> None:
    x, gamma, beta, dxn, residual = inputs(dtype, seed=4)
    _, mean, rstd = (value.astype(np.float32) for value in layernorm(*f64(x, gamma, beta), 1e-5))
    dgamma, dbeta = np.full_like(gamma, 2), np.full_like(gamma, 3)
    wide = f64(dxn, x, gamma, mean, rstd)
    dx_exact, dgamma_exact, dbeta_exact = layernorm_gradient(*wide)
    normed = (np.abs(wide[1]) + np.abs(wide[3])[:, None]) * wide[4][:, None]
    weighted = np.abs(wide[0] * wide[2])
    size = weighted + weighted.mean(axis=1, keepdims=True) + normed * (weighted * normed).mean(axis=1, keepdims=True)
    size = size * wide[4][:, None] + np.abs(residual.astype(np.float64))
    used = None if alias == "none" else residual
    dx = {"none": np.empty_like(x), "dxn": dxn, "residual": residual}[alias]
    expected = dx_exact + (residual.astype(np.float64) if used is not None else 0)
    sums = {"dgamma": dgamma, "dbeta": dbeta}
    given = {"dxn": dxn, "x": x, "gamma": gamma, "mean": mean, "rstd": rstd, "dx": dx, **sums, "residual": used}
    grad = np.abs(wide[0])
    call(name, "layernorm_backward", **given, accumulate=accumulate)
    close(dx, expected, size, x.shape[1] + 10)
    close(dgamma, dgamma_exact + (2 if accumulate else 0), (grad * normed).sum(axis=0) + 2, len(x) + 6)
    close(dbeta, dbeta_exact + (3 if accumulate else 0), grad.sum(axis=0) + 3, len(x) + 4)


def test_layernorm_oracle_gradient_matches_finite_differences() -> None:
    rng = np.random.default_rng(5)
    x, dxn = rng.normal(size=(2, 3, 6))
    gamma, beta = rng.normal(size=(2, 6))
    _, mean, rstd = layernorm(x, gamma, beta, 1e-2)
    dx, dgamma, dbeta = layernorm_gradient(dxn, x, gamma, mean, rstd)

    def loss() -> float:
        return float((layernorm(x, gamma, beta, 1e-2)[0] * dxn).sum())

    for exact, parameter in ((dx, x), (dgamma, gamma), (dbeta, beta)):
        np.testing.assert_allclose(exact, numeric_gradient(loss, parameter), atol=1e-8)


@pytest.mark.parametrize("name", SETS)
def test_layernorm_shows_overflow_and_nan(name: str) -> None:
    x, gamma, beta, dxn, _ = inputs(np.float16, seed=6, tokens=23)
    x[3, 5], x[4, 6] = np.nan, np.inf
    xn, mean, rstd = np.empty_like(x), *np.empty((2, len(x)), np.float32)
    call(name, "layernorm_forward", x=x, gamma=gamma, beta=beta, xn=xn, mean=mean, rstd=rstd, eps=1e-6)
    assert np.isnan(xn[3]).all()
    assert np.isnan(xn[4, 6])
    assert np.isfinite(np.delete(xn, [3, 4], axis=0)).all()
    x[3:5], mean[:], rstd[:] = 1e-3, 0, 1000
    dx, dgamma, dbeta = np.empty_like(x), np.empty_like(gamma), np.empty_like(beta)
    given = {"dxn": dxn * np.float16(1000), "x": x, "gamma": gamma, "mean": mean, "rstd": rstd}
    call(name, "layernorm_backward", **given, dx=dx, dgamma=dgamma, dbeta=dbeta, accumulate=False)
    assert np.isinf(dx).any()
    assert np.isinf(dgamma).any()


def ups(dtype: Any, seed: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    rng = np.random.default_rng(seed)
    up, dact = (rng.normal(size=(2, 9, 1000)) * 3).astype(dtype)
    up[0, :11] = 0, 5, -5, 12, -12, 90, -90, 1e4, -1e4, 6e-8, -6e-8
    return up, dact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_gelu(name: str, dtype: Any) -> None:
    up, dact = ups(dtype, seed=7)
    act, dup = np.empty_like(up), np.empty_like(up)
    call(name, "gelu_forward", up=up, act=act)
    call(name, "gelu_backward", up=up, dact=dact, dup=dup)
    u, d = f64(up, dact)
    # the exponential has the rounding error of its argument 2 z, of which no more than 90 matters
    argument = np.minimum(np.abs(2 * np.sqrt(2 / np.pi) * (u + 0.044715 * u**3)), 90)
    # 1e-15: the cancellation of 1 + tanh in the oracle itself
    close(act, gelu(u), np.abs(gelu(u)) * (12 + argument) + np.abs(u) * 1e-15 / EPS, 1)
    slope = 1 + np.abs(u) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * u**2) * np.exp(-argument)
    close(dup, d * gelu_gradient(u), np.abs(d) * slope, 16 + argument)


def test_gelu_oracle_gradient_matches_finite_differences() -> None:
    up = np.random.default_rng(8).normal(size=(4, 5)) * 2
    np.testing.assert_allclose(gelu_gradient(up), numeric_gradient(lambda: float(gelu(up).sum()), up), atol=1e-8)


@pytest.mark.parametrize("name", SETS)
def test_gelu_shows_nan_and_keeps_large_values(name: str) -> None:
    up = np.array([[np.nan, np.inf, 6e4, -6e4, 1]], np.float16)
    act, dup = np.empty_like(up), np.empty_like(up)
    call(name, "gelu_forward", up=up, act=act)
    np.testing.assert_array_equal(act[0, :4], np.array([np.nan, np.inf, 6e4, 0], np.float16))
    call(name, "gelu_backward", up=up, dact=np.ones_like(up), dup=dup)
    assert np.isnan(dup[0, 0])
    np.testing.assert_array_equal(dup[0, 2:4], np.array([1, 0], np.float16))


def test_fast_gelu_does_not_depend_on_the_place() -> None:
    up, dact = ups(np.float16, seed=9)
    whole, gradient = np.empty_like(up), np.empty_like(up)
    call("fast", "gelu_forward", up=up, act=whole)
    call("fast", "gelu_backward", up=up, dact=dact, dup=gradient)
    for row, width in ((3, 1), (4, 17), (5, 999)):
        part, slope = np.empty((2, 1, width), np.float16)
        mine, theirs = up[row, -width:][None].copy(), dact[row, -width:][None].copy()
        call("fast", "gelu_forward", up=mine, act=part)
        call("fast", "gelu_backward", up=mine, dact=theirs, dup=slope)
        same_bits(part[0], whole[row, -width:])
        same_bits(slope[0], gradient[row, -width:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_positions_are_added_by_the_place_in_a_sequence(name: str, dtype: Any) -> None:
    rng = np.random.default_rng(10)
    y, positions = rng.normal(size=(3 * 11, 33)).astype(dtype), rng.normal(size=(20, 33)).astype(dtype)
    expected = (y.astype(np.float32) + np.tile(positions[:11], (3, 1)).astype(np.float32)).astype(dtype)
    call(name, "position_forward", positions=positions, y=y, seq_len=11)
    same_bits(y, expected)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_gradients_of_positions(name: str, dtype: Any, table_dtype: Any, accumulate: bool) -> None:
    rng = np.random.default_rng(11)
    dy, start = rng.normal(size=(5 * 12, 33)).astype(dtype), rng.normal(size=(20, 33)).astype(table_dtype)
    table = start.copy() if accumulate else np.full_like(start, np.nan)
    call(name, "position_backward", dy=dy, dpositions=table, seq_len=12, accumulate=accumulate)
    wide, base = f64(dy.reshape(5, 12, 33), start)
    before = base[:12] if accumulate else np.zeros((12, 33))
    close(table[:12], wide.sum(axis=0) + before, np.abs(wide).sum(axis=0) + np.abs(before), 6)
    same_bits(table[12:], start[12:] if accumulate else np.zeros_like(start[12:]))


@pytest.mark.parametrize("name", SETS)
def test_gradients_of_positions_are_summed_in_float32_in_order(name: str) -> None:
    narrow, wide = np.empty((1, 4), np.float16), np.empty((1, 4), np.float32)
    for values, table, total in (([2048, 1, 1, 1], narrow, 2051), ([1e8, 1, -1e8, 1], wide, 1)):
        dy = np.repeat(np.array(values, table.dtype)[:, None], 4, axis=1)
        call(name, "position_backward", dy=dy, dpositions=table, seq_len=1, accumulate=False)
        assert (table == table.dtype.type(total)).all()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_positions_of_slices_are_those_of_the_sequences(name: str, dtype: Any, accumulate: bool) -> None:
    rng = np.random.default_rng(12)
    y, positions = rng.normal(size=(3, 40, 17)).astype(dtype), rng.normal(size=(50, 17)).astype(dtype)
    whole, gradient = y.copy(), positions.copy()
    call(name, "position_forward", positions=positions, y=whole.reshape(-1, 17), seq_len=40)
    call(name, "position_backward", dy=y.reshape(-1, 17), dpositions=gradient, seq_len=40, accumulate=accumulate)
    sums = positions.copy()
    for low, high in ((30, 40), (8, 30), (0, 8)):
        part, place = y[:, low:high].reshape(-1, 17).copy(), {"seq_len": high - low, "first_position": low}
        before = sums.copy()
        call(name, "position_backward", dy=part, dpositions=sums, accumulate=accumulate, **place)
        others = np.delete(before, np.s_[low:high], axis=0)
        same_bits(np.delete(sums, np.s_[low:high], axis=0), others if accumulate else np.zeros_like(others))
        same_bits(sums[low:high], gradient[low:high])
        call(name, "position_forward", positions=positions, y=part, **place)
        same_bits(part.reshape(3, -1, 17), whole[:, low:high])
