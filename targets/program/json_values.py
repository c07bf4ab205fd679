"""Checked values from JSON: each function returns its argument in the expected type, or raises."""

from __future__ import annotations

import re
from collections.abc import Collection
from math import isfinite
from typing import Any

LIMIT = 1 << 50
"""Exclusive upper bound of sizes, counts and offsets: more bytes than any machine has."""


_LONGEST_TEXT = 1 << 16
_SHOWN = 60
_WORD = re.compile(r"[\w.+\-]+(\[[0-9]+:[0-9]+\])?")


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of some keys and values.

    Raises ValueError where a key is given twice, because it is undefined which one counts.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:_SHOWN]!a} is there twice")
    return found


def refuse_unknown(value: Any, known: Collection[str], where: str) -> None:
    """Raise ValueError where an object has a key that nothing reads, TypeError where the value is no object."""
    if not isinstance(value, dict):
        raise TypeError(f"{where} is no object with keys")
    odd = next((name for name in value if name not in known), None)
    if odd is not None:
        raise ValueError(f"{where} cannot have a key {odd[:_SHOWN]!a}; its keys are {', '.join(sorted(known))}")


def listed(value: Any) -> list[Any]:
    """Return a list; raise TypeError for anything else, so that a string is not taken for a list of characters."""
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r}")
    return value


def whole(value: Any) -> int:
    """Return a size, count or offset: an int from 0 up to `LIMIT`.

    Raises ValueError for anything else.
    """
    if type(value) is not int or not 0 <= value < LIMIT:
        raise ValueError(f"expected a size, got {value!r}")
    return value


def text(value: Any) -> str:
    """Return a string of at most 64 Ki printable characters, on one line.

    Raises TypeError or ValueError for anything else.
    """
    if len(shown(value)) > _LONGEST_TEXT:
        raise ValueError(f"expected a line of text, got {value[:_SHOWN]!a}")
    return str(value)


def shown(value: Any) -> str:
    """Return a printable string, on one line, of any length.

    Raises TypeError or ValueError for anything else.
    """
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    if not value.isprintable():
        raise ValueError(f"expected a line of text, got {value[:_SHOWN]!a}")
    return value


def word(value: Any) -> str:
    """Return a name of the schedule language: letters, digits, `_`, `.`, `+` and `-`.

    Rows `[first:stop]` of a step's operand may follow. Raises TypeError or ValueError for anything else.
    """
    if not _WORD.fullmatch(text(value)):
        raise ValueError(f"expected a name, got {value[:_SHOWN]!a}")
    return str(value)


def option(value: Any) -> bool | int | float | str | None:
    """Return the value of a kernel's option: a flag, a finite number, a line of text, or none.

    The kernel's declaration says which of these it takes (`ratrain.targets.program.kernel_calls`). Raises ValueError
    for anything else.
    """
    if isinstance(value, str):
        return text(value)
    if value is None or isinstance(value, bool | int) or (isinstance(value, float) and isfinite(value)):
        return value
    raise ValueError(f"an option is a flag, a number or a line of text, it cannot be {ascii(value)[:_SHOWN]}")
