"""TOML as users' files contain it: reader with diagnostics, and writer of single values."""

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
"""Most dots in a line. `tomllib` takes time quadratic in the parts of a dotted key; no sensible file has this many."""


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text.

    Raises ValueError (mostly `tomllib.TOMLDecodeError`) or RecursionError if it is not TOML, or a line has more than
    `_MOST_DOTS` dots.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _MOST_DOTS:
            raise ValueError(f"a line has more than {_MOST_DOTS} dots (at line {number}, column 1)")
    return tomllib.loads(text)


def toml_data(source: Source, code: str) -> dict[str, Any]:
    """Parse a TOML text; raise `DiagnosticError` with `code` at the place of a syntax error."""
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
    """Format a value on one line of TOML: a boolean, number, string, list or (inline) table.

    A lone surrogate becomes '?'. Raises ValueError for an infinite or NaN number, which no file of this project may
    have, and for None and other types, which TOML cannot express.
    """
    if isinstance(value, bool):  # before int, of which bool is a subclass
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
    """Format a key for TOML, quoted if it must be."""
    return key if _BARE_KEY.fullmatch(key) else _quoted(key)


def toml_comment(text: str) -> str:
    """Format a comment line, without characters that TOML forbids or that other readers take for a line end."""
    return f"# {''.join(each for each in text if each.isprintable())}".rstrip()


def _quoted(text: str) -> str:
    """Format a basic string of TOML: JSON's form, with unprintable characters escaped as well."""
    sound = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in json.dumps(sound, ensure_ascii=False))
