"""TOML as files of users have it."""

from __future__ import annotations

import re
import tomllib
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.diagnostics import Location, fail

if TYPE_CHECKING:
    from ratrain.ratrain_ir.frontend.text import Source

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
