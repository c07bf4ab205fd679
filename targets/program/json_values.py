"""Values out of JSON that must be what they should be."""

from __future__ import annotations

import re
from math import isfinite
from typing import Any

LIMIT = 1 << 50
"""Sizes, counts and offsets are below this: more bytes than any machine has."""


_LONGEST_TEXT = 1 << 16
_SHOWN = 60
_WORD = re.compile(r"[\w.+\-]+(\[[0-9]+:[0-9]+\])?")


def whole(value: Any) -> int:
    """A size, count or offset.

    Raises ValueError for anything else.
    """
    if type(value) is not int or not 0 <= value < LIMIT:
        raise ValueError(f"expected a size, got {value!r}")
    return value


def text(value: Any) -> str:
    """A string that can be shown: without control characters and halves of surrogate pairs, and not a page long.

    Raises TypeError or ValueError for anything else.
    """
    if len(shown(value)) > _LONGEST_TEXT:
        raise ValueError(f"expected a line of text, got {value[:_SHOWN]!a}")
    return str(value)


def shown(value: Any) -> str:
    """A line that can be shown, of any length.

    Raises TypeError or ValueError for anything else.
    """
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    if not value.isprintable():
        raise ValueError(f"expected a line of text, got {value[:_SHOWN]!a}")
    return value


def word(value: Any) -> str:
    """A name as the schedule language has them: letters, digits, `_`, `.`, `+` and `-`; of a step's operand also its rows.

    Raises TypeError or ValueError for anything else.
    """
    if not _WORD.fullmatch(text(value)):
        raise ValueError(f"expected a name, got {value[:_SHOWN]!a}")
    return str(value)


def option(value: Any) -> bool | int | float | str | None:
    """Return the value of a kernel's option: a flag, a finite number, a line of text, or none.

    The kernel's declaration says which of these it takes (`ratrain.targets.program.kernel_calls`). Raises ValueError for anything else.
    """
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value)):
        return value
    raise ValueError(f"an option is a flag, a number or a line of text, it cannot be {ascii(value)[:_SHOWN]}")
