"""Reader and writer of pipeline strings such as `place-1f1b,recompute{policy=full},bucket-grad-sync{bytes=64MiB}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import attrs
from attrs import frozen

from ratrain.passes.pass_base import PATH, Pass, option_text, path_of_text
from ratrain.passes.registry import pass_class
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Location, nearest
from ratrain.ratrain_ir.support.quantities import QuantityError, whole_bytes

_MAX_COUNT_DIGITS = 7
_PASS = re.compile(r"\s*([^\s,{}]+)\s*(\{([^{}]*)\})?\s*")


@frozen
class ParsedPass:
    """Pass read from a pipeline string, with the places of its options."""

    item: Pass
    places: Mapping[str, slice]
    """By field name of each option written out: its slice of the string."""


def parse_pipeline(text: str) -> list[Pass]:
    """Parse a pipeline string into passes; a blank string gives none.

    Raises `DiagnosticError` RT070 with a caret under the place, or RT004 for an unknown pass.
    """
    return [said.item for said in read_pipeline(text)]


def read_pipeline(text: str) -> list[ParsedPass]:
    """Parse a pipeline string into passes with the places of the options that it spells out.

    Raises `DiagnosticError` RT070 with a caret under the place, or RT004 for an unknown pass.
    """
    passes: list[ParsedPass] = []
    position = 0
    if not text.strip():
        return passes
    while True:
        match = _PASS.match(text, position)
        if match is None:
            _fail(text, position, "expected the name of a pass")
        passes.append(_make(text, match))
        position = match.end()
        if position == len(text):
            return passes
        if text[position] != ",":
            _fail(text, position, f"expected ',' between passes, got '{text[position]}'")
        position += 1


def pipeline_text(passes: list[Pass]) -> str:
    """Return the pipeline string of a list of passes; it parses back to equal passes."""
    return ",".join(map(pass_text, passes))


def pass_text(item: Pass) -> str:
    """Return the text of one pass, with the options that differ from their defaults."""
    options = [
        f"{attribute.name.replace('_', '-')}={option_text(getattr(item, attribute.name))}"
        for attribute in attrs.fields(type(item))
        if getattr(item, attribute.name) != attribute.default
    ]
    return item.name + (f"{{{' '.join(options)}}}" if options else "")


def size_in_bytes(text: str) -> int | None:
    """Return the bytes of a size like `64MiB`, `1.5 GB` or `1000`.

    None if it is no size, no whole number of bytes, or larger than any memory.
    """
    try:
        return whole_bytes(text)
    except QuantityError:
        return None


def _make(text: str, match: re.Match[str]) -> ParsedPass:
    try:
        cls = pass_class(match[1])
    except DiagnosticError as error:
        first = error.diagnostics[0]
        place = Location("pipeline", 1, match.start(1) + 1, len(match[1]))
        raise DiagnosticError([attrs.evolve(first, location=place, source=text)]) from None
    options: dict[str, Any] = {}
    places: dict[str, slice] = {}
    fields = {a.name.replace("_", "-"): a for a in attrs.fields(cls)}
    for part in re.finditer(r"[^\s,]+", match[3] or ""):
        at = match.start(3) + part.start()
        key, equals, value = part[0].partition("=")
        if not equals or not value:
            _fail(text, at, f"options of '{cls.name}' are written key=value, got '{part[0]}'", len(part[0]))
        if key not in fields:
            known = ", ".join(fields) or "none"
            _fail(text, at, f"'{cls.name}' has no option '{key}'; its options: {known}", len(key), nearest(key, fields))
        if fields[key].name in options:
            _fail(text, at, f"'{key}' of '{cls.name}' is given twice", len(part[0]))
        options[fields[key].name] = _read_option(text, at + len(key) + 1, cls, fields[key], value)
        places[fields[key].name] = slice(at, at + len(part[0]))
    for key, attribute in fields.items():
        if attribute.default is attrs.NOTHING and attribute.name not in options:
            way_out = f"write {cls.name}{{{key}={attribute.metadata['unit'].upper()}}}"
            _fail(text, match.start(1), f"'{cls.name}' needs the option '{key}'", len(match[1]), way_out)
    return ParsedPass(cls(**options), places)


def _read_option(text: str, at: int, cls: type[Pass], attribute: attrs.Attribute[Any], value: str) -> Any:
    choices = attribute.metadata.get("choices")
    if choices is not None:
        if value not in choices:
            expected = f"expected one of {', '.join(choices)}, got '{value}'"
            _fail(text, at, f"{attribute.name} of '{cls.name}': {expected}", len(value), nearest(value, choices))
        return value == "true" if isinstance(attribute.default, bool) else value
    words = attribute.metadata.get("words", ())
    if value in words:
        return value
    if attribute.metadata.get("unit") == PATH:
        return path_of_text(value)
    if attribute.metadata.get("unit") == "bytes":
        try:
            return whole_bytes(value)
        except QuantityError as error:
            message = f"expected {' or '.join(('bytes like 64MiB', *words))}, got '{value}'"
            _fail(text, at, f"{attribute.name} of '{cls.name}': {message}", len(value), _joined(error.help))
    if not (value.isascii() and value.isdigit() and len(value) < _MAX_COUNT_DIGITS):
        _fail(text, at, f"{attribute.name} of '{cls.name}': expected a number, got '{value}'", len(value))
    return int(value)


def _joined(words: str) -> str:
    """Write `64 MiB` as `64MiB`: blanks separate the options of a pass."""
    return re.sub(r"(\d) (?=[A-Z])", r"\1", words)


def _fail(text: str, at: int, message: str, length: int = 1, help: str | None = None) -> NoReturn:  # noqa: A002
    place = Location("pipeline", 1, at + 1, length)
    raise DiagnosticError([Diagnostic("RT070", message, place, help=help, source=text)])
