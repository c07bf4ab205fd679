"""Functions about schedules and programs: compare, check, export and print them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from ratrain.ratrain_ir.analysis.actions import (
    actions_of_module,
    compute_only,
    torch_csv_lines,
    with_gathered_parameters,
)
from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrain_ir.support.diagnostics import misuse
from ratrain.ratrain_ir.verifier import check as check_module
from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule
from ratrain.ratrainc.bridge.exporting import Exported, export_plan
from ratrain.ratrainc.bridge.recomputing import recomputing
from ratrain.ratrainc.compiling.building import load
from ratrain.ratrainc.compiling.opening import load_schedule
from ratrain.ratrainc.compiling.proving import sound_program
from ratrain.ratrainc.functions.timing import check_stage
from ratrain.ratrainc.report.disassembly import routine_lines, stream_lines, tile_lines
from ratrain.ratrainc.report.schedule_diff import Difference, difference
from ratrain.ratrainc.report.schedule_table import ScheduleTable, schedule_table
from ratrain.ratrainc.report.table_report import TableReport, table_report

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.schedule_worth import PassTimes
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.program.program import Program

ExportFormat = Literal["torch-csv", "megatron", "torchtitan"]


def diff(before: Module | str, after: Module | str) -> Difference:
    """Compare two schedules, given as modules or `.rtir` files: ops added, dropped and moved, tensors, and peaks."""
    return difference(_module(before), _module(after))


def lint(table: str, *, sharded: bool = False, times: PassTimes | None = None, forward_only: int = 0) -> TableReport:
    """Prove that a schedule table of another runtime is sound, and report its step time and idle time.

    `table` is the path of a CSV file as torch.distributed.pipelining writes it. With `sharded`, stages begin a step
    with a shard of their parameters. `times` are the durations of a pass; None counts a forward and each half of a
    backward as one unit. The first `forward_only` stages have no backward: nothing below the next one trains.

    Raises `UnsoundTableError`, a `DiagnosticError`, with every cell that is wrong.
    """
    return table_report(table, times, sharded=sharded, forward_only=forward_only)


def schedule(
    kind: str,
    stages: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    layout: str | None = None,
    slices: int = 1,
) -> ScheduleTable:
    """Make the table of a well-known schedule: forwards and backwards, one row a stage.

    Without `chunks` or `layout` the schedule's own are used. Raises `DiagnosticError` for a shape that the schedule
    cannot have.
    """
    return schedule_table(kind, stages, micro_batches, chunks, layout, slices)


def export(module: Module | str, format: ExportFormat = "torch-csv", *, lowered: bool = False) -> Exported:  # noqa: A002 - as the option is named
    """Export a schedule as the table of another runtime, or its plan as settings of Megatron-LM or torchtitan.

    A table has computations alone, or all actions if `lowered`. Settings say whether layers are computed again;
    Megatron-LM's have the model too. Keys of the plan, fields of the model and recomputation that the settings cannot
    express are in `missing`; settings that nothing here says, in `to_add`.

    Raises `DiagnosticError` if the schedule is not sound, or a table cannot express it.
    """
    known = _module(module)
    check_module(known)
    if format != "torch-csv":
        if lowered:
            misuse(f"lowered is for a table: the format {format} writes settings")
        return export_plan(format, known.plan, known.model, recomputing(known))
    actions = actions_of_module(known)
    table = with_gathered_parameters(actions) if lowered else compute_only(actions)
    check_schedule(table, forward_only=known.topology.forward_only)
    return Exported("".join(f"{line}\n" for line in torch_csv_lines(table)), ())


def disassemble(program: Program | str, *, stage: int | None = None, engine: str | None = None) -> Iterator[str]:
    """Yield the instruction streams of a program line by line, with addresses and waits.

    `stage` and `engine` restrict them to one stage or one engine (`compute`, `send`, ...); None means all.
    """
    names = [item.value for item in ENGINES]
    if engine is not None and engine not in names:
        misuse(f"there is no engine '{engine}'; the engines are {', '.join(names)}")
    known = _program(program)
    check_stage(stage, len(known.stages))
    return stream_lines(known, stage, engine)


def disassemble_routines(program: Program | str) -> Iterator[str]:
    """Yield the routines that a program calls, line by line: kernels, operands, workspace."""
    return routine_lines(_program(program))


def disassemble_tiles(program: Program | str, *, core: int = 0, limit: int = 60) -> Iterator[str]:
    """Yield the tile schedules of a program, line by line: buffers, transfers, waits.

    Of each schedule, only the first `limit` events of core `core` are shown.
    """
    # an unsound schedule may have endless events, so the program is proved before any is listed
    known = sound_program(program)
    return tile_lines(known, core, limit)


def _module(given: Module | str) -> Module:
    return load_schedule(given) if isinstance(given, str) else given


def _program(given: Program | str) -> Program:
    return load(given) if isinstance(given, str) else given
