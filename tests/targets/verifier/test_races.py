"""Races: the waits of emitted programs suffice, each of them is needed, and the checker finds what lacks one, across steps too."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import networkx as nx
import pytest
from attrs import evolve

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrainc.cli import main
from ratrain.targets.program.instruction import Access, Instruction
from ratrain.targets.program.rtx import write_program
from ratrain.targets.verifier import race_sweep
from ratrain.targets.verifier.program_verifier import check_program
from ratrain.targets.verifier.races import check_races, stage_races
from tests.end_to_end.tiny_runs import losses, make_program, same_bits, start, train
from tests.mutation.subjects import SUBJECTS, copy_program

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program, ProgramStage

WaitPlace = tuple[int, Engine, int, int]
"""Stage, engine, position in the stream, position among the waits."""


def wait_places(program: Program) -> Iterator[WaitPlace]:
    for number, stage in enumerate(program.stages):
        for engine, stream in stage.streams.items():
            for at, item in enumerate(stream):
                for index in range(len(item.waits)):
                    yield number, engine, at, index


def without_waits(program: Program, *places: WaitPlace) -> Program:
    changed = copy_program(program)
    for number, engine, at, index in sorted(places, key=lambda place: -place[3]):  # later waits first: indices stay
        stream = changed.stages[number].streams[engine]
        waits = stream[at].waits
        stream[at] = evolve(stream[at], waits=waits[:index] + waits[index + 1 :])
    return changed


# What the waits allow


def test_twenty_interleavings_train_the_same_bits() -> None:
    program = make_program()
    ordered = train(program, 2)
    orders = set()
    for seed in range(20):
        run = start(program, 2, interleave_seed=seed)
        engine = run.engine
        seen: list[tuple[str, str]] = []
        engine.complete = lambda rank, on, item, seen=seen, done=engine.complete: (
            seen.append((rank.name, item.title)),
            done(rank, on, item),
        )
        list(run.steps())
        assert losses(run) == losses(ordered), f"--interleave {seed}"
        same_bits(run, ordered)
        orders.add(tuple(seen))
    assert len(orders) == 20, "the same order twice: less is tested than it seems"


@pytest.mark.parametrize("name", SUBJECTS)
def test_emitted_programs_do_not_race(name: str) -> None:
    program = SUBJECTS[name].program()
    assert [stage_races(stage) for stage in program.stages] == [[]] * len(program.stages)


@pytest.mark.parametrize("name", list(SUBJECTS)[:4])
def test_the_compiled_sweep_finds_what_the_plain_one_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = SUBJECTS[name].program()
    places = list(wait_places(program))
    for place in [None, *Random(0).sample(places, min(8, len(places)))]:
        changed = program if place is None else without_waits(program, place)
        found = []
        for operands in (0, 1 << 40):
            monkeypatch.setattr(race_sweep, "ALLOWANCE", Allowance(operands, operands))
            found.append([stage_races(stage) for stage in changed.stages])
        assert found[0] == found[1]


# Every wait is needed; one stage alone has none for the step before, since its every step begins with loading


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_single_dropped_wait_is_a_race(name: str) -> None:
    """Waits are transitively reduced, so none is implied by the others; dropping one cannot make anything hang."""
    program = SUBJECTS[name].program()
    places = list(wait_places(program))
    assert places
    for place in places:
        number, engine, at, index = place
        item = program.stages[number].streams[engine][at]
        races = stage_races(without_waits(program, place).stages[number])
        assert races, f"stage @{number}, '{item.title}' without its wait for {item.waits[index]}"


@pytest.mark.parametrize("name", [name for name in SUBJECTS if not name.startswith("p1-")])
def test_a_dropped_wait_for_the_previous_step_is_a_race_across_steps(name: str) -> None:
    program = SUBJECTS[name].program()
    across = [place for place in wait_places(program) if _wait(program, place).previous_step]
    assert across
    for place in across:
        races = stage_races(without_waits(program, place).stages[place[0]])
        assert any(race.second[2] > race.first[2] for race in races)


def _wait(program: Program, place: WaitPlace) -> object:
    number, engine, at, index = place
    return program.stages[number].streams[engine][at].waits[index]


def test_a_race_across_steps_is_reported_as_one() -> None:
    program = SUBJECTS["p2-d2-zero1"].program()
    messages = []
    for place in wait_places(program):
        if _wait(program, place).previous_step:
            found = Diagnostics()
            check_races(without_waits(program, place), found)
            assert {item.code for item in found.errors} == {"RT081"}
            assert len({item.message for item in found.errors}) == len(found.errors), "one race, said twice"
            messages += [item.message for item in found.errors]
    assert any(" of the next step)" in message for message in messages)


# An oracle: all pairs, and paths in a graph


def oracle(stage: ProgramStage) -> set[frozenset[tuple[Engine, int, int]]]:
    """All pairs of conflicting accesses in two steps that no path of stream order and waits connects, as (engine, number, step)."""
    graph = nx.DiGraph()
    events = [(e, at, step) for step in (0, 1) for e in ENGINES for at in range(1, len(stage.streams[e]) + 1)]
    graph.add_nodes_from(events)
    for engine, at, step in events:
        length = len(stage.streams[engine])
        if at > 1 or step:
            graph.add_edge((engine, at - 1, step) if at > 1 else (engine, length, step - 1), (engine, at, step))
        for wait in stage.streams[engine][at - 1].waits:
            if step >= wait.previous_step:
                graph.add_edge((wait.engine, wait.count, step - wait.previous_step), (engine, at, step))
    after = {event: nx.descendants(graph, event) for event in events}
    return {
        frozenset((one, other))
        for one, other in combinations(events, 2)
        if one not in after[other] and other not in after[one] and _conflict(stage, one, other)
    }


def _conflict(stage: ProgramStage, one: tuple[Engine, int, int], other: tuple[Engine, int, int]) -> bool:
    return any(
        a.start < b.stop and b.start < a.stop and (writes or also_writes)
        for a, writes in _accesses(stage, stage.streams[one[0]][one[1] - 1])
        for b, also_writes in _accesses(stage, stage.streams[other[0]][other[1] - 1])
    )


def _accesses(stage: ProgramStage, item: Instruction) -> list[tuple[range, bool]]:
    tensors = [(stage.tensors[o.tensor], o.access is not Access.READ) for o in item.operands]
    return [(range(tensor.offset, tensor.end), writes) for tensor, writes in tensors]


@pytest.mark.parametrize("name", ["p1-d1-zero0", "p2-d2-zero2-each", "p3-d1-zero0-tied"])
def test_the_checker_agrees_with_all_pairs_and_paths(name: str) -> None:
    program = SUBJECTS[name].program()
    random = Random(name)
    places = list(wait_places(program))
    racing = 0
    for _ in range(4):
        mutant = without_waits(program, *random.sample(places, random.randint(0, 4)))
        for stage in mutant.stages:
            expected = oracle(stage)
            found = {frozenset((race.first, race.second)) for race in stage_races(stage)}
            assert bool(found) == bool(expected)
            assert found <= expected
            racing += bool(found)
    assert racing


# Who refuses


@pytest.fixture(scope="module")
def racing() -> Program:
    """A program that lacks one wait, and has no other fault."""
    program = SUBJECTS["p2-d2-zero1"].program()
    for place in wait_places(program):
        changed = without_waits(program, place)
        try:
            check_program(changed)
        except DiagnosticError as error:
            if {item.code for item in error.diagnostics} == {"RT081"}:
                return changed
    raise AssertionError("every dropped wait is found by an earlier rule")


@pytest.mark.parametrize("command", ["verify", "simulate", "run"])
def test_a_racing_program_is_refused_everywhere(
    command: str, racing: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "racing.rtx")
    write_program(racing, path)
    assert main([command, path]) == 1
    captured = capsys.readouterr()
    assert "error[RT081]" in captured.err
    assert "no wait orders them" in captured.err
    assert not captured.out
