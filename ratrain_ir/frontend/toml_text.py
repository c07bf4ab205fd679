"""TOML as files of users have it."""

from __future__ import annotations

import tomllib
from typing import Any

_MOST_DOTS = 1000
"""Of one line. The library's time grows with the square of the parts of a key; no file of ours has a line with so many."""


def parse_toml(text: str) -> dict[str, Any]:
    """The data of a TOML text.

    Raises ValueError (mostly `tomllib.TOMLDecodeError`) or RecursionError where it is none, or has a line with more dots than any use.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MOST_DOTS:
            raise ValueError(f"a line has more than {_MOST_DOTS} dots (at line {number}, column 1)")
    return tomllib.loads(text)
