"""Mutations of chunks in programs: messages of another one, channels taken for each other, another layout under the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.ops.base import Engine
from tests.mutation.plan_shapes import SCHEDULE_CODES, other_shape
from tests.mutation.program_parts import (
    HANG,
    MESSAGES,
    NO_OP,
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

    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.program.program import Program


def _is_message(item: Instruction) -> bool:
    return item.peer is not None


@operator(NO_OP, "RT027", MESSAGES, VALUES)
def change_chunk(program: Program, random: Random) -> str | None:
    """An instruction, mostly a message, says another chunk, or none."""
    place = pick(program, random, lambda item: _is_message(item) or random.random() < 0.02)
    if place is None:
        return None
    count = program.plan.pp * program.plan.chunks
    title = title_of(place)
    chunk = other_of(random, (None, *range(count + 1)), item_at(place).chunk)
    put(place, chunk=chunk)
    return f"{title}: chunk {chunk}"


def _of_way(program: Program, place: Place) -> list[Place]:
    """The messages of a stage that go the same way between the same two stages."""
    item = item_at(place)
    return [
        other
        for other in places(program, _is_message)
        if other[0] == place[0]
        and other[2] is place[2]
        and (item_at(other).peer, item_at(other).variant) == (item.peer, item.variant)
    ]


@operator(NO_OP, "RT027", MESSAGES, VALUES, HANG)
def exchange_chunks_of_messages(program: Program, random: Random) -> str | None:
    """Two messages of one way between the same two stages exchange their chunks, and keep what they carry."""
    place = pick(program, random, _is_message)
    if place is None:
        return None
    mine = item_at(place).chunk
    partners = [other for other in _of_way(program, place) if item_at(other).chunk != mine]
    if not partners:
        return None
    other = random.choice(partners)
    theirs = item_at(other).chunk
    put(other, chunk=mine)
    put(place, chunk=theirs)
    return f"{title_of(place)} and {title_of(other)}"


@operator(MESSAGES, VALUES, HANG)
def cross_channels(program: Program, random: Random) -> str | None:
    """A stage, or both ends of the way, take two channels between the same stages for each other."""
    place = pick(program, random, _is_message)
    if place is None:
        return None
    item = item_at(place)
    chunks = sorted({item_at(other).chunk for other in _of_way(program, place)} - {None})
    if len(chunks) < 2:
        return None
    one, other = random.sample(chunks, 2)
    number = {one: other, other: one}
    both = random.random() < 0.5
    for index, stage in enumerate(program.stages):
        for engine in (Engine.SEND, Engine.RECV) if both or index == place[0] else ():
            stream = stage.streams[engine]
            stream[:] = [
                evolve(held, chunk=number[held.chunk])
                if held.variant == item.variant and held.chunk in number
                else held
                for held in stream
            ]
    where = "everywhere" if both else f"on stage @{place[0]}"
    return f"{item.variant}s of c{one} and c{other} {where}"


@operator(SCHEDULE_CODES, "RT080 RT043")
def change_shape_of_plan(program: Program, random: Random) -> str | None:
    """The program stands under another plan of as many stages."""
    found = other_shape(program.plan, program.model, random)
    if found is None:
        return None
    program.plan, words = found
    return words
