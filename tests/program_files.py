"""Programs as commands have them: written, read back, verified. Tests that execute a program execute the one out of its file."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.runtime.training import preparation
from ratrain.targets.verifier.program_verifier import check_program

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun


def prepare(program: Program, *arguments: Any, verified: bool = True, **named: Any) -> TrainingRun:
    """Prepare a run of the program out of its file; the arguments are those of `ratrain.targets.runtime.training.preparation.prepare`."""
    return preparation.prepare(through_its_file(program, verified=verified), *arguments, **named)


def through_its_file(program: Program, *, verified: bool = True) -> Program:
    """Write a program and read it back as `ratrainc run` does; `verified` is False for programs that a test has broken on purpose."""
    data = program_bytes(program)
    read = parse_program(data, f"{program.name}.rtx")
    if verified:
        _check(data)
    return read


@lru_cache(maxsize=64)
def _check(data: bytes) -> None:
    """Verify the program in a file's bytes; the same bytes once, as many runs are of one program."""
    read = parse_program(data, "read.rtx")
    assert program_bytes(read) == data, "what was read is written otherwise"
    try:
        check_program(read)
    except DiagnosticError as error:
        if [each.code for each in error.diagnostics] != ["RT065"]:  # a machine that a test has made, and no file says
            raise
