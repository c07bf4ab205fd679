"""Report on a table of actions: soundness, step time and idle time; the work of `ratrainc lint`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from ratrain.passes.placement.foreign_table import check_ascending
from ratrain.ratrain_ir.analysis.actions import ActionTable, read_torch_csv
from ratrain.ratrain_ir.analysis.schedule_worth import (
    UNIT_TIMES,
    PassTimes,
    StepTime,
    in_flight_on_ranks,
    in_flight_on_stages,
    step_time,
)
from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, Shown, TextTable
from ratrain.ratrainc.report.picture import table_picture

if TYPE_CHECKING:
    from ratrain.ratrainc.report.svg import Picture


@frozen(repr=False)
class TableReport(Shown):
    """A sound table, with its step time and idle time."""

    file: str
    table: ActionTable = field(eq=False)
    units: StepTime
    """a step in which a forward and each half of a backward take one unit"""
    timed: StepTime | None
    """a step with the given times; None without any"""
    times: PassTimes = UNIT_TIMES
    """the given times, else the times of `units`"""
    out_of_order: Diagnostic | None = None
    """first pass whose micro-batch does not ascend within its stage, which is sound elsewhere and is not placed here"""

    @property
    def has_halves(self) -> bool:
        """True if any backward is in halves."""
        return any(action.kind is ActionKind.BACKWARD_WEIGHT for action in self.table.actions)

    def picture(self) -> Picture:
        """Draw the step, a lane for each rank."""
        bubble = (self.timed or self.units).bubble_fraction
        return table_picture(
            self.table, self.times, f"{self.file}: {_summary(self.table)}, bubble {100 * bubble:.1f} %"
        )

    def parts(self) -> Iterator[Part]:
        """Yield what was proved, the step and its bubble, and the passes in flight."""
        yield f"{self.file}: sound ({_summary(self.table)})"
        if (found := self.out_of_order) is not None:
            where = self.file if found.location is None else str(found.location)
            yield f"{where}: sound, but 'place-from-file' refuses it: {found.message} ({found.help})"
        yield from _worth_parts(self.table, self.units, self.timed)

    def to_json(self) -> dict[str, Any]:
        """Return the report as `--json` prints it."""
        return soundness(self.table, []) | {
            "ascending": self.out_of_order is None,
            "worth": _worth_data(self.table, self.units, self.timed),
        }


class UnsoundTableError(DiagnosticError):
    """The error for a table that is not sound; `table` is None if it could not be read."""

    def __init__(self, diagnostics: list[Diagnostic], table: ActionTable | None) -> None:
        super().__init__(diagnostics)
        self.table = table

    def to_json(self) -> dict[str, Any]:
        """Return what is known of the table, as `--json` prints it."""
        return soundness(self.table, self.diagnostics) | {"ascending": None, "worth": None}


def soundness(table: ActionTable | None, diagnostics: list[Diagnostic]) -> dict[str, Any]:
    """Return the facts about soundness for `--json`; ranks and actions are None if the file could not be read."""
    return {
        "sound": not diagnostics,
        "diagnostics": [each.to_json() for each in diagnostics],
        "ranks": None if table is None else len(table.rows),
        "actions": None if table is None else sum(map(len, table.rows)),
    }


def table_report(file: str, times: PassTimes | None, *, sharded: bool, forward_only: int) -> TableReport:
    """Check a table (CSV of torch.distributed.pipelining) and time its step.

    `times` are the durations of a pass, or None. With `sharded`, stages begin a step with a shard of their parameters;
    the first `forward_only` have no backward. Raises `UnsoundTableError` if the table cannot be read, or is not sound.
    """
    table: ActionTable | None = None
    with paused_gc():
        try:
            table = read_torch_csv(file)
            check_schedule(table, sharded=sharded, forward_only=forward_only)
        except DiagnosticError as error:
            raise UnsoundTableError(error.diagnostics, table) from None
        units = step_time(table, UNIT_TIMES)
        timed = None if times is None else step_time(table, times)
    return TableReport(file, table, units, timed, times or UNIT_TIMES, _out_of_order(table))


def _out_of_order(table: ActionTable) -> Diagnostic | None:
    """Return the refusal of a sound table whose micro-batches do not ascend; None if they do."""
    try:
        check_ascending(table)
    except DiagnosticError as error:
        return error.diagnostics[0]
    return None


def _summary(table: ActionTable) -> str:
    stages = {action.stage for action in table.actions}
    micro_batches = {action.micro_batch for action in table.actions} - {None}
    empty = len(table.ranks_without_actions)
    ranks = number_of(len(table.rows), "rank") + (f" ({empty} without actions)" if empty else "")
    form = "with messages" if table.is_lowered else "compute only"
    counts = ((len(stages), "stage"), (len(micro_batches), "micro-batch"), (sum(map(len, table.rows)), "action"))
    return ", ".join([ranks, *(number_of(*each) for each in counts), form])


# what a step of the table is worth


def _worth_data(actions: ActionTable, units: StepTime, timed: StepTime | None) -> dict[str, object]:
    """Return the step in units and, if it was timed, in seconds, with the passes in flight by rank and by stage."""
    return {
        "units": units.seconds,
        "bubble_fraction": units.bubble_fraction,
        "bubble_to_work": units.bubble_to_work,
        "in_flight": in_flight_on_ranks(actions),
        "in_flight_of_stages": {str(stage): most for stage, most in in_flight_on_stages(actions).items()},
        "timed": None
        if timed is None
        else {
            "seconds": timed.seconds,
            "bubble_fraction": timed.bubble_fraction,
            "bubble_to_work": timed.bubble_to_work,
        },
    }


def _worth_parts(actions: ActionTable, units: StepTime, timed: StepTime | None) -> Iterator[Part]:
    """Yield the same as text."""
    yield f"a step takes {units.seconds:g} units: {_bubble_text(units)}"
    if timed is not None:
        yield f"a step takes {seconds_text(timed.seconds)} with the times given: {_bubble_text(timed)}"
    shown, unit = (units, "units of time") if timed is None else (timed, "times of a step as given")
    form = "{:g}".format if timed is None else seconds_text
    on_stages = in_flight_on_stages(actions)
    rows = []
    for rank, most in enumerate(in_flight_on_ranks(actions)):
        if rank in shown.busy:
            stages = sorted({action.stage for action in actions.rows[rank]})
            each = ", ".join(f"{stage}: {on_stages[stage]}" for stage in stages)
            busy = shown.busy[rank]
            rows.append([str(rank), each, str(most), form(busy), form(shown.seconds - busy)])
    yield TextTable(f"passes in flight at most, and {unit}", ["rank", "of stages", "in flight", "work", "idle"], rows)


def _bubble_text(step: StepTime) -> str:
    return f"the bubble is {step.bubble_fraction:.1%} of it, {step.bubble_to_work:.1%} of the work"
