"""Values out of JSON that must be what they should be."""

from __future__ import annotations

import re
from collections.abc import Collection
from math import isfinite
from typing import Any

LIMIT = 1 << 50
"""Sizes, counts and offsets are below this: more bytes than any machine has."""


_LONGEST_TEXT = 1 << 16
_SHOWN = 60
_WORD = re.compile(r"[\w.+\-]+(\[[0-9]+:[0-9]+\])?")


def once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of some keys and values.

    Raises ValueError where a key is there twice: which of them counts nobody can say.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:_SHOWN]!a} is there twice")
    return found


def refuse_unknown(value: Any, known: Collection[str], where: str) -> None:
    """Raise ValueError where an object has a key that nothing reads, or TypeError where it is none."""
    if not isinstance(value, dict):
        raise TypeError(f"{where} is no object with keys")
    odd = next((name for name in value if name not in known), None)
    if odd is not None:
        raise ValueError(f"{where} cannot have a key {odd[:_SHOWN]!a}; its keys are {', '.join(sorted(known))}")


def listed(value: Any) -> list[Any]:
    """A list. Raises TypeError for anything else, of which a text would go for its characters."""
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r}")
    return value


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
