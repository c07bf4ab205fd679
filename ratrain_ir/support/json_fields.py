"""JSON values as fields of a text's header, there and back: numbers, texts and lists as they are, others escaped."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote, unquote

_JSON = "json:"
"""Prefix of values that a header cannot hold directly."""
_PLAIN = " {}[]:,.'()<>/+-*=!?@#$&;|^~`"
"""Characters of a JSON text that a header's string holds unescaped."""
_MOST = 10**18


def as_field(value: object) -> Any:
    """Return a JSON value as a field of a header.

    Numbers, booleans, null, plain strings and lists of these stay; others become an escaped JSON text with a prefix.
    """
    if _is_plain(value):
        return value
    if isinstance(value, list | tuple) and all(map(_is_plain, value)):
        return tuple(value)
    return _JSON + quote(json.dumps(value, separators=(", ", ": ")), safe=_PLAIN)


def of_field(value: object) -> object:
    """Return the JSON value of a field: the inverse of `as_field`. A text that is not JSON after all stays a text."""
    if isinstance(value, tuple | list):
        return [of_field(item) for item in value]
    if isinstance(value, str) and value.startswith(_JSON):
        try:
            return json.loads(unquote(value.removeprefix(_JSON)))
        except (ValueError, RecursionError):
            return value
    return value


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return value.isprintable() and '"' not in value and not value.startswith(_JSON)
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < _MOST
    return value is None or isinstance(value, bool | float)
