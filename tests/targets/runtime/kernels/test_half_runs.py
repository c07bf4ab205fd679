"""Products that are summed in float16 by runs: their error against float64, the same bits in all sets, one rounding a product."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.accumulation import HALF_RUN
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.mt3000.kernels.tiled import Tiled
from ratrain.targets.mt3000.tiling.gemm import GemmShape
from ratrain.targets.mt3000.tiling.tile_search import gemm_tiles
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.runtime.kernels import Scratch, kernel_set
from tests.targets.mt3000.tile_shapes import MT3000
from tests.targets.runtime.kernels.kernels_oracle import HOST_SETS, call, same_bits

_HALF_UNIT, _SINGLE_UNIT = 2.0**-11, 2.0**-24
"""Largest relative error of one rounding to float16 and to float32."""
_HALF_UNDERFLOW = 2.0**-25
"""Largest absolute error of one rounding to a subnormal float16."""
HALVES = st.integers(0, (1 << 16) - 1)
"""Bits of any float16."""


def half_run_error(depth: int, run: int) -> tuple[float, float]:
    """Bound the error of a sum of `depth` products by runs of `run`, where no sum of a run overflows float16.

    Returns (relative, absolute): the error is at most relative * (sum of the products' magnitudes) + absolute. A
    product meets at most min(depth, run) roundings to float16 and one to float32 for each run (Higham, "Accuracy and
    Stability of Numerical Algorithms", section 3.1); underflow adds `_HALF_UNDERFLOW` for each product.
    """
    growth = (1 + _HALF_UNIT) ** min(depth, run) * (1 + _SINGLE_UNIT) ** ceil(depth / run)
    return growth - 1, depth * _HALF_UNDERFLOW * growth


@st.composite
def products(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Arguments of `gemm` with some of all that it can add, and the extent that it sums over."""
    m, n, depth = draw(st.integers(1, 40)), draw(st.integers(1, 40)), draw(st.integers(1, 200))
    run = draw(st.sampled_from((1, 7, 16, 64, HALF_RUN)))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    scale = draw(st.sampled_from((1.0, 2.0**-9)))
    trans_a, trans_b = draw(st.booleans()), draw(st.booleans())
    a = (scale * rng.normal(size=(depth, m) if trans_a else (m, depth))).astype(np.float16)
    b = (scale * rng.normal(size=(n, depth) if trans_b else (depth, n))).astype(np.float16)
    out = rng.normal(size=(m, n)).astype(draw(st.sampled_from((np.float16, np.float32))))
    given = {"a": a, "b": b, "out": out, "trans_a": trans_a, "trans_b": trans_b, "half_run": run}
    given["accumulate"] = draw(st.booleans())
    if draw(st.booleans()):
        given["bias"] = rng.normal(size=n).astype(np.float16)
    if draw(st.booleans()):
        given["residual"] = rng.normal(size=(m, n)).astype(np.float16)
    return given, depth


def exact(given: dict[str, Any], out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """In float64: the result, the sum of the products' magnitudes, the magnitude of what is added to it."""
    left, right = (given[name].T if given[f"trans_{name}"] else given[name] for name in "ab")
    left, right = left.astype(np.float64), right.astype(np.float64)
    added = [given[name] for name in ("bias", "residual") if name in given] + [out] * given["accumulate"]
    terms = np.broadcast_arrays(np.zeros(out.shape), *(term.astype(np.float64) for term in added))
    return left @ right + sum(terms), np.abs(left) @ np.abs(right), sum(map(np.abs, terms))


@settings(max_examples=40, deadline=None)
@given(products())
def test_both_sets_are_within_the_bound_and_have_the_same_bits(drawn: tuple[dict[str, Any], int]) -> None:
    given, depth = drawn
    before, results = given["out"].copy(), []
    expected, magnitude, added = exact(given, before)
    relative, absolute = half_run_error(depth, given["half_run"])
    single = 4 * 2.0**-24 * (magnitude * (1 + relative) + added)  # the terms join in float32
    info = np.finfo(before.dtype)
    storage = float(info.eps) / 2 * (np.abs(expected) + relative * magnitude + single) + float(info.smallest_subnormal)
    for name in HOST_SETS:
        out = before.copy()
        call(name, "gemm", **{**given, "out": out})
        assert (np.abs(out.astype(np.float64) - expected) <= relative * magnitude + absolute + single + storage).all()
        results.append(out)
    same_bits(*results)


def test_the_bound_grows_with_the_run_and_hardly_with_the_depth() -> None:
    assert half_run_error(4096, 64)[0] < 0.04 < half_run_error(4096, HALF_RUN)[0] < 0.3
    assert half_run_error(8192, 64)[0] < 1.01 * half_run_error(4096, 64)[0]
    assert half_run_error(16, HALF_RUN)[0] == half_run_error(16, 16)[0]


def test_a_longer_run_loses_more() -> None:
    """Reach what the bound allows for: equal terms, whose sum soon has no bits for them."""
    lost = []
    for run in (1, 64, HALF_RUN, 4096):
        a, b, out = np.full((1, 4096), 1.1, np.float16), np.ones((4096, 1), np.float16), np.empty((1, 1), np.float32)
        call("reference", "gemm", a=a, b=b, out=out, half_run=run)
        whole = 4096 * float(np.float16(1.1))
        lost.append(abs(float(out[0, 0]) - whole) / whole)
        assert lost[-1] <= half_run_error(4096, run)[0]
    assert lost == sorted(lost)
    assert lost[0] < 1e-6 < 1e-3 < lost[2] < 0.05 < lost[3]


def nearest_half(value: Fraction) -> np.float16:
    """The float16 next to a number, ties to even, by whole numbers."""
    if abs(value) < Fraction(2) ** -24:
        places = -24
    else:
        # the exponent: 2^e <= |value| < 2^(e + 1)
        e = abs(value.numerator).bit_length() - value.denominator.bit_length()
        e -= Fraction(2) ** e > abs(value)
        places = max(e - 10, -24)
    rounded = Fraction(round(value / Fraction(2) ** places)) * Fraction(2) ** places
    if abs(rounded) >= 65536:
        return np.float16(np.inf if rounded > 0 else -np.inf)
    return np.float16(float(rounded))


def two_terms(name: str, first: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """first + left * right of each element, as a set sums two products of which one factor is 1."""
    count = len(first)
    a = np.stack([first, left], axis=1)
    # a row each: K = 2, and a diagonal of results
    b = np.stack([np.ones(count, np.float16), right])
    out = np.empty((count, count), np.float32)
    call(name, "gemm", a=a, b=b, out=out, half_run=2)
    return np.diagonal(out).astype(np.float16)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(HALVES, HALVES, HALVES), min_size=1, max_size=30))
def test_a_product_is_added_with_one_rounding(drawn: list[tuple[int, int, int]]) -> None:
    first, left, right = (np.array(column, np.uint16).view(np.float16) for column in zip(*drawn, strict=True))
    fast, reference = (two_terms(name, first, left, right) for name in HOST_SETS)
    for s, a, b, mine, other in zip(first, left, right, fast, reference, strict=True):
        if np.isfinite([s, a, b]).all():
            assert mine == other == nearest_half(Fraction(float(s)) + Fraction(float(a)) * Fraction(float(b))), (
                s,
                a,
                b,
            )
        else:
            with np.errstate(all="ignore"):
                wanted = np.float64(s) + np.float64(a) * np.float64(b)
            assert np.array_equal([mine, other], [wanted, wanted], equal_nan=True), (s, a, b)


@pytest.mark.parametrize(
    ("s", "a", "b"), [(1.0, 2.0**-11, 1.0009765625), (65504.0, 16.0, 0.9995), (2.0**-24, 0.5, 2.0**-24)]
)
def test_ties_that_two_roundings_would_miss(s: float, a: float, b: float) -> None:
    given = [np.array([value], np.float16) for value in (s, a, b)]
    exactly = Fraction(float(given[0][0])) + Fraction(float(given[1][0])) * Fraction(float(given[2][0]))
    assert {float(two_terms(name, *given)[0]) for name in HOST_SETS} == {float(nearest_half(exactly))}


@settings(max_examples=15, deadline=None)
@given(products(), st.booleans())
def test_tiles_have_the_bits_of_the_reference(drawn: tuple[dict[str, Any], int], late: bool) -> None:
    """With one term to add at most: several are added in another order."""
    given, depth = drawn
    given = {key: value for key, value in given.items() if key not in ("bias", "residual")}
    m, n = given["out"].shape
    types = {np.dtype(np.float16): Dtype.F16, np.dtype(np.float32): Dtype.F32}
    out = types[given["out"].dtype]
    added = (("out", out),) if given["accumulate"] else ()
    shape = GemmShape(
        m, n, depth, Dtype.F16, Dtype.F16, out, given["trans_a"], given["trans_b"], added, given["half_run"]
    )
    kernels = Tiled({"gemm": gemm_tiles(shape, MT3000)})
    kernels.late = late
    found, expected = given["out"].copy(), given["out"].copy()
    scratch = Scratch(kernels.scratch_bytes("gemm", **given))
    kernels.gemm(**{**given, "out": found}, scratch=scratch)
    call("reference", "gemm", **{**given, "out": expected})
    same_bits(found, expected)


@pytest.mark.parametrize("name", ["torch", "torch-device"])
def test_sets_of_pytorch_refuse_by_name(name: str) -> None:
    pytest.importorskip("torch")
    a = np.zeros((2, 2), np.float16)
    with pytest.raises(DiagnosticError, match=rf"RT093.*the kernel set '{name}' sums products in f32") as raised:
        kernel_set(name).scratch_bytes("gemm", a=a, b=a, out=a, half_run=2)
    assert "--kernels fast" in str(raised.value.diagnostics[0].help)


@pytest.mark.parametrize("types", [("bf16", "bf16"), ("f32", "f32"), ("f16", "f32")])
def test_other_types_are_not_summed_in_float16(types: tuple[str, str]) -> None:
    given = {name: (Dtype(dtype), (2, 2)) for name, dtype in zip("ab", types, strict=True)}
    given["out"] = (Dtype.F32, (2, 2))
    assert KERNELS["gemm"].rule({"half_run": 4}, given) == "'gemm' sums products of f16 alone in f16"
    assert KERNELS["gemm"].rule({}, given) is None
