"""What operators on programs share: their registry, codes by cause, and how an instruction is found, named and changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.ops.base import ENGINES, Engine
from ratrain.targets.program.program import Program, ProgramStage
from tests.mutation.operators import Registry

if TYPE_CHECKING:
    from random import Random

    from ratrain.targets.program.instruction import Instruction

operator: Registry[Program] = Registry()

NO_OP = "RT080"
RACE = "RT081"
HANG = "RT042"
BYTES = "RT050"
VALUES = "RT020 RT022 RT024 RT030 RT031 RT033 RT034 RT032 RT040"
"""The program is lifted to a schedule, whose ops then find other values than they mean."""
MESSAGES = "RT041"
TOO_LITTLE = "RT025 RT034"
"""Workspace is smaller than an op needs on the machine: of a collective, or to stream state through."""
COLLECTIVES = "RT043"
IN_FLIGHT = "RT044"

Place = tuple[int, ProgramStage, Engine, int]


def places(program: Program, wanted: Callable[[Instruction], bool]) -> list[Place]:
    return [
        (number, stage, engine, at)
        for number, stage in enumerate(program.stages)
        for engine in ENGINES
        for at, item in enumerate(stage.streams[engine])
        if wanted(item)
    ]


def pick(program: Program, random: Random, wanted: Callable[[Instruction], bool] = lambda _i: True) -> Place | None:
    found = places(program, wanted)
    return random.choice(found) if found else None


def item_at(place: Place) -> Instruction:
    _, stage, engine, at = place
    return stage.streams[engine][at]


def title_of(place: Place) -> str:
    number, _, engine, at = place
    return f"stage @{number} {engine.value} {at + 1} '{item_at(place).title}'"


def put(place: Place, **changes: Any) -> None:
    _, stage, engine, at = place
    stage.streams[engine][at] = evolve(item_at(place), **changes)


def other_of(random: Random, values: Any, than: Any) -> Any:
    """One of the values that differs, or None."""
    found = [value for value in values if value != than]
    return random.choice(found) if found else None
