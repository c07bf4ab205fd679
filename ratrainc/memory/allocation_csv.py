"""Allocation problems as CSV with the columns of MiniMalloc: id, lower, upper, size; solutions add `offset`.

    id,lower,upper,size
    a,0,3,64            buffer a has 64 bytes from time 0 to 2
    b,2,5,32            b lives at time 2 as well, so the two share no bytes

A column that would change the answer is honoured or refused by name. An `offset` for every buffer is a placement to be
checked; sizes must be multiples of every `alignment`; `gaps` and `hint` may only be empty.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from ratrain.passes.memory.allocation import AllocationProblem
from ratrain.ratrain_ir.support.diagnostics import Diagnostics, Location, fail, nearest
from ratrain.ratrain_ir.support.files import checked, read_text, write_text
from ratrain.ratrain_ir.support.text import shown

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.lifetime import Interval

_NUMBERS = ("lower", "upper", "size")
_COLUMNS = ("id", *_NUMBERS)
_OFFSET, _ALIGNMENT = "offset", "alignment"
_UNSUPPORTED = {
    "gaps": "a buffer lives all the time between lower and upper: give each part of its life as a buffer, if "
    "they may lie apart",
    "hint": "addresses are found without hints",
}
"""Columns of MiniMalloc that are not supported, with what to do instead."""
_KNOWN = (*_COLUMNS, _OFFSET, _ALIGNMENT, *_UNSUPPORTED)
_OTHER_NAMES = {
    "start": "'start' is lower here",
    "begin": "'begin' is lower here",
    "end": "'end' is the last time at which a buffer lives, the end included, so upper = end + 1",
    "buffer_id": "'buffer_id' is id here",
    "buffer": "'buffer' is id here",
}
"""Hints on column names that other programs use."""
_MOST = 1 << 60
"""Exclusive limit on times and on the sum of sizes, so that they can be added as 64-bit integers."""
_DIGITS = len(str(_MOST)) + 1
"""Most characters of a number, with its sign."""
_MOST_ERRORS = 100

_Buffers: TypeAlias = "tuple[list[str], list[int], list[tuple[Interval, ...]]]"
"""Names, sizes and lifetimes."""


@frozen(eq=False)
class AllocationTable:
    """A problem with the names of its buffers and the lines of its file."""

    problem: AllocationProblem
    ids: list[str]
    header: list[str]
    rows: list[list[str]]
    given: list[int] | None = None
    """the offset of each buffer in bytes; None if the file has no offsets"""


def read_problem(path: str) -> AllocationTable:
    """Read the problem in a CSV file.

    Raises `DiagnosticError` RT002 if the file is not such a table, RT004 for unknown columns, and RT005 or RT006 for
    wrong values, with their lines.
    """
    return parse_problem(read_text(path, "allocation problem"), path)


def parse_problem(text: str, path: str) -> AllocationTable:
    """Parse the problem in the text of a CSV file. Raises `DiagnosticError` as `read_problem` does."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        fail("RT002", f"the allocation problem is not CSV: {error}", Location(path, reader.line_num))
    header = _header(path, lines)
    rows = [row for _, row in lines[1:]]
    # the fast path reads whole columns; only a table with an error is read again row by row
    ids, sizes, intervals = _sound(header, rows) or _diagnosed(path, header, lines[1:])
    if sum(sizes) >= _MOST:
        fail("RT005", f"the sizes add up to {sum(sizes)} bytes; the most is {_MOST - 1}", Location(path, 1))
    positions = max((spans[-1][1] for spans in intervals), default=0)
    given = None
    if len(header) > len(_COLUMNS):
        places = [Location(path, line) for line, _ in lines[1:]]
        optional = {name: [row[header.index(name)].strip() for row in rows] for name in header if name not in _COLUMNS}
        given = _more(optional, ids, sizes, places)
    return AllocationTable(AllocationProblem(sizes, intervals, positions), ids, header, rows, given)


def _more(
    columns: dict[str, list[str]], ids: Sequence[str], sizes: Sequence[int], places: Sequence[Location]
) -> list[int] | None:
    """Return the offsets that optional columns give, or None.

    Raises `DiagnosticError` RT005 for a column that cannot be honoured.
    """
    for name, way_out in _UNSUPPORTED.items():
        at = next((at for at, text in enumerate(columns.get(name, ())) if text), None)
        if at is not None:
            text = f"{name} of buffer '{ids[at]}': the column '{name}' is not supported"
            fail("RT005", text, places[at], help=f"{way_out}; leave the column out, or empty")
    if _ALIGNMENT in columns:
        _check_alignments(columns[_ALIGNMENT], ids, sizes, places)
    offsets = columns.get(_OFFSET, ())
    missing = next((at for at, text in enumerate(offsets) if not text), None)
    if not any(offsets):
        return None
    if missing is not None:
        at = next(at for at, text in enumerate(offsets) if text)
        fail(
            "RT005",
            f"offset of buffer '{ids[at]}': it is given, and that of '{ids[missing]}' is not: some buffers "
            "cannot be pinned while others "
            "are placed",
            places[at],
            help="leave the column out to have all placed, or give all offsets to have them checked",
        )
    return _numbers(_OFFSET, offsets, 0, ids, places)


def _numbers(name: str, texts: Sequence[str], least: int, ids: Sequence[str], places: Sequence[Location]) -> list[int]:
    """Return the numbers of a column, each at least `least`. Raises `DiagnosticError` RT005 for others."""
    diagnostics, numbers = Diagnostics(), []
    for text, buffer, place in zip(texts, ids, places, strict=True):
        number = _number(text)
        if (number is None or number < least) and len(diagnostics.items) < _MOST_ERRORS:
            expected = f"no less than {least}" if number is not None else _expected(text)
            diagnostics.error("RT005", f"{name} of buffer '{buffer}': expected {expected}, got {shown(text)}", place)
        numbers.append(number or 0)
    diagnostics.check()
    return numbers


def _check_alignments(
    texts: Sequence[str], ids: Sequence[str], sizes: Sequence[int], places: Sequence[Location]
) -> None:
    """Refuse, with RT005, sizes that are not multiples of every alignment.

    The allocator's offsets are sums of sizes, so a common divisor of all sizes divides every offset.
    """
    common = math.lcm(*_numbers(_ALIGNMENT, [text or "1" for text in texts], 1, ids, places))
    at = next((at for at, size in enumerate(sizes) if size % common), None)
    if at is not None:
        fail(
            "RT005",
            f"size of buffer '{ids[at]}': {sizes[at]} is no multiple of {common}, which the column "
            f"'{_ALIGNMENT}' asks for",
            places[at],
            help=f"round every size up to a multiple of {common}: offsets are multiples of it then",
        )


def _sound(header: list[str], rows: list[list[str]]) -> _Buffers | None:
    """Return the buffers of the rows, read column by column; None if any row is wrong."""
    if not rows or any(len(row) != len(header) for row in rows):
        return None
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    ids = [name.strip() for name in columns["id"]]
    if len(set(ids)) < len(ids) or any(len(text) > _DIGITS for name in _NUMBERS for text in columns[name]):
        return None
    # int() also accepts `1_000` and digits of other scripts, which the format does not have
    if any("_" in text or not text.isascii() for text in ("".join(columns[name]) for name in _NUMBERS)):
        return None
    try:
        lower, upper, size = (list(map(int, columns[name])) for name in _NUMBERS)
    except ValueError:
        return None
    if min(size) < 0 or any(start >= stop for start, stop in zip(lower, upper, strict=True)):
        return None
    if min(lower) <= -_MOST or max(upper) >= _MOST or max(size) >= _MOST:
        return None
    return ids, size, [(span,) for span in zip(lower, upper, strict=True)]


def _diagnosed(path: str, header: list[str], lines: list[tuple[int, list[str]]]) -> _Buffers:
    """Return the buffers, read row by row.

    Raises `DiagnosticError` RT005 and RT006 for wrong values, RT002 for rows that are too short or too long.
    """
    diagnostics = Diagnostics()
    seen: dict[str, int] = {}
    sizes: list[int] = []
    intervals: list[tuple[Interval, ...]] = []
    for line, row in lines:
        if len(diagnostics.items) >= _MOST_ERRORS:
            break
        place = Location(path, line)
        if len(row) != len(header):
            diagnostics.error("RT002", f"expected {len(header)} fields as in the header, got {len(row)}", place)
            continue
        fields = dict(zip(header, row, strict=True))
        numbers = {name: _number(fields[name]) for name in _NUMBERS}
        name = fields["id"].strip()
        if name in seen:
            diagnostics.error("RT006", f"the buffer '{name}' is declared twice; first in line {seen[name]}", place)
        seen.setdefault(name, line)
        lower, upper, size = numbers["lower"], numbers["upper"], numbers["size"]
        if lower is None or upper is None or size is None:
            wrong = next(key for key in _NUMBERS if numbers[key] is None)
            diagnostics.error(
                "RT005",
                f"{wrong} of buffer '{name}': expected {_expected(fields[wrong])}, got {shown(fields[wrong])}",
                place,
            )
        elif size < 0:
            diagnostics.error("RT005", f"size of buffer '{name}': expected no less than 0, got {size}", place)
        elif lower >= upper:
            diagnostics.error(
                "RT005", f"upper of buffer '{name}': expected more than lower, {lower}, got {upper}", place
            )
        else:
            sizes.append(size)
            intervals.append(((lower, upper),))
    diagnostics.check()
    return list(seen), sizes, intervals


def write_solution(path: str, table: AllocationTable, offsets: list[int]) -> None:
    """Write the table with the column `offset`, atomically.

    Raises `DiagnosticError` RT002 if it cannot be written, and RT011 if it would not be read back as this placement.
    """

    def read(text: str) -> None:
        back = parse_problem(text, path)
        if (back.ids, back.given, back.problem.sizes) != (table.ids, offsets, table.problem.sizes):
            fail("RT005", "other offsets are read back")

    write_text(path, checked("".join(f"{line}\n" for line in _lines(table, offsets)), "solution", read))


def _lines(table: AllocationTable, offsets: list[int]) -> Iterator[str]:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="")
    kept = [k for k, name in enumerate(table.header) if name != _OFFSET]
    rows = ([*(row[k] for k in kept), str(offset)] for row, offset in zip(table.rows, offsets, strict=True))
    for row in ([*(table.header[k] for k in kept), _OFFSET], *rows):
        writer.writerow(row)
        yield stream.getvalue()
        stream.seek(0)
        stream.truncate()


def _header(path: str, lines: list[tuple[int, list[str]]]) -> list[str]:
    """Return the names of the columns.

    Raises `DiagnosticError` RT002 if one is missing, RT004 if one is unknown, RT006 if one is given twice.
    """
    if not lines:
        fail("RT002", "the allocation problem is empty; expected a header id,lower,upper,size", Location(path, 1))
    line, row = lines[0]
    header = [name.strip() for name in row]
    place = Location(path, line)
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        meant = [text for name, text in _OTHER_NAMES.items() if name in header]
        way_out = "; ".join(meant) or f"expected {','.join(_COLUMNS)}"
        fail("RT002", f"the header has no column '{missing[0]}'", place, help=way_out)
    for name in header:
        if name not in _KNOWN:
            fail("RT004", f"there is no column '{name}'", place, help=_OTHER_NAMES.get(name) or nearest(name, _KNOWN))
        if header.count(name) > 1:
            fail("RT006", f"the column '{name}' is given twice", place)
    return header


_INTEGER = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)


def _number(text: str) -> int | None:
    """Return the integer in a text; None if it is not one, or not between -`_MOST` and `_MOST`."""
    if len(text) > _DIGITS or not _INTEGER.fullmatch(text):
        return None
    value = int(text)
    return value if -_MOST < value < _MOST else None


def _expected(text: str) -> str:
    """Say what is expected in place of a bad number: one within bounds if it is an integer, else an integer."""
    return f"an integer between -{_MOST} and {_MOST}" if _INTEGER.fullmatch(text) else "an integer in digits"
