"""Tables of published measurements as CSV, with the columns of docs/validation-tables.md."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define, evolve, field, frozen

from ratrain.passes.pipeline_text import parse_pipeline, size_in_bytes
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import KEYS, Plan
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrain_ir.text.plan_file import Overlay, load_plan, made_for, parse_plan
from ratrain.ratrain_ir.topology import topology_of
from ratrain.ratrainc.choices.machine_choice import resized
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, STRATEGIES, Strategy, hiding_exchanges, strategy
from ratrain.ratrainc.choices.times_text import textbook_times
from ratrain.ratrainc.planner.search.plan_evaluation import Task
from ratrain.ratrainc.validation.frameworks import FRAMEWORKS, FrameworkBytes, refusal
from ratrain.ratrainc.validation.measured_tables import (
    Cells,
    TableLine,
    check_header,
    read_commented_table,
    read_lines,
)
from ratrain.targets.machine.capacity import capacity_of
from ratrain.targets.machine.constants import largest_value
from ratrain.targets.machine.machine import Machine, load_machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.target import Capacity
    from ratrain.targets.simulator.given_times import GivenTimes

T = TypeVar("T")

TIMES = ("step_seconds", "tokens_per_second")
MEASURES_OF: Mapping[str, tuple[str, ...]] = {
    "bubble": ("bubble_fraction",),
    "step-time": TIMES,
    "scaling": TIMES,
    "zero3-micro-batch": TIMES,
    "memory": ("peak_bytes",),
    "out-of-memory": ("fits",),
}
"""Classes of rows, with the measures that each allows."""
COMPARED_IN_GROUPS = ("scaling", "zero3-micro-batch")
"""Classes whose rows are compared with the first row of their group."""
_, HELD_OUT = SPLITS = ("fit", "held-out")
MEASURES = tuple(dict.fromkeys(measure for measures in MEASURES_OF.values() for measure in measures))
ABOUT = ("source", "certainty", "note")
"""Columns for readers: no figure depends on them."""
OWN_COLUMNS = (
    *("id", "class", "split", "model", "machine", "capacity", "strategy", "plan", "times", "group", "needs"),
    *("peak_of", "peak_stages", "framework", "job"),
    *ABOUT,
    *MEASURES,
)
REQUIRED = ("id", "class", "split", "model")
REQUIRED_OF_FIT = ("model",)
"""Columns that a fit needs; without `class` a row is a step-time, without `split` it may be either."""
PEAKS_OF = ("tensors", "rank")
_WHAT = "validation table"


@frozen
class ValidationRow:
    """A measured step, and the task that simulates it."""

    line: TableLine
    id: str
    kind: str
    """class of the row"""
    split: str
    """`fit`: constants of the machine were set with this row in sight; `held-out`: none were"""
    measure: str
    measured: float
    """value in the unit of the measure; for `fits`, 1 or 0"""
    group: str
    needs: str
    """unbuilt feature that the row needs; empty if it can be simulated"""
    about: Mapping[str, str]
    task: Task | None = field(repr=False)
    """None if the row needs an unbuilt feature"""
    overhead_bytes: int = 0
    """the machine's overheads of a rank, if the measured peak includes them"""
    left_bytes: int = 0
    """DDR of a rank less the machine's overheads"""
    framework: FrameworkBytes | None = None
    """framework whose bytes are compared; None compares the simulated program's"""
    peak_stages: tuple[int, ...] = ()
    """stages whose ranks the measured peak was read on; empty: all"""
    machine: Machine | None = field(default=None, repr=False)
    """the machine of the row with its own bytes of DDR, which the task may have replaced"""

    @property
    def seconds(self) -> float:
        """Measured seconds of a step; the row measures a time, and has a task."""
        assert self.task is not None
        assert self.measure in TIMES
        of_rate = self.measure == "tokens_per_second"
        return self.task.plan.tokens_per_step / self.measured if of_rate else self.measured

    @property
    def fits(self) -> bool:
        """True if the step ran, as it did if it was timed."""
        return self.measure != "fits" or self.measured > 0


@frozen
class ValidationTable:
    """A table of measurements."""

    path: str
    comments: tuple[str, ...]
    """lines above its header"""
    rows: tuple[ValidationRow, ...]

    @property
    def name(self) -> str:
        """Name of its file, without folder and ending."""
        return Path(self.path).stem


def read_validation_table(path: str, machine: Machine | None = None) -> ValidationTable:
    """Read the rows of a table; `machine` replaces the machines that rows name.

    Raises `DiagnosticError` with everything that is wrong, each at its line and column.
    """
    return _read_table(path, machine, REQUIRED)


def read_rows_to_fit(path: str, machine: Machine | None = None, strategy: Strategy | None = None) -> ValidationTable:
    """Read the rows of a table for a fit: as `read_validation_table`, but only the model must be said.

    Plans of rows that name no strategy are adapted to `strategy`, if one is given.
    """
    return _read_table(path, machine, REQUIRED_OF_FIT, strategy)


def _read_table(
    path: str, machine: Machine | None, required: Sequence[str], strategy: Strategy | None = None
) -> ValidationTable:
    comments, lines = read_commented_table(path, _WHAT)
    header = check_header(lines[0], (*OWN_COLUMNS, *KEYS.keys), required)
    ids: set[str] = set()
    load = cache(lambda name: load_machine(name or None))
    rows = read_lines(lines, header, lambda cells: _RowReader(cells, machine, load, ids, required, strategy).row())
    return ValidationTable(path, tuple(comments), tuple(rows))


@cache
def _roomy_machine() -> Machine:
    """Return a machine of practically unlimited bytes, for rows that give their own times."""
    return resized(load_machine(None), int(largest_value("ddr_capacity")))


@define
class _RowReader:
    """A reader of one row, which collects everything that is wrong with it."""

    cells: Cells
    machine: Machine | None
    load: Callable[[str], Machine]
    ids: set[str]
    """ids of the earlier rows"""
    required: Sequence[str] = REQUIRED
    default: Strategy | None = None
    """strategy that plans of rows without one are adapted to; None: the default one, which changes none"""
    named: Machine | None = None
    """the machine of the row, before `capacity`"""
    problems: Diagnostics = field(factory=Diagnostics)

    def row(self) -> ValidationRow:
        """Return the row. Raises `DiagnosticError` with everything that is wrong with it."""
        cells = self.cells
        name = self.attempt("id", self.id)
        kind = (
            "step-time" if self.may_lack("class") else self.attempt("class", lambda: cells.word("class", MEASURES_OF))
        )
        split = "" if self.may_lack("split") else self.attempt("split", lambda: cells.word("split", SPLITS))
        measure = None if kind is None else self.attempt("class", lambda: self.measure(kind))
        measured = None if measure is None else self.attempt(measure, lambda: self.measured(measure))
        needs = cells.text("needs")
        task = self.task(kind or "") if not needs else None
        capacity = None if task is None else self.attempt("machine", lambda: self.capacity(task))
        framework = self.attempt("framework", lambda: self.framework(measure, task))
        left = 0 if capacity is None else _left_bytes(capacity, framework)
        taken = 0 if capacity is None else capacity.installed - left
        overhead = self.attempt("peak_of", lambda: self.overhead_bytes(measure, taken))
        stages = self.attempt("peak_stages", lambda: self.peak_stages(measure, task))
        self.problems.check()
        assert name is not None
        assert kind is not None
        assert split is not None
        assert measure is not None
        assert measured is not None
        about = {key: cells.text(key) for key in ABOUT}
        return ValidationRow(
            *(cells.line, name, kind, split, measure, measured, cells.text("group"), needs, about),
            task=task if task is None or framework is None else _unbounded(task),
            overhead_bytes=overhead or 0,
            left_bytes=left,
            framework=framework,
            peak_stages=stages or (),
            machine=self.named,
        )

    def may_lack(self, key: str) -> bool:
        """Return True if a row says nothing in a column, and need not."""
        return key not in self.required and not self.cells.text(key)

    def attempt(self, key: str, read: Callable[[], T]) -> T | None:
        """Return the result of `read`; if it raises, collect the diagnostics at the column and return None."""
        header = self.cells.header
        try:
            with self.cells.line.blamed(header.index(key) if key in header else None):
                return read()
        except DiagnosticError as error:
            self.problems.items.extend(error.diagnostics)
            return None

    def id(self) -> str:
        name = self.cells.text("id")
        if self.may_lack("id"):
            return ""
        if not name:
            self.cells.fail("id", "a row needs an id")
        if name in self.ids:
            self.cells.fail("id", f"the id '{name}' is given twice", code="RT006")
        self.ids.add(name)
        return name

    def measure(self, kind: str) -> str:
        wanted, given = MEASURES_OF[kind], [name for name in MEASURES if self.cells.text(name)]
        if len(given) != 1 or given[0] not in wanted:
            found = " and ".join(given) or "nothing"
            wrong = next((name for name in given if name not in wanted), "class")
            self.cells.fail(
                wrong, f"a row of class '{kind}' says {' or '.join(wanted)} and no other measure, got {found}"
            )
        return given[0]

    def measured(self, measure: str) -> float:
        text = self.cells.text(measure)
        if measure == "fits":
            return float(self.cells.word("fits", ("yes", "no")) == "yes")
        if measure == "peak_bytes":
            return float(self.bytes("peak_bytes"))
        if measure == "bubble_fraction" and text.strip("0.") == "" and text:
            return 0.0
        value = self.cells.number(measure)
        if measure == "bubble_fraction" and value >= 1:
            self.cells.fail(measure, f"a bubble fraction is below 1, got '{text}'")
        return value

    def capacity(self, task: Task) -> Capacity:
        return capacity_of(task.machine, topology_of(task.model, task.plan))

    def overhead_bytes(self, measure: str | None, taken: int) -> int:
        """Return the bytes of a rank that belong to no tensor, if the measured peak includes them, else 0."""
        if not self.cells.text("peak_of"):
            return 0
        whole_rank = self.cells.word("peak_of", PEAKS_OF) == "rank"
        if measure not in (None, "peak_bytes"):
            self.cells.fail("peak_of", f"peak_of says what a peak holds: it changes nothing of {measure}")
        return taken if whole_rank else 0

    def framework(self, measure: str | None, task: Task | None) -> FrameworkBytes | None:
        """Return the framework of the published run, or None; it must apply to the measure and the plan."""
        if not self.cells.text("framework"):
            return None
        framework = FRAMEWORKS[self.cells.word("framework", FRAMEWORKS)]
        if measure not in (None, "peak_bytes", "fits"):
            self.cells.fail("framework", f"framework says what a run held: it changes nothing of {measure}")
        wanted = "" if task is None else refusal(framework, task.model, task.plan, task.pipeline)
        if wanted:
            self.cells.fail("framework", f"its formulas are for plans {wanted}", help="leave the framework out")
        return framework

    def peak_stages(self, measure: str | None, task: Task | None) -> tuple[int, ...]:
        """Return the stages on which the measured peak was read; empty if none are named."""
        if not self.cells.text("peak_stages"):
            return ()
        if measure not in (None, "peak_bytes"):
            self.cells.fail("peak_stages", f"peak_stages says where a peak was read: it changes nothing of {measure}")
        stages = _toml_value(self.cells.text("peak_stages"))
        whole = isinstance(stages, list) and bool(stages) and all(type(each) is int and each >= 0 for each in stages)
        if not whole or (task is not None and max(stages) >= task.plan.pp):
            given = self.cells.text("peak_stages")
            self.cells.fail("peak_stages", f"peak_stages is stages of the plan like [0, 1], got '{given}'")
        return tuple(stages)

    def bytes(self, key: str) -> int:
        size = size_in_bytes(self.cells.text(key))
        if not size:
            self.cells.fail(key, f"{key} is bytes like 19570000000, 20GB or 20GiB, got '{self.cells.text(key)}'")
        return size

    def task(self, kind: str) -> Task | None:
        """Return the task that simulates the row; None if something is wrong with it."""
        times = self.attempt("times", lambda: self.times(kind))
        machine = self.machine_of(times)
        chosen = self.attempt("strategy", self.strategy)
        model = self.attempt("model", self.model)
        plan = None if model is None else self.attempt("plan", lambda: self.plan(model))
        if model is None or plan is None or machine is None or chosen is None:
            return None
        if self.default is not None and not self.cells.text("strategy"):
            adapted = self.attempt("plan", lambda: self.adapted(plan, chosen, model, machine))
            return None if adapted is None else Task(model, *adapted, machine, times=times)
        self.attempt("strategy", lambda: self.check_strategy(plan, chosen))
        return Task(model, plan, hiding_exchanges(chosen.passes, plan), machine, times=times)

    def adapted(self, plan: Plan, chosen: Strategy, model: ModelConfig, machine: Machine) -> tuple[Plan, str]:
        """Adapt a plan to a strategy that the row does not name; what the row itself says must agree."""
        chosen.check_schedule(plan, lambda: self.place("schedule"))
        if self.cells.text("zero") and chosen.zero not in (None, plan.zero):
            text = f"the strategy '{chosen.name}' is ZeRO {chosen.zero}, the row is ZeRO {plan.zero}"
            help_text = f"say zero = {chosen.zero}, or use another strategy"
            self.cells.fail("zero", text, code="RT064", help=help_text)
        return chosen.applied(plan, model, machine)

    def times(self, kind: str) -> GivenTimes | None:
        text = self.cells.text("times")
        if not text:
            return None
        if kind != "bubble":
            self.cells.fail(
                "times", "times of ops go with the class 'bubble': they have no unit, and a machine has none"
            )
        try:
            return textbook_times(text)
        except ValueError as error:
            self.cells.fail("times", str(error))

    def machine_of(self, times: GivenTimes | None) -> Machine | None:
        """Return the machine of the row; None if something is wrong with it."""
        cells = self.cells
        if times is not None:
            for key in ("machine", "capacity"):
                self.attempt(key, partial(self.refuse_with_times, key))
            return _roomy_machine()
        capacity = self.attempt("capacity", lambda: self.bytes("capacity")) if cells.text("capacity") else None
        meant = None
        if self.machine is None and not cells.text("machine") and (path := cells.text("plan")):
            with suppress(DiagnosticError):  # `plan` reports what is wrong with the file
                meant = made_for(cells.path_of(path))
            capacity = meant.capacity if meant is not None and capacity is None else capacity
        name = self.machine_name() if meant is None else meant.machine
        machine = self.named = self.machine or self.attempt("machine", lambda: self.load(name))
        return machine if capacity is None or machine is None else resized(machine, capacity)

    def refuse_with_times(self, key: str) -> None:
        if self.cells.text(key):
            self.cells.fail(key, f"{key} changes nothing where 'times' says what ops take", help="leave one out")

    def machine_name(self) -> str:
        name = self.cells.text("machine")
        return str(self.cells.path_of(name)) if name.endswith(".toml") else name

    def strategy(self) -> Strategy:
        text = self.cells.text("strategy")
        if not text:
            return self.default or strategy(DEFAULT_STRATEGY)
        if text in {item.name for item in STRATEGIES}:
            return strategy(text)
        try:
            parse_pipeline(text)
        except DiagnosticError as error:
            if not {*text} & {*",{"}:
                strategy(text)  # raises the error for an unknown name, which lists the known ones
            self.cells.fail("strategy", error.diagnostics[0].message, code=error.diagnostics[0].code)
        return Strategy("pipeline", text, "")

    def model(self) -> ModelConfig:
        name = self.cells.text("model")
        if not name:
            self.cells.fail("model", "a row needs a model: a preset, or the path of a config.json")
        model = load_model(str(self.cells.path_of(name)) if name.endswith(".json") else name)
        check_model(model)
        return model

    def plan(self, model: ModelConfig) -> Plan:
        cells = self.cells
        values = {key: _toml_value(cells.text(key)) for key in KEYS.keys if cells.text(key)}
        overlay = Overlay(values, self.place)
        path = cells.text("plan")
        if path:
            return load_plan(cells.path_of(path), model, overlay)
        return parse_plan("", file=cells.line.path, model=model, overlay=overlay)

    def check_strategy(self, plan: Plan, chosen: Strategy) -> None:
        """Raise `DiagnosticError` if the plan contradicts the strategy: another schedule or level, or tp is 1."""
        chosen.check_schedule(plan, lambda: self.place("schedule"))
        if chosen.needs_tensor_ranks and plan.tp == 1:
            text = f"the strategy '{chosen.name}' is about tensor-parallel ranks, the plan has none"
            self.cells.fail("strategy", text, code="RT064", help="say tp, or use another strategy")
        problem = None if chosen.schedule is None else SCHEDULES[chosen.schedule].problem(plan.shape)
        if problem is not None:
            text = f"the strategy '{chosen.name}' cannot have this plan: {problem}"
            self.cells.fail(
                "strategy", text, code="RT064", help="say chunks, layout or slices, or use another strategy"
            )
        if chosen.zero not in (None, plan.zero):
            text = f"the strategy '{chosen.name}' is ZeRO {chosen.zero}, the plan is ZeRO {plan.zero}"
            self.cells.fail("zero", text, code="RT064", help=f"say zero = {chosen.zero}")

    def place(self, key: str) -> Place:
        return Place(self.cells.place(key), self.cells.line.text)


def _left_bytes(capacity: Capacity, framework: FrameworkBytes | None) -> int:
    """Return the bytes of a rank's memory that are left; most frameworks count their allocator's loss themselves."""
    slack = 0 if framework is None or framework.job else dict(capacity.overheads).get("allocator_slack", 0)
    return capacity.left + slack


def _unbounded(task: Task) -> Task:
    """Return the task on its machine with practically unlimited memory: a framework's bytes decide, not its own."""
    roomy = resized(task.machine, int(largest_value("ddr_capacity")))
    return evolve(task, machine=evolve(roomy, name=task.machine.name), apportioned=True)


def _toml_value(cell: str) -> Any:
    """Return the value of a key as a plan's file would have it; words need no quotes."""
    try:
        values = tomllib.loads(f"value = {cell}")
    except (ValueError, RecursionError):
        return cell
    return values["value"] if values.keys() == {"value"} else cell
