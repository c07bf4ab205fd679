"""Schedules edited by hand: a legal swap trains the same bits, an illegal one is refused with the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratrain_ir.diagnostics import DiagnosticError
from ratrain_ir.parser import parse_module
from ratrain_ir.printer import print_module
from ratrainc import api
from ratrainc.cli import main
from targets.program_verifier import check_program
from targets.rtx import parse_program, program_bytes
from tests.unit.tiny_runs import losses, make_plan, same_bits, state, train
from tests.unit.tiny_runs import MODEL as TOY

if TYPE_CHECKING:
    from targets.program import Program
    from targets.runtime.training import TrainingRun

STEPS = 3
ALLOCATION = "insert-release,legalise,allocate-ddr"
ORDER = "place-1f1b,insert-prefetch,recompute{policy=full},bucket-grad-sync"


@pytest.fixture(scope="module")
def allocated() -> str:
    """A schedule as `compile` writes it."""
    return print_module(api.compile(TOY, make_plan(), passes=f"{ORDER},{ALLOCATION}"))


@pytest.fixture(scope="module")
def placed() -> str:
    """A schedule in order, before anything has an address."""
    return print_module(api.compile(TOY, make_plan(), passes=ORDER))


@pytest.fixture(scope="module")
def untouched(allocated: str) -> TrainingRun:
    """What the schedule trains as it was."""
    return train(program_of(allocated), STEPS)


def program_of(text: str) -> Program:
    """The program of an edited schedule: verified, allocated where it is not, written, read back and verified."""
    module = parse_module(text, file="edited.rtir")
    api.check(module)
    program = parse_program(program_bytes(api.emit(module)), "edited.rtx")
    check_program(program)
    return program


def line_of(lines: list[str], *parts: str, stage: int = 0) -> int:
    """The one line of a stage that has all the parts."""
    starts = [i for i, line in enumerate(lines) if line.startswith("  stage @")] + [len(lines)]
    found = [i for i in range(starts[stage], starts[stage + 1]) if all(part in lines[i] for part in parts)]
    assert len(found) == 1, f"{parts}: {[lines[i] for i in found]}"
    return found[0]


def moved(text: str, *parts: str, before: tuple[str, ...], stage: int = 0) -> str:
    """The text with one line moved to stand right before another."""
    lines = text.splitlines(keepends=True)
    line = lines.pop(line_of(lines, *parts, stage=stage))
    lines.insert(line_of(lines, *before, stage=stage), line)
    edited = "".join(lines)
    assert edited != text
    assert sorted(edited.splitlines()) == sorted(text.splitlines())
    return edited


def swapped(text: str, one: tuple[str, ...], other: tuple[str, ...], stage: int = 0) -> str:
    """The text with two neighbouring lines swapped."""
    lines = text.splitlines(keepends=True)
    first, second = line_of(lines, *one, stage=stage), line_of(lines, *other, stage=stage)
    assert abs(first - second) == 1, f"lines {first} and {second} are no neighbours"
    lines[first], lines[second] = lines[second], lines[first]
    return "".join(lines)


def same_training(text: str, untouched: TrainingRun) -> None:
    """Fail unless an edited schedule gives the same losses and the same state, ordered and interleaved."""
    program = program_of(text)
    for seed in (None, 4):
        run = train(program, STEPS, interleave_seed=seed)
        assert losses(run) == losses(untouched)
        mine, theirs = state(run), state(untouched)
        assert all(array.tobytes() == theirs[name].tobytes() for name, array in mine.items())


Edit = Callable[[str], str]

LEGAL_ALLOCATED: dict[str, Edit] = {
    "two updates": lambda text: swapped(text, ("= update mlp.0",), ("= update attention.0",))
    if "= update mlp.0" in text
    else moved(text, "update mlp.0", before=("update attention.0",)),
    "two gathers": lambda text: moved(text, "all_gather mlp.0", before=("all_gather attention.0",)),
    "the loss and a reduction": lambda text: moved(
        text, "all_reduce_scalar loss", before=("all_reduce_scalar flags",), stage=1
    ),
}


@pytest.mark.parametrize("name", LEGAL_ALLOCATED)
def test_a_legal_swap_in_an_allocated_schedule_trains_the_same(
    name: str, allocated: str, untouched: TrainingRun
) -> None:
    same_training(LEGAL_ALLOCATED[name](allocated), untouched)
