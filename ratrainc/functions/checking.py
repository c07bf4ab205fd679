"""What schedules and programs are: proved sound, compared, told as text and as tables of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from attrs import field, frozen

from ratrain.ratrain_ir.actions import actions_of_module, compute_only, torch_csv_lines, with_gathered_parameters
from ratrain.ratrain_ir.diagnostics import misuse
from ratrain.ratrain_ir.module import Module, TargetInfo
from ratrain.ratrain_ir.ops import ENGINES
from ratrain.ratrain_ir.verifier import check as check_module
from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule
from ratrain.ratrainc.bridge.exporting import Exported, export_plan
from ratrain.ratrainc.difference import Difference, difference
from ratrain.ratrainc.disassembly import routine_lines, stream_lines, tile_lines
from ratrain.ratrainc.functions.building import check, load
from ratrain.ratrainc.functions.opening import load_schedule
from ratrain.ratrainc.functions.proving import proved_schedule, sound_program
from ratrain.ratrainc.functions.timing import check_stage
from ratrain.ratrainc.parts import Part, Shown
from ratrain.ratrainc.schedule_table import ScheduleTable, schedule_table
from ratrain.ratrainc.table_report import TableReport, table_report
from ratrain.targets.program.program import Program

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.schedule_worth import PassTimes
    from ratrain.targets.machine.machine import Machine

ExportFormat = Literal["torch-csv", "megatron", "torchtitan"]


@frozen(repr=False)
class Proof(Shown):
    """That a schedule or a program is sound, and what it was proved of."""

    words: str
    target: TargetInfo | None = field(eq=False)
    """the machine that it was sized for; None: it was for none"""

    def parts(self) -> Iterator[Part]:
        """A sentence."""
        yield f"sound ({self.words})"


def verify(what: Module | Program | str, *, machine: str | Machine | None = None) -> Proof:
    """Prove that a module, a program or the file of one is sound.

    A module is proved for the machine it was sized for, or for the one given. Raises `DiagnosticError` with all that is wrong.
    """
    is_program = what.endswith(".rtx") if isinstance(what, str) else isinstance(what, Program)
    if is_program and machine is not None:
        misuse("a program holds what its machine's routines need: it is proved for no other machine")
    if isinstance(what, str) and not is_program:
        proved = proved_schedule(what, machine=machine)
        return Proof(f"level {proved.level.value}, {proved.stages} stages, {proved.ops} ops", proved.target)
    if isinstance(what, Module):
        check(what, machine=machine)
    else:
        what = sound_program(what, anew=True)
        count = sum(stage.instructions for stage in what.stages)
        words = f"{len(what.stages)} stages, {count} instructions, {len(what.routines)} routines"
        return Proof(words, what.info)
    ops = sum(len(stage.ops) for stage in what.stages)
    return Proof(f"level {what.level.value}, {len(what.stages)} stages, {ops} ops", what.target)


def diff(before: Module | str, after: Module | str) -> Difference:
    """What differs between two schedules, modules or files, in schedule terms: ops added, dropped, moved; tensors; peaks."""
    return difference(_module(before), _module(after))


def lint(table: str, *, sharded: bool = False, times: PassTimes | None = None) -> TableReport:
    """Prove that a schedule table of another runtime (CSV of torch.distributed.pipelining) is sound, and say what it is worth.

    `sharded`: stages begin a step with a shard of their parameters. `times` are those of a pass, to time a step with. Raises
    `UnsoundTableError`, a `DiagnosticError`, with every cell that is wrong.
    """
    return table_report(table, times, sharded=sharded)


def schedule(
    kind: str,
    stages: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    layout: str | None = None,
    slices: int = 1,
) -> ScheduleTable:
    """A well-known schedule as a table of forwards and backwards, one row a stage; chunks and layout are the kind's own if not given.

    Raises `DiagnosticError` for a shape that the schedule cannot have.
    """
    return schedule_table(kind, stages, micro_batches, chunks, layout, slices)


def export(module: Module | str, format: ExportFormat = "torch-csv", *, lowered: bool = False) -> Exported:  # noqa: A002 - as the option is named
    """A schedule as the table of another runtime, or its plan as settings of Megatron-LM or torchtitan.

    A table has compute alone, or all actions where it is `lowered`. What settings do not express is in `missing`. Raises
    `DiagnosticError` where the schedule is not sound, or no table can say it.
    """
    known = _module(module)
    check_module(known)
    if format != "torch-csv":
        if lowered:
            misuse(f"lowered is for a table: the format {format} writes settings")
        return export_plan(format, known.plan, known.model.layers)
    actions = actions_of_module(known)
    table = with_gathered_parameters(actions) if lowered else compute_only(actions)
    check_schedule(table)
    return Exported("".join(f"{line}\n" for line in torch_csv_lines(table)), ())


def disassemble(program: Program | str, *, stage: int | None = None, engine: str | None = None) -> Iterator[str]:
    """Each engine's stream with addresses and waits, line by line: of all stages and engines, or of one."""
    names = [item.value for item in ENGINES]
    if engine is not None and engine not in names:
        misuse(f"there is no engine '{engine}'; the engines are {', '.join(names)}")
    known = _program(program)
    check_stage(stage, len(known.stages))
    return stream_lines(known, stage, engine)


def disassemble_routines(program: Program | str) -> Iterator[str]:
    """The routines that a program calls, line by line: kernels, operands, workspace."""
    return routine_lines(_program(program))


def disassemble_tiles(program: Program | str, *, core: int = 0, limit: int = 60) -> Iterator[str]:
    """The tile schedules of a program, line by line: buffers, transfers, waits; of each the first `limit` events of a core."""
    # of schedules that are not sound the events need not end
    known = sound_program(program)
    return tile_lines(known, core, limit)


def _module(given: Module | str) -> Module:
    return load_schedule(given) if isinstance(given, str) else given


def _program(given: Program | str) -> Program:
    return load(given) if isinstance(given, str) else given
