"""Measured step times as CSV: a model, a plan and what one step took; and the times the simulator predicts for them.

Columns: model (preset or config.json), plan (TOML), step_seconds or tokens_per_second; optional: the plan's dp, micro_batches,
micro_batch_size and zero where they differ from the plan file's, and use = fit or held-out. Paths are relative to the table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.diagnostics import DiagnosticError, Diagnostics, Location, fail, nearest
from ratrain.ratrain_ir.frontend.model_config import ModelConfig, check_model, load_model
from ratrain.ratrain_ir.frontend.plan import Plan
from ratrain.ratrain_ir.frontend.plan_text import check_plan, load_plan
from ratrain.ratrainc.calibration.tables import TableLine, read_table

if TYPE_CHECKING:
    from ratrain.ratrainc.calibration.fitting import Seconds
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

_REQUIRED = ("model", "plan")
_MEASURES = ("step_seconds", "tokens_per_second")
_PLAN_COLUMNS = ("dp", "micro_batches", "micro_batch_size", "zero")
_USES = ("fit", "held-out")
_COLUMNS = (*_REQUIRED, *_MEASURES, *_PLAN_COLUMNS, "use")
_MOST_ERRORS = 100


@frozen
class Row:
    """A measured step."""

    model: ModelConfig
    plan: Plan
    seconds: float
    use: str
    """fit, held-out, or nothing where the table does not say"""
    label: str


def read_rows(path: str) -> list[Row]:
    """The rows of a table.

    Raises `DiagnosticError` RT002 where it is not such a table, and all that is wrong with its values, each at line and column.
    """
    lines = read_table(path, "table of measured steps")
    header = _header(lines[0])
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
            rows.append(_Cells(line, header).row())
        except DiagnosticError as error:
            diagnostics.items.extend(error.diagnostics)
    diagnostics.check()
    if not rows:
        fail("RT002", "the table has no rows", Location(path, 1))
    return rows


def _header(line: TableLine) -> Sequence[str]:
    header = line.cells
    for index, name in enumerate(header):
        place = line.place_of(index)
        if name not in _COLUMNS:
            fail("RT004", f"there is no column '{name}'", place, help=nearest(name, _COLUMNS), source=line.text)
        if header.count(name) > 1:
            fail("RT006", f"the column '{name}' is given twice", place, source=line.text)
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        fail("RT002", f"the header has no column '{missing[0]}'", line.place, source=line.text)
    if sum(name in header for name in _MEASURES) != 1:
        fail("RT002", f"the header needs one of {' and '.join(_MEASURES)}", line.place, source=line.text)
    return header


@frozen
class _Cells:
    """One line of a table, by the names of its columns."""

    line: TableLine
    header: Sequence[str]

    def row(self) -> Row:
        name = self.text("model")
        with self.line.blamed(self.header.index("model")):
            model = load_model(str(self.beside(name)) if name.endswith(".json") else name)
            check_model(model)
        with self.line.blamed(self.header.index("plan")):
            plan = load_plan(str(self.beside(self.text("plan"))), model)
        changes: dict[str, Any] = {key: self.count(key) for key in _PLAN_COLUMNS if self.text(key)}
        plan = evolve(plan, **changes)
        with self.line.blamed():
            check_plan(plan, model)
        use = self.text("use")
        if use and use not in _USES:
            self.fail("use", f"use is {' or '.join(_USES)}, got '{use}'")
        measure = next(key for key in _MEASURES if key in self.header)
        value = self.number(measure)
        seconds = value if measure == "step_seconds" else plan.tokens_per_step / value
        return Row(model, plan, seconds, use, f"{model.name} on {plan.clusters}")

    def text(self, key: str) -> str:
        return self.line.cells[self.header.index(key)] if key in self.header else ""

    def beside(self, name: str) -> Path:
        return Path(self.line.path).parent / name

    def fail(self, key: str, message: str) -> None:
        fail("RT005", message, self.line.place_of(self.header.index(key)), source=self.line.text)

    def count(self, key: str) -> int:
        text = self.text(key)
        if not text.isascii() or not text.isdigit() or len(text) > 9:
            self.fail(key, f"{key} is a whole number, got '{text}'")
        return int(text)

    def number(self, key: str) -> float:
        try:
            value = float(self.text(key))
        except ValueError:
            value = math.nan
        if not 1e-9 < value < 1e15:
            self.fail(key, f"{key} is a positive number, got '{self.text(key)}'")
        return value


def compiled(rows: Sequence[Row], machine: Machine, passes: str | None = None) -> list[Program]:
    """The programs of rows, for a machine.

    Raises `DiagnosticError` where a row's plan does not fit the machine.
    """
    from ratrain import api

    return [api.emit(api.compile(row.model, row.plan, machine=machine, passes=passes), machine=machine) for row in rows]


def predicted(programs: Sequence[Program], machine: Machine) -> Seconds:
    """Simulated seconds of a steady step of each program."""
    from ratrain import api

    return np.array([api.simulate(program, machine=machine).step_seconds for program in programs])


def held_out(rows: Sequence[Row], every: int) -> list[bool]:
    """Which rows are not fitted: what the table says, else each `every`-th; none with 0."""
    return [row.use == "held-out" if row.use else bool(every) and i % every == 0 for i, row in enumerate(rows, 1)]
