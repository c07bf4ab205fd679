"""Tables of published measurements as CSV, by the columns that docs/validation-tables.md describes."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define, evolve, field, frozen

from ratrain.passes.pipeline_text import parse_pipeline, size_in_bytes
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.plan import KEYS, Plan
from ratrain.ratrain_ir.config.plan_text import Overlay, load_plan, parse_plan
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.support.text import Place
from ratrain.ratrain_ir.topology import topology_of
from ratrain.ratrainc.calibration.measured_tables import (
    Cells,
    TableLine,
    check_header,
    read_commented_table,
    read_lines,
)
from ratrain.ratrainc.choices.machine_choice import resized
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY, STRATEGIES, Strategy, strategy
from ratrain.ratrainc.choices.times_text import textbook_times
from ratrain.ratrainc.planner.search.plan_evaluation import Task
from ratrain.ratrainc.validation.frameworks import FRAMEWORKS, FrameworkBytes, refusal
from ratrain.targets.machine.capacity import capacity_of
from ratrain.targets.machine.machine import Machine, largest_value, load_machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.target import Capacity
    from ratrain.targets.simulator.given_times import GivenTimes

T = TypeVar("T")

_TIMES = ("step_seconds", "tokens_per_second")
MEASURES_OF: Mapping[str, tuple[str, ...]] = {
    "bubble": ("bubble_fraction",),
    "step-time": _TIMES,
    "scaling": _TIMES,
    "zero3-micro-batch": _TIMES,
    "memory": ("peak_bytes",),
    "out-of-memory": ("fits",),
}
"""The classes of rows, each with what can have been measured."""
COMPARED_IN_GROUPS = ("scaling", "zero3-micro-batch")
"""Classes that are about what changes from row to row."""
SPLITS = ("fit", "held-out")
MEASURES = tuple(dict.fromkeys(measure for measures in MEASURES_OF.values() for measure in measures))
ABOUT = ("source", "certainty", "note")
"""Columns for people: no figure depends on them."""
OWN_COLUMNS = (
    *("id", "class", "split", "model", "machine", "capacity", "strategy", "plan", "times", "group", "needs"),
    *("peak_of", "peak_stages", "framework"),
    *ABOUT,
    *MEASURES,
)
REQUIRED = ("id", "class", "split", "model")
PEAKS_OF = ("tensors", "rank")
_WHAT = "validation table"


@frozen
class ValidationRow:
    """What was measured of one step, and the task that simulates it."""

    line: TableLine
    id: str
    kind: str
    """its class"""
    split: str
    """`fit`: constants of the machine were set with it in sight; `held-out`: none were"""
    measure: str
    measured: float
    """in the unit of the measure; of `fits`, 1 or 0"""
    group: str
    needs: str
    """what is not built that it needs; empty where it can be simulated"""
    about: Mapping[str, str]
    task: Task | None = field(repr=False)
    """None where it needs something"""
    overhead_bytes: int = 0
    """what a measured peak has beside tensors: the machine's overheads of a rank"""
    left_bytes: int = 0
    """what the machine's overheads leave of its DDR"""
    framework: FrameworkBytes | None = None
    """whose bytes the row is about; None: those of the simulated program"""
    peak_stages: tuple[int, ...] = ()
    """whose ranks the measured peak was read of; empty: of all"""

    @property
    def fits(self) -> bool:
        """Whether the step ran there. What was timed did."""
        return self.measure != "fits" or self.measured > 0


@frozen
class ValidationTable:
    """A table of measurements."""

    path: str
    comments: tuple[str, ...]
    """the lines above its header"""
    rows: tuple[ValidationRow, ...]


def read_validation_table(path: str, machine: Machine | None = None) -> ValidationTable:
    """The rows of a table; a machine that is given takes the place of those that rows name.

    Raises `DiagnosticError` with everything that is wrong, each at its line and column.
    """
    comments, lines = read_commented_table(path, _WHAT)
    header = check_header(lines[0], (*OWN_COLUMNS, *KEYS.keys), REQUIRED)
    ids: set[str] = set()
    load = cache(lambda name: load_machine(name or None))
    rows = read_lines(lines, header, lambda cells: _RowReader(cells, machine, load, ids).row())
    return ValidationTable(path, tuple(comments), tuple(rows))


@cache
def _roomy_machine() -> Machine:
    """A machine without a limit of bytes, for rows that give their own times."""
    return resized(load_machine(None), int(largest_value("ddr_capacity")))


@define
class _RowReader:
    """Reads one row, and collects what is wrong with it."""

    cells: Cells
    machine: Machine | None
    load: Callable[[str], Machine]
    ids: set[str]
    """of the rows before"""
    problems: Diagnostics = field(factory=Diagnostics)

    def row(self) -> ValidationRow:
        """The row. Raises `DiagnosticError` with all that is wrong with it."""
        cells = self.cells
        name = self.attempt("id", self.id)
        kind = self.attempt("class", lambda: cells.word("class", MEASURES_OF))
        split = self.attempt("split", lambda: cells.word("split", SPLITS))
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
        )

    def attempt(self, key: str, read: Callable[[], T]) -> T | None:
        """What `read` gives; None, and the diagnostics at the column, where it raises."""
        header = self.cells.header
        try:
            with self.cells.line.blamed(header.index(key) if key in header else None):
                return read()
        except DiagnosticError as error:
            self.problems.items.extend(error.diagnostics)
            return None

    def id(self) -> str:
        name = self.cells.text("id")
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
        """Bytes of a rank that no tensor has, where the measured peak has them."""
        if not self.cells.text("peak_of"):
            return 0
        whole_rank = self.cells.word("peak_of", PEAKS_OF) == "rank"
        if measure not in (None, "peak_bytes"):
            self.cells.fail("peak_of", f"peak_of says what a peak holds: it changes nothing of {measure}")
        return taken if whole_rank else 0

    def framework(self, measure: str | None, task: Task | None) -> FrameworkBytes | None:
        """The framework of the published run; it is about bytes, of plans that it could have run."""
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
        """The stages of which the measured peak was read."""
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
        """What simulates the row; None where something is wrong with it."""
        times = self.attempt("times", lambda: self.times(kind))
        machine = self.machine_of(times)
        chosen = self.attempt("strategy", self.strategy)
        model = self.attempt("model", self.model)
        plan = None if model is None else self.attempt("plan", lambda: self.plan(model))
        if model is None or plan is None or machine is None or chosen is None:
            return None
        self.attempt("strategy", lambda: self.check_strategy(plan, chosen))
        return Task(model, plan, chosen.passes_for(plan), machine, times=times)

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
        """The machine of the row; None where something is wrong with it."""
        cells = self.cells
        if times is not None:
            for key in ("machine", "capacity"):
                self.attempt(key, partial(self.refuse_beside_times, key))
            return _roomy_machine()
        capacity = self.attempt("capacity", lambda: self.bytes("capacity")) if cells.text("capacity") else None
        machine = self.machine or self.attempt("machine", lambda: self.load(self.machine_name()))
        return machine if capacity is None or machine is None else resized(machine, capacity)

    def refuse_beside_times(self, key: str) -> None:
        if self.cells.text(key):
            self.cells.fail(key, f"{key} changes nothing where 'times' says what ops take", help="leave one out")

    def machine_name(self) -> str:
        name = self.cells.text("machine")
        return str(self.cells.beside(name)) if name.endswith(".toml") else name

    def strategy(self) -> Strategy:
        text = self.cells.text("strategy") or DEFAULT_STRATEGY
        if text in {item.name for item in STRATEGIES}:
            return strategy(text)
        try:
            parse_pipeline(text)
        except DiagnosticError as error:
            if not {*text} & {*",{"}:
                strategy(text)  # says which there are
            self.cells.fail("strategy", error.diagnostics[0].message, code=error.diagnostics[0].code)
        return Strategy("pipeline", text, "")

    def model(self) -> ModelConfig:
        name = self.cells.text("model")
        if not name:
            self.cells.fail("model", "a row needs a model: a preset, or the path of a config.json")
        model = load_model(str(self.cells.beside(name)) if name.endswith(".json") else name)
        check_model(model)
        return model

    def plan(self, model: ModelConfig) -> Plan:
        cells = self.cells
        values = {key: _toml_value(cells.text(key)) for key in KEYS.keys if cells.text(key)}
        overlay = Overlay(values, self.place)
        path = cells.text("plan")
        if path:
            return load_plan(cells.beside(path), model, overlay)
        return parse_plan("", file=cells.line.path, model=model, overlay=overlay)

    def check_strategy(self, plan: Plan, chosen: Strategy) -> None:
        """Raise `DiagnosticError` where the plan says another schedule or level than the strategy is named after."""
        chosen.check_schedule(plan, lambda: self.place("schedule"))
        if chosen.needs_peers and plan.tp == 1:
            text = f"the strategy '{chosen.name}' is about tensor peers, the plan has none"
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
    """What is left of a rank's memory; a framework has its own account of what its allocator loses."""
    slack = 0 if framework is None else dict(capacity.overheads).get("allocator_slack", 0)
    return capacity.left + slack


def _unbounded(task: Task) -> Task:
    """The task on its machine with room for whatever its plan holds, as it is not its bytes that are asked for."""
    roomy = resized(task.machine, int(largest_value("ddr_capacity")))
    return evolve(task, machine=evolve(roomy, name=task.machine.name), apportioned=True)


def _toml_value(cell: str) -> Any:
    """The value of a key as a plan's file would have it: words need no quotes."""
    try:
        values = tomllib.loads(f"value = {cell}")
    except (ValueError, RecursionError):
        return cell
    return values["value"] if values.keys() == {"value"} else cell


def label_of(path: str) -> str:
    """What a table is called: the name of its file."""
    return Path(path).stem
