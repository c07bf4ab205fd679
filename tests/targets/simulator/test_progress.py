"""Progress of programs: the wait graph finds the same streams stuck, at the same instructions, as a run in time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.ops.base import ENGINES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.program.instruction import CountWait
from ratrain.targets.simulator.flat_program import flatten
from ratrain.targets.simulator.progress import STEPS, check_done, check_progress, instructions_done
from ratrain.targets.simulator.timed_run import simulate
from tests.end_to_end.tiny_runs import MODEL, hanging_program, make_program

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.targets.program.program import Program

MADE: tuple[Callable[[], Program], ...] = (
    make_program,
    lambda: make_program(evolve(MODEL, tied_embeddings=True), pp=3, zero=2, reduce="each-micro-batch"),
    lambda: make_program(dp=1, tp=2),
)


def refusal(check: Callable[[], object]) -> str | None:
    """What is said of a program; None where it ends."""
    try:
        check()
    except DiagnosticError as error:
        return error.diagnostics[0].message
    return None


def by_the_graph(program: Program, *, rendezvous: bool) -> str | None:
    columns = program.columns()
    done = instructions_done(flatten(columns, program.topology), rendezvous=rendezvous)
    return refusal(lambda: check_done(columns, done, STEPS, rendezvous=rendezvous))


def by_the_clock(program: Program, *, rendezvous: bool) -> str | None:
    return refusal(lambda: simulate(program, lambda _stage, _item: 1.0, rendezvous=rendezvous))


@settings(max_examples=25)
@given(st.sampled_from(MADE), st.randoms(use_true_random=False), st.integers(0, 3))
def test_the_same_streams_wait_for_ever_in_the_graph_and_in_time(made, random, changes):
    program = made()
    for _ in range(changes):
        stage = random.choice(program.stages)
        busy = [engine for engine in ENGINES if stage.streams[engine]]
        item, awaited = random.choice(stage.streams[random.choice(busy)]), random.choice(busy)
        count = random.randint(1, len(stage.streams[awaited]))
        item.waits = (*item.waits, CountWait(awaited, count, random.random() < 0.5))
    found = {rendezvous: by_the_graph(program, rendezvous=rendezvous) for rendezvous in (False, True)}
    event(f"{sum(text is not None for text in found.values())} of both kinds of sends hang")
    for rendezvous, text in found.items():
        assert text == by_the_clock(program, rendezvous=rendezvous)
    expected = found[False] or found[True]
    assert refusal(lambda: check_progress(program.columns(), program.topology)) == expected


def test_a_program_that_hangs_is_refused_with_the_names_of_who_waits() -> None:
    program = hanging_program()
    with pytest.raises(DiagnosticError, match=r"buffered sends; .* stage @0 send engine at 'send activation m0 @1'"):
        check_progress(program.columns(), program.topology)
