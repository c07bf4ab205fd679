"""Arrays and texts inside a page: columns one after the other, deflated, in base64.

A script element has the bytes of its columns, and a directory of them as an attribute:

    <script type="text/plain" id="ops" data-columns="seconds:f8:3 keyword:u1:3">eJx...</script>

`data.js` unpacks an element when it is first needed.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping
from html import escape

import numpy as np
from numpy.typing import NDArray

_NUMBER_TYPES = {"u1", "i1", "u2", "i2", "u4", "i4", "f8"}
"""Types that `data.js` has typed arrays for; all are little-endian."""
_LEVEL = 4
"""Level of zlib: half the time of level 6, for pages that are less than 2 % larger."""


def packed_columns(name: str, columns: Mapping[str, tuple[str, NDArray[np.generic]]]) -> str:
    """Return a script element with columns of numbers: name -> (type, values).

    Wide types come first: a typed array of the browser must start at a multiple of its item size.
    """
    # by item size, largest first: then every column begins at a multiple of its own
    ordered = sorted(columns.items(), key=lambda item: -int(item[1][0][1:]))
    assert all(kind in _NUMBER_TYPES for _, (kind, _) in ordered)
    body = b"".join(_exact(values, kind).tobytes() for _, (kind, values) in ordered)
    directory = " ".join(f"{column}:{kind}:{len(values)}" for column, (kind, values) in ordered)
    return _element(name, directory, body)


def packed_lines(name: str, lines: Iterable[str]) -> str:
    """Return a script element with lines of text."""
    return _element(name, "text", "\n".join(lines).encode())


def _exact(values: NDArray[np.generic], kind: str) -> NDArray[np.generic]:
    """Convert values to a little-endian type; no value may change."""
    exact: NDArray[np.generic] = values.astype(f"<{kind}")
    assert np.array_equal(exact, values), f"values do not fit {kind}"
    return exact


def _element(name: str, directory: str, body: bytes) -> str:
    text = base64.b64encode(zlib.compress(body, _LEVEL)).decode("ascii")
    return f'<script type="text/plain" id="{escape(name)}" data-columns="{escape(directory)}">{text}</script>\n'
