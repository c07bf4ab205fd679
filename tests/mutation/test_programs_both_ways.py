"""Prove programs and their mutants from columns, by one process and by two: the findings are those of each op lifted."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.process_pool import processes
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.simulator.progress import check_progress
from ratrain.targets.verifier import program_proof, program_verifier
from ratrain.targets.verifier.program_proof import is_proved
from tests.mutation.subjects import SUBJECTS, copy_program
from tests.mutation.table import OPERATORS

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

EACH = 3
"""Mutants of an operator and a subject."""


def read(program: Program) -> Program | None:
    """Return the program as a file has it; None where the container refuses it."""
    try:
        return parse_program(program_bytes(program), "mutant.rtx")
    except DiagnosticError:
        return None


def is_sound(program: Program) -> bool:
    """Return whether a program is sound when it is lifted op by op, races and progress left out."""
    try:
        program_verifier.check_lifted(program, program.columns(), None, Diagnostics())
    except DiagnosticError:
        return False
    return True


def is_usual(program: Program) -> bool:
    """Return whether a sound program can be proved from columns."""
    in_ddr = all(form.home is Home.DDR for form in program.columns().forms)
    lends = any(item.keyword in KEPT for stage in program.stages for each in stage.streams.values() for item in each)
    return in_ddr and not program.plan.slices and not lends


KEPT = {"peer_offload", "peer_reload", "donor_accept", "donor_return"}


def findings(program: Program) -> list[str]:
    found: list[str] = []
    try:
        program_verifier.check_program(program)
    except DiagnosticError as error:
        found = [item.render() for item in error.diagnostics]
    return found


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.sampled(20)
def test_programs_of_mutants(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = SUBJECTS[name]
    changed = [("unchanged", copy_program(subject.program()))]
    for operator in OPERATORS["program"].values():
        for number in range(EACH):
            program = copy_program(subject.program())
            change = operator.change(program, Random(f"{operator.name}/{subject.name}/{number}"))
            if change is not None:
                changed.append((change, program))
    for number, (change, mutant) in enumerate(changed):
        if (program := read(mutant)) is None:
            continue
        expected = findings(program)
        asked: list[bool] = []

        def proved_in(*given: Any, asked: list[bool] = asked) -> bool:
            asked.append(is_proved(*given))
            return asked[-1]

        with monkeypatch.context() as patch, processes(2 - number % 2, least_work=0):
            patch.setattr(program_proof, "LEAST", 0)
            patch.setattr(program_verifier, "is_proved", proved_in)
            assert findings(parse_program(program_bytes(mutant), "mutant.rtx")) == expected, change
        proved = any(asked)
        assert not proved or is_sound(program), change
        if change == "unchanged":
            assert proved == is_usual(program)


def test_a_large_program_is_proved_without_its_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    program = read(SUBJECTS["p2-d2-zero1"].program())
    assert program is not None
    monkeypatch.setattr(program_proof, "LEAST", 0)
    monkeypatch.setattr(program_verifier, "check_lifted", None)
    program_verifier.check_program(program)
    assert all(stage.unread is not None for stage in program.stages)
    check_progress(program.columns(), program.topology)
