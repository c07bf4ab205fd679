"""Rotary position embedding: the angle per position of each pair of a head's elements, scaled or not.

Source: RoFormer (Su et al., 2021), with the formulas of `transformers` (`modeling_rope_utils`).
"""

from __future__ import annotations

from functools import cache
from math import floor, log, pi
from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrain_ir.config.rope_scaling import parse_scaling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.ratrain_ir.config.rope_scaling import RopeScaling


@cache
def rope_frequencies(theta: float, width: int, scaling: str = "") -> tuple[NDArray[np.float32], float]:
    """Return the radians per position of each pair of rotated elements, f32 [width / 2], and a factor for the elements.

    Values are rounded as `transformers` rounds them. The factor is YaRN's attention factor, else 1. `width` is the
    number of rotated elements of a head; `scaling` is the text of a `RopeScaling`, empty for none. Dynamic scaling
    returns unscaled frequencies, as it changes nothing within the original length. Raises ValueError if `scaling` is no
    scaling.
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
    """Scale as Llama 3.1: divide low frequencies by `factor`, keep high ones, blend linearly between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_positions"] * plain / (2 * pi)  # full turns within the original length
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    interpolated: NDArray[np.float64] = (1 - share) * plain / scaling["factor"] + share * plain
    return interpolated


def _yarn(plain: NDArray[np.float64], theta: float, width: int, scaling: RopeScaling) -> NDArray[np.float64]:
    """Scale as YaRN: keep pairs that turn often in the original length, divide slow ones by `factor`, blend between."""

    # Inverse of the frequency: the (fractional) pair that makes `turns` full turns within the original length
    # (`find_correction_dim` of `transformers`).
    def pair_of(turns: float) -> float:
        return width * log(scaling["original_positions"] / (turns * 2 * pi)) / (2 * log(theta))

    low, high = pair_of(scaling["beta_fast"]), pair_of(scaling["beta_slow"])
    if scaling["truncate"]:
        low, high = floor(low), -floor(-high)
    low, high = max(low, 0), min(high, width - 1)
    high = high if high != low else high + 0.001  # against a division by zero, as in `transformers`
    stays = 1 - np.clip((np.arange(width // 2) - low) / (high - low), 0.0, 1.0)
    scaled: NDArray[np.float64] = plain / scaling["factor"] * (1 - stays) + plain * stays
    return scaled
