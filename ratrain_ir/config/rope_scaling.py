"""Scaling of rotary frequencies for longer sequences: its kinds and their text.

The kinds are as in `transformers` (`modeling_rope_utils`): linear interpolation (Chen et al., 2023), dynamic NTK, YaRN
(Peng et al., 2023), and the interpolation by wavelength of Llama 3.1.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

PARAMETERS = {
    "linear": ("factor",),
    "dynamic": ("factor", "original_positions"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_positions"),
    "yarn": ("factor", "beta_fast", "beta_slow", "original_positions", "attention_factor", "truncate"),
}
"""Kinds of scaling with their parameters in order."""


@frozen
class RopeScaling:
    """Scaling of rotary frequencies; written as its kind and its parameters, like `llama3 8 1 4 8192`."""

    kind: str
    values: tuple[float, ...]

    def __str__(self) -> str:
        return " ".join(
            [self.kind, *(f"{value:g}" if float(f"{value:g}") == value else repr(value) for value in self.values)]
        )

    def __getitem__(self, name: str) -> float:
        """Return a parameter by name."""
        return self.values[PARAMETERS[self.kind].index(name)]


def parse_scaling(text: str) -> RopeScaling | None:
    """Return the scaling that a text describes; None if it describes none, or not in the form that `str` gives."""
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
    """Return a scaling with parameters by name; None if they are out of range."""
    scaling = RopeScaling(kind, tuple(float(parameters[name]) for name in PARAMETERS[kind]))
    return None if _problem(scaling) else scaling


def _problem(scaling: RopeScaling) -> bool:
    """Tell whether parameters are out of range."""
    values = dict(zip(PARAMETERS[scaling.kind], scaling.values, strict=True))
    if not all(map(isfinite, scaling.values)) or not 1 <= values["factor"] < 1e6:
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
