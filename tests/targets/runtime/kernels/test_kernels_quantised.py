"""Block-quantised elements: how far they are off, what is not finite, and the same bits from every kernel set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ratrain.ratrain_ir.config.quantised import (
    BLOCK_ELEMENTS,
    FORMATS,
    LARGEST_CODE,
    LEAST_SCALE,
    block_count,
    packed_bytes,
    packed_nbytes,
)
from ratrain.targets.runtime.kernels.reference.reference_quantised import packed_parts
from tests.targets.runtime.kernels.kernels_oracle import DTYPES, SETS, call, same_bits

BITS = tuple(FORMATS.values())
LONG = (1 << 18) + 777  # over two chunks of every kernel that works by chunks, and a piece of a block
FLOATS = st.floats(
    -(2.0**127), 2.0**127, width=32
)  # beside the largest float32 the product of code and scale may overflow
ANY_FLOATS = hnp.arrays(np.float32, st.integers(1, 700), elements=FLOATS)


def packed(name: str, a: np.ndarray, bits: int) -> np.ndarray:
    found = np.full(packed_bytes(a.size, bits), 0xEE, np.uint8)
    call(name, "quantise", a=a, packed=found, bits=bits)
    return found


def unpacked(name: str, given_bytes: np.ndarray, like: np.ndarray, bits: int) -> np.ndarray:
    out = np.empty_like(like)
    call(name, "dequantise", packed=given_bytes, out=out, bits=bits)
    return out


def varied(seed: int, dtype: Any) -> np.ndarray:
    """Elements whose blocks differ in size by orders of magnitude, with blocks of zeros."""
    rng = np.random.default_rng(seed)
    sizes = np.repeat(10.0 ** rng.integers(-6, 4, block_count(LONG)), BLOCK_ELEMENTS)[:LONG]
    sizes[5 * BLOCK_ELEMENTS : 7 * BLOCK_ELEMENTS] = 0
    return (rng.normal(size=LONG) * sizes).astype(dtype)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", SETS)
@given(a=ANY_FLOATS)
def test_no_element_is_off_by_more_than_half_a_scale(name: str, bits: int, a: np.ndarray) -> None:
    found = packed(name, a, bits)
    scales = np.repeat(packed_parts(found, a.size)[0], BLOCK_ELEMENTS)[: a.size].astype(np.float64)
    largest = np.maximum.reduceat(np.abs(a), np.arange(0, a.size, BLOCK_ELEMENTS))
    expected = np.repeat(largest / np.float32(LARGEST_CODE[bits]), BLOCK_ELEMENTS)[: a.size]
    np.testing.assert_array_equal(scales, np.where(expected < np.float32(LEAST_SCALE), 0, expected))
    off = np.abs(unpacked(name, found, a, bits).astype(np.float64) - a)
    # quotient, scale and product are rounded to float32: of the largest code, 3 half units in the last place
    assert (off <= np.where(scales > 0, scales * (0.5 + LARGEST_CODE[bits] * 2.0**-22), LEAST_SCALE * 128)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", SETS)
def test_every_kernel_set_has_the_same_bytes(name: str, bits: int, dtype: Any) -> None:
    a = varied(1, dtype)
    found = packed(name, a, bits)
    np.testing.assert_array_equal(found, packed("reference", a, bits))
    same_bits(unpacked(name, found, a, bits), unpacked("reference", found, a, bits))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", SETS)
def test_the_mean_is_that_of_what_parts_stand_for_in_order(name: str, bits: int, dtype: Any, accumulate: bool) -> None:
    parts = [packed("reference", varied(seed, np.float32), bits) for seed in (1, 2, 3)]
    out = varied(4, dtype)
    expected = out.copy()
    values = [unpacked("reference", part, np.empty(LONG, np.float32), bits) for part in parts]
    with np.errstate(over="ignore"):
        call("reference", "mean_of_replicas", parts=values, out=expected, accumulate=accumulate, divisor=3.0)
    finite = call(name, "mean_of_quantised", parts=parts, out=out, accumulate=accumulate, divisor=3.0, bits=bits)
    assert finite is bool(np.isfinite(expected).all())
    same_bits(out, expected)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("name", SETS)
def test_what_is_not_finite_is_not_finite_in_its_whole_block_alone(name: str, bits: int, bad: float) -> None:
    a = np.ones(1000, np.float16)
    for place in (0, 300, 999):
        a[:] = 1
        a[place] = bad
        found = packed(name, a, bits)
        block = np.arange(1000) // BLOCK_ELEMENTS == place // BLOCK_ELEMENTS
        values = unpacked(name, found, a, bits)
        assert np.isnan(values[block]).all()
        np.testing.assert_allclose(values[~block].astype(np.float32), 1, rtol=1e-3)
        out = np.empty(1000, np.float32)
        clean = packed(name, np.ones(1000, np.float16), bits)
        assert (
            call(name, "mean_of_quantised", parts=[clean, found], out=out, accumulate=False, divisor=2.0, bits=bits)
            is False
        )


@pytest.mark.parametrize("bits", BITS)
def test_bytes_of_packed_elements(bits: int) -> None:
    whole = 10 * BLOCK_ELEMENTS
    assert packed_bytes(whole, bits) == packed_nbytes(whole, bits) == whole * bits // 8 + 40
    for elements in range(1, 600):
        assert packed_bytes(elements, bits) % 4 == 0
        assert 0 <= packed_bytes(elements, bits) - (4 * block_count(elements) + elements * bits / 8) < 4
