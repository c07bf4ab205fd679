"""What operators on schedules share: their registry, codes by cause, and how an op is found, named and changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from attrs import evolve

from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.text.printer import op_text
from tests.mutation.operators import Registry

if TYPE_CHECKING:
    from random import Random

    from ratrain.ratrain_ir.ops.base import Op

operator: Registry[Module] = Registry()

# What a change can cause, by cause. A later cause is seen only where the earlier ones are absent.
LIFE = "RT020 RT021 RT022 RT023 RT024 RT028"
VALUES = "RT030 RT031 RT033 RT034 RT032 RT024"
MESSAGES = "RT040 RT041"
ORDER = "RT042 RT043 RT044"
BYTES = "RT050"
OPERANDS = "RT025 RT034"

Place = tuple[Stage, int]
GROUPS = ("reads", "writes", "updates", "scratch")


def places(module: Module, wanted: Callable[[Op], bool]) -> list[Place]:
    return [(stage, at) for stage in module.stages for at, op in enumerate(stage.ops) if wanted(op)]


def is_work(op: Op) -> bool:
    return type(op) is not Release


def is_release(op: Op) -> bool:
    return type(op) is Release


def is_kind(*kinds: type[Op]) -> Callable[[Op], bool]:
    return lambda op: isinstance(op, kinds)


def pick(module: Module, random: Random, wanted: Callable[[Op], bool]) -> Place | None:
    found = places(module, wanted)
    return random.choice(found) if found else None


def pick_two(module: Module, random: Random, wanted: Callable[[Op], bool]) -> tuple[Stage, int, int] | None:
    """Two ops of one stage, in order."""
    stage = random.choice(module.stages)
    found = [at for at, op in enumerate(stage.ops) if wanted(op)]
    if len(found) < 2:
        return None
    first, second = sorted(random.sample(found, 2))
    return stage, first, second


def title_of(place: Place, op: Op | None = None) -> str:
    stage, at = place
    return f"stage @{stage.index} op {at + 1} '{op_text(op or stage.ops[at])[:80]}'"


def put(place: Place, **changes: Any) -> str:
    """Change an op in place; what was done, in words."""
    stage, at = place
    before = title_of(place)
    stage.ops[at] = evolve(stage.ops[at], **changes)
    return f"{before} -> '{op_text(stage.ops[at])[:80]}'"


def other_of(random: Random, values: Sequence[Any], than: Any) -> Any:
    """One of the values that differs, or None."""
    found = [value for value in values if value != than]
    return random.choice(found) if found else None
