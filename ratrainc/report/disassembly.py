"""A program as text: the work of `ratrainc disasm`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.diagnostics import misuse
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.targets.program.on_chip import on_chip_form

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program, ProgramStage
    from ratrain.targets.program.routine import OnChipSchedule, Step


def stream_lines(program: Program, only_stage: int | None, only_engine: str | None) -> Iterator[str]:
    """Yield the instruction streams with addresses and waits, of one stage or engine, or of all (None)."""
    yield f"program {program.name}: {program.topology.words}, target {program.target}"
    yield f"pipeline {program.pipeline}"
    for index, stage in enumerate(program.stages):
        if only_stage not in (None, index):
            continue
        yield f"stage @{index}: arena {stage.arena_bytes} bytes, peak live {stage.peak_live_bytes}"
        for engine, stream in stage.streams.items():
            if only_engine in (None, engine.value):
                yield f"  {engine.value}: {number_of(len(stream), 'instruction')}"
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


def tile_lines(program: Program, core: int, limit: int) -> Iterator[str]:
    """Return lines of every distinct on-chip schedule, with the first `limit` events of a core in each.

    Raises `DiagnosticError` where no schedule has such a core.
    """
    users: dict[OnChipSchedule, list[str]] = {}
    for routine in program.routines:
        for number, step in enumerate(routine.steps, 1):
            for schedule in step.on_chip.values():
                users.setdefault(schedule, []).append(f"{routine.key} step {number}")
    cores = max((on_chip_form(schedule.form).cores(schedule) for schedule in users), default=0)
    if users and not 0 <= core < cores:
        misuse(f"there is no core {core}: the cores are 0 to {cores - 1}")
    if users:
        return chain.from_iterable(
            on_chip_form(schedule.form).lines(schedule, steps, core, limit) for schedule, steps in users.items()
        )
    way_out = "'ratrainc compile --model M --plan P.toml --machine mt3000-tiles -o X.rtx' makes one that has them"
    return iter([f"no tile schedules: the program was compiled for {program.target} without them", f"help: {way_out}"])


def routine_lines(program: Program) -> Iterator[str]:
    """Yield the routines with their kernels, operands and workspace."""
    for routine in program.routines:
        yield f"routine {routine.key}: workspace {routine.workspace_bytes} bytes"
        for formal in routine.formals:
            yield f"    operand {formal.name} : {formal.dtype.value}{list(formal.shape)}"
        for item in routine.intermediates:
            yield f"    workspace {item.name} : {item.dtype.value}{list(item.shape)} at {item.offset:#x}"
        for step in routine.steps:
            operands = ", ".join(f"{name}={reference}" for name, reference in step.operands.items())
            options = "".join(f" {key}={value}" for key, value in step.options.items())
            ranks = f" of context ranks {_of_ranks(step)}" if step.by_rank else ""
            yield f"    {step.kernel} ({operands}){options}{ranks}"


def _of_ranks(step: Step) -> str:
    """Format what each context rank that runs a step adds to its options."""
    own = {rank: options for rank, options in enumerate(step.by_rank) if options is not None}
    return "; ".join(" ".join([f"{rank}", *(f"{k}={v}" for k, v in options.items())]) for rank, options in own.items())
