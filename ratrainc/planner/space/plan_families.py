"""Families of plans: a family has one schedule, one use of memories, and the pipeline of passes that makes its plans.

A search over the whole space has several. Each has arrays of bounds of its own (`family_spaces.py`); the best plan, and
what it rules out, is common to all. `1f1b+host` is a schedule with another memory: `host` or `file`, if the machine has
it, may take state and activations; `peer`, the DDR of other stages, may take activations.
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

AHEAD = "1f1b-ahead"
"""Schedule that is searched where a plan has exchanges to hide: without any it is 1F1B with more in memory."""
USUAL = ("1f1b", AHEAD, "zb-h1", "interleaved", "zb-v", "v-half", "v-min", "seq1f1b")
"""Schedules of the whole space. GPipe and breadth-first hold more for the same bubble, DualPipe-V and ZB-H2 more than
ZB-V; `--schedules` has them."""
_WITH = "+"
_MEMORIES = (*(home.value for home in STORES), PEER)


@frozen
class PlanFamily:
    """Plans that one pipeline makes."""

    name: str
    """its schedule, followed by + and a memory if it has one; or its strategy"""
    strategy: Strategy

    @property
    def schedule(self) -> str:
        """Its schedule, or its strategy."""
        return family_schedule(self.name)

    @property
    def memory(self) -> str | None:
        """The memory other than a rank's DDR that its plans may use; None without one."""
        return self.name.partition(_WITH)[2] or None


def family_schedule(name: str) -> str:
    """Return the schedule, or the strategy, in the name of a family."""
    return name.partition(_WITH)[0]


def with_memories(schedules: Sequence[str], machine: Machine) -> tuple[str, ...]:
    """Name families: each schedule alone, then each with each other memory that the machine has."""
    return (*schedules, *(f"{each}{_WITH}{home.value}" for home, _ in machine.stores for each in schedules))


def problem_of(name: str) -> str | None:
    """Return what is wrong with the name of a family, or None."""
    schedule, _, memory = name.partition(_WITH)
    if schedule not in SCHEDULES:
        return f"'{schedule}' is not a schedule"
    if _WITH in name and memory not in _MEMORIES:
        return f"'{memory}' of '{name}' is not a memory"
    return None


def families(strategy: Strategy, names: Sequence[str]) -> tuple[PlanFamily, ...]:
    """Make a family for each name, with the passes of a strategy behind the placement of its schedule.

    Raises `DiagnosticError` RT064 for an unknown schedule or memory, for a strategy that places a schedule itself, and
    for a memory with a strategy that does not decide with `joint-order`, the pass that chooses what goes there.
    """
    if strategy.schedule is not None:
        text = f"the strategy '{strategy.name}' places {strategy.schedule}, and schedules to choose from are given"
        fail("RT064", text, help="leave one of them out")
    for name in names:
        if (problem := problem_of(name)) is not None:
            known = SCHEDULES if family_schedule(name) not in SCHEDULES else _MEMORIES
            fail("RT064", problem, help=nearest(name, known) or ", ".join(known))
    return tuple(PlanFamily(name, evolve(strategy, passes=_passes(strategy, name))) for name in names)


def _passes(strategy: Strategy, name: str) -> str:
    """Return the pipeline of a family; 1F1B needs no pass that places it."""
    schedule, _, memory = name.partition(_WITH)
    passes = _using(strategy, memory) if memory else strategy.passes
    return passes if schedule == "1f1b" else pipeline_text([PlaceSchedulePass(schedule), *parse_pipeline(passes)])


def _using(strategy: Strategy, memory: str) -> str:
    """Return a strategy's pipeline that may keep state in a memory; for `peer`, that may keep activations there.

    Raises `DiagnosticError` RT064 if the strategy has no `joint-order` that could choose that.
    """
    items = parse_pipeline(strategy.passes)
    if not any(isinstance(item, JointOrderPass) and (memory != PEER or item.policy == "auto") for item in items):
        text = f"the strategy '{strategy.name}' does not choose what goes to the memory '{memory}'"
        fail("RT064", text, help="plan for 'ratrain', or leave the memory out")

    def using(item: JointOrderPass) -> JointOrderPass:
        return evolve(item, store=memory) if memory == PEER else evolve(item, offload=memory)

    return pipeline_text([using(item) if isinstance(item, JointOrderPass) else item for item in items])
