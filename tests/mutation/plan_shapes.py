"""Other plans of the same stages: what a module or program is put under that was made for one of them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import LAYOUTS

if TYPE_CHECKING:
    from random import Random

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan

SCHEDULE_CODES = "RT025 RT026 RT027 RT028 RT020 RT030 RT031 RT033 RT034 RT032 RT040 RT041 RT042 RT044"
"""Blocks, messages and their order are then those of another plan."""


def other_shape(plan: Plan, model: ModelConfig, random: Random) -> tuple[Plan, str] | None:
    """A sound plan with another schedule, layout, number of chunks or cut, and what of it is another; None for one chunk a stage."""
    if plan.chunks == 1:
        return None
    found = [
        evolve(plan, schedule=schedule, chunks=chunks, layout=layout, cuts=tuple(range(1, plan.pp * chunks)))
        for schedule, chunks, layout in product((None, *SCHEDULES), (1, plan.chunks), LAYOUTS)
        if chunks > 1 or layout == LAYOUTS[0]
    ]
    found = [
        other for other in found if other.schedule is None or SCHEDULES[other.schedule].problem(other.shape) is None
    ]
    if model.layers > plan.pp * plan.chunks:
        found += [evolve(plan, cuts=(*plan.cuts[:-1], plan.cuts[-1] + 1))] * len(found)
    chosen = random.choice([other for other in found if other != plan])
    return chosen, f"{chosen.schedule}, {chosen.chunks} chunks, {chosen.layout}, cuts {chosen.cuts}"


def other_lengths(lengths: tuple[int, ...], random: Random) -> tuple[int, ...]:
    """Lengths of slices of a sequence that is as long as these together."""
    changed = list(lengths)
    at = random.randrange(len(changed))
    how = random.choice(("join", "cut", "shift", "reverse", "none"))
    if how == "none":
        return ()
    if how == "join" and len(changed) > 1:
        at = random.randrange(len(changed) - 1)
        changed[at : at + 2] = [changed[at] + changed[at + 1]]
    elif how == "cut" and changed[at] > 1:
        first = random.randrange(1, changed[at])
        changed[at : at + 1] = [first, changed[at] - first]
    elif how == "shift" and changed[at] > 1:
        changed[at] -= 1
        changed[at - 1] += 1
    else:
        changed.reverse()
    return tuple(changed)
