"""Patterns of the shell (`*`, `?`, `[...]`), and the text that `${X%...}` and similar expansions give."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable


def matches(text: str, pattern: str) -> bool:
    """Tell whether a pattern matches all of a text."""
    return re.fullmatch(_regex(pattern), text) is not None


def _regex(pattern: str) -> str:
    try:
        return re.compile(fnmatch.translate(pattern.replace("[^", "[!"))).pattern
    except re.error:
        return re.escape(pattern)


def changed_by(text: str, sign: str, words: str, number: Callable[[str], int | None]) -> str | None:
    """Apply the expansion `${X<sign><words>}` to a value; None if the expansion is not supported.

    `number` evaluates the offset and the length of `${X:offset:length}`.
    """
    if sign in ("%", "%%"):
        # `%` and `#` remove the shortest part that matches, `%%` and `##` the longest.
        order = range(len(text), -1, -1) if sign == "%" else range(len(text) + 1)
        return next((text[:at] for at in order if matches(text[at:], words)), text)
    if sign in ("#", "##"):
        order = range(len(text) + 1) if sign == "#" else range(len(text), -1, -1)
        return next((text[at:] for at in order if matches(text[:at], words)), text)
    if sign in ("/", "//", "/#", "/%"):
        return _replaced(text, sign, words)
    if sign in ("^", "^^", ",", ",,") and not words:
        changed = text.upper() if sign[0] == "^" else text.lower()
        return changed if len(sign) == 2 else changed[:1] + text[1:]
    if sign == ":":
        first, _, count = words.partition(":")
        start, length = number(first), number(count) if count else None
        if start is None or (count and length is None):
            return None
        start = max(len(text) + start, 0) if start < 0 else start
        return text[start:] if length is None else text[start : start + length if length >= 0 else length]
    return text if sign == "@" and words == "Q" and re.fullmatch(r"[\w./-]+", text) else None


def _replaced(text: str, sign: str, words: str) -> str:
    pattern, _, new = words.partition("/")
    if not pattern:
        return text
    # fnmatch anchors a pattern at the end of the text. Here it may match anywhere, unless the sign says otherwise.
    regex = re.sub(r"\\Z$|\\z$", "", _regex(pattern))
    regex = f"\\A(?:{regex})" if sign == "/#" else f"(?:{regex})\\Z" if sign == "/%" else regex
    return re.sub(regex, lambda _match: new, text, count=0 if sign == "//" else 1)
