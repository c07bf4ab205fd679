"""CSV tables of measurements; each field knows its place for diagnostics."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import NoReturn, TypeVar

from attrs import evolve, frozen

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics, Location, fail, nearest
from ratrain.ratrain_ir.support.files import read_text

R = TypeVar("R")

_MOST_ERRORS = 100


@frozen
class TableLine:
    """The fields of one line, without the spaces around them."""

    path: str
    number: int
    cells: Sequence[str]

    @property
    def text(self) -> str:
        """Line as diagnostics show it."""
        return ",".join(self.cells)

    @property
    def place(self) -> Location:
        """Location of the whole line."""
        return Location(self.path, self.number, 1, max(1, len(self.text)))

    def place_of(self, index: int) -> Location:
        """Return the location of a field, counted from 0."""
        column = 1 + sum(len(cell) + 1 for cell in self.cells[:index])
        return Location(self.path, self.number, column, max(1, len(self.cells[index])))

    @contextmanager
    def blamed(self, index: int | None = None) -> Iterator[None]:
        """Give diagnostics that the block raises without a place the place of a field, or of the line."""
        place = self.place if index is None else self.place_of(index)
        try:
            yield
        except DiagnosticError as error:
            located = [d if d.location else evolve(d, location=place, source=self.text) for d in error.diagnostics]
            raise DiagnosticError(located) from None


@frozen
class Cells:
    """One line of a table, by the names of its columns."""

    line: TableLine
    header: Sequence[str]

    def text(self, key: str) -> str:
        """Return the text in a column; empty if the table does not have the column."""
        return self.line.cells[self.header.index(key)] if key in self.header else ""

    def path_of(self, name: str) -> Path:
        """Return a path that the table gives relative to its own folder."""
        return Path(self.line.path).parent / name

    def place(self, key: str) -> Location:
        """Return the location of a column's field; of the line if the table does not have the column."""
        return self.line.place_of(self.header.index(key)) if key in self.header else self.line.place

    def fail(self, key: str, message: str, *, code: str = "RT005", help: str | None = None) -> NoReturn:  # noqa: A002
        """Raise `DiagnosticError` at a column."""
        fail(code, message, self.place(key), source=self.line.text, help=help)

    def number(self, key: str) -> float:
        """Return the positive number in a column; report an error if it is not one."""
        try:
            value = float(self.text(key))
        except ValueError:
            value = math.nan
        if not 1e-9 < value < 1e15:
            self.fail(key, f"{key} is a positive number, got '{self.text(key)}'")
        return value

    def word(self, key: str, choices: Collection[str]) -> str:
        """Return the word in a column; report an error if it is not one of `choices`."""
        text = self.text(key)
        if text not in choices:
            self.fail(key, f"{key} is {' or '.join(choices)}, got '{text}'", help=nearest(text, choices))
        return text


def read_table(path: str, what: str) -> list[TableLine]:
    """Read the lines of a CSV file that are not empty.

    Raises `DiagnosticError` RT002 if it is not CSV or has no header.
    """
    return _lines(path, what, read_text(path, what))


def read_commented_table(path: str, what: str) -> tuple[list[str], list[TableLine]]:
    """Read a CSV file; return the comments above its header, without `#`, and the non-empty lines from there on.

    Raises `DiagnosticError` RT002 if it is not CSV or has no header.
    """
    text = read_text(path, what)
    above = list(takewhile(lambda line: line.startswith("#"), text.split("\n")))
    rest = text.split("\n", len(above))[len(above) :]
    return [line[1:].strip() for line in above], _lines(path, what, "\n" * len(above) + "".join(rest))


def _lines(path: str, what: str, text: str) -> list[TableLine]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        lines = [TableLine(path, reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as error:
        fail("RT002", f"the {what} is not CSV: {error}", Location(path, reader.line_num))
    if not lines:
        fail("RT002", f"the {what} is empty", Location(path, 1))
    return lines


def check_header(line: TableLine, known: Collection[str], required: Collection[str]) -> Sequence[str]:
    """Return the names of the columns.

    Raises `DiagnosticError` with every column that is unknown (RT004), given twice (RT006) or missing (RT002).
    """
    header = line.cells
    diagnostics = Diagnostics()
    for index, name in enumerate(header):
        place = line.place_of(index)
        if name not in known:
            text = f"there is no column '{name}'"
            diagnostics.error("RT004", text, place, help=nearest(name, known), source=line.text)
        elif name in header[:index]:
            diagnostics.error("RT006", f"the column '{name}' is given twice", place, source=line.text)
    for name in required:
        if name not in header:
            diagnostics.error("RT002", f"the header has no column '{name}'", line.place, source=line.text)
    diagnostics.check()
    return header


def read_lines(lines: Sequence[TableLine], header: Sequence[str], read: Callable[[Cells], R]) -> list[R]:
    """Apply `read` to each line below the header, and return the results.

    Raises `DiagnosticError` with the errors of all lines, and RT002 if there are no lines.
    """
    diagnostics = Diagnostics()
    rows = []
    for line in lines[1:]:
        if len(diagnostics.items) >= _MOST_ERRORS:
            break
        if len(line.cells) != len(header):
            text = f"expected {len(header)} fields as in the header, got {len(line.cells)}"
            diagnostics.error("RT002", text, line.place, source=line.text)
            continue
        try:
            rows.append(read(Cells(line, header)))
        except DiagnosticError as error:
            new = [
                each for each in error.diagnostics if each not in diagnostics.items
            ]  # a file may be named by many rows
            diagnostics.items.extend(new)
    diagnostics.check()
    if not rows:
        fail("RT002", "the table has no rows", Location(lines[0].path, 1))
    return rows
