"""A well-known schedule as a table of forwards and backwards: the work of `ratrainc schedule`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from attrs import evolve, frozen

from ratrain.ratrain_ir.analysis.actions import (
    actions_of_orders,
    order_row,
    parse_torch_csv,
    torch_csv_lines,
    torch_csv_row,
)
from ratrain.ratrain_ir.analysis.schedule_worth import UNIT_TIMES
from ratrain.ratrain_ir.schedules.action import ActionKind
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, fail, misuse
from ratrain.ratrain_ir.support.files import MIB, MOST_BYTES, checked, write_lines
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrain_ir.support.text import shown
from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.report.picture import table_picture

if TYPE_CHECKING:
    from ratrain.ratrainc.report.svg import Picture

_MOST_DRAWN = 20_000
"""Most forwards of a picture; with more, boxes are thinner than a pixel."""
_MOST_STAGES_IN_CHUNKS = 1024
"""Most stages of a table with several chunks a stage.

Their order with few micro-batches is that of about two micro-batches a stage, without the ones that do not exist. So
the work grows with the square of the stages.
"""


@frozen(repr=False)
class ScheduleTable(Shown):
    """The order of every stage under a schedule; `2F1` is chunk 2's forward of micro-batch 1."""

    kind: str
    shape: PipelineShape

    def rows(self) -> Iterator[str]:
        """Yield the rows of the CSV, one a stage, one by one: a large table need not be in memory.

        Raises `DiagnosticError` as soon as the table is longer than `ratrainc lint` reads.
        """
        size = 0
        for number, row in enumerate(_lines(self.kind, self.shape)):
            size += len(row) + 1
            if size > MOST_BYTES["schedule table"]:
                _too_long(self.shape)
            # one row is proof of the format; to read every row again would double the time
            yield checked(row, "schedule table", _read_row) if number == 0 else row

    def parts(self) -> Iterator[Part]:
        """Yield the rows."""
        return self.rows()

    def picture(self) -> Picture:
        """Draw a step in which a forward and each half of a backward take one unit of time, a lane for each stage.

        Raises `DiagnosticError` for a table too long to draw.
        """
        actions = self.shape.micro_batches * self.shape.slices * len(self.shape.chunk_stages)
        if actions > _MOST_DRAWN:
            text = f"the picture would have {actions:,} forwards, and at most {_MOST_DRAWN:,} can be told apart"
            misuse(f"{text}: draw fewer micro-batches")
        stages = range(self.shape.stages)
        table = actions_of_orders([SCHEDULES[self.kind].actions(self.shape, stage) for stage in stages])
        check_schedule(table)
        return table_picture(
            table,
            UNIT_TIMES,
            f"{self.kind}: {number_of(self.shape.stages, 'stage')}, "
            f"{number_of(self.shape.micro_batches, 'micro-batch')}",
        )

    def problem(self) -> str | None:
        """Say what is wrong with the order of a plugin's schedule, as `ratrainc lint` does; None if nothing is.

        Orders of the project's own schedules are not looked at.
        """
        if SCHEDULES.is_own(self.kind):
            return None
        orders = [SCHEDULES[self.kind].actions(self.shape, stage) for stage in range(self.shape.stages)]
        passes = self.shape.micro_batches * self.shape.slices
        for stage, order in enumerate(orders):
            chunks = self.shape.chunks_of(stage)
            done = {action.work for action in order if action.kind is ActionKind.FORWARD}
            if len(done) < passes * len(chunks):
                return f"stage {stage} has {len(done)} of {passes * len(chunks)} forwards"
        try:
            check_schedule(actions_of_orders(orders))
        except DiagnosticError as error:
            return error.diagnostics[0].message
        return None

    def save(self, path: str) -> None:
        """Write the CSV.

        Raises `DiagnosticError` RT002 if the file cannot be written, and as `rows` does.
        """
        write_lines(path, self.rows())


def schedule_table(
    kind: str, stages: int, micro_batches: int, chunks: int | None, layout: str | None, slices: int
) -> ScheduleTable:
    """Make the table of a schedule; None takes the schedule's own chunks or layout.

    Raises `DiagnosticError` for a shape that the schedule cannot have, or for a table too large for `ratrainc lint`.
    """
    if kind not in SCHEDULES:
        misuse(f"there is no schedule '{kind}'; there are {', '.join(SCHEDULES)}")
    schedule = SCHEDULES[kind]
    shape = PipelineShape(stages, micro_batches, chunks or schedule.chunks, layout or schedule.layout, slices)
    _check_shape(kind, shape)
    _check_size(kind, shape)
    return ScheduleTable(kind, shape)


def _check_shape(kind: str, shape: PipelineShape) -> None:
    """Refuse chunks, a layout or slices that the schedule cannot have, or that would change nothing."""
    schedule = SCHEDULES[kind]
    problem = schedule.problem(shape)
    if problem is None and shape.chunks == 1 and shape.layout != "loop":
        problem = f"--layout {shape.layout} changes nothing with one chunk a stage"
    if problem is not None:
        usual = "" if schedule.chunks == 1 else f" --chunks {schedule.chunks} --layout {schedule.layout}"
        usual += " --slices 4" if kind == "seq1f1b" else ""
        misuse(
            f"{schedule.title} cannot be made: {problem}; for example "
            f"'ratrainc schedule --kind {kind} --stages 4 --micro-batches 8{usual}'"
        )


def _check_size(kind: str, shape: PipelineShape) -> None:
    """Refuse a table that `lint` could not read even if all its actions were as short as possible."""
    most = MOST_BYTES["schedule table"] // len("0F0,")
    passes = shape.stages * shape.micro_batches * shape.chunks * shape.slices
    actions = passes * (3 if _splits_backwards(kind, shape) else 2)
    if actions > most:
        size = MOST_BYTES["schedule table"] // MIB
        misuse(
            f"a table of {number_of(shape.stages, 'stage', ',')} and "
            f"{number_of(shape.micro_batches, 'micro-batch', ',')} has up to "
            f"{number_of(actions, 'action', ',')}; "
            f"one of more than {most:,} is longer than 'ratrainc lint' reads ({size} MiB)"
        )
    if shape.chunks > 1 and shape.stages > _MOST_STAGES_IN_CHUNKS:
        misuse(
            f"tables of several chunks a stage are made for up to {_MOST_STAGES_IN_CHUNKS:,} stages, not "
            f"{shape.stages:,}"
        )


def _too_long(shape: PipelineShape) -> NoReturn:
    misuse(
        f"a table of {number_of(shape.stages, 'stage', ',')} and "
        f"{number_of(shape.micro_batches, 'micro-batch', ',')} is longer than 'ratrainc "
        "lint' reads "
        f"({MOST_BYTES['schedule table'] // MIB} MiB)"
    )


def _read_row(row: str) -> None:
    """Raise `DiagnosticError` RT007 if a row, once read, is not printed as it was."""
    if (again := next(torch_csv_lines(parse_torch_csv(row, "X.csv")))) != row:
        fail("RT007", f"the first row is read back as {shown(again)}")


def _splits_backwards(kind: str, shape: PipelineShape) -> bool:
    """Return True if the schedule has backwards in halves, found by its smallest table."""
    least = evolve(shape, stages=2, micro_batches=1, slices=min(shape.slices, 2), chunks=min(shape.chunks, 2))
    orders = (SCHEDULES[kind].actions(least, stage) for stage in range(2))
    return any(action.kind is ActionKind.BACKWARD_WEIGHT for order in orders for action in order)


def _lines(kind: str, shape: PipelineShape) -> Iterator[str]:
    """Yield the rows one by one: a large table need not be in memory."""
    for stage in range(shape.stages):
        yield torch_csv_row(order_row(stage, SCHEDULES[kind].actions(shape, stage)))
