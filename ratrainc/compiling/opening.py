"""Loading of schedules and programs without verifying them, and the machines they are for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.files import decoded, read_bytes
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.record import check_carried, check_on_machine, compiled_for
from ratrain.targets.program.rtx import parse_program

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.program.program import Program


def program_in(data: bytes, path: str) -> Program:
    """Read the program in the bytes of a `.rtx`; `path` is for messages.

    Raises `DiagnosticError` if the file is malformed.
    """
    with paused_gc():
        program = parse_program(data, path)
    check_carried(program.info, program.topology, path)
    check_on_machine(program, path)
    return program


def load_schedule(path: str) -> Module:
    """Load a module from a `.rtir`; it is not verified yet.

    Raises `DiagnosticError` if it cannot be read, or carries a machine that its target contradicts.
    """
    return schedule_in(read_bytes(path, "schedule"), path)


def schedule_in(data: bytes, path: str) -> Module:
    """Read the module in the bytes of a `.rtir`, without verifying it; `path` is for messages.

    Raises `DiagnosticError` as `load_schedule` does.
    """
    from ratrain.ratrain_ir.text.parser import parse_module

    with paused_gc():
        module = parse_module(decoded(data, path, "schedule"), file=path)
    check_carried_by(module, path)
    return module


def check_carried_by(module: Module, path: str) -> None:
    """Raise `DiagnosticError` if the module of a file carries a machine that its target contradicts."""
    if module.target is not None:
        assert module.source is not None
        check_carried(module.target, module.topology, path, module.source.line(module.target.line))


def machine_for(module: Module, machine: str | Machine | None) -> Machine:
    """Return the machine to use for a module: the given one, else the one it was compiled for, else the MT-3000.

    `machine` may be a name or the path of a machine file. Raises `DiagnosticError` as `load_machine` does, and RT065 if
    the module's machine is not known here.
    """
    if isinstance(machine, Machine):
        return machine
    return load_machine(machine) if machine or module.target is None else compiled_for(module.target)


def machine_of(program: Program) -> Machine:
    """Return the machine that a program was compiled for.

    Raises `DiagnosticError` RT065 if it is not known here.
    """
    return compiled_for(program.info)
