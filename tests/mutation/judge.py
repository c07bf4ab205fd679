"""What becomes of a mutant: refused, with a code; or run, and found equal to the original, bit for bit; or neither.

A mutant that nothing refuses and that trains something else is a hole in the verifier. So is one that ends in a traceback, and one
that hangs or leaves its memory plan only when it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain import api
from ratrain.ratrain_ir.module import Level, Module
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrainc.compiling.opening import program_in
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import elements, losses, start

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program
    from ratrain.targets.runtime.training.training import TrainingRun
    from tests.mutation.subjects import Subject

STEPS = 2
INTERLEAVE_SEEDS = (1, 2)
OVERFLOWING_SCALE = 2.0**22
"""A loss scale at which the first steps of the subjects overflow in some block."""


class Verdict(Enum):
    """What became of a mutant."""

    REFUSED = "refused"
    EQUIVALENT = "equivalent"
    SURVIVOR = "survivor"


@frozen
class Judgement:
    """A verdict, and why. `by` is what refused it, or how it was shown equivalent."""

    verdict: Verdict
    by: str
    codes: tuple[str, ...] = ()
    message: str = ""


def judge_module(mutant: Module, subject: Subject) -> Judgement:
    """Judge a mutant of a module. One that nothing refuses goes on as a user would have it: through its text, to a file, to a run."""
    by = "verifier"
    try:
        api.check(mutant, machine=subject.machine)
        by = "text"
        module = parse_module(print_module(mutant), file="mutant.rtir")
        api.check(module, machine=subject.machine)
        by = "emission"
        program = _emitted(module, subject)
        by = "program verifier"
        program = _loaded(program)
    except DiagnosticError as error:
        return _refused(by, error)
    except Exception as error:  # noqa: BLE001 - whatever it is, a user would see it
        return Judgement(Verdict.SURVIVOR, by, (), f"{type(error).__name__}: {error}")
    return _judge_run(program, subject)


def judge_program(mutant: Program, subject: Subject) -> Judgement:
    """Judge a mutant of a program as a user would meet it: as a file with a digest that is right."""
    try:
        program = _loaded(mutant)
    except DiagnosticError as error:
        return _refused("program verifier", error)
    except Exception as error:  # noqa: BLE001
        return Judgement(Verdict.SURVIVOR, "program verifier", (), f"{type(error).__name__}: {error}")
    return _judge_run(program, subject)


def _emitted(module: Module, subject: Subject) -> Program:
    if module.level is not Level.ALLOCATED:
        api.run_passes(module, "allocate-ddr", machine=subject.machine)
    return api.emit(module, machine=subject.machine)


def _loaded(program: Program) -> Program:
    found = program_in(program_bytes(program), "mutant.rtx")
    check_program(found)
    return found


def _refused(by: str, error: DiagnosticError) -> Judgement:
    codes = tuple(sorted({diagnostic.code for diagnostic in error.diagnostics}))
    return Judgement(Verdict.REFUSED, by, codes, error.diagnostics[0].message)


# Execution


@frozen
class Behaviour:
    """All that a run leaves behind: its losses, its skipped blocks, and every carried tensor of every rank."""

    losses: tuple[float, ...]
    skipped: tuple[int, ...]
    state: str


def behaviour(program: Program, *, overflows: bool = False, interleave_seed: int | None = None) -> Behaviour:
    """Train for some steps, every access held against the program's own lives, freed bytes poisoned.

    Raises `DiagnosticError` where the run stops.
    """
    return _behaviour_of(finished_run(program, overflows=overflows, interleave_seed=interleave_seed))


def finished_run(program: Program, *, overflows: bool = False, interleave_seed: int | None = None) -> TrainingRun:
    """The run whose behaviour counts."""
    # verified before; of what is judged the capacity is none, as no run depends on it
    run = start(program, STEPS, verified=False, poison=True, interleave_seed=interleave_seed)
    if overflows and program.plan.loss_scale is None:
        for ranks in run.engine.ranks:
            for rank in ranks:
                rank.fill("scale", "", (OVERFLOWING_SCALE, 0.0))
    list(run.steps())
    return run


def _behaviour_of(run: TrainingRun) -> Behaviour:
    digest = hashlib.sha256()
    for ranks in run.engine.ranks:
        for rank in ranks:
            for (what, unit), numbers in sorted(rank.stage.carried.items()):
                held = {elements(rank, number).tobytes() for number in numbers}
                digest.update(f"{what} {unit} {len(held)}".encode())
                digest.update(min(held))
    skipped = tuple(step.report.skipped_blocks for step in run.done)
    return Behaviour(tuple(losses(run)), skipped, digest.hexdigest())


@cache
def original_behaviour(subject: Subject, *, overflows: bool) -> Behaviour:
    """What every mutant of the subject must do."""
    return behaviour(subject.program(), overflows=overflows)


@cache
def _original_bytes(subject: Subject) -> bytes:
    return essence(subject.program())


def essence(program: Program) -> bytes:
    """The container without what no run depends on: the figures and names that only people read."""
    return program_bytes(evolve(program, name="mutant", pipeline="", capacity_bytes=1))


_RUNS: tuple[tuple[str, bool, int | None], ...] = (
    ("ordered", False, None),
    ("ordered, with overflows", True, None),
    *((f"interleave {seed}", False, seed) for seed in INTERLEAVE_SEEDS),
)


def _judge_run(program: Program, subject: Subject) -> Judgement:
    essential = essence(program)
    if essential == _original_bytes(subject):
        return Judgement(Verdict.EQUIVALENT, "the same program")
    return _run_verdict(essential, subject)


@cache
def _run_verdict(essential: bytes, subject: Subject) -> Judgement:
    """Run a program in every way, and compare; equal programs of several mutants run once."""
    program = parse_program(essential, "mutant.rtx")
    for name, overflows, seed in _RUNS:
        expected = original_behaviour(subject, overflows=overflows)
        problem = _difference(lambda o=overflows, s=seed: behaviour(program, overflows=o, interleave_seed=s), expected)
        if problem is not None:
            return Judgement(Verdict.SURVIVOR, "run", (), f"{name}: {problem}")
    return Judgement(Verdict.EQUIVALENT, "equal runs")


def _difference(run: Callable[[], Behaviour], expected: Behaviour) -> str | None:
    try:
        found = run()
    except DiagnosticError as error:
        return error.diagnostics[0].render()
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    if found == expected:
        return None
    return f"losses {found.losses} instead of {expected.losses}" if found.losses != expected.losses else "other state"
