"""Values out of JSON that must be what they should be."""

from __future__ import annotations

from typing import Any

_LIMIT = 1 << 50
"""Sizes, counts and offsets are below this: more bytes than any machine has."""


def whole(value: Any) -> int:
    """A size, count or offset.

    Raises ValueError for anything else.
    """
    if type(value) is not int or not 0 <= value < _LIMIT:
        raise ValueError(f"expected a size, got {value!r}")
    return value


def text(value: Any) -> str:
    """A string.

    Raises TypeError for anything else.
    """
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value
