"""Tables of a validation, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, TextTable
from ratrain.ratrainc.validation.ranking import LEAST_ROWS
from ratrain.ratrainc.validation.validation_rows import COMPARED_IN_GROUPS, SPLITS, ValidationRow

if TYPE_CHECKING:
    from ratrain.ratrainc.validation.errors import Errors
    from ratrain.ratrainc.validation.outcome import RowOutcome, Validation

_GB, _MB = 1e9, 1e6


def validation_parts(validation: Validation) -> Iterator[Part]:
    """Yield a table for each class, errors by class and by table, rankings, predictions of fitting, and notes."""
    by_table = [medians_table(validation)] if len(validation.tables) > 1 else []
    summaries = (error_table(validation), *by_table, ranking_table(validation), fit_table(validation))
    for each in (*class_tables(validation), *summaries):
        if each.rows:
            yield evolve(each, most=len(each.rows))
    yield from (text for text in (folded_text(validation), left_out_text(validation)) if text)


def class_tables(validation: Validation) -> Iterator[TextTable]:
    """Yield a table for each class: measured, simulated, and the error."""
    for kind in validation.classes():
        outcomes = validation.of_class(kind)
        if kind == "out-of-memory":
            rows = [[each.row.id, each.row.split, *_fit_cells(each)] for each in outcomes]
            yield TextTable(kind, ("row", "split", "measured", "simulated", "verdict", "needed", "left"), rows)
            continue
        columns = ["row", "split", "measured", "simulated", "error"]
        if _under_a_framework(outcomes):
            columns += ["the program itself", "error"]
        if kind in COMPARED_IN_GROUPS:
            columns += ["against first: measured", "simulated", "error"]
        yield TextTable(kind, columns, [_cells(each, outcomes) for each in outcomes])


def _fit_cells(outcome: RowOutcome) -> list[str]:
    words = {True: "fits", False: "does not fit"}
    fits = [words[outcome.row.fits], _folded_mark(outcome) + words[outcome.fits], outcome.verdict]
    return [*fits, *(_value_text("peak_bytes", value) for value in (outcome.needed_bytes, outcome.row.left_bytes))]


def _under_a_framework(outcomes: Sequence[RowOutcome]) -> bool:
    """Return True if some peaks are a framework's, so that the program's own get columns too."""
    return any(each.row.framework is not None for each in outcomes) and outcomes[0].row.kind == "memory"


def _folded_mark(outcome: RowOutcome) -> str:
    return "~" if outcome.evaluation is not None and outcome.evaluation.estimated else ""


def _cells(outcome: RowOutcome, outcomes: Sequence[RowOutcome]) -> list[str]:
    """Return the cells of a row in the table of its class."""
    row, simulated, error = outcome.row, outcome.simulated, outcome.error
    cells = [row.id, row.split, _value_text(row.measure, row.measured)]
    if simulated is None or error is None:
        cells += ["does not fit", "-"]
    else:
        cells += [_folded_mark(outcome) + _value_text(row.measure, simulated), _signed_text(row.measure, error)]
    if _under_a_framework(outcomes):
        program = outcome.program_peak_bytes
        cells += [_value_text(row.measure, program), _percent_text(program / row.measured - 1)]
    if row.kind in COMPARED_IN_GROUPS:
        ratios, ratio_error = outcome.ratios, outcome.ratio_error
        if ratios is None or ratio_error is None:
            cells += ["-"] * 3
        else:
            cells += [f"{ratios[0]:.3f}", f"{ratios[1]:.3f}", _percent_text(ratio_error)]
    return cells


def _value_text(measure: str, value: float) -> str:
    if measure == "step_seconds":
        return seconds_text(value)
    if measure == "peak_bytes":
        return f"{value / _GB:.2f} GB" if value >= _GB / 10 else f"{value / _MB:.2f} MB"
    return f"{value:.4f}" if measure == "bubble_fraction" else f"{value:,.1f} tokens/s"


def _signed_text(measure: str, error: float) -> str:
    return f"{error:+z.4f}" if measure == "bubble_fraction" else _percent_text(error)


def _percent_text(error: float) -> str:
    return f"{100 * error:+z.2f} %"


def error_table(validation: Validation) -> TextTable:
    """Return the mean, median and largest error of each class, separately for fitted and held-out rows."""
    rows: list[list[str]] = []
    for kind, errors in validation.errors_by_class():
        rows += _error_rows(kind, errors, points=kind == "bubble")
        if kind in COMPARED_IN_GROUPS:
            rows += _error_rows(f"{kind}, against the first", validation.ratio_errors(kind), points=False)
    title = "error of simulated against measured (of bubbles: the difference of the fractions)"
    return TextTable(title, ("class", "split", "rows", "mean", "median", "largest"), rows)


def medians_table(validation: Validation) -> TextTable:
    """Return the median error of each table's classes, separately for fitted and held-out rows."""
    rows = []
    for table in validation.tables:
        for kind, errors in validation.of_table(table).errors_by_class():
            if errors:
                cells = [_median_cells(kind, errors.get(split)) for split in SPLITS]
                rows.append([table.name, kind, *cells[0], *cells[1]])
    columns = ("table", "class", *(name for split in SPLITS for name in (f"{split} rows", "median")))
    return TextTable("median error of each table's rows", columns, rows)


def _median_cells(kind: str, errors: Errors | None) -> tuple[str, str]:
    return ("0", "-") if errors is None else (str(errors.count), _size_text(errors.median, points=kind == "bubble"))


def ranking_table(validation: Validation) -> TextTable:
    """Return the rank correlation of measured and simulated rates, of tables and groups with enough timed rows."""
    rows = []
    for each in validation.rankings():
        coefficient = "-" if each.spearman is None else f"{each.spearman:.3f}"
        cells = (Path(each.table).stem, each.group or "whole table", each.split, str(each.rows))
        rows.append([*cells, coefficient, _size_text(each.median, points=False)])
    title = (
        f"Spearman's rank correlation of measured and simulated tokens a second and rank, of {LEAST_ROWS} rows or more"
    )
    return TextTable(title, ("table", "rows of", "split", "rows", "Spearman", "median error"), rows)


def _size_text(error: float, *, points: bool) -> str:
    """Return an error without a sign: of bubbles in points, else in percent."""
    return f"{error:.4f}" if points else f"{100 * error:.2f} %"


def _error_rows(name: str, errors: dict[str, Errors], *, points: bool) -> Iterator[list[str]]:
    for split in SPLITS:
        if split in errors:
            each = errors[split]
            values = (each.mean, each.median, each.largest)
            yield [name, split, str(each.count), *(_size_text(value, points=points) for value in values)]


def fit_table(validation: Validation) -> TextTable:
    """Return the counts of right and wrong predictions of fitting, by class."""
    rows = []
    for kind in validation.classes():
        fits = validation.fits(kind)
        counts = (fits.right_fits, fits.false_alarms, fits.right_refusals, fits.misses)
        if any(counts):
            rows.append([kind, *map(str, counts)])
    columns = ("class", "ran: fits", "does not (false alarm)", "out of memory: does not fit", "fits (miss)")
    return TextTable("what ran and what ran out of memory, and what the simulated plan does", columns, rows)


def left_out_text(validation: Validation) -> str:
    """Say how many rows were left out, and why; empty if none were."""
    needs = validation.needs()
    if not needs:
        return ""
    words = ", ".join(f"{need} ({count})" for need, count in sorted(needs.items(), key=lambda item: -item[1]))
    return f"left out: {number_of(sum(needs.values()), 'row')}, by what they need that is not built: {words}"


def folded_text(validation: Validation) -> str:
    """Explain the mark `~`; empty if no step is folded."""
    count = sum(each.evaluation is not None and each.evaluation.estimated for each in validation.outcomes)
    if not count:
        return ""
    return (
        f"~: folded, {number_of(count, 'row')}: a few micro-batches are simulated, and their pace stands for the "
        "others (all: --whole)"
    )


def row_text(outcome: RowOutcome | ValidationRow) -> str:
    """Return the line that tells of a row when it is done."""
    if isinstance(outcome, ValidationRow):
        return f"{outcome.id}: cannot be compiled"
    row, simulated, error = outcome.row, outcome.simulated, outcome.error
    if row.measure == "fits":
        return f"{row.id}: {'fits' if outcome.fits else 'does not fit'}, {outcome.verdict}"
    if simulated is None or error is None:
        return f"{row.id}: does not fit, {outcome.verdict}"
    mark = _folded_mark(outcome)
    values = f"measured {_value_text(row.measure, row.measured)}, simulated {mark}{_value_text(row.measure, simulated)}"
    return f"{row.id}: {values}, {_signed_text(row.measure, error)}"
