"""CSV tables of measurements, line by line, with the places that diagnostics name."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import evolve, frozen

from ratrain.ratrain_ir.diagnostics import DiagnosticError, Location, fail
from ratrain.ratrain_ir.files import read_text


@frozen
class TableLine:
    """The fields of one line, without the spaces around them."""

    path: str
    number: int
    cells: Sequence[str]

    @property
    def text(self) -> str:
        """The line as diagnostics show it."""
        return ",".join(self.cells)

    @property
    def place(self) -> Location:
        """All of the line."""
        return Location(self.path, self.number, 1, max(1, len(self.text)))

    def place_of(self, index: int) -> Location:
        """One field, counted from 0."""
        column = 1 + sum(len(cell) + 1 for cell in self.cells[:index])
        return Location(self.path, self.number, column, max(1, len(self.cells[index])))

    @contextmanager
    def blamed(self, index: int | None = None) -> Iterator[None]:
        """Give diagnostics that name no place that of a field, or of the line: what is wrong comes from there."""
        place = self.place if index is None else self.place_of(index)
        try:
            yield
        except DiagnosticError as error:
            located = [d if d.location else evolve(d, location=place, source=self.text) for d in error.diagnostics]
            raise DiagnosticError(located) from None


def read_table(path: str, what: str) -> list[TableLine]:
    """The lines of a CSV file that are not empty.

    Raises `DiagnosticError` RT002 where it is not CSV or has no header.
    """
    reader = csv.reader(io.StringIO(read_text(path, what), newline=""), strict=True)
    try:
        lines = [TableLine(path, reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except csv.Error as error:
        fail("RT002", f"the {what} is not CSV: {error}", Location(path, reader.line_num))
    if not lines:
        fail("RT002", f"the {what} is empty", Location(path, 1))
    return lines
