"""Allocation problems as CSV, in the columns of MiniMalloc: id, lower, upper, size; solutions add offset."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

from attrs import frozen

from ratrain.passes.memory.allocation import AllocationProblem
from ratrain.ratrain_ir.diagnostics import Diagnostics, Location, fail, nearest
from ratrain.ratrain_ir.files import read_text, write_lines

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.lifetime import Interval

_NUMBERS = ("lower", "upper", "size")
_COLUMNS = ("id", *_NUMBERS)
_OFFSET = "offset"
_MOST = 1 << 60
"""Times and the sum of the sizes stay below this, so that they can be added as 64-bit integers."""
_DIGITS = len(str(_MOST)) + 1
"""Characters of a number, with its sign."""
_MOST_ERRORS = 100

_Buffers: TypeAlias = "tuple[list[str], list[int], list[tuple[Interval, ...]]]"
"""Names, sizes and lifetimes."""


@frozen(eq=False)
class Table:
    """A problem, its buffers' names, and its lines as they were."""

    problem: AllocationProblem
    ids: list[str]
    header: list[str]
    rows: list[list[str]]


def read_problem(path: str) -> Table:
    """The problem in a CSV file.

    Raises `DiagnosticError` RT002 when the file is not such a table, RT005 and RT006 for wrong values, with their lines.
    """
    reader = csv.reader(io.StringIO(read_text(path, "allocation problem"), newline=""), strict=True)
    try:
        lines = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        fail("RT002", f"the allocation problem is not CSV: {error}", Location(path, reader.line_num))
    header = _header(path, lines)
    rows = [row for _, row in lines[1:]]
    ids, sizes, intervals = _sound(header, rows) or _diagnosed(path, header, lines[1:])
    if sum(sizes) >= _MOST:
        fail("RT005", f"the sizes add up to {sum(sizes)} bytes; the most is {_MOST - 1}", Location(path, 1))
    positions = max((spans[-1][1] for spans in intervals), default=0)
    return Table(AllocationProblem(sizes, intervals, positions), ids, header, rows)


def _sound(header: list[str], rows: list[list[str]]) -> _Buffers | None:
    """The buffers of rows that are all as they should be, column by column; None where one is not."""
    if not rows or any(len(row) != len(header) for row in rows):
        return None
    columns = dict(zip(header, zip(*rows, strict=True), strict=True))
    ids = [name.strip() for name in columns["id"]]
    if len(set(ids)) < len(ids) or any(len(text) > _DIGITS for name in _NUMBERS for text in columns[name]):
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
    """The buffers of rows that are told apart, each with its line.

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
            diagnostics.error("RT005", f"{wrong} of buffer '{name}': expected an integer, got '{fields[wrong]}'", place)
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


def write_solution(path: str, table: Table, offsets: list[int]) -> None:
    """Write the table with the column offset, atomically.

    Raises `DiagnosticError` RT002 when it cannot be written.
    """
    write_lines(path, _lines(table, offsets))


def _lines(table: Table, offsets: list[int]) -> Iterator[str]:
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
    """The names of the columns.

    Raises `DiagnosticError` RT002 where one is missing, unknown or given twice.
    """
    if not lines:
        fail("RT002", "the allocation problem is empty; expected a header id,lower,upper,size", Location(path, 1))
    line, row = lines[0]
    header = [name.strip() for name in row]
    place = Location(path, line)
    missing = [name for name in _COLUMNS if name not in header]
    if missing:
        fail("RT002", f"the header has no column '{missing[0]}'", place, help=f"expected {','.join(_COLUMNS)}")
    for name in header:
        if name not in {*_COLUMNS, _OFFSET}:
            fail("RT004", f"there is no column '{name}'", place, help=nearest(name, (*_COLUMNS, _OFFSET)))
        if header.count(name) > 1:
            fail("RT006", f"the column '{name}' is given twice", place)
    return header


def _number(text: str) -> int | None:
    """An integer of moderate size, or None."""
    try:
        value = int(text) if len(text) <= _DIGITS else _MOST
    except ValueError:
        return None
    return value if -_MOST < value < _MOST else None
