"""A validation as a page in Markdown. Its prose is the comments above the tables' headers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ratrain.ratrainc.validation.rows import label_of
from ratrain.ratrainc.validation.tables import TextTable, class_tables, error_table, fit_table, left_out_text

if TYPE_CHECKING:
    from ratrain.ratrainc.validation.outcome import Validation
    from ratrain.ratrainc.validation.rows import ValidationTable

_WIDTH = 119
_INTRODUCTION = (
    "What was published of steps that ran, and what the simulator says of the same plans. Written by `ratrainc validate ... --markdown` "
    "from the tables named below: do not edit it. What a row says, and which rows are compared, is in "
    "[validation-tables.md](validation-tables.md). Rows of the split `fit` were in sight when constants of their machine were set; the others "
    "are held out."
)


def page(validation: Validation) -> Iterator[str]:
    """The lines of the page: errors by class, what was called fitting, and each table with its rows."""
    yield from ("# Validation", "")
    yield from (*_paragraph(_INTRODUCTION), "")
    yield from _titled("Errors by class", error_table(validation))
    yield from _titled("What fits", fit_table(validation))
    if left_out := left_out_text(validation):
        yield from (*_paragraph(f"{left_out[0].upper()}{left_out[1:]}."), "")
    sections = [_section(validation.of_table(table), table) for table in validation.tables]
    for number, section in enumerate(sections):
        lines = list(section)
        yield from lines if number + 1 < len(sections) else lines[:-1]


def _section(validation: Validation, table: ValidationTable) -> Iterator[str]:
    """One table: what it says of itself, and its rows by class."""
    yield from (f"## {label_of(table.path)}", "")
    for comment in _comments(table.comments):
        yield from (*_paragraph(comment), "")
    for each in class_tables(validation):
        yield from (f"Class {each.title}:", "", *_table(each), "")
    if left_out := left_out_text(validation):
        yield from (*_paragraph(f"{left_out[0].upper()}{left_out[1:]}."), "")


def _comments(comments: Sequence[str]) -> Iterator[str]:
    """Paragraphs: an empty comment line parts two."""
    lines: list[str] = []
    for line in (*comments, ""):
        if line:
            lines.append(line)
        elif lines:
            yield " ".join(lines)
            lines = []


def _titled(title: str, table: TextTable) -> Iterator[str]:
    if table.rows:
        yield from (f"## {title}", "", *_paragraph(f"{table.title[0].upper()}{table.title[1:]}."), "")
        yield from (*_table(table), "")


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _table(table: TextTable) -> Iterator[str]:
    for cells in (table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows):
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
