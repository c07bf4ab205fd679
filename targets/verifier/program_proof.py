"""Proof of a large program from its columns, without objects for its instructions.

The rules are the same as in `program_verifier`, each over one instruction of each kind or over columns
(`ratrain.targets.program.lifted_columns`). It proves or does not; it explains nothing. Whatever it does not prove,
`program_verifier` lifts op by op, for the messages or because it is unusual.

The schedule is proved as an allocated one at once. Whatever is sound with addresses is sound without them: live tensors
that share no byte of an arena within the capacity need no more bytes than there are, and addresses only add orders that
ops must keep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.analysis.columns import FoundError
from ratrain.ratrain_ir.module import Level, Module, Stage
from ratrain.ratrain_ir.process_pool import each
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.support.loops import at_any_size
from ratrain.ratrain_ir.verifier import prove_stage
from ratrain.ratrain_ir.verifier.communication import check_communication
from ratrain.ratrain_ir.verifier.reporter import refuser
from ratrain.ratrain_ir.verifier.stage_ends import StageEnds
from ratrain.targets.program.lifted_columns import UnliftedError, lifted_columns
from ratrain.targets.verifier.program_rules import check_workspace_of_stage, target_for
from ratrain.targets.verifier.routine_calls import RoutineCalls

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.columns import ProgramColumns
    from ratrain.targets.program.program import Program
    from ratrain.targets.target import MachineTarget

LEAST = 50_000
"""Least instructions of a program that is proved so. Fewer are lifted in less time than the loops take to compile if
they are not kept."""


@frozen
class _ProvedStage:
    """One stage that is sound alone, and what it takes to judge all together."""

    ends: StageEnds
    called: frozenset[int]
    """routines that it calls"""


def is_proved(program: Program, columns: ProgramColumns, machine: Machine | None) -> bool:
    """Return whether a program keeps the rules 1 to 3; False says that it may not.

    `columns` are the program's. Ops that call no routine are checked for `machine`, or else for the program's own.
    """
    if len(columns) < LEAST or not columns.stages:
        return False
    stages = [Stage(index) for index in range(columns.stages)]
    text = program.name, Level.ALLOCATED, program.model, program.plan, stages, program.info, program.pipeline
    module = Module(*text)
    try:
        target = target_for(module, machine)
    except DiagnosticError:  # said after what else is wrong
        return False
    calls = RoutineCalls(program, Diagnostics())

    def proved(index: int) -> _ProvedStage | None:
        with at_any_size():  # there are enough instructions to compile loops for
            return _proved_stage(program, columns, index, module, target, calls)

    # The first stage is proved here, which loads the loops for the processes too.
    found = [proved(0), *each(proved, range(1, columns.stages), work=len(columns))]
    sound = [stage for stage in found if stage is not None]
    return len(sound) == len(found) and _fit_together(module, sound, len(program.routines))


def _fit_together(module: Module, stages: Sequence[_ProvedStage], routines: int) -> bool:
    """Return whether the messages of stages fit, and all routines are called."""
    if len(frozenset[int]().union(*(stage.called for stage in stages))) < routines:
        return False
    try:
        check_communication(module, refuser(module), [stage.ends for stage in stages], claimed=True)
    except FoundError:
        return False
    return True


def _proved_stage(
    program: Program,
    columns: ProgramColumns,
    index: int,
    module: Module,
    target: MachineTarget,
    calls: RoutineCalls,
) -> _ProvedStage | None:
    """Check a stage alone; return None if anything about it may be wrong."""
    try:
        lifted = lifted_columns(program, columns, index)
    except UnliftedError:
        return None
    for instruction in lifted.instructions:
        calls.check(index, lifted.examples, instruction)
    stage = module.stages[index]
    ends = None if calls.diagnostics.errors else prove_stage(module, stage, None, lifted.columns)
    if ends is None:
        return None
    report = refuser(module)
    report.know(stage, lifted.columns)
    try:
        check_workspace_of_stage(module, stage, target, report)
    except FoundError:
        return None
    return _ProvedStage(ends, frozenset(calls.called))
