"""What an emitted program must satisfy beyond a sound container: bounds, operands that fit their routines, progress."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain_ir.blocks import parse_block, stage_blocks
from ratrain_ir.diagnostics import Diagnostics
from ratrain_ir.ops import OP_CLASSES, Engine
from ratrain_ir.types import ALIGNMENT_BYTES, StateKind
from targets.simulator import simulate

if TYPE_CHECKING:
    from targets.program import Instruction, Program, ProgramStage
    from targets.routine import Routine


def check_program(program: Program) -> None:
    """Raise `DiagnosticError` unless a program is sound.

    RT080: an operand or routine does not fit; RT051, RT052: addresses; RT042: it cannot end with buffered or rendezvous sends.
    """
    found = Diagnostics()
    for index, stage in enumerate(program.stages):
        _check_addresses(program, index, stage, found)
        for engine, stream in stage.streams.items():
            for number, instruction in enumerate(stream, 1):
                problem = _problem(program, index, engine, instruction)
                if problem:
                    place = f"stage @{index}, {engine.value} engine, instruction {number} '{instruction.title}'"
                    found.error("RT080", f"{place}: {problem}")
    found.check()
    for rendezvous in (False, True):
        simulate(program, lambda _stage, _instruction: 1.0, rendezvous=rendezvous)


def _check_addresses(program: Program, index: int, stage: ProgramStage, found: Diagnostics) -> None:
    for tensor in stage.tensors:
        if tensor.offset % ALIGNMENT_BYTES:
            found.error("RT051", f"stage @{index}: %{tensor.name} at {tensor.offset:#x} is not aligned")
    if stage.arena_bytes > program.capacity_bytes:
        excess = stage.arena_bytes - program.capacity_bytes
        found.error("RT052", f"stage @{index}: the arena exceeds the capacity by {excess} bytes")


def _problem(program: Program, stage: int, engine: Engine, instruction: Instruction) -> str | None:
    """What is wrong with an instruction, or None."""
    default = OP_CLASSES[instruction.keyword].default_engine
    if engine is not default and not (instruction.keyword == "update" and engine is Engine.HOST):
        return f"it belongs on the {default.value} engine"
    owned = set(map(str, stage_blocks(program.model, program.plan, stage)))
    for name in instruction.blocks:
        if parse_block(name) is None or name not in owned:
            return f"'{name}' is not a block of this stage"
    calls_routine = default is Engine.COMPUTE and instruction.keyword != "update"
    if calls_routine != (instruction.routine is not None):
        return "it must call a routine" if calls_routine else "it cannot call a routine"
    if instruction.routine is not None:
        return _call_problem(program.routines[instruction.routine], program.stages[stage], instruction)
    return None


def _call_problem(routine: Routine, stage: ProgramStage, instruction: Instruction) -> str | None:
    """What is wrong with the operands of a call, or None."""
    tensors = {operand.role: stage.tensors[operand.tensor] for operand in instruction.operands}
    for formal in routine.formals:
        tensor = tensors.get(formal.name)
        if tensor is None:
            return f"routine {routine.key} needs an operand '{formal.name}'"
        if tensor.type.dtype is not formal.dtype or tensor.type.shape != formal.shape:
            return f"'{formal.name}' of routine {routine.key} does not fit %{tensor.name} : {tensor.type}"
    workspace = tensors.get("workspace")
    held = workspace.type.nbytes if workspace is not None and workspace.kind is StateKind.WORKSPACE else 0
    if held < routine.workspace_bytes:
        return f"routine {routine.key} needs {routine.workspace_bytes} bytes of workspace, the call has {held}"
    return None
