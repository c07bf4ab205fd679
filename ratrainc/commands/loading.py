"""Schedules and programs as commands read them: with the machine they are for, and a word where that is another one than they say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrainc.machine_choice import given_machine
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ratrain.passes.manager import BeforePass
    from ratrain.passes.pass_base import Pass
    from ratrain.ratrain_ir.module import Module, TargetInfo
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program


def checked_schedule(file: str, machine: str | None) -> tuple[Module, Machine | None]:
    """The verified module of a `.rtir`, and the machine that `--machine` names.

    Raises `DiagnosticError` where either is not sound.
    """
    from ratrain import api

    chosen = _given(machine)
    module = api.load_schedule(file)
    api.check(module, machine=chosen)
    if module.target is not None:
        _state(file, module.target, chosen)
    return module, chosen


def saying_passes(tell: Callable[[str], None], what: str) -> BeforePass:
    """Tells which pass works on something, and which are left."""

    def begin(item: Pass, left: Sequence[Pass]) -> None:
        then = f", then {', '.join(each.name for each in left)}" if left else ", the last pass"
        tell(f"{what}: {item.name}{then}")

    return begin


def explained_schedule(file: str, machine: str | None) -> tuple[Module, Machine | None]:
    """The verified module of a `.rtir`, or the one that a `.rtx` was made from, and the machine that `--machine` names.

    Raises `DiagnosticError` as `checked_schedule`, and RT002 where the module that a program was made from cannot be made again.
    """
    if not file.endswith(".rtx"):
        return checked_schedule(file, machine)
    from ratrain.ratrainc.console import status

    with status(f"reading and verifying {file}"):
        program, on = checked_program(file, machine)
    with status(f"compiling what {file} was made from"):
        return _made_again(program, file), on if machine else None


def _made_again(program: Program, file: str) -> Module:
    """The module of a program: what its model, its plan and its passes give, where that is this very program.

    Raises `DiagnosticError` RT002 where it is not.
    """
    from attrs import evolve

    from ratrain import api
    from ratrain.passes.placement.placed_by import placed_by
    from ratrain.ratrain_ir.diagnostics import DiagnosticError, fail
    from ratrain.targets.program.rtx import program_bytes

    made_for = api.machine_of(program)
    # of a placed module the plan tells the order that its pipeline made, and a placement of its own name makes it again
    is_placed = bool(program.pipeline) and placed_by(program.pipeline) is not None
    plan = evolve(program.plan, schedule=None) if is_placed else program.plan
    way_out = "give the .rtir that it was compiled from"
    try:
        module = api.compile(program.model, plan, machine=made_for, passes=program.pipeline)
        module.name = program.name
        again = api.emit(module, machine=made_for)
    except DiagnosticError as error:
        why = error.diagnostics[0].message
        fail("RT002", f"what '{file}' was made from cannot be made again: {why}", help=way_out)
    if program_bytes(again) != program_bytes(program):
        why = "its model, plan and passes give another program: its schedule was edited, or compiled by another version"
        fail("RT002", f"what '{file}' was made from cannot be made again: {why}", help=way_out)
    return module


def checked_program(file: str, machine: str | None) -> tuple[Program, Machine]:
    """The verified program of a `.rtx` or `.rtir`, and its machine: that of `--machine`, else the one it was compiled for.

    Raises `DiagnosticError` where either is not sound, or the machine is not known here.
    """
    from ratrain import api
    from ratrain.targets.program.program_verifier import check_program

    if file.endswith(".rtir"):
        module, chosen = checked_schedule(file, machine)
        program = api.emit(module, machine=chosen)
    else:
        chosen = _given(machine)
        program = api.load(file)
        _state(file, program.info, chosen)
    check_program(program)
    return program, chosen or api.machine_of(program)


def _given(machine: str | None) -> Machine | None:
    return given_machine(machine) if machine else None


def _state(file: str, info: TargetInfo, chosen: Machine | None) -> None:
    """Say that --machine takes the place of the machine that a file was compiled for."""
    from ratrain.targets.machine.record import machine_digest

    if chosen is None or info.digest == machine_digest(chosen):
        return
    was = f"'{info.name}'"
    if info.name == chosen.name:
        if not info.digest:
            return  # it says no more than the name
        was = "one of that name with other numbers"
    echo(f"the machine is '{chosen.name}', of --machine; {file} was compiled for {was}", err=True)
