"""Measured step times to fit constants to, and the simulator's predictions for them.

Tables are those of `ratrainc validate`, read by the same reader: a row is the same step of the same program there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.support.diagnostics import Location, fail
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrainc.choices.machine_choice import resized
from ratrain.ratrainc.planner.search.plan_evaluation import Task
from ratrain.ratrainc.validation.validation_rows import HELD_OUT, TIMES, read_rows_to_fit
from ratrain.targets.machine.machine import Machine

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.strategies import Strategy
    from ratrain.ratrainc.validation.errors import Seconds
    from ratrain.targets.program.program import Program


@frozen
class MeasuredRow:
    """A measured step."""

    task: Task
    seconds: float
    split: str
    """`fit`, `held-out`, or empty if the table does not say"""
    label: str
    capacity: int | None = None
    """bytes of DDR that replace those of the machine"""


@frozen
class MeasuredRows:
    """The rows of a table that a fit can use."""

    rows: list[MeasuredRow]
    machine: Machine
    """the machine that all of them ran on"""
    left_out: int
    """rows that measure no time, or need what is not built"""


def read_rows(path: str, machine: Machine | None = None, strategy: Strategy | None = None) -> MeasuredRows:
    """Read the timed rows of a table; `machine` replaces those that rows name, `strategy` is of rows that name none.

    Raises `DiagnosticError` RT002 if it is not such a table or has no timed row, RT064 if a row contradicts a strategy
    or rows name several machines, and all errors in values, each with line and column.
    """
    every = read_rows_to_fit(path, machine, strategy).rows
    rows = [row for row in every if row.task is not None and row.measure in TIMES]
    place = Location(path, 1)
    if not rows:
        fail("RT002", "no row of the table has a time that can be simulated: nothing can be fitted", place)
    machines = {row.machine.name: row.machine for row in rows if row.machine is not None}
    if len(machines) > 1:
        text = f"its rows ran on several machines ({', '.join(machines)}), and a fit is of one"
        fail("RT064", text, place, help="give each machine a table, or name one with --machine")
    (chosen,) = machines.values()
    found = []
    for row in rows:
        task = row.task
        assert task is not None
        label = row.id or f"{task.model.name} on {task.plan.clusters}"
        capacity = None if task.machine is chosen else task.machine.whole("ddr_capacity")
        found.append(MeasuredRow(task, row.seconds, row.split, label, capacity))
    return MeasuredRows(found, chosen, len(every) - len(rows))


def compiled(rows: Sequence[MeasuredRow], machine: Machine) -> list[Program]:
    """Compile the rows for a machine. Raises `DiagnosticError` if a row's plan does not fit it."""
    from ratrain.ratrainc.compiling import building

    programs = []
    for row in rows:
        there, task = machine if row.capacity is None else resized(machine, row.capacity), row.task
        module = building.compile(task.model, task.plan, machine=there, passes=task.pipeline)
        programs.append(building.emit(module, machine=there))
    return programs


def predicted(programs: Sequence[Program], machine: Machine) -> Seconds:
    """Return the simulated seconds of a steady step of each program."""
    from ratrain.targets.simulator.figures import simulated

    with paused_gc():
        return np.array([simulated(program, machine)[0].step_seconds for program in programs])


def held_out(rows: Sequence[MeasuredRow], every: int) -> list[bool]:
    """Return, for each row, True if it is held out: as the table says, else every `every`-th row; none if 0."""
    return [row.split == HELD_OUT if row.split else bool(every) and i % every == 0 for i, row in enumerate(rows, 1)]
