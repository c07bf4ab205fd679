"""Schedules and programs of files, proved sound: by a proof, or by the receipt of one (`ratrain.ratrain_ir.receipts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.files import read_bytes
from ratrain.ratrain_ir.receipts import prove
from ratrain.ratrainc.functions.opening import load_schedule, machine_for, program_in
from ratrain.targets.machine.machine import load_machine
from ratrain.targets.machine.record import machine_digest

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.program.program import Program


def sound_schedule(path: str, *, machine: str | Machine | None = None, anew: bool = False) -> Module:
    """The module of a `.rtir`, proved for the machine it was sized for or for the one given; by a proof of now where it is wanted `anew`.

    Raises `DiagnosticError` with all that is wrong.
    """
    module = load_schedule(path)
    assert module.source is not None
    on = b"" if module.target is None else machine_digest(machine_for(module, machine)).encode()

    def proof() -> None:
        from ratrain.ratrainc.functions.building import check

        check(module, machine=machine)

    prove(proof, "schedule", on, "\n".join(module.source.lines).encode(), anew=anew)
    return module


def sound_program(given: Program | str, *, machine: str | Machine | None = None, anew: bool = False) -> Program:
    """A program, proved, or the one of a `.rtx`, or of a `.rtir`, which is proved and emitted first, for `machine` where one is given.

    Raises `DiagnosticError` with all that is wrong.
    """
    if not isinstance(given, str):
        _check_program(given)
        return given
    if isinstance(machine, str):
        machine = load_machine(machine)
    if given.endswith(".rtir"):
        from ratrain.ratrainc.functions.building import emit

        return sound_program(emit(sound_schedule(given, machine=machine, anew=anew), machine=machine))
    data = read_bytes(given, "program")
    program = program_in(data, given)
    prove(lambda: _check_program(program), "program", data, anew=anew)
    return program


def _check_program(program: Program) -> None:
    from ratrain.targets.program.program_verifier import check_program

    check_program(program)
