"""The values of inert `config.json` keys as fields of a text's header: any JSON value, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.fields import Value

_JSON = "json:"
"""Before a value that a header cannot hold as it is."""
_PLAIN = " {}[]:,.'()<>/+-*=!?@#$&;|^~`"
"""Characters of a JSON text that stand as they are in a header's string."""
_MOST = 10**18


def as_field(value: object) -> Value:
    """A JSON value as a field: numbers, flags, null, plain texts and lists of these as they are, others in a text."""
    if _is_plain(value):
        return value  # type: ignore[return-value]
    if isinstance(value, list | tuple) and all(map(_is_plain, value)):
        return tuple(value)
    return _JSON + quote(json.dumps(value, separators=(", ", ": ")), safe=_PLAIN)


def of_field(value: object) -> object:
    """The inverse of `as_field`; a text that is no JSON after all stays a text."""
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
