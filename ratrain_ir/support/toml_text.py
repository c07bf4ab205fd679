"""TOML as files of users have it."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.diagnostics import Location, fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.support.text import Source

_PLACE = re.compile(r"^(.*) \(at (?:line (\d+), column (\d+)|end of document)\)$", re.DOTALL)

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


def toml_data(source: Source, code: str) -> dict[str, Any]:
    """The data of a TOML text; raises `DiagnosticError` `code` at the place where it stops being one."""
    try:
        return parse_toml(source.text)
    except tomllib.TOMLDecodeError as error:
        match = _PLACE.match(str(error))
        message = match[1] if match else str(error)
        last = len(source.lines)
        at_place = match and match[2]
        place = (
            source.at(int(match[2]), int(match[3]))
            if match and at_place
            else source.at(last, len(source.lines[-1]) + 1)
        )
        fail(code, f"the file is not valid TOML: {message}", place.location, source=place.source)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).split(";")[0]
        fail(code, f"the file is not usable TOML: {reason}", Location(source.file, 1))


_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def toml_value(value: object) -> str:
    """Write a value on one line as TOML has it: a truth value, number, string, list or table; tables are written inline.

    A half of a surrogate pair, which no Unicode text has, becomes '?'. Raises ValueError for a number that is not finite, which no file
    of ours may have, and for None and other kinds, which TOML has no word for.
    """
    if isinstance(value, bool):  # before int, which it is too
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float) and math.isfinite(value):
        return float.__repr__(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + " }"
    raise ValueError(f"TOML has no word for {value!r}")


def toml_key(key: str) -> str:
    """Write a key as TOML has it, quoted where it must be."""
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def toml_comment(text: str) -> str:
    """Write a line of comment, without the characters that a comment may not have or that other readers end a line at."""
    return f"# {''.join(each for each in text if each.isprintable())}".rstrip()


def _quoted(text: str) -> str:
    """A basic string: as JSON writes it, but that all that cannot be shown is escaped too."""
    sound = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(sound, ensure_ascii=False))
