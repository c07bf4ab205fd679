"""Matrices in nf4: the format in float64 and by hand, the same bits from every kernel set, and bitsandbytes itself."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ratrain.ratrain_ir.config.quantised import NESTED_BLOCK, NF4_BLOCK, nf4_bytes, packed_bytes
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.targets.program.kernels import KERNELS
from ratrain.targets.runtime.kernels.reference.reference_nf4 import NESTED_LEVELS, NF4_LEVELS, nf4_parts, pack_nf4
from tests.targets.runtime.kernels.kernels_oracle import DTYPES, SETS, call, same_bits

LONG = (1 << 18) + 16_385
"""Elements: over a chunk of the reference, whole nested blocks, a short one, and an odd rest."""
LEVELS = (
    *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
)
"""Levels as the paper prints them."""
ANY = hnp.arrays(np.float32, st.integers(1, 700), elements=st.floats(-(2.0**60), 2.0**60, width=32))


def unpacked(name: str, packed: np.ndarray, size: int, dtype: Any = np.float32) -> np.ndarray:
    out = np.empty(size, dtype)
    call(name, "dequantise_nf4", packed=packed, out=out)
    return out


def codes_of(packed: np.ndarray, size: int) -> np.ndarray:
    pairs = nf4_parts(packed, size).pairs
    return np.stack([pairs >> 4, pairs & 15], 1).reshape(-1)[:size]


def maxima_of(packed: np.ndarray, size: int) -> np.ndarray:
    """Maxima in float64, from the stored parts."""
    offset, scales, nested, _ = nf4_parts(packed, size)
    return NESTED_LEVELS[nested].astype(np.float64) * np.repeat(scales, NESTED_BLOCK)[: nested.size] + offset


def varied(seed: int, size: int = LONG) -> np.ndarray:
    """Normal elements whose blocks differ in size, with blocks of zeros and one outlier."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=size) * np.repeat(rng.uniform(0.01, 2, -(-size // NF4_BLOCK)), NF4_BLOCK)[:size]
    found[3 * NF4_BLOCK : 6 * NF4_BLOCK] = 0
    found[size // 2] = 1000
    return found.astype(np.float32)


def middles(levels: np.ndarray) -> np.ndarray:
    return (levels[:-1].astype(np.float64) + levels[1:]) / 2


def test_levels_are_those_of_the_paper_and_of_dynamic_exponents() -> None:
    assert np.abs(NF4_LEVELS - LEVELS).max() < 1e-7
    wanted = [0.0, 1.0]
    for exponent in range(7):
        parts = 2**exponent
        sizes = [10.0 ** (exponent - 6) * (0.1 + 0.9 * (k + 0.5) / parts) for k in range(parts)]
        wanted += sizes + [-each for each in sizes]
    assert NESTED_LEVELS.size == 256
    np.testing.assert_allclose(NESTED_LEVELS, np.sort(wanted), rtol=2e-6)


@given(a=ANY)
def test_codes_are_those_of_the_nearest_levels(a: np.ndarray) -> None:
    """Oracle in float64: an element less than a few roundings from the middle of two levels may have either."""
    packed = pack_nf4(a)
    largest = np.maximum.reduceat(np.abs(a), np.arange(0, a.size, NF4_BLOCK)).astype(np.float64)
    scaled = a / np.maximum(np.repeat(largest, NF4_BLOCK)[: a.size], 1e-38)
    nearest = np.abs(scaled[:, None] - np.array(LEVELS)).argmin(1)
    near_middle = np.abs(scaled[:, None] - middles(NF4_LEVELS)).min(1) < 1e-6
    assert ((codes_of(packed, a.size) == nearest) | near_middle).all()
    offset, scales, nested, _ = nf4_parts(packed, a.size)
    assert offset[0] == np.float32(largest.mean()) or offset[0] == pytest.approx(largest.mean(), rel=1e-6)
    # the widest gap of the nested levels is 0.9 / 64, and 0.993 is the largest negative one
    off = np.abs(maxima_of(packed, a.size) - largest)
    assert (off <= np.repeat(scales, NESTED_BLOCK)[: nested.size] * 0.0072 + 1e-6 * abs(offset[0]) + 1e-37).all()


def test_a_matrix_by_hand() -> None:
    values = np.array([0.3, -1.2, 0.0], np.float32)
    packed = pack_nf4(values)
    offset, scales, nested, pairs = nf4_parts(packed, 3)
    # one maximum is its own mean, and leaves nothing; 0.25 is nearest to level 10, an odd rest is followed by a 0
    assert (offset[0], scales[0], NESTED_LEVELS[nested[0]]) == (values.dtype.type(1.2), np.float32(1e-38), 0)
    assert pairs.tolist() == [10 << 4 | 0, 7 << 4 | 7]
    assert len(packed) == 12
    assert unpacked("reference", packed, 3).tolist() == (NF4_LEVELS[[10, 0, 7]] * values.dtype.type(1.2)).tolist()


def test_two_equally_near_levels_give_the_lower_one() -> None:
    bounds = (NF4_LEVELS[:-1] + NF4_LEVELS[1:]) / np.float32(2)
    found = codes_of(pack_nf4(np.append(bounds, np.float32(1))), 16)
    assert found.tolist() == list(range(16))


def test_zeros_stay_zeros_and_an_outlier_is_kept() -> None:
    values = varied(1)
    for name in ("reference", "fast"):
        found = unpacked(name, pack_nf4(values), values.size)
        assert (found[3 * NF4_BLOCK : 6 * NF4_BLOCK] == 0).all()
        assert found[values.size // 2] == pytest.approx(1000, rel=1e-3)
        assert (unpacked(name, pack_nf4(np.zeros(1000, np.float32)), 1000) == 0).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_element_that_is_not_finite_makes_the_matrix_nan(bad: float) -> None:
    values = varied(2, 5000)
    values[4321] = bad
    assert np.isnan(unpacked("fast", pack_nf4(values), 5000)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 63, 64, 65, 16_384, 16_385, LONG])
@pytest.mark.parametrize("name", SETS)
def test_every_kernel_set_has_the_same_bits(name: str, size: int, dtype: Any) -> None:
    packed = pack_nf4(varied(3, size))
    wanted = unpacked("reference", packed, size, dtype)
    same_bits(unpacked(name, packed, size, dtype), wanted)
    exact = NF4_LEVELS[codes_of(packed, size)] * np.repeat(maxima_of(packed, size), NF4_BLOCK)[:size]
    # three roundings to float32 and one to storage
    bound = 2.0**-22 * 1000 + np.abs(exact) * float(ml_dtypes.finfo(dtype).eps) / 2 + 6e-8
    assert (np.abs(wanted.astype(np.float64) - exact) <= bound * (1 + 1e-3)).all()


def test_the_error_on_normal_weights_is_below_that_of_int4_blocks() -> None:
    values = np.random.default_rng(4).normal(size=1 << 20).astype(np.float32)
    packed = np.empty(packed_bytes(values.size, 4), np.uint8)
    call("fast", "quantise", a=values, packed=packed, bits=4)
    blocks = np.empty_like(values)
    call("fast", "dequantise", packed=packed, out=blocks, bits=4)
    nf4 = unpacked("fast", pack_nf4(values), values.size)

    def error(found: np.ndarray) -> float:
        return float(np.sqrt(np.square(found - values).mean()))

    assert error(nf4) == pytest.approx(0.092, abs=0.002)
    assert error(blocks) == pytest.approx(0.126, abs=0.002)


@pytest.mark.parametrize(("elements", "wanted"), [(1, 12), (64, 44), (65, 44), (16_384, 8456), (16_385, 8464)])
def test_bytes_of_a_packed_matrix(elements: int, wanted: int) -> None:
    assert nf4_bytes(elements) == wanted


def test_a_routine_that_unpacks_other_bytes_is_refused() -> None:
    rule = KERNELS["dequantise_nf4"].rule
    assert rule is not None
    of = {size: {"packed": (Dtype.U8, (size,)), "out": (Dtype.F32, (5, 13))} for size in (44, 48)}
    assert rule({}, of[44]) is None
    assert rule({}, of[48]) == "48 bytes are not those of 65 elements in nf4"


def test_a_large_matrix_takes_4_127_bits_an_element() -> None:
    assert nf4_bytes(4096 * 4096) * 8 / 4096**2 == pytest.approx(4.127, abs=5e-4)


@pytest.mark.full
@pytest.mark.parity
@pytest.mark.parametrize("size", [2, 64, 66, 16_384, 16_450, LONG + 1])
def test_bytes_and_values_are_those_of_bitsandbytes(size: int) -> None:
    """Compare with its PyTorch form, bit for bit; offsets, sums in float32 there, within their rounding."""
    torch: Any = pytest.importorskip("torch")
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    values = varied(5, size)
    packed = pack_nf4(values)
    offset, scales, nested, pairs = nf4_parts(packed, size)
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    ops = torch.ops.bitsandbytes
    given = torch.from_numpy(values).reshape(1, -1)
    theirs, maxima = ops.quantize_4bit.default._op_dk(key, given, NF4_BLOCK, "nf4", torch.uint8)
    assert theirs.reshape(-1).numpy().tobytes() == pairs.tobytes()
    assert maxima.mean().item() == pytest.approx(float(offset[0]), rel=1e-6)
    levels = functional.create_dynamic_map()
    assert levels.numpy().tobytes() == NESTED_LEVELS.tobytes()
    rest = maxima - torch.from_numpy(offset.copy())
    codes, tops = ops.quantize_blockwise.default._op_dk(key, rest, levels, NESTED_BLOCK)
    assert codes.numpy().tobytes() == nested.tobytes()
    assert tops.numpy().tobytes() == scales.tobytes()
    back = ops.dequantize_blockwise.default._op_dk(key, codes, tops, levels, NESTED_BLOCK, torch.float32)
    back = back + torch.from_numpy(offset.copy())
    for kind, dtype in ((torch.float32, np.float32), (torch.float16, np.float16)):
        found = ops.dequantize_4bit.default._op_dk(key, theirs, back, NF4_BLOCK, "nf4", [1, size], kind)
        assert found.numpy().tobytes() == unpacked("fast", packed, size, dtype).tobytes()
