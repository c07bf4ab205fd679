"""Measured step times as CSV (a model, a plan and the time of a step), and the simulator's predictions for them.

Columns: model (preset or config.json), plan (TOML), step_seconds or tokens_per_second; optional: the plan's dp,
micro_batches, micro_batch_size and zero if they differ from the plan file's, and use = fit or held-out. Paths are
relative to the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.calibration.measured_tables import Cells, check_header, read_lines, read_table

if TYPE_CHECKING:
    from ratrain.ratrainc.calibration.fitting import Seconds
    from ratrain.ratrainc.choices.strategies import Strategy
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program

_REQUIRED = ("model", "plan")
_MEASURES = ("step_seconds", "tokens_per_second")
_PLAN_COLUMNS = ("dp", "micro_batches", "micro_batch_size", "zero")
_USES = ("fit", "held-out")
_COLUMNS = (*_REQUIRED, *_MEASURES, *_PLAN_COLUMNS, "use")


@frozen
class MeasuredRow:
    """A measured step."""

    model: ModelConfig
    plan: Plan
    seconds: float
    use: str
    """`fit`, `held-out`, or empty if the table does not say"""
    label: str


def read_rows(path: str, strategy: Strategy) -> list[MeasuredRow]:
    """Read the rows of a table, which ran under a strategy.

    Raises `DiagnosticError` RT002 if it is not such a table, RT064 if a row names another ZeRO level than the strategy,
    and all errors in values, each with line and column.
    """
    lines = read_table(path, "table of measured steps")
    header = check_header(lines[0], _COLUMNS, _REQUIRED)
    if sum(name in header for name in _MEASURES) != 1:
        text = f"the header needs one of {' and '.join(_MEASURES)}"
        fail("RT002", text, lines[0].place, source=lines[0].text)
    return read_lines(lines, header, lambda cells: _row(cells, strategy))


def _row(cells: Cells, strategy: Strategy) -> MeasuredRow:
    name = cells.text("model")
    with cells.line.blamed(cells.header.index("model")):
        model = load_model(str(cells.path_of(name)) if name.endswith(".json") else name)
        check_model(model)
    with cells.line.blamed(cells.header.index("plan")):
        plan = load_plan(str(cells.path_of(cells.text("plan"))), model)
    changes: dict[str, Any] = {key: _count(cells, key) for key in _PLAN_COLUMNS if cells.text(key)}
    if strategy.zero is not None and changes.get("zero", strategy.zero) != strategy.zero:
        text = f"the strategy '{strategy.name}' is ZeRO {strategy.zero}, the row is ZeRO {changes['zero']}"
        cells.fail("zero", text, code="RT064", help=f"say zero = {strategy.zero}, or use another strategy")
    plan = evolve(plan, **changes)
    with cells.line.blamed():
        check_plan(plan, model)
    use = cells.word("use", _USES) if cells.text("use") else ""
    measure = next(key for key in _MEASURES if key in cells.header)
    value = cells.number(measure)
    seconds = value if measure == "step_seconds" else plan.tokens_per_step / value
    return MeasuredRow(model, plan, seconds, use, f"{model.name} on {plan.clusters}")


def _count(cells: Cells, key: str) -> int:
    text = cells.text(key)
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        cells.fail(key, f"{key} is a whole number, got '{text}'")
    return int(text)


def compiled(rows: Sequence[MeasuredRow], machine: Machine, strategy: Strategy) -> list[Program]:
    """Compile the rows for a machine, each plan adapted to the strategy.

    Raises `DiagnosticError` if a row's plan does not fit the machine, or does not suit the strategy.
    """
    from ratrain.ratrainc.compiling import building

    programs = []
    for row in rows:
        plan, pipeline = strategy.applied(row.plan, row.model, machine)
        module = building.compile(row.model, plan, machine=machine, passes=pipeline)
        programs.append(building.emit(module, machine=machine))
    return programs


def predicted(programs: Sequence[Program], machine: Machine) -> Seconds:
    """Return the simulated seconds of a steady step of each program."""
    from ratrain.ratrainc.report.timing import simulate

    return np.array([simulate(program, machine=machine).step_seconds for program in programs])


def held_out(rows: Sequence[MeasuredRow], every: int) -> list[bool]:
    """Return, for each row, True if it is held out: as the table says, else every `every`-th row; none if 0."""
    return [row.use == "held-out" if row.use else bool(every) and i % every == 0 for i, row in enumerate(rows, 1)]
