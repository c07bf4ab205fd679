"""`ratrainc disasm`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.options import Source, refuse_idle
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from ratrain.targets.program.program import Instruction, Program, ProgramStage
    from ratrain.targets.program.routine import OnChipSchedule

_EPILOG = """\b
Examples:
  ratrainc disasm tiny.rtx | less
  ratrainc disasm tiny.rtx --stage 0 --engine compute
  ratrainc disasm tiny.rtx --routines
  ratrainc disasm tiny.rtx --tiles --core 5 --limit 1000 | less
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=Source("program"), metavar="FILE.rtx")
@click.option("--stage", type=click.IntRange(min=0), help="Only this stage.")
@click.option("--engine", metavar="ENGINE", help="Only this engine: compute, send, recv, collective or host.")
@click.option("--routines", is_flag=True, help="Print the routines instead: kernels, operands, workspace.")
@click.option("--tiles", is_flag=True, help="Print the tile schedules instead: buffers, transfers, waits.")
@click.option(
    "--core", type=click.IntRange(min=0), default=0, show_default=True, help="With --tiles: the core to follow."
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=60, show_default=True, help="With --tiles: events of each schedule."
)
def command(
    file: str, stage: int | None, engine: str | None, routines: bool, tiles: bool, core: int, limit: int
) -> None:
    """Print a program: each engine's stream with addresses and waits, the routines it calls, or their tile schedules."""
    from ratrain import api
    from ratrain.ratrain_ir.ops import ENGINES

    names = [item.value for item in ENGINES]
    if engine is not None and engine not in names:
        raise click.UsageError(f"there is no engine '{engine}'; the engines are {', '.join(names)}")
    if routines and tiles:
        raise click.UsageError("--routines and --tiles exclude each other")
    if routines or tiles:
        refuse_idle("is for streams: it does not go with --routines or --tiles", "stage", "engine")
    if not tiles:
        refuse_idle("goes with --tiles", "core", "limit")
    program = api.load(file)
    if stage is not None and stage >= len(program.stages):
        raise click.UsageError(f"there is no stage {stage}: the program has stages 0 to {len(program.stages) - 1}")
    if tiles:
        from ratrain.targets.program.program_verifier import check_program

        check_program(program)  # of schedules that are not sound the events need not end

        lines = _on_chip_lines(program, core, limit)
    else:
        lines = _routine_lines(program) if routines else _program_lines(program, stage, engine)
    echo("\n".join(lines))


def _program_lines(program: Program, only_stage: int | None, only_engine: str | None) -> Iterator[str]:
    yield f"program {program.name}: {program.topology.words}, target {program.target}"
    yield f"pipeline {program.pipeline}"
    for index, stage in enumerate(program.stages):
        if only_stage not in (None, index):
            continue
        yield f"stage @{index}: arena {stage.arena_bytes} bytes, peak live {stage.peak_live_bytes}"
        for engine, stream in stage.streams.items():
            if only_engine in (None, engine.value):
                yield f"  {engine.value}: {len(stream)} instructions"
                for number, instruction in enumerate(stream, 1):
                    yield f"  {number:6d}  {_instruction_text(program, stage, instruction)}"


def _instruction_text(program: Program, stage: ProgramStage, instruction: Instruction) -> str:
    routine = "" if instruction.routine is None else f" call {program.routines[instruction.routine].key}"
    operands = ", ".join(
        f"{operand.role}={'rwus'[operand.access.value]}:{stage.tensors[operand.tensor].offset:#x}"
        for operand in instruction.operands
    )
    waits = " ".join(
        f"{wait.engine.value}>={wait.count}{' of the previous step' if wait.previous_step else ''}"
        for wait in instruction.waits
    )
    return f"{instruction.title}{routine} ({operands})" + (f"  wait {waits}" if waits else "")


def _on_chip_lines(program: Program, core: int, limit: int) -> Iterator[str]:
    """Every distinct on-chip schedule, and the first `limit` events of a core."""
    from ratrain.targets.program.on_chip import on_chip_form

    users: dict[OnChipSchedule, list[str]] = {}
    for routine in program.routines:
        for number, step in enumerate(routine.steps, 1):
            for schedule in step.on_chip.values():
                users.setdefault(schedule, []).append(f"{routine.key} step {number}")
    if not users:
        yield f"no tile schedules: the program was compiled for {program.target} without them"
    for schedule, steps in users.items():
        yield from on_chip_form(schedule.form).lines(schedule, steps, core, limit)


def _routine_lines(program: Program) -> Iterator[str]:
    for routine in program.routines:
        yield f"routine {routine.key}: workspace {routine.workspace_bytes} bytes"
        for formal in routine.formals:
            yield f"    operand {formal.name} : {formal.dtype.value}{list(formal.shape)}"
        for item in routine.intermediates:
            yield f"    workspace {item.name} : {item.dtype.value}{list(item.shape)} at {item.offset:#x}"
        for step in routine.steps:
            operands = ", ".join(f"{name}={reference}" for name, reference in step.operands.items())
            options = "".join(f" {key}={value}" for key, value in step.options.items())
            yield f"    {step.kernel} ({operands}){options}"
