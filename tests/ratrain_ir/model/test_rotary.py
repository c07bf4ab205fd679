"""Frequencies of rotary embeddings against the formulas of `transformers` written apart, and the texts of their scaling."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.rope_scaling import PARAMETERS, make_scaling, parse_scaling
from ratrain.ratrain_ir.model.rotary import rope_frequencies

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192.0}
YARN = {
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_positions": 2048.0,
    "attention_factor": 1.25,
    "truncate": 1.0,
}


def plain(theta: float, width: int) -> list[float]:
    return [theta ** (-2 * i / width) for i in range(width // 2)]


def llama3(theta: float, width: int, p: dict[str, float]) -> list[float]:
    """`_compute_llama3_parameters`: by wavelength, one frequency at a time."""
    found = []
    for frequency in plain(theta, width):
        wavelength = 2 * math.pi / frequency
        if wavelength < p["original_positions"] / p["high_freq_factor"]:
            found.append(frequency)
        elif wavelength > p["original_positions"] / p["low_freq_factor"]:
            found.append(frequency / p["factor"])
        else:
            smooth = p["original_positions"] / wavelength - p["low_freq_factor"]
            smooth /= p["high_freq_factor"] - p["low_freq_factor"]
            found.append((1 - smooth) * frequency / p["factor"] + smooth * frequency)
    return found


def yarn(theta: float, width: int, p: dict[str, float]) -> list[float]:
    """`_compute_yarn_parameters`: interpolated and extrapolated frequencies, mixed by a ramp."""

    def correction(turns: float) -> float:
        return width * math.log(p["original_positions"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = correction(p["beta_fast"]), correction(p["beta_slow"])
    if p["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    found = []
    for i, frequency in enumerate(plain(theta, width)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        found.append(frequency / p["factor"] * ramp + frequency * (1 - ramp))
    return found


@pytest.mark.parametrize(("theta", "width"), [(1e4, 64), (5e5, 128), (1e6, 2), (1e4, 20)])
def test_frequencies_without_scaling(theta: float, width: int) -> None:
    frequency, growth = rope_frequencies(theta, width)
    assert frequency.dtype == np.float32
    assert growth == 1
    np.testing.assert_allclose(frequency, plain(theta, width), rtol=2e-6)


@pytest.mark.parametrize(("theta", "width"), [(1e4, 64), (5e5, 128), (1e4, 20)])
def test_linear_scaling_divides_frequencies(theta: float, width: int) -> None:
    frequency, growth = rope_frequencies(theta, width, "linear 2.5")
    assert growth == 1
    np.testing.assert_allclose(frequency, np.array(plain(theta, width)) / 2.5, rtol=2e-6)


@pytest.mark.parametrize(("theta", "width", "factor"), [(5e5, 128, 8.0), (5e5, 64, 32.0), (1e4, 20, 1.0)])
def test_llama3_scaling(theta: float, width: int, factor: float) -> None:
    values = LLAMA3 | {"factor": factor}
    frequency, growth = rope_frequencies(theta, width, str(make_scaling("llama3", values)))
    assert growth == 1
    # between the wavelengths the share cancels: an error of a frequency counts for 1 / (high - low) of the turns that it makes
    np.testing.assert_allclose(frequency, llama3(theta, width, values), rtol=2e-5)
    if factor > 1:
        kinds = np.round(np.array(plain(theta, width)) / frequency, 4)
        assert kinds[0] == 1
        assert kinds[-1] == factor
        assert ((kinds > 1) & (kinds < factor)).any()


@pytest.mark.parametrize("truncate", [0.0, 1.0])
@pytest.mark.parametrize(("theta", "width", "original"), [(1e4, 64, 2048.0), (1e6, 128, 32768.0), (1e4, 8, 16.0)])
def test_yarn_scaling(theta: float, width: int, original: float, truncate: float) -> None:
    values = YARN | {"original_positions": original, "truncate": truncate}
    frequency, growth = rope_frequencies(theta, width, str(make_scaling("yarn", values)))
    assert growth == 1.25
    np.testing.assert_allclose(frequency, yarn(theta, width, values), rtol=2e-6)


POSITIVE = st.floats(1, 9e5, allow_nan=False)


@given(POSITIVE, POSITIVE, POSITIVE, st.integers(1, 1 << 20))
def test_texts_are_read_as_they_were_written(factor: float, low: float, more: float, original: int) -> None:
    values = {"factor": factor, "low_freq_factor": low, "high_freq_factor": low + more, "original_positions": original}
    scaling = make_scaling("llama3", values)
    if low + more >= 1e6 or low + more == low:
        assert scaling is None
        return
    assert scaling is not None
    assert parse_scaling(str(scaling)) == scaling
    assert {name: scaling[name] for name in PARAMETERS["llama3"]} == values


def test_texts_are_short() -> None:
    texts = [str(make_scaling(kind, values)) for kind, values in (("llama3", LLAMA3), ("yarn", YARN))]
    assert texts == ["llama3 8 1 4 8192", "yarn 4 32 1 2048 1.25 1"]
    assert str(make_scaling("linear", {"factor": 0.1 + 1})) == "linear 1.1"


@pytest.mark.parametrize(
    "text",
    [
        *("", "linear", "linear 2 3", "dynamic 2", "linear two", "linear 2.0", "linear  2", " linear 2", "linear +2"),
        *("linear 0.5", "linear nan", "linear inf", "linear -2", "linear 1e6", "linear 1e+06"),
        *("llama3 8 4 1 8192", "llama3 8 1 1 8192", "llama3 8 0 4 8192", "llama3 8 1 4 0.5", "llama3 8 1 4"),
        *("yarn 4 1 32 2048 1 1", "yarn 4 32 1 2048 0 1", "yarn 4 32 1 2048 1 2", "yarn 4 32 1 0 1 1"),
    ],
)
def test_other_texts_are_none(text: str) -> None:
    assert parse_scaling(text) is None


def test_frequencies_of_an_unknown_scaling_are_refused() -> None:
    with pytest.raises(ValueError, match="'ntk 2' is no scaling"):
        rope_frequencies(1e4, 64, "ntk 2")


def test_parameters_out_of_range_make_no_scaling() -> None:
    assert make_scaling("linear", {"factor": 0.5}) is None
    assert make_scaling("yarn", YARN | {"attention_factor": 0.0}) is None
    assert make_scaling("llama3", LLAMA3 | {"high_freq_factor": 1.0}) is None


@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_dynamic_scaling_changes_nothing_within_its_positions(factor: float) -> None:
    """`_compute_dynamic_ntk_parameters` with sequences of `max_position_embeddings` or fewer: a base of theta * 1."""
    made = make_scaling("dynamic", {"factor": factor, "original_positions": 32.0})
    assert made is not None
    got, growth = rope_frequencies(1e4, 64, str(made))
    assert got.tobytes() == rope_frequencies(1e4, 64)[0].tobytes()
    assert growth == 1.0
    assert make_scaling("dynamic", {"factor": factor, "original_positions": 0.5}) is None
