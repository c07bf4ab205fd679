"""A validation as a page in Markdown, whose prose is the comments above the tables' headers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ratrain.ratrainc.console.markdown_text import escaped, prose, wrapped
from ratrain.ratrainc.validation.validation_tables import (
    class_tables,
    error_table,
    fit_table,
    folded_text,
    left_out_text,
    medians_table,
    ranking_table,
)

if TYPE_CHECKING:
    from ratrain.ratrainc.console.parts import TextTable
    from ratrain.ratrainc.validation.outcome import Validation
    from ratrain.ratrainc.validation.validation_rows import ValidationTable

_INTRODUCTION = (
    "What was published of steps that ran, and what the simulator says of the same plans. Written by `ratrainc "
    "validate ... --markdown` "
    "from the tables named below: do not edit it. What a row says, and which rows are compared, is in "
    "[validation-tables.md](validation-tables.md). Rows of the split `fit` were in sight when constants of "
    "their machine were set; the others "
    "are held out."
)
_READING = (
    "Read with care: efficiencies of the GPU machine files and what a kernel costs the host are fitted to the "
    "rows of split `fit` (`make constants`); latencies are assumed. Known to be left out of the model: dropout "
    "and its masks, "
    "fragmentation of an eager framework's allocator, what frameworks hold in addition to the step's tensors "
    "(reduction buckets, flat copies of "
    "gradients), how the efficiency of a real kernel varies with shapes, and traffic of others on the network. "
    "Of these bytes, rows that "
    "name a framework have what its code and published formulas say. What a table's source does not state, and "
    "what was chosen in its "
    "place, is said in its section."
)
_CLASSES = (
    "Classes: `bubble` (idle share of a step), `step-time`, `scaling` (the same model on more ranks), "
    "`zero3-micro-batch` (throughput as the "
    "micro-batch of a rank shrinks), `memory` (bytes of the fullest rank) and `out-of-memory` (what ran, and "
    "what did not fit)."
)


def page(validation: Validation) -> str:
    """Return the page: errors by class and table, rankings, predictions of fitting, and each table with its rows."""
    parts = ["# Validation", _INTRODUCTION, _CLASSES, _READING, *_said(_not_asked_for(validation))]
    parts += _titled("Errors by class", error_table(validation))
    parts += _titled("Rankings", ranking_table(validation))
    parts += _titled("Errors by table", medians_table(validation))
    parts += _titled("What fits", fit_table(validation))
    parts += _said(folded_text(validation))
    parts += _left_out(validation)
    for table in validation.tables:
        parts += _section(validation.of_table(table), table)
    return wrapped("\n\n".join(parts)) + "\n"


def _not_asked_for(validation: Validation) -> str:
    """Name the tables in the same folders that were not validated; empty if there are none."""
    paths = {Path(table.path).resolve() for table in validation.tables}
    present = {path for folder in {path.parent for path in paths} for path in folder.glob("*.csv")}
    names = ", ".join(sorted(path.stem for path in present - paths))
    return f"other tables in these folders, not named and not counted here: {names}" if names else ""


def _section(validation: Validation, table: ValidationTable) -> Iterator[str]:
    """Yield the section of one table: its comments, and its rows by class."""
    yield f"## {escaped(table.name)}"
    yield from _comments(table.comments)
    for each in class_tables(validation):
        yield f"Class {escaped(each.title)}:"
        yield _table(each)
    yield from _left_out(validation)


def _comments(comments: Sequence[str]) -> Iterator[str]:
    """Yield paragraphs; an empty comment line separates two."""
    lines: list[str] = []
    for line in (*comments, ""):
        if line:
            lines.append(line)
        elif lines:
            yield prose(" ".join(lines))
            lines = []


def _titled(title: str, table: TextTable) -> Iterator[str]:
    if table.rows:
        yield f"## {title}"
        yield _sentence(escaped(table.title))
        yield _table(table)


def _left_out(validation: Validation) -> Iterator[str]:
    yield from _said(left_out_text(validation))


def _said(text: str) -> Iterator[str]:
    """Yield a plain text as an escaped sentence, unless it is empty."""
    if text:
        yield _sentence(escaped(text))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _table(table: TextTable) -> str:
    rows = (table.columns, ["---", *["---:"] * (len(table.columns) - 1)], *table.rows)
    return "\n".join(f"| {' | '.join(map(escaped, cells))} |" for cells in rows)
