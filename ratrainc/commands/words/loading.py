"""Loading of schedules and programs in commands, with their machine; a machine that differs from theirs is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrainc.choices.machine_choice import given_machine
from ratrain.ratrainc.console.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, TargetInfo
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program


def checked_schedule(file: str, machine: str | None) -> tuple[Module, Machine | None]:
    """Load and verify the module of a `.rtir`; return it and the machine that `--machine` names.

    Raises `DiagnosticError` if either is not sound.
    """
    from ratrain.ratrainc.compiling.proving import sound_schedule

    chosen = machine_of_option(machine)
    module = sound_schedule(file, machine=chosen)
    if module.target is not None:
        state_machine(file, module.target, chosen)
    return module, chosen


def explained_schedule(file: str, machine: str | None) -> tuple[Module, Machine | None]:
    """Load and verify the module of a `.rtir`, or the one that a `.rtx` was made from; return it and `--machine`.

    Raises `DiagnosticError` as `checked_schedule` does, and RT002 if the module of a program cannot be made again.
    """
    if not file.endswith(".rtx"):
        return checked_schedule(file, machine)
    from ratrain.ratrainc.compiling.building import source_module
    from ratrain.ratrainc.console.console import status

    with status(f"reading and verifying {file}"):
        program, on = checked_program(file, machine)
    with status(f"compiling what {file} was made from"):
        return source_module(program, file), on if machine else None


def checked_program(file: str, machine: str | None) -> tuple[Program, Machine]:
    """Load and verify the program of a `.rtx` or `.rtir`; return it and its machine.

    The machine is `--machine`'s, else the one it was compiled for. Raises `DiagnosticError` if either is not sound, or
    the machine is not known here.
    """
    from ratrain import api
    from ratrain.ratrainc.compiling.proving import sound_program

    if file.endswith(".rtir"):
        module, chosen = checked_schedule(file, machine)
        program = sound_program(api.emit(module, machine=chosen))
    else:
        chosen = machine_of_option(machine)
        program = sound_program(file, machine=chosen)
        state_machine(file, program.info, chosen)
    return program, chosen or api.machine_of(program)


def machine_of_option(machine: str | None) -> Machine | None:
    """Load the machine that `--machine` names; None without the option."""
    return given_machine(machine) if machine else None


def state_machine(file: str, info: TargetInfo, chosen: Machine | None) -> None:
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
