"""Rotary position embedding: how fast each pair of elements of a head turns, and how that is scaled for longer sequences.

The formulas are those of `transformers` (`modeling_rope_utils`): RoFormer (Su et al., 2021), linear interpolation (Chen et al., 2023),
YaRN (Peng et al., 2023), and the interpolation by wavelength of Llama 3.1. Dynamic NTK scaling grows the base with sequences longer than
the original positions; plans have none.
"""

from __future__ import annotations

from functools import cache
from math import floor, log, pi
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

PARAMETERS = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_positions"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_positions"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_positions", "attention_factor", "truncate"),
}
"""The kinds of scaling, with their parameters in order."""


@frozen
class RopeScaling:
    """How the frequencies of a rotary embedding are scaled; written as its kind and its parameters, like `llama3 8 1 4 8192`."""

    kind: str
    values: tuple[float, ...]

    def __str__(self) -> str:
        return " ".join(
            [self.kind, *(f"{value:g}" if float(f"{value:g}") == value else repr(value) for value in self.values)]
        )

    def __getitem__(self, name: str) -> float:
        """A parameter by its name."""
        return self.values[PARAMETERS[self.kind].index(name)]


def parse_scaling(text: str) -> RopeScaling | None:
    """The scaling that a text writes; None where it writes none."""
    kind, *words = text.split(" ")
    if len(words) != len(PARAMETERS.get(kind, ())) or kind not in PARAMETERS:
        return None
    try:
        values = tuple(float(word) for word in words)
    except ValueError:
        return None
    scaling = RopeScaling(kind, values)
    return scaling if str(scaling) == text and not _problem(scaling) else None


def make_scaling(kind: str, parameters: Mapping[str, float]) -> RopeScaling | None:
    """A scaling of a kind with parameters by name; None where these make none."""
    scaling = RopeScaling(kind, tuple(float(parameters[name]) for name in PARAMETERS[kind]))
    return None if _problem(scaling) else scaling


def _problem(scaling: RopeScaling) -> bool:
    """Whether parameters are out of range."""
    values = dict(zip(PARAMETERS[scaling.kind], scaling.values, strict=True))
    if not all(np.isfinite(scaling.values)) or not 1 <= values["factor"] < 1e6:
        return True
    if scaling.kind == "dynamic":
        return not _is_length(values["original_positions"])
    if scaling.kind == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        return not (0 < low < high < 1e6 and _is_length(values["original_positions"]))
    if scaling.kind == "yarn":
        fast, slow = values["beta_fast"], values["beta_slow"]
        whole = values["truncate"] in (0, 1) and _is_length(values["original_positions"])
        return not (0 < slow < fast < 1e6 and whole and 0 < values["attention_factor"] < 1e3)
    return False


def _is_length(positions: float) -> bool:
    return positions.is_integer() and 1 <= positions < 1 << 30


@cache
def rope_frequencies(theta: float, width: int, scaling: str = "") -> tuple[NDArray[np.float32], float]:
    """Radians a position by which each pair of the `width` rotated elements of a head turns, [width / 2], as `transformers` rounds them.

    Beside it the factor by which the rotated elements grow (YaRN's attention factor, else 1). `scaling` is the text of a `RopeScaling`;
    empty: none.
    """
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    unscaled = np.float32(1) / np.power(np.float32(theta), exponent)
    if not scaling:
        return unscaled, 1.0
    plain = unscaled.astype(np.float64)
    known = parse_scaling(scaling)
    if known is None:
        msg = f"{scaling!r} is no scaling of a rotary embedding"
        raise ValueError(msg)
    if known.kind == "dynamic":
        return unscaled, 1.0
    if known.kind == "linear":
        return (plain / known["factor"]).astype(np.float32), 1.0
    if known.kind == "llama3":
        return _llama3(plain, known).astype(np.float32), 1.0
    return _yarn(plain, theta, width, known).astype(np.float32), known["attention_factor"]


def _llama3(plain: NDArray[np.float64], scaling: RopeScaling) -> NDArray[np.float64]:
    """Long wavelengths are interpolated, short ones stay, those between go over smoothly."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_positions"] * plain / (2 * pi)  # within the original length
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    interpolated: NDArray[np.float64] = (1 - share) * plain / scaling["factor"] + share * plain
    return interpolated


def _yarn(plain: NDArray[np.float64], theta: float, width: int, scaling: RopeScaling) -> NDArray[np.float64]:
    """Pairs that turn often within the original length stay, those that turn seldom are interpolated."""

    def pair_of(turns: float) -> float:
        return width * log(scaling["original_positions"] / (turns * 2 * pi)) / (2 * log(theta))

    low, high = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = floor(low), -floor(-high)
    low, high = max(low, 0), min(high, width - 1)
    high = high if high != low else high + 0.001  # as the original does against a division by zero
    stays = 1 - np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)
    scaled: NDArray[np.float64] = plain / scaling["factor"] * (1 - stays) + plain * stays
    return scaled
