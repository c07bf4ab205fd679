"""Reader of users' text files, with the places of keys in them, which diagnostics point at."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

from attrs import field, frozen

from ratrain.ratrain_ir.support.diagnostics import Location, fail
from ratrain.ratrain_ir.support.files import help_for, opened, without_mark

MAX_BYTES = 1 << 20
"""Most bytes that are read. A configuration or plan has a few thousand; a larger file is something else."""


@frozen
class Place:
    """Location that a diagnostic points at, and the source line that it shows."""

    location: Location | None = None
    source: str | None = None


Places = Callable[[str], Place]
"""Function from a key (`hidden_size`, `parallel.pp`) to its place, as exactly as it is known."""


def nowhere(_key: str) -> Place:
    """Return an empty place: the `Places` of values that do not come from a text."""
    return Place()


@frozen
class Source:
    """A text and the name of its file; lines and columns count from 1, lines end at line feeds."""

    file: str
    text: str
    lines: list[str] = field(init=False, repr=False)
    _starts: list[int] = field(init=False, repr=False, eq=False)
    """index of the first character of each line"""

    def __attrs_post_init__(self) -> None:
        lines = self.text.split("\n")
        object.__setattr__(self, "_starts", list(accumulate((len(line) + 1 for line in lines[:-1]), initial=0)))
        object.__setattr__(self, "lines", [_printable(line) for line in lines])

    def at(self, line: int, column: int, length: int = 1) -> Place:
        """Return the place at a line and column; a line past the end becomes the last line."""
        line = min(line, len(self.lines))
        return Place(Location(self.file, line, column, max(1, length)), self.lines[line - 1])

    def span(self, start: int, end: int) -> Place:
        """Return the place of `text[start:end]`, cut at the end of its first line."""
        line = bisect_right(self._starts, max(start, 0))
        column = start - self._starts[line - 1] + 1
        stop = self.text.find("\n", start)
        return self.at(line, column, (end if stop < 0 else min(end, stop)) - start)

    def top(self) -> Place:
        """Return the place of the file as a whole, for keys that are missing."""
        return Place(Location(self.file, 1))


def _printable(line: str) -> str:
    """Replace control characters one for one, so that columns stay right and a terminal is safe."""
    return "".join(c if c.isprintable() or c == "\t" else "\ufffd" for c in line.removesuffix("\r"))


def read_text(path: str | Path, code: str, what: str) -> str:
    """Return the text of a UTF-8 file without its byte order mark; `what` describes the expected file in messages.

    Raises RT002 if the file cannot be opened or read, and `code` if it is too large, empty or not UTF-8.
    """
    file = str(path)
    try:
        with opened(path) as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        fail(
            "RT002",
            f"{shown(file)} cannot be read: {reason}",
            help=help_for(error) or f"name a readable file that is {what}",
        )
    if len(data) > MAX_BYTES:
        fail(code, f"the file is larger than {MAX_BYTES} bytes: it is not {what}", Location(file, 1))
    try:
        data = without_mark(data)
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        begin = data.rfind(b"\n", 0, error.start) + 1
        column = len(data[begin : error.start].decode("utf-8", "replace")) + 1
        source = data[begin:].split(b"\n", 1)[0].decode("utf-8", "replace")
        fail(
            code,
            f"byte 0x{data[error.start]:02x} is not UTF-8 text: the file is not {what}",
            Location(file, line, column),
            source=_printable(source),
            help="save the file as UTF-8",
        )
    if not text.strip():
        fail(code, f"the file is empty: {what} is expected", Location(file, 1))
    return text


def json_places(source: Source) -> tuple[Places, list[tuple[str, Place, Place]]]:
    """Find the places of the keys of a JSON object, and its repeated keys as (key, first place, later place).

    The text must be known to be a valid JSON object.
    """
    decoder = json.JSONDecoder()
    text = source.text
    places: dict[str, Place] = {}
    repeated: list[tuple[str, Place, Place]] = []
    at = _after_space(text, text.index("{") + 1)
    while text[at] != "}":
        key, end = decoder.raw_decode(text, at)
        colon = _after_space(text, end)
        _, end = decoder.raw_decode(text, _after_space(text, colon + 1))
        place = source.span(at, end)
        if key in places:
            repeated.append((key, places[key], place))
        places.setdefault(key, place)
        at = _after_space(text, end)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    return lambda key: places.get(key, source.top()), repeated


_JSON_SPACE = re.compile(r"[ \t\r\n]*")


def _after_space(text: str, at: int) -> int:
    match = _JSON_SPACE.match(text, at)
    return match.end() if match else at


_HEADER = re.compile(r"\s*\[\s*([\w\"'.-]+)\s*\]")
_KEY = re.compile(r"\s*([\w\"'.-]+)\s*=")
_INLINE_KEY = re.compile(r"[{,]\s*([\w\"'-]+)\s*=[^,}]*")


def toml_places(source: Source) -> Places:
    """Find the places of the keys of a TOML text, as `section.key`.

    The place of a key is its line, else the header of its section, else the file. The search goes line by line and does
    not understand multi-line strings, which plans do not need.
    """
    places: dict[str, Place] = {}
    section = ""
    for number, line in enumerate(source.lines, 1):
        body = line.split("#", 1)[0].rstrip()
        if header := _HEADER.match(body):
            section = _unquoted(header[1])
            places.setdefault(section, source.at(number, header.start(1), len(body) - header.start(1) + 1))
        elif key := _KEY.match(body):
            path = f"{section}.{_unquoted(key[1])}".lstrip(".")
            start = key.start(1)
            places.setdefault(path, source.at(number, start + 1, len(body) - start))
            for inner in _INLINE_KEY.finditer(body, key.end()):
                place = source.at(number, inner.start(1) + 1, len(inner[0].rstrip()) - (inner.start(1) - inner.start()))
                places.setdefault(f"{path}.{_unquoted(inner[1])}", place)
    return lambda path: places.get(path) or places.get(path.rpartition(".")[0]) or source.top()


def _unquoted(key: str) -> str:
    return key.replace('"', "").replace("'", "")


def shown(value: object) -> str:
    """Format a user's value for a message: on one line, of bounded length, printable."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    try:
        text = json.dumps(value) if isinstance(value, (bool, str, type(None))) else repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints, or endless nesting
        return "a value too large to print"
    return text if len(text) <= 80 else f"{text[:76]} ..."
