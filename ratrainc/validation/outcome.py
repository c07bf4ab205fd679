"""Results of simulating measured rows: errors by class and split, and predictions of what fits."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, field, frozen

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.support.notebook import ShownInNotebook
from ratrain.ratrainc.planner.search.kept_results import evaluate_kept
from ratrain.ratrainc.planner.search.plan_evaluation import PlanEvaluation, Task
from ratrain.ratrainc.validation.errors import Errors
from ratrain.ratrainc.validation.folding import task_of
from ratrain.ratrainc.validation.frameworks import framework_bytes
from ratrain.ratrainc.validation.ranking import ALL, LEAST_ROWS, Ranking
from ratrain.ratrainc.validation.validation_rows import (
    COMPARED_IN_GROUPS,
    HELD_OUT,
    MEASURES_OF,
    SPLITS,
    TIMES,
    ValidationRow,
    ValidationTable,
)

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.kept_results import KeptResults


@frozen
class RowOutcome:
    """A row and the evaluation of its simulation."""

    row: ValidationRow
    evaluation: PlanEvaluation | None
    """None if the row needs an unbuilt feature"""
    first: RowOutcome | None = field(default=None, repr=False)
    """first row of its group, which it is compared with; None for that row and for rows without a group"""

    @property
    def fits(self) -> bool:
        """True if the simulated plan fits the machine; under a framework, if the framework's bytes fit."""
        if self.evaluation is None or self.evaluation.step_seconds is None:
            return False
        return self.row.framework is None or self.needed_bytes <= self.row.left_bytes

    @cached_property
    def accounts(self) -> list[dict[str, int]]:
        """The framework's bytes by purpose, for each stage; empty if the row names no framework."""
        if self.row.framework is None or self.evaluation is None or self.row.task is None:
            return []
        return framework_bytes(self.row.framework, self.row.task, self.evaluation.schedule_bytes)

    @property
    def needed_bytes(self) -> int:
        """Bytes of the fullest rank: the framework's, else those of the simulated program's tensors."""
        return max(self._by_stage)

    @property
    def peak_bytes(self) -> int:
        """Peak comparable with the measured one: of the ranks it was read on, with the overheads that it includes."""
        return self._measured_like(self._by_stage)

    @property
    def program_peak_bytes(self) -> int:
        """Peak of the simulated program, comparable in the same way, without the framework's rules."""
        assert self.evaluation is not None
        return self._measured_like(self.evaluation.peak_bytes)

    @property
    def _by_stage(self) -> Sequence[int]:
        assert self.evaluation is not None
        return [sum(each.values()) for each in self.accounts] or self.evaluation.peak_bytes

    def _measured_like(self, by_stage: Sequence[int]) -> int:
        return max(by_stage[each] for each in self.row.peak_stages or range(len(by_stage))) + self.row.overhead_bytes

    @property
    def simulated(self) -> float | None:
        """Simulated value of the row's measure; None if the plan does not fit, or is not simulated."""
        evaluation, task = self.evaluation, self.row.task
        if evaluation is None or task is None or evaluation.step_seconds is None:
            return None
        if self.row.measure == "bubble_fraction":
            return evaluation.bubble_fraction
        if self.row.measure == "peak_bytes":
            return float(self.peak_bytes)
        if self.row.measure == "tokens_per_second":
            return task.plan.tokens_per_step / evaluation.step_seconds
        return evaluation.step_seconds if self.row.measure == "step_seconds" else None

    @property
    def error(self) -> float | None:
        """Simulated / measured - 1; for bubble fractions, which may be 0, the difference; None if not simulated."""
        simulated, measured = self.simulated, self.row.measured
        if simulated is None:
            return None
        return simulated - measured if self.row.measure == "bubble_fraction" else simulated / measured - 1

    @property
    def is_timed(self) -> bool:
        """True if a time was measured, and is simulated: the row has a rate."""
        return self.row.measure in TIMES and self.simulated is not None

    @property
    def ratios(self) -> tuple[float, float] | None:
        """Tokens a second and rank relative to the first row of the group, measured and simulated; None if unknown."""
        if self.first is None or self.simulated is None or self.first.simulated is None:
            return None
        return (
            self.rank_rate(self.row.measured) / self.first.rank_rate(self.first.row.measured),
            self.rank_rate(self.simulated) / self.first.rank_rate(self.first.simulated),
        )

    @property
    def ratio_error(self) -> float | None:
        """Simulated ratio / measured ratio - 1; None without ratios."""
        return None if self.ratios is None else self.ratios[1] / self.ratios[0] - 1

    def rank_rate(self, value: float) -> float:
        """Return tokens a second and rank for a value of the row's measure."""
        assert self.row.task is not None
        plan = self.row.task.plan
        tokens = value if self.row.measure == "tokens_per_second" else plan.tokens_per_step / value
        return tokens / plan.clusters

    @property
    def verdict(self) -> str:
        """Verdict on the prediction of fitting: `right`, `false alarm` or `miss`."""
        if self.fits == self.row.fits:
            return "right"
        return "false alarm" if self.row.fits else "miss"

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as `--json` prints it."""
        row, evaluation = self.row, self.evaluation
        data: dict[str, Any] = {
            "table": row.line.path,
            "line": row.line.number,
            "id": row.id,
            "class": row.kind,
            "split": row.split,
            "group": row.group,
            **row.about,
            "needs": row.needs,
            "measure": row.measure,
            "measured": row.fits if row.measure == "fits" else row.measured,
        }
        if evaluation is None or row.task is None:
            return data
        ratios = self.ratios
        return data | {
            "model": row.task.model.name,
            "machine": row.task.machine.name,
            "passes": row.task.pipeline,
            "simulated": self.fits if row.measure == "fits" else self.simulated,
            "error": self.error,
            "ratio": None if ratios is None else {"measured": ratios[0], "simulated": ratios[1]},
            "ratio_error": self.ratio_error,
            "folded": evaluation.estimated,
            "fits": {"measured": row.fits, "simulated": self.fits, "verdict": self.verdict},
            "refusal": evaluation.refusal,
            "bytes": self._bytes_json() if row.task.times is None else None,
        }

    def _bytes_json(self) -> dict[str, Any]:
        """Return the bytes that the fullest rank needs and has, the program's peak, and the framework's account."""
        assert self.evaluation is not None
        return {
            "needed": self.needed_bytes,
            "left": self.row.left_bytes,
            "program": max(self.evaluation.peak_bytes),
            "account": max(self.accounts, key=lambda each: sum(each.values()), default=None),
        }


@frozen
class Fits:
    """Counts of right and wrong predictions of fitting."""

    right_fits: int
    right_refusals: int
    false_alarms: int
    """ran, and was predicted not to fit"""
    misses: int
    """ran out of memory, and was predicted to fit"""

    def to_json(self) -> dict[str, int]:
        """Return the counts as `--json` prints them."""
        names = ("right_fits", "right_refusals", "false_alarms", "misses")
        return {name: getattr(self, name) for name in names}


@frozen(repr=False)
class Validation(ShownInNotebook):
    """The outcomes of all rows of some tables."""

    tables: tuple[ValidationTable, ...]
    outcomes: tuple[RowOutcome, ...]

    def __repr__(self) -> str:
        rows = sum(each.evaluation is not None for each in self.outcomes)
        return f"Validation({rows} rows of {len(self.tables)} tables)"

    def classes(self) -> list[str]:
        """Return the classes with simulated rows, in their usual order."""
        return [kind for kind in MEASURES_OF if self.of_class(kind)]

    def of_class(self, kind: str) -> list[RowOutcome]:
        """Return the outcomes of a class that were simulated."""
        return [each for each in self.outcomes if each.row.kind == kind and each.evaluation is not None]

    def of_table(self, table: ValidationTable) -> Validation:
        """Return the validation restricted to one table."""
        rows = {id(row) for row in table.rows}
        return Validation((table,), tuple(each for each in self.outcomes if id(each.row) in rows))

    def errors(self, kind: str) -> dict[str, Errors]:
        """Return the errors of a class by split; splits without errors are left out."""
        return _by_split(self.of_class(kind), lambda each: each.error)

    def errors_by_class(self) -> list[tuple[str, dict[str, Errors]]]:
        """Return the errors of each class that has errors, by split."""
        return [(kind, self.errors(kind)) for kind in self.classes() if kind != "out-of-memory"]

    def ratio_errors(self, kind: str) -> dict[str, Errors]:
        """Return the errors of a class's ratios within groups, by split."""
        return _by_split(self.of_class(kind), lambda each: each.ratio_error)

    def fits(self, kind: str | None = None) -> Fits:
        """Count right and wrong predictions of fitting, of a class or of all (None).

        Rows that give their own times are left out: their bytes mean nothing.
        """
        of_kind = (each for each in self.outcomes if kind in (None, each.row.kind))
        asked = [each for each in of_kind if each.row.task is not None and each.row.task.times is None]
        count = Counter((each.row.fits, each.fits) for each in asked)
        return Fits(count[True, True], count[False, False], count[True, False], count[False, True])

    def rankings(self) -> Iterator[Ranking]:
        """Yield the rankings of each table with enough timed rows, and of its groups: of all rows, of the held-out.

        A group is the rows of a name in the column `group`, or those that share model and machine. A group that is the
        whole table is not repeated. Compared are tokens a second and rank.
        """
        for table in self.tables:
            outcomes = [each for each in self.of_table(table).outcomes if each.is_timed]
            seen = set()
            for group, rows in {"": outcomes, **_groups(outcomes)}.items():
                key = frozenset(map(id, rows))
                if key not in seen and len(rows) >= LEAST_ROWS:
                    seen.add(key)
                    held = [each for each in rows if each.row.split == HELD_OUT]
                    yield _ranking(table.path, group, ALL, rows)
                    if 1 < len(held) < len(rows):
                        yield _ranking(table.path, group, HELD_OUT, held)

    def needs(self) -> dict[str, int]:
        """Return the unbuilt features that rows need, with the number of rows left out for each."""
        return dict(Counter(each.row.needs for each in self.outcomes if each.row.needs))

    def to_json(self) -> dict[str, Any]:
        """Return the validation as `--json` prints it."""
        return {
            "tables": [table.path for table in self.tables],
            "rows": [each.to_json() for each in self.outcomes],
            "errors": {kind: _errors_json(errors) for kind, errors in self.errors_by_class()},
            "ratio_errors": {
                kind: _errors_json(self.ratio_errors(kind)) for kind in self.classes() if kind in COMPARED_IN_GROUPS
            },
            "errors_by_table": [
                {"table": table.path, "class": kind, **_errors_json(errors)}
                for table in self.tables
                for kind, errors in self.of_table(table).errors_by_class()
                if errors
            ],
            "rankings": [each.to_json() for each in self.rankings()],
            "fits": {kind: self.fits(kind).to_json() for kind in self.classes()},
            "left_out": self.needs(),
        }


def _groups(outcomes: Sequence[RowOutcome]) -> dict[str, list[RowOutcome]]:
    """Return timed rows by the name of their group, and by model and machine."""
    groups = defaultdict(list)
    for each in outcomes:
        assert each.row.task is not None
        if each.row.group:
            groups[each.row.group].append(each)
        groups[f"{each.row.task.model.name} on {each.row.task.machine.name}"].append(each)
    return groups


def _ranking(table: str, group: str, split: str, rows: Sequence[RowOutcome]) -> Ranking:
    rates, signed = [], []
    for each in rows:
        if each.simulated is not None and each.error is not None:
            rates.append((each.rank_rate(each.row.measured), each.rank_rate(each.simulated)))
            signed.append(each.error)
    return Ranking.of(table, group, split, rates, Errors.of(np.array(signed)))


def _by_split(outcomes: Iterable[RowOutcome], error_of: Callable[[RowOutcome], float | None]) -> dict[str, Errors]:
    signed: dict[str, list[float]] = {split: [] for split in SPLITS}
    for each in outcomes:
        error = error_of(each)
        if error is not None:
            signed[each.row.split].append(error)
    return {split: Errors.of(np.array(values)) for split, values in signed.items() if values}


def _errors_json(errors: dict[str, Errors]) -> dict[str, Any]:
    return {split.replace("-", "_"): each.to_json() for split, each in errors.items()}


def validate(
    tables: Sequence[ValidationTable],
    jobs: int = 1,
    hear: Callable[[RowOutcome | ValidationRow], None] = lambda _outcome: None,
    *,
    whole: bool = False,
    kept: KeptResults | None = None,
) -> Validation:
    """Compile and simulate the rows of tables with `jobs` processes; `hear` gets each outcome, or the row if refused.

    Long steps are folded if that changes no result (`task_of`), unless `whole`. What is in `kept` is not simulated
    again, and what is found goes there. Raises `DiagnosticError` with every row that cannot be compiled for another
    reason than that it does not fit.
    """
    rows = [row for table in tables for row in table.rows]
    tasks: dict[int, Task] = {
        number: task for number, row in enumerate(rows) if (task := task_of(row, whole=whole)) is not None
    }
    found: dict[int, PlanEvaluation | DiagnosticError] = {}
    numbers = list(tasks)

    def note(at: int, evaluation: PlanEvaluation | DiagnosticError) -> None:
        found[numbers[at]] = evaluation
        row = rows[numbers[at]]
        hear(row if isinstance(evaluation, DiagnosticError) else RowOutcome(row, evaluation))

    evaluate_kept([(rows[number].id, task) for number, task in tasks.items()], jobs, kept, note)
    problems = Diagnostics()
    outcomes = []
    for number, row in enumerate(rows):
        evaluation = found.get(number)
        if isinstance(evaluation, DiagnosticError):
            problems.items.extend(_at_row(row, evaluation))
        else:
            outcomes.append(RowOutcome(row, evaluation))
    problems.check()
    return Validation(tuple(tables), tuple(_compared(outcomes)))


def _at_row(row: ValidationRow, error: DiagnosticError) -> Iterator[Any]:
    """Yield the diagnostics of a row that cannot be simulated, with its place in the table."""
    for each in error.diagnostics:
        yield evolve(each, message=f"row '{row.id}': {each.message}", location=row.line.place, source=row.line.text)


def _compared(outcomes: Iterable[RowOutcome]) -> Iterator[RowOutcome]:
    """Yield the outcomes; each after the first of its group gets that first one to be compared with."""
    firsts: dict[tuple[str, str, str], RowOutcome] = {}
    for each in outcomes:
        row = each.row
        if each.evaluation is None or not row.group or row.kind not in COMPARED_IN_GROUPS:
            yield each
            continue
        key = row.line.path, row.kind, row.group
        first = firsts.setdefault(key, each)
        yield each if first is each else evolve(each, first=first)
