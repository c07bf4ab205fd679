"""Reader of Hjson, the format of DeepSpeed's settings: JSON with comments, trailing commas and unquoted words."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.bridge.settings import Setting

if TYPE_CHECKING:
    from ratrain.ratrain_ir.support.text import Place, Source


@frozen
class _Table:
    """An object of the text, with its keys in order; a repeated key is kept each time."""

    entries: list[tuple[str, Any, int, int]]
    """key, value, and the start and exclusive end index of the value in the text"""


def hjson_settings(source: Source, what: str) -> dict[str, Setting]:
    """Read the settings of an Hjson object, by dotted names; a key that itself has a dot is quoted in its name.

    Raises `DiagnosticError` RT063 if the text is not Hjson or no object, and RT064 if an object has a key twice.
    """
    table = _parsed(source, what)
    found: dict[str, Setting] = {}
    _flatten(source, table, "", found)
    return found


def _parsed(source: Source, what: str) -> _Table:
    import hjson.decoder

    def parse_object(
        state: tuple[str, int],
        encoding: str,
        strict: bool,
        scan_once: Any,
        _object_hook: object,
        _pairs_hook: object,
        memo: Any = None,
        without_braces: bool = False,
    ) -> tuple[_Table, int]:
        spans: list[tuple[int, int]] = []  # the parser scans one value after each key, in their order

        def scan(text: str, start: int) -> tuple[Any, int]:
            value, end = scan_once(text, start)
            spans.append((start, end))
            return value, end

        def table(pairs: list[tuple[str, Any]]) -> _Table:
            return _Table([(key, value, *span) for (key, value), span in zip(pairs, spans, strict=True)])

        made: tuple[_Table, int] = hjson.decoder.JSONObject(
            state, encoding, strict, scan, None, table, memo, without_braces
        )
        return made

    decoder = hjson.decoder.HjsonDecoder()
    # hjson drops places and repeated keys. Its object parser is replaced by one that keeps both.
    decoder.parse_object = parse_object
    decoder.scan_once, decoder.scan_object_once = hjson.decoder.make_scanner(decoder)  # which looked at it before
    try:
        data = decoder.decode(source.text)
    except hjson.HjsonDecodeError as error:
        place = source.at(error.lineno, error.colno)
        fail("RT063", f"the file is not usable Hjson or JSON: {error.msg}", place.location, source=place.source)
    except IndexError:  # the parser runs over the end of the text
        place = source.span(at := max(0, source.text.rfind("/*")), at + 2)
        fail("RT063", "a comment does not end: /* without */", place.location, source=place.source)
    except (ValueError, OverflowError, RecursionError) as error:  # thousands of digits, 1e999, nesting
        fail("RT063", f"the file is not usable Hjson or JSON: {error}", source.top().location)
    if not isinstance(data, _Table):
        fail("RT063", f"{what} is an object: {{...}}", source.top().location)
    return data


def _flatten(source: Source, table: _Table, within: str, found: dict[str, Setting]) -> None:
    first: set[str] = set()
    for key, value, start, end in table.entries:
        name = f"{within}{key if '.' not in key else repr(key)}"
        place = _place(source, key, start, end)
        if key in first:
            fail("RT064", f"{name} is said twice", place.location, source=place.source, help="leave one of them")
        first.add(key)
        if isinstance(value, _Table) and value.entries:
            _flatten(source, value, f"{name}.", found)
        else:
            found[name] = Setting(_plain(value), place)


def _place(source: Source, key: str, start: int, end: int) -> Place:
    """Return the place of a key and its value; only of the value if the key is written with escapes."""
    before = source.text.rfind(key, 0, start) if key else -1
    between = source.text[before + len(key) : start] if before >= 0 else ""
    return source.span(before if re.fullmatch(r"[\"']?\s*:\s*", between) else start, end)


def _plain(value: Any) -> Any:
    """Return a value with the tables in its lists as dictionaries."""
    if isinstance(value, _Table):
        return {key: _plain(each) for key, each, _, _ in value.entries}
    return [_plain(each) for each in value] if isinstance(value, list) else value
