"""Options that kernels are declared with: a type, the values that a step may give, a default."""

from __future__ import annotations

from math import isfinite
from typing import Any

from ratrain.ratrain_ir.config.rope_scaling import parse_scaling
from ratrain.targets.program.kernel import KernelOption


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Return whether a value is a count that memory could hold."""
    return type(value) is int and 0 < value < 1 << 50


def is_count_or_none(value: Any) -> bool:
    """Return whether a value is a count or None."""
    return value is None or is_count(value)


def is_position(value: Any) -> bool:
    """Return whether a value is a position: below 2^24, as rotation and ALiBi compute positions in float32."""
    return type(value) is int and 0 <= value < 1 << 24


def is_scaling(value: Any) -> bool:
    """Return whether a value is the text of a rotary scaling; empty for none."""
    return isinstance(value, str) and (not value or parse_scaling(value) is not None)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < 1e30 and isfinite(value)


FLAG, COUNT, POSITIVE = (
    KernelOption("bool", _is_flag),
    KernelOption("int", is_count),
    KernelOption("float", _is_positive),
)
UNLESS_GIVEN = KernelOption("bool", _is_flag, default=False)
POSITION, STARTS_AT = KernelOption("int", is_position), KernelOption("int", is_position, default=0)
NUMBER = KernelOption("float")
DENOMINATOR = KernelOption("SupportsFloat", _is_positive)
"""A number, or an object of a memory for a number that differs from step to step."""
ADDS = {"accumulate": FLAG}
SCALES = KernelOption("float", _is_positive, default=1.0)
TOKEN = KernelOption("int | None", is_position, default=None)
POSITIVE_OR_NONE = KernelOption("float | None", _is_positive, default=None)
HALF_RUN = KernelOption("int | None", is_count, default=None)
OFFSETS = {"unit_offset": UNLESS_GIVEN}
COEFFICIENT = KernelOption("float", lambda value: value == 0 or _is_positive(value), default=0.0)
"""Factor of a loss in addition to that of the model; 0 leaves it out."""
