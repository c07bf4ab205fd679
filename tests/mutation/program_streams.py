"""Mutations of waits and streams: what is missing, weaker, twice, or elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.program.instruction import CountWait, Instruction
from tests.mutation.program_parts import (
    BYTES,
    COLLECTIVES,
    HANG,
    IN_FLIGHT,
    MESSAGES,
    NO_OP,
    RACE,
    VALUES,
    Place,
    item_at,
    operator,
    other_of,
    pick,
    places,
    put,
    title_of,
)

if TYPE_CHECKING:
    from random import Random

    from ratrain.targets.program.program import Program, ProgramStage

# Waits


def _waiting(item: Instruction) -> bool:
    return bool(item.waits)


def _change_wait(
    program: Program,
    random: Random,
    change: Callable[[ProgramStage, CountWait], CountWait | None],
    wanted: Callable[[CountWait], bool] = lambda _w: True,
) -> str | None:
    """Change one wait of those wanted; None from `change` drops it."""
    place = pick(program, random, lambda item: any(map(wanted, item.waits)))
    if place is None:
        return None
    waits = list(item_at(place).waits)
    at = random.choice([i for i, wait in enumerate(waits) if wanted(wait)])
    before, after = waits[at], change(place[1], waits[at])
    if after == before:
        return None
    waits[at : at + 1] = [] if after is None else [after]
    put(place, waits=tuple(waits))
    return f"{title_of(place)}: {_wait_text(before)} -> {_wait_text(after) if after else 'no wait'}"


def _wait_text(wait: CountWait) -> str:
    return f"{wait.engine.value} {wait.count}{' of the previous step' if wait.previous_step else ''}"


@operator(RACE, VALUES, BYTES)
def drop_wait(program: Program, random: Random) -> str | None:
    return _change_wait(program, random, lambda _stage, _wait: None)


@operator(RACE, VALUES, BYTES)
def weaken_wait(program: Program, random: Random) -> str | None:
    return _change_wait(
        program,
        random,
        lambda _stage, wait: evolve(wait, count=random.randint(1, wait.count - 1)),
        lambda w: w.count > 1,
    )


@operator(HANG)
def strengthen_wait(program: Program, random: Random) -> str | None:
    """Wait for more: it hangs, or is slower."""
    return _change_wait(
        program,
        random,
        lambda stage, wait: evolve(wait, count=random.randint(wait.count, len(stage.streams[wait.engine]))),
    )


@operator(RACE, VALUES, BYTES)
def wait_for_the_previous_step(program: Program, random: Random) -> str | None:
    return _change_wait(
        program, random, lambda _s, wait: evolve(wait, previous_step=True), lambda wait: not wait.previous_step
    )


@operator(HANG)
def wait_for_this_step(program: Program, random: Random) -> str | None:
    """What waited for the step before waits for its own step: it hangs, or is slower."""
    return _change_wait(
        program, random, lambda _s, wait: evolve(wait, previous_step=False), lambda wait: wait.previous_step
    )


@operator(RACE, VALUES, BYTES, HANG)
def wait_for_another_engine(program: Program, random: Random) -> str | None:
    def change(stage: ProgramStage, wait: CountWait) -> CountWait:
        engine = other_of(random, [e for e in ENGINES if stage.streams[e]], wait.engine)
        return evolve(wait, engine=engine, count=min(wait.count, len(stage.streams[engine])))

    return _change_wait(program, random, change)


@operator(HANG)
def add_wait(program: Program, random: Random) -> str | None:
    place = pick(program, random)
    assert place is not None
    stage = place[1]
    engine = random.choice([e for e in ENGINES if stage.streams[e]])
    wait = CountWait(engine, random.randint(1, len(stage.streams[engine])), random.random() < 0.3)
    put(place, waits=(*item_at(place).waits, wait))
    return f"{title_of(place)}: {_wait_text(wait)}"


# Streams


def _renumber(stage: ProgramStage, engine: Engine, start: int, by: int) -> None:
    """Keep all waits on what they waited for, after instructions from `start` on have moved by one place."""
    for stream in stage.streams.values():
        for at, item in enumerate(stream):
            waits = tuple(
                evolve(w, count=w.count + by) if w.engine is engine and w.count > start else w for w in item.waits
            )
            stream[at] = evolve(item, waits=tuple(w for w in waits if w.count > 0))


def _remove(place: Place) -> Instruction:
    """Take an instruction out; who waited for it waits for the one before."""
    _, stage, engine, at = place
    item = stage.streams[engine].pop(at)
    _renumber(stage, engine, at, -1)
    return item


def _insert(stage: ProgramStage, engine: Engine, at: int, item: Instruction) -> None:
    _renumber(stage, engine, at, 1)
    stage.streams[engine].insert(at, item)


@operator(VALUES, HANG, COLLECTIVES, RACE, BYTES)
def drop_instruction(program: Program, random: Random) -> str | None:
    place = pick(program, random)
    assert place is not None
    name = title_of(place)
    _remove(place)
    return name


@operator(VALUES, HANG, COLLECTIVES, RACE)
def repeat_instruction(program: Program, random: Random) -> str | None:
    place = pick(program, random)
    assert place is not None
    _, stage, engine, at = place
    name = title_of(place)
    _insert(stage, engine, at + 1, evolve(item_at(place)))
    return name


def _swap(place: Place, other: int, *, waits_stay: bool) -> str:
    _, stage, engine, at = place
    stream = stage.streams[engine]
    name = f"{title_of(place)} and {other + 1} '{stream[other].title}'"
    one, two = stream[at], stream[other]
    if waits_stay:
        one, two = evolve(one, waits=two.waits), evolve(two, waits=one.waits)
    stream[at], stream[other] = two, one
    return f"{name}, waits {'stay' if waits_stay else 'go along'}"


@operator(VALUES, HANG, MESSAGES, COLLECTIVES, IN_FLIGHT, RACE, BYTES)
def swap_neighbours(program: Program, random: Random) -> str | None:
    place = pick(program, random)
    assert place is not None
    at = place[3]
    if at + 1 == len(place[1].streams[place[2]]):
        return None
    return _swap(place, at + 1, waits_stay=random.random() < 0.5)


@operator(VALUES, HANG, MESSAGES, COLLECTIVES, IN_FLIGHT, RACE, BYTES)
def swap_distant(program: Program, random: Random) -> str | None:
    place = pick(program, random)
    assert place is not None
    other = other_of(random, range(len(place[1].streams[place[2]])), place[3])
    return None if other is None else _swap(place, other, waits_stay=random.random() < 0.5)


def _swap_on(*engines: Engine) -> Callable[[Program, Random], str | None]:
    def change(program: Program, random: Random) -> str | None:
        found = [place for place in places(program, lambda _i: True) if place[2] in engines]
        place = random.choice(found) if found else None
        if place is None or len(place[1].streams[place[2]]) < 2:
            return None
        other = other_of(random, range(len(place[1].streams[place[2]])), place[3])
        return _swap(place, other, waits_stay=random.random() < 0.5)

    return change


@operator(VALUES, HANG, COLLECTIVES, RACE, BYTES)
def swap_collectives(program: Program, random: Random) -> str | None:
    return _swap_on(Engine.COLLECTIVE)(program, random)


@operator(VALUES, HANG, MESSAGES, RACE, BYTES)
def swap_messages(program: Program, random: Random) -> str | None:
    return _swap_on(Engine.SEND, Engine.RECV)(program, random)


@operator(NO_OP, VALUES, HANG, RACE, BYTES)
def move_to_another_engine(program: Program, random: Random) -> str | None:
    """Updates may be on two engines; nothing else has a choice."""
    updates = random.random() < 0.3
    place = pick(program, random, lambda item: item.keyword == "update" or not updates)
    assert place is not None
    _, stage, engine, _ = place
    to = other_of(random, (Engine.COMPUTE, Engine.HOST) if updates else ENGINES, engine)
    name = title_of(place)
    item = _remove(place)
    at = random.randint(0, len(stage.streams[to]))
    _insert(stage, to, at, evolve(item, waits=tuple(w for w in item.waits if w.engine is not to)))
    return f"{name} to {to.value} {at + 1}"
