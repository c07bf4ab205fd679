"""Families of plans: those of one schedule and one use of memories, which one pipeline of passes makes.

A search over the whole space has several. What the bounds know is of a family, so that each has arrays of its own
(`family_spaces.py`); the best plan and what it rules out are common to all. `1f1b+host` is a schedule with a memory beside DDR: one that the
machine has (`host`, `file`), in which state may stay and activations may wait, or the DDR of other stages (`peer`), in which these may wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.passes.pipeline_text import parse_pipeline, pipeline_text
from ratrain.passes.placement.place_schedule import PlaceSchedulePass
from ratrain.passes.recovery.recompute import PEER
from ratrain.passes.state.joint_order import JointOrderPass
from ratrain.ratrain_ir.config.types import STORES
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.support.diagnostics import fail, nearest
from ratrain.ratrainc.choices.strategies import Strategy

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine

USUAL = ("1f1b", "zb-h1", "interleaved", "zb-v", "v-half", "v-min", "seq1f1b")
"""Schedules of the whole space. GPipe and breadth-first hold more for the same bubble, DualPipe-V more than ZB-V; `--schedules` has them."""


@frozen
class Family:
    """Plans that one pipeline makes."""

    name: str
    """its schedule, with the memory it may use beside DDR behind a +; or its strategy"""
    strategy: Strategy

    @property
    def schedule(self) -> str:
        """Its schedule, or its strategy."""
        return schedule_of(self.name)

    @property
    def memory(self) -> str | None:
        """The memory that its plans may use beside DDR."""
        return self.name.partition(_WITH)[2] or None


_WITH = "+"


def schedule_of(name: str) -> str:
    """The schedule of a family by its name, or its strategy."""
    return name.partition(_WITH)[0]


def with_memories(schedules: Sequence[str], machine: Machine) -> tuple[str, ...]:
    """Names of families: of each schedule alone, then with each memory that a machine has beside DDR."""
    return (*schedules, *(f"{each}{_WITH}{home.value}" for home, _ in machine.stores for each in schedules))


def problem_of(name: str) -> str | None:
    """What is wrong with the name of a family; None where nothing is."""
    schedule, _, memory = name.partition(_WITH)
    if schedule not in SCHEDULES:
        return f"'{schedule}' is not a schedule"
    if _WITH in name and memory not in _MEMORIES:
        return f"'{memory}' of '{name}' is not a memory"
    return None


_MEMORIES = (*(home.value for home in STORES), PEER)


def families(strategy: Strategy, names: Sequence[str]) -> tuple[Family, ...]:
    """A family for each schedule, or schedule and memory, with a strategy's passes behind its placement.

    Raises `DiagnosticError` RT064 for a schedule or a memory that does not exist, for a strategy that places a schedule itself, and for one
    that does not decide with `joint-order`, which chooses what goes to a memory.
    """
    if strategy.schedule is not None:
        text = f"the strategy '{strategy.name}' places {strategy.schedule}, and schedules to choose from are given"
        fail("RT064", text, help="leave one of them out")
    for name in names:
        if (problem := problem_of(name)) is not None:
            known = SCHEDULES if schedule_of(name) not in SCHEDULES else _MEMORIES
            fail("RT064", problem, help=nearest(name, known) or ", ".join(known))
    return tuple(Family(name, evolve(strategy, passes=_passes(strategy, name))) for name in names)


def _passes(strategy: Strategy, name: str) -> str:
    schedule, _, memory = name.partition(_WITH)
    return _placed(_using(strategy, memory) if memory else strategy.passes, schedule)


def _using(strategy: Strategy, memory: str) -> str:
    """A strategy's pipeline in which masters and moments may stay in a memory; of other stages' DDR, in which activations may wait there."""
    items = parse_pipeline(strategy.passes)
    if not any(isinstance(item, JointOrderPass) and (memory != PEER or item.policy == "auto") for item in items):
        text = f"the strategy '{strategy.name}' does not choose what goes to the memory '{memory}'"
        fail("RT064", text, help="plan for 'ratrain', or leave the memory out")

    def using(item: JointOrderPass) -> JointOrderPass:
        return evolve(item, store=memory) if memory == PEER else evolve(item, offload=memory)

    return pipeline_text([using(item) if isinstance(item, JointOrderPass) else item for item in items])


def _placed(passes: str, schedule: str) -> str:
    """A pipeline behind the placement of a schedule; without one where it is placed anyway."""
    return passes if schedule == "1f1b" else pipeline_text([PlaceSchedulePass(schedule), *parse_pipeline(passes)])
