"""Blocking collectives in programs: the waits around them, and a mark that is kept and cannot lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import is_blocking
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.testing.equality import first_difference
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.targets.program.instruction import CountWait
from ratrain.targets.program.lifting import lift
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import make_program
from tests.mutation.subjects import SUBJECTS, copy_program

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program, ProgramStage

BLOCKING = [name for name, subject in SUBJECTS.items() if "blocking=true" in subject.passes]


@pytest.fixture
def program() -> Program:
    """Two stages; of each the gradients are reduced at once, then come the updates, then the gathers."""
    return make_program(name="baseline-1f1b")


def awaits(stage: ProgramStage, engine: Engine, at: int) -> set[CountWait]:
    return set(stage.streams[engine][at].waits)


def test_the_waits_hold_compute_around_each_blocking_collective() -> None:
    """A collective waits for the compute instruction before it, and the one after it waits for the collective, across the step's end too.

    The loss scale is fixed: what updates it would be waited for last, and imply the wait for the gathers.
    """
    for stage in make_program(name="baseline-1f1b", loss_scale=1.0).stages:
        compute, collectives = stage.streams[Engine.COMPUTE], stage.streams[Engine.COLLECTIVE]
        first_update = next(at for at, item in enumerate(compute) if item.keyword == "update")
        reduction = next(at for at, item in enumerate(collectives) if item.keyword == "reduce_scatter")
        gathers = [at for at, item in enumerate(collectives) if item.keyword == "all_gather"]
        assert all(collectives[at].blocking for at in (reduction, *gathers))
        assert CountWait(Engine.COMPUTE, first_update, False) in awaits(stage, Engine.COLLECTIVE, reduction)
        assert CountWait(Engine.COLLECTIVE, reduction + 1, False) in awaits(stage, Engine.COMPUTE, first_update)
        assert CountWait(Engine.COMPUTE, len(compute), False) in awaits(stage, Engine.COLLECTIVE, gathers[0])
        assert CountWait(Engine.COLLECTIVE, gathers[-1] + 1, True) in awaits(stage, Engine.COMPUTE, 0)


def test_without_the_mark_those_waits_are_not_there() -> None:
    for stage in make_program(name="baseline-1f1b-overlapped", loss_scale=1.0).stages:
        compute, collectives = stage.streams[Engine.COMPUTE], stage.streams[Engine.COLLECTIVE]
        gathers = [at for at, item in enumerate(collectives) if item.keyword == "all_gather"]
        assert not any(item.blocking for item in collectives)
        assert CountWait(Engine.COMPUTE, len(compute), False) not in awaits(stage, Engine.COLLECTIVE, gathers[0])
        assert CountWait(Engine.COLLECTIVE, gathers[-1] + 1, True) not in awaits(stage, Engine.COMPUTE, 0)


@pytest.mark.parametrize("name", BLOCKING)
def test_the_mark_is_kept_by_text_container_and_lifting(name: str) -> None:
    module, program = SUBJECTS[name].module(), SUBJECTS[name].program()
    assert first_difference(parse_module(print_module(module)), module) is None
    marked = sum(map(is_blocking, (op for stage in module.stages for op in stage.ops)))
    assert marked
    again = parse_program(program_bytes(program), "a.rtx")
    assert program_bytes(again) == program_bytes(program)
    found = Diagnostics()
    lifted = lift(again, found)
    assert not found.errors
    assert sum(map(is_blocking, (op for stage in lifted.stages for op in stage.ops))) == marked
    check_program(again)


def test_a_program_without_the_mark_is_stored_as_before_there_was_one() -> None:
    """Files from before are read: the mark is a bit that was always 0."""
    plain = make_program()
    marked = copy_program(plain)
    for stage in marked.stages:
        stream = stage.streams[Engine.COLLECTIVE]
        stream[:] = [evolve(item, blocking=item.keyword == "all_gather") for item in stream]
    assert len(program_bytes(marked)) == len(program_bytes(plain))
    assert not any(
        i.blocking for s in parse_program(program_bytes(plain), "a").stages for i in s.streams[Engine.COLLECTIVE]
    )


def test_a_mark_without_the_waits_is_refused() -> None:
    program = copy_program(make_program())
    for stage in program.stages:
        stream = stage.streams[Engine.COLLECTIVE]
        stream[:] = [evolve(item, blocking=item.keyword == "all_gather") for item in stream]
    with pytest.raises(DiagnosticError, match=r"RT081.*one is a blocking collective and the other computes"):
        check_program(program)


def test_only_a_collective_on_tensors_can_have_the_mark(program: Program) -> None:
    for engine, keyword in ((Engine.COMPUTE, "update"), (Engine.COLLECTIVE, "all_reduce_scalar")):
        changed = copy_program(program)
        stream = changed.stages[0].streams[engine]
        at = next(at for at, item in enumerate(stream) if item.keyword == keyword)
        stream[at] = evolve(stream[at], blocking=True)
        with pytest.raises(DiagnosticError, match=f"RT080.*it has fields that '{keyword}' does not have"):
            check_program(changed)


def test_disassembly_shows_it(program: Program) -> None:
    titles = {item.title for item in program.stages[0].streams[Engine.COLLECTIVE]}
    assert "all_gather embed blocking" in titles
    assert any(title.startswith("reduce_scatter") and title.endswith(" blocking") for title in titles)


def test_a_program_is_no_slower_for_saying_nothing(program: Program) -> None:
    """The simulator has no rule of its own for blocking collectives: it is in the waits."""
    silent = copy_program(program)
    for stage in silent.stages:
        stage.streams[Engine.COLLECTIVE][:] = [
            evolve(item, blocking=False) for item in stage.streams[Engine.COLLECTIVE]
        ]
    assert api.simulate(silent).step_seconds == api.simulate(program).step_seconds
