"""What families beyond LLaMA and GPT-2 have, of both kernel sets against float64: norms of heads, activations, rotary variants, scales."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numba
import numpy as np
import numpy.typing as npt
import pytest

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.mt3000.kernels.tiled import Tiled
from ratrain.targets.program.attention_spec import AttentionSpec
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.runtime.kernels.fast import fast_numba
from tests.targets.runtime.kernels.kernels_oracle import (
    DTYPES,
    EPS,
    SETS,
    call,
    close,
    f64,
    head,
    head_gradient,
    numeric_gradient,
    rmsnorm,
    rmsnorm_gradient,
    same_bits,
)

Values = npt.NDArray[Any]
Wide = npt.NDArray[np.float64]

_erf = np.vectorize(math.erf, otypes=[float])


def random(seed: int, *shape: int, dtype: Any) -> Values:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("heads", "head_dim", "tokens"), [(1, 8, 5), (6, 16, 23), (3, 128, 200)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_head_norm(name: str, dtype: Any, heads: int, head_dim: int, tokens: int, unit_offset: bool) -> None:
    x, dxn = random(1, 2, tokens, heads * head_dim, dtype=dtype)
    gamma, xn, rstd = random(2, head_dim, dtype=dtype), np.empty_like(x), np.empty(tokens * heads, np.float32)
    options = {"heads": heads, "head_dim": head_dim, "unit_offset": unit_offset}
    call(name, "head_norm_forward", x=x, gamma=gamma, xn=xn, rstd=rstd, eps=1e-6, **options)
    wide, grad = (array.astype(np.float64).reshape(-1, head_dim) for array in (x, dxn))
    weight = gamma.astype(np.float64) + unit_offset
    expected, rstd_exact = rmsnorm(wide, weight, 1e-6)
    close(rstd, rstd_exact, rstd_exact, head_dim + 4)
    close(xn.reshape(-1, head_dim), expected, np.abs(wide * rstd_exact[:, None]) * (np.abs(weight) + 1), head_dim + 8)

    dx_exact, dgamma_exact = rmsnorm_gradient(grad, wide, weight, rstd.astype(np.float64))
    r = rstd.astype(np.float64)[:, None]
    terms = np.abs(grad) * (np.abs(weight) + 1)
    size = r * terms + r**3 * np.abs(wide) * (terms * np.abs(wide)).mean(axis=1, keepdims=True)
    for accumulate in (False, True):
        for alias in (False, True):
            dx, dgamma = dxn.copy() if alias else np.empty_like(x), np.full_like(gamma, 2)
            given = {"dxn": dx if alias else dxn, "x": x, "gamma": gamma, "rstd": rstd, "dx": dx, "dgamma": dgamma}
            call(name, "head_norm_backward", **given, **options, accumulate=accumulate)
            close(dx.reshape(-1, head_dim), dx_exact, size, head_dim + 12)
            sums = np.abs(grad * wide * r).sum(axis=0) + 2
            close(dgamma, dgamma_exact + 2 * accumulate, sums, tokens * heads + 6)


@pytest.mark.parametrize(("parts", "copies"), [(2, 1), (4, 1), (1, 2), (3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_norms_of_parts_of_rows_are_that_of_the_whole(name: str, dtype: Any, parts: int, copies: int) -> None:
    """Several have each part, and parts of the gradient of its norm: squares count once, and what they have adds up to the gradients."""
    tokens, width, eps = 23, 24, 1e-6
    x = random(1, tokens, parts * width, dtype=dtype)
    dxn = random(2, copies, tokens, parts * width, dtype=dtype)
    gamma = random(3, parts * width, dtype=dtype)
    columns = [slice(part * width, (part + 1) * width) for part in range(parts) for _ in range(copies)]
    sources = [np.ascontiguousarray(x[:, part]) for part in columns]
    grads = [np.ascontiguousarray(dxn[number % copies][:, part]) for number, part in enumerate(columns)]
    weights = [np.ascontiguousarray(gamma[part]) for part in columns]
    squares, products = (np.zeros((len(columns), tokens), np.float32) for _ in range(2))
    for number, (source, grad, weight) in enumerate(zip(sources, grads, weights, strict=True)):
        call(name, "row_squares", x=source, squares=squares[number], share=1 / copies)
        call(name, "row_products", dxn=grad, x=source, gamma=weight, products=products[number])
    sums = {"squares": squares.sum(axis=0), "products": products.sum(axis=0)}
    wide, above, factors = f64(x, dxn, gamma)
    expected, rstd = rmsnorm(wide, factors, eps)
    r, inner = rstd[:, None], (above.sum(axis=0) * factors * wide).sum(axis=1, keepdims=True)
    along = r**3 * wide * inner / (parts * width) / copies
    of_copies = r * factors * above - along
    np.testing.assert_allclose(of_copies.sum(axis=0), rmsnorm_gradient(above.sum(axis=0), wide, factors, rstd)[0])
    largest = r * (np.abs(above) * np.abs(factors)).sum(axis=0)
    largest += r**3 * np.abs(wide) * (largest / r * np.abs(wide)).mean(axis=1, keepdims=True)
    options = {"width": parts * width, "eps": eps}
    for number, part in enumerate(columns):
        source, weight = sources[number], weights[number]
        xn, dx, dgamma = np.empty_like(source), np.empty_like(source), np.full_like(weight, 2)
        call(name, "summed_norm_forward", x=source, gamma=weight, squares=sums["squares"], xn=xn, **options)
        close(xn, expected[:, part], np.abs(expected[:, part]), parts * width + 12)
        given = {"dxn": grads[number], "x": source, "gamma": weight, **sums, "dx": dx, "dgamma": dgamma, **options}
        call(name, "summed_norm_backward", **given, share=1 / copies, accumulate=True)
        close(dx, of_copies[number % copies][:, part], largest[:, part], 2 * parts * width + 20)
        terms = above[number % copies][:, part] * wide[:, part] * r
        close(dgamma, terms.sum(axis=0) + 2, np.abs(terms).sum(axis=0) + 2, parts * width + tokens + 12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_rmsnorm_with_a_unit_offset_is_that_of_one_more(name: str, dtype: Any) -> None:
    x, dxn, residual = random(3, 3, 300, 96, dtype=dtype)
    gamma = random(4, 96, dtype=dtype)
    xn, rstd, dx, dgamma = np.empty_like(x), np.empty(300, np.float32), np.empty_like(x), np.full_like(gamma, 2)
    call(name, "rmsnorm_forward", x=x, gamma=gamma, xn=xn, rstd=rstd, eps=1e-5, unit_offset=True)
    given = {"dxn": dxn, "x": x, "gamma": gamma, "rstd": rstd, "dx": dx, "dgamma": dgamma, "residual": residual}
    call(name, "rmsnorm_backward", **given, accumulate=True, unit_offset=True)
    wide, grad, weight = x.astype(np.float64), dxn.astype(np.float64), gamma.astype(np.float64) + 1
    expected, rstd_exact = rmsnorm(wide, weight, 1e-5)
    close(xn, expected, np.abs(wide * rstd_exact[:, None]) * (np.abs(weight) + 1), 104)
    dx_exact, dgamma_exact = rmsnorm_gradient(grad, wide, weight, rstd.astype(np.float64))
    r, terms = rstd.astype(np.float64)[:, None], np.abs(grad) * (np.abs(weight) + 1)
    size = r * terms + r**3 * np.abs(wide) * (terms * np.abs(wide)).mean(axis=1, keepdims=True)
    close(dx, dx_exact + residual.astype(np.float64), size + np.abs(residual.astype(np.float64)), 108)
    close(dgamma, dgamma_exact + 2, np.abs(grad * wide * r).sum(axis=0) + 2, 306)


def gelu(u: Wide, exact: bool) -> tuple[Wide, Wide]:
    """Value and derivative, as Hugging Face's `gelu` and `gelu_new` are defined."""
    if exact:
        share = np.vectorize(math.erfc, otypes=[float])(-u / math.sqrt(2)) / 2
        return u * share, share + u * np.exp(-u * u / 2) / math.sqrt(2 * math.pi)
    z = math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * u**2)
    # (1 + tanh(z)) / 2 without its cancellation
    share = np.where(z > 0, 1, np.exp(2 * np.minimum(z, 0))) / (1 + np.exp(-2 * np.abs(z)))
    return u * share, share + 2 * u * share * (1 - share) * slope


@pytest.mark.parametrize("exact", [False, True])
def test_gelu_oracle_gradient_matches_finite_differences(exact: bool) -> None:
    u = np.random.default_rng(5).normal(size=(4, 5)) * 2
    np.testing.assert_allclose(
        gelu(u, exact)[1], numeric_gradient(lambda: float(gelu(u, exact)[0].sum()), u), atol=1e-8
    )
    if exact:
        np.testing.assert_allclose(gelu(u, exact)[0], u * (1 + _erf(u / math.sqrt(2))) / 2, atol=1e-15)


def activations(dtype: Any, seed: int) -> tuple[Values, Values, Values]:
    gate, up, grad = (np.random.default_rng(seed).normal(size=(3, 9, 1000)) * 3).astype(dtype)
    gate[0, :11] = 0, 5, -5, 8, -8, 20, -20, 1e4, -1e4, 6e-8, -6e-8
    return gate, up, grad


def errors(g: Wide, exact: bool) -> tuple[Wide, Wide]:
    """Of GELU and of its derivative: roundings of their terms. That of the exponential is that of its argument; below 3e-38 it is 0."""
    argument = g * g / 2 if exact else np.abs(2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    argument = np.minimum(argument, 90)
    value, _ = gelu(g, exact)
    steep = np.ones_like(g) if exact else 1 + 3 * 0.044715 * g**2
    lost = 1e-36 / EPS * (1 + np.abs(g)) * steep
    slope = gelu(-np.abs(g), exact)[0] / -np.where(g == 0, 1, np.abs(g)) + np.abs(g) * np.exp(-argument) * steep
    # the derivative by tanh has 1 - share in it, with the rounding of the share as long as that is not 1
    cancels = 0 if exact else 2 * np.abs(g) * steep * (argument < 20)
    return np.abs(value) * (14 + argument) + lost, (1 + slope) * 14 + slope * argument + cancels + lost


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_gated_and_plain_gelu(name: str, dtype: Any, exact: bool) -> None:
    gate, up, grad = activations(dtype, seed=6)
    g, u, d = f64(gate, up, grad)
    value, slope = gelu(g, exact)
    value_error, slope_error = errors(g, exact)
    act, dact = np.empty_like(gate), np.empty_like(gate)
    call(name, "gelu_forward", up=gate, act=act, exact=exact)
    call(name, "gelu_backward", up=gate, dact=grad, dup=dact, exact=exact)
    close(act, value, value_error, 1)
    close(dact, d * slope, np.abs(d) * slope_error, 1)
    prod, dgate, dup = np.empty_like(gate), np.empty_like(gate), np.empty_like(gate)
    call(name, "geglu_forward", gate=gate, up=up, prod=prod, exact=exact)
    call(name, "geglu_backward", gate=gate, up=up, dprod=grad, dgate=dgate, dup=dup, exact=exact)
    close(prod, value * u, value_error * np.abs(u), 1)
    close(dgate, d * u * slope, np.abs(d * u) * slope_error, 1)
    close(dup, d * value, value_error * np.abs(d), 1)
    for a, b in ((0, 1), (2, 0), (1, 2)):
        arrays = [gate.copy(), up.copy(), grad.copy()]
        given = dict(zip(("gate", "up", "dprod"), arrays, strict=True))
        call(name, "geglu_backward", **given, dgate=arrays[a], dup=arrays[b], exact=exact)
        same_bits(arrays[a], dgate)
        same_bits(arrays[b], dup)
    for out in (0, 1):
        arrays = [gate.copy(), grad.copy()]
        call(name, "gelu_backward", up=arrays[0], dact=arrays[1], dup=arrays[out], exact=exact)
        same_bits(arrays[out], dact)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_squared_relu(name: str, dtype: Any) -> None:
    up, dact, _ = activations(dtype, seed=7)
    up[0, 7], up[1, 0] = 100, np.nan
    act, dup = np.empty_like(up), np.empty_like(up)
    call(name, "relu2_forward", up=up, act=act)
    call(name, "relu2_backward", up=up, dact=dact, dup=dup)
    assert np.isnan(act[1, 0])
    assert np.isnan(dup[1, 0])
    u, d = f64(up, dact)
    rest = ~np.isnan(u)
    close(act[rest], np.maximum(u, 0)[rest] ** 2, u[rest] ** 2, 1)
    close(dup[rest], (2 * np.maximum(u, 0) * d)[rest], np.abs(2 * u * d)[rest], 1)
    for out in (0, 1):
        arrays = [up.copy(), dact.copy()]
        call(name, "relu2_backward", up=arrays[0], dact=arrays[1], dup=arrays[out])
        same_bits(arrays[out], dup)


def test_tanh_has_the_error_that_is_stated() -> None:
    @numba.njit
    def tangents(x: Values, out: Values) -> None:
        for i in range(x.size):
            out[i] = fast_numba.tanh32(x[i])

    x = np.concatenate([np.linspace(-12, 12, 1000001), np.logspace(-37, 1, 200001)]).astype(np.float32)
    out = np.empty_like(x)
    tangents(x, out)
    exact = np.tanh(x.astype(np.float64))
    assert (np.abs(out - exact) <= 3 * EPS * np.abs(exact)).all()
    edges = np.array([np.nan, np.inf, -np.inf, 9, -1e30, 0], np.float32)
    out = np.empty_like(edges)
    tangents(edges, out)
    np.testing.assert_array_equal(out, np.array([np.nan, 1, -1, 1, -1, 0], np.float32))


def rotated(x: Wide, heads: int, seq_len: int, width: int, theta: float, interleaved: bool, sign: float) -> Wide:
    """Each pair as a complex number, turned; frequencies and angles in float32, as Hugging Face has them."""
    frequency = np.float32(1) / np.float32(theta) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))
    angle = (np.arange(seq_len, dtype=np.float32)[:, None] * frequency).astype(np.float64)[None, :, None]
    out = x.copy().reshape(-1, seq_len, heads, x.shape[1] // heads)
    low, high = (
        (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(width // 2), slice(width // 2, width))
    )
    turned = (out[..., low] + 1j * out[..., high]) * np.exp(1j * sign * angle)
    out[..., low], out[..., high] = turned.real, turned.imag
    return out.reshape(x.shape)


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, None), (16, 4), (20, 20), (80, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_rope_of_a_part_and_of_neighbours(
    name: str, dtype: Any, head_dim: int, rotary_dim: int | None, interleaved: bool, inverse: bool
) -> None:
    x = random(8, 2 * 33, 3 * head_dim, dtype=dtype)
    width = rotary_dim or head_dim
    expected = rotated(x.astype(np.float64), 3, 33, width, 1e4, interleaved, -1 if inverse else 1)
    turned = x.copy()
    options = {"heads": 3, "head_dim": head_dim, "seq_len": 33, "theta": 1e4, "inverse": inverse}
    call(name, "rope", x=turned, **options, rotary_dim=rotary_dim, interleaved=interleaved)
    close(turned, expected, np.abs(x.astype(np.float64)).max() * 2, 4)
    others = np.s_[:, :, width:]
    same_bits(turned.reshape(-1, 3, head_dim)[others], x.reshape(-1, 3, head_dim)[others])


@pytest.mark.parametrize("name", SETS)
def test_rope_with_scaled_frequencies(name: str) -> None:
    x = random(9, 40, 2 * 16, dtype=np.float32)
    options = {"heads": 2, "head_dim": 16, "seq_len": 40, "inverse": False}
    slower, plain = x.copy(), x.copy()
    call(name, "rope", x=slower, **options, theta=1e4, scaling="linear 4")
    call(name, "rope", x=plain, **options, theta=1e4)
    same_bits(slower[::4][:1], x[:1])
    np.testing.assert_allclose(
        slower[4], rotated(np.tile(x[4].astype(float), (2, 1)), 2, 2, 16, 1e4, False, 1.0)[1], atol=1e-6
    )
    grown = x.copy()
    call(name, "rope", x=grown, **options, theta=1e4, scaling="yarn 4 32 1 8 1.5 1")
    lengths = [np.linalg.norm(array.astype(float), axis=1) for array in (grown, x)]
    np.testing.assert_allclose(lengths[0], 1.5 * lengths[1], rtol=1e-5)
    assert (slower != plain).any()


@pytest.mark.parametrize("alias", ["none", "a", "b", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_scaled_sums_and_products(name: str, dtype: Any, alias: str) -> None:
    a, b = random(10, 2, 7, 1001, dtype=dtype)
    if alias == "both":
        b = a
    scale = np.float32(0.22)
    expected = (a.astype(np.float32) + scale * b.astype(np.float32)).astype(dtype)
    product = (a.astype(np.float32) * scale).astype(dtype)
    apart = np.empty_like(a)
    call(name, "scale", a=a, out=apart, scale=0.22)
    same_bits(apart, product)
    inside = a.copy()
    call(name, "scale", a=inside, out=inside, scale=0.22)
    same_bits(inside, product)
    out = {"none": np.empty_like(a), "a": a, "b": b, "both": a}[alias]
    call(name, "add", a=a, b=b, out=out, scale=0.22)
    same_bits(out, expected)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("table_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_scaled_embedding(name: str, dtype: Any, table_dtype: Any, accumulate: bool) -> None:
    tokens = np.random.default_rng(11).integers(0, 20, 70).astype(np.int32)
    table, y, dy = random(12, 30, 33, dtype=dtype), np.empty((70, 33), dtype), random(13, 70, 33, dtype=dtype)
    call(name, "embedding_forward", tokens=tokens, table=table, y=y, scale=6.5)
    same_bits(y, (table[tokens].astype(np.float32) * np.float32(6.5)).astype(dtype))
    start = random(14, 30, 33, dtype=table_dtype)
    dtable = start.copy()
    call(name, "embedding_backward", tokens=tokens, dy=dy, dtable=dtable, accumulate=accumulate, scale=6.5)
    expected, size = (accumulate * array for array in (start.astype(np.float64), np.abs(start.astype(np.float64))))
    np.add.at(expected, tokens, 6.5 * dy.astype(np.float64))
    np.add.at(size, tokens, 6.5 * np.abs(dy.astype(np.float64)))
    close(dtable, expected, size, np.bincount(tokens).max() + 2)


SHAPES = {"scaled": (0.25, None), "capped": (1.0, 4.0), "both": (0.5, 3.0)}


@pytest.mark.parametrize("shape", SHAPES)
def test_head_oracle_gradient_matches_finite_differences(shape: str) -> None:
    rng = np.random.default_rng(15)
    xn, table, labels = rng.normal(size=(5, 4)), rng.normal(size=(7, 4)), rng.integers(0, 7, 5)
    dx, dw = head_gradient(xn, table, labels, 0.3, False, *SHAPES[shape])

    def loss() -> float:
        return 0.3 * head(xn, table, labels, False, *SHAPES[shape])[2]

    np.testing.assert_allclose(dx, numeric_gradient(loss, xn), atol=1e-8)
    np.testing.assert_allclose(dw, numeric_gradient(loss, table), atol=1e-8)


@pytest.mark.parametrize("chunk", [8, 37])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_head_of_scaled_and_capped_logits(name: str, dtype: Any, shape: str, chunk: int) -> None:
    tokens, hidden, vocab = 37, 24, 330
    xn, table = random(16, tokens, hidden, dtype=dtype), random(17, vocab, hidden, dtype=dtype)
    labels = np.random.default_rng(18).integers(0, vocab, tokens).astype(np.int32)
    scale, softcap = SHAPES[shape]
    options = {"normalise": False, "scale_of_logits": scale, "softcap": softcap}
    wide = f64(xn, table)
    _, lse_exact, loss_exact = head(*wide, labels, False, scale, softcap)
    lse, loss, logits = np.empty(tokens, np.float32), np.zeros(1), np.empty((chunk, vocab), np.float32)
    read = {"xn": xn, "table": table, "labels": labels, "lse": lse}
    call(name, "head_forward", **read, loss=loss, logits=logits, accumulate=False, **options)
    product = float((np.abs(wide[0]) @ np.abs(wide[1]).T).max()) * scale
    error = (hidden + 24) * EPS * product + 8 * EPS * (softcap or 0) + vocab * EPS
    close(lse, lse_exact, error / EPS, 1)
    assert abs(loss[0] - loss_exact) <= tokens * (2 * error + EPS * np.abs(lse_exact).max())

    dx_exact, dw_exact = head_gradient(*wide, labels, 8.0, False, scale, softcap)
    gradient = {"scale": np.array([64, np.nan], np.float32), "denominator": 8.0}
    dxn, dtable = np.empty_like(xn), np.full_like(table, np.nan)
    call(name, "head_backward", **read, logits=logits, **gradient, dxn=dxn, dtable=dtable, accumulate=False, **options)
    # a probability less the label is wrong by the error of its logit and lse, its slope by twice that of a tanh
    wrong = 8 * scale * (4 * error + 16 * EPS + 2 * (error / softcap if softcap else 0))
    terms = 8 * scale * np.abs(np.exp(head(*wide, labels, False, scale, softcap)[0] - lse_exact[:, None]))
    terms[np.arange(tokens), labels] += 8 * scale
    bound = terms * (wrong / (8 * scale) + (vocab + tokens) * EPS)
    chunks = -(-tokens // chunk)
    stored = (chunks - 1) * float(ml_dtypes.finfo(dtype).eps) / 2 * (terms.T @ np.abs(wide[0])) + chunks * 2.0**-24
    close(dxn, dx_exact, bound @ np.abs(wide[1]) / EPS, 1)
    close(dtable, dw_exact, (bound.T @ np.abs(wide[0]) + stored) / EPS, 1)
    if chunk == tokens:
        kept = logits_of(name, read, options, vocab)
        again, added = np.empty_like(xn), np.ones_like(table)
        outs = {"dlogits": np.empty_like(kept), "dxn": again, "dtable": added}
        call(name, "head_backward_from_logits", **read, logits=kept, **gradient, **outs, accumulate=True, **options)
        np.testing.assert_array_equal(again, dxn)
        close(added, dw_exact + 1, bound.T @ np.abs(wide[0]) / EPS + 1, 1)


def logits_of(name: str, read: dict[str, Values], options: dict[str, Any], vocab: int) -> Values:
    """All logits, as a forward leaves them."""
    logits = np.empty((len(read["xn"]), vocab), np.float32)
    call(name, "head_forward", **read, loss=np.zeros(1), logits=logits, accumulate=False, **options)
    return logits


def test_logits_of_a_normalised_table_are_neither_scaled_nor_capped() -> None:
    for kernel in ("head_forward", "head_backward", "head_backward_from_logits"):
        rule = KERNELS[kernel].rule
        for options in ({"softcap": 30.0}, {"scale_of_logits": 0.5}):
            assert "neither scaled nor capped" in (rule({"normalise": True, **options}, {}) or "")
            assert rule({"normalise": False, **options}, {}) is None
        assert rule({"normalise": True}, {}) is None


def test_the_tiled_set_refuses_capped_scores() -> None:
    spec = AttentionSpec(batch=1, seq_len=8, heads=1, kv_heads=1, head_dim=8, softcap=30.0)
    for kernel in ("attention_forward", "attention_backward"):
        with pytest.raises(DiagnosticError, match=f"RT093.*no tile schedules for '{kernel}' with a soft cap"):
            Tiled().scratch_bytes(kernel, spec=spec)
