"""Families of plans: those of one schedule and one use of memories, which one pipeline of passes makes.

A search over the whole space has several. What the bounds know is of a family, so that each has arrays of its own
(`family_spaces.py`); the best plan and what it rules out are common to all.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.placement.place_schedule import PlaceSchedulePass
from ratrain.ratrain_ir.diagnostics import fail, nearest
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrainc.strategies import Strategy

USUAL = ("1f1b", "zb-h1", "interleaved", "zb-v", "v-half", "v-min", "seq1f1b")
"""Schedules of the whole space. GPipe and breadth-first hold more for the same bubble, DualPipe-V more than ZB-V; `--schedules` has them."""


@frozen
class Family:
    """Plans that one pipeline makes."""

    name: str
    """its schedule, or its strategy"""
    strategy: Strategy


def families(strategy: Strategy, schedules: Sequence[str]) -> tuple[Family, ...]:
    """A family for each schedule, with a strategy's passes behind its placement.

    Raises `DiagnosticError` RT064 for a schedule that does not exist, and for a strategy that places one itself.
    """
    if strategy.schedule is not None:
        text = f"the strategy '{strategy.name}' places {strategy.schedule}, and schedules to choose from are given"
        fail("RT064", text, help="leave one of them out")
    for name in schedules:
        if name not in SCHEDULES:
            fail("RT064", f"'{name}' is not a schedule", help=nearest(name, SCHEDULES) or ", ".join(SCHEDULES))
    return tuple(Family(name, evolve(strategy, passes=_placed(strategy.passes, name))) for name in schedules)


def _placed(passes: str, schedule: str) -> str:
    """A pipeline behind the placement of a schedule; without one where it is placed anyway."""
    return passes if schedule == "1f1b" else pipeline_text([PlaceSchedulePass(schedule), *parse_pipeline(passes)])
