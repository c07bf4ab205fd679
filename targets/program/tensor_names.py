"""Names of a program's tensors, a line each, checked over all characters at once.

An automaton over two neighbouring characters stands in for the regular expression: a name is sound if every pair of
kinds of characters is allowed. Numpy checks millions of names in milliseconds.
"""

from __future__ import annotations

import re

import numpy as np

_NAME = r"[A-Za-z_][\w\-]*+(?:\.[\w\-]++)*+"
"""Name of a tensor as the schedule language has it, so that a program's tensors can be written there."""
_NAMES = re.compile(rf"{_NAME}(?:\n{_NAME})*+")
_OTHER, _LETTER, _DIGIT, _DOT, _END = range(5)
"""Kinds of ASCII characters: not in names; begins a name; only continues it (digits, hyphens); joins its parts; ends
it."""
_KIND_OF = np.array(
    [
        _LETTER if chr(code).isalpha() or chr(code) == "_"
        else _DIGIT if chr(code).isdigit() or chr(code) == "-"
        else {".": _DOT, "\n": _END}.get(chr(code), _OTHER)
        for code in range(128)
    ],
    np.uint8,
)  # fmt: skip
_FOLLOWS = np.zeros(64, np.bool_)
"""Table by kinds of two characters, 8 * one + the other: True if the other may follow the one."""
for _one, _others in (
    (_LETTER, (_LETTER, _DIGIT, _DOT, _END)),
    (_DIGIT, (_LETTER, _DIGIT, _DOT, _END)),
    (_DOT, (_LETTER, _DIGIT)),
    (_END, (_LETTER,)),
):
    _FOLLOWS[[8 * _one + other for other in _others]] = True


def are_names(lines: str) -> bool:
    """Return whether each line is the name of a tensor."""
    if not lines.isascii():
        # Letters beyond ASCII are rare: the regular expression, which is slow, decides.
        return _NAMES.fullmatch(lines) is not None
    kinds = _KIND_OF[np.frombuffer(f"\n{lines}\n".encode("ascii"), np.uint8)]
    return bool(_FOLLOWS[8 * kinds[:-1] + kinds[1:]].all())


def longest(lines: str) -> int:
    """Return the number of characters of the longest line."""
    if not lines.isascii():
        return max(map(len, lines.split("\n")))
    ends = np.flatnonzero(np.frombuffer(f"\n{lines}\n".encode("ascii"), np.uint8) == ord("\n"))
    return int(np.diff(ends).max()) - 1
