"""Which blocks keep their views whole where `zero = 3` would gather all of them for each use: chosen by simulated steps.

A block of level 2 is gathered once a step, and its view takes its bytes all the time. What that earns is what compute waits for its gathers
under level 3; so blocks are taken in the order of waited seconds a byte. Of the runs of that order from its begin, some are compiled, placed
and simulated, and the shortest step is taken: all runs of few blocks, of many those of some lengths, and of lengths beside the best one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.zero_levels import BlockLevel, ZeroLevels
from ratrain.ratrain_ir.model.blocks import Block, block, flat_elements, named_block
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.collectives import AllGather
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.topology import topology_of
from ratrain.ratrainc.choices.timed_plan import RefusedPlan, TimedPlan, time_plan
from ratrain.targets.simulator.bubbles import Bubbles

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine

_ALL_TRIED = 8
"""Up to so many blocks, or groups of them, every number of them is tried."""
_KEPT = 2
"""The level of a block whose view stays whole; its gradient is sharded as ever."""


@frozen
class LevelChoice:
    """What was chosen, and what speaks for it."""

    levels: ZeroLevels | None
    """None: every view is gathered for each use"""
    kept: tuple[Block, ...]
    step_seconds: float
    gathered_seconds: float
    """a step with all views gathered for each use"""
    exposed_seconds: float
    """of that, what compute engines waited for gathers, on the stage where they waited most"""
    tried: int
    """steps that were simulated"""

    @property
    def words(self) -> str:
        """One line for people."""
        gathered = f"{self.gathered_seconds:.4g} s a step with all views gathered for each use"
        if self.levels is None:
            return f"zero_blocks: none; {gathered}, of which {self.exposed_seconds:.3g} s wait for gathers ({self.tried} plans tried)"
        return f'zero_blocks = "{self.levels}": {self.step_seconds:.4g} s; {gathered} ({self.tried} plans tried)'


def choose_levels(
    model: ModelConfig, plan: Plan, pipeline: str, machine: Machine, tell: Callable[[str], None] = lambda _: None
) -> LevelChoice:
    """The levels of blocks of a plan with `zero = 3` that make the shortest step of what was tried.

    Raises `DiagnosticError`: RT064 for a plan in which nothing is to be chosen; that of the pipeline where the plan fits in no way.
    """
    if plan.zero_blocks is not None:
        fail("RT064", "the plan says zero_blocks: nothing is left to choose", help="leave them out of the plan")
    if plan.zero != 3 or plan.dp == 1:
        text = f"levels are chosen where views are gathered for each use: the plan has zero = {plan.zero} and dp = {plan.dp}"
        fail("RT064", text, help="use zero = 3, with replicas")
    first = time_plan(model, plan, pipeline, machine)
    if isinstance(first, RefusedPlan):
        raise first.error
    groups = _ordered(first, model, plan)
    seconds = {0: first.figures.step_seconds}

    def try_number(number: int) -> float:
        if number not in seconds:
            tell(f"{number} of {len(groups)} blocks keep their views")
            timed = time_plan(model, _keeping(model, plan, groups[:number]), pipeline, machine)
            seconds[number] = timed.figures.step_seconds if isinstance(timed, TimedPlan) else float("inf")
        return seconds[number]

    best = _shortest(len(groups), try_number)
    kept = tuple(each for group in groups[:best] for each in group)
    return LevelChoice(
        _keeping(model, plan, groups[:best]).zero_blocks,
        kept,
        seconds[best],
        seconds[0],
        max(sum(waited.values()) for waited in _waited(first)),
        len(seconds),
    )


def _shortest(most: int, seconds_of: Callable[[int], float]) -> int:
    """The number up to `most` with the least seconds of those that are tried; of equal ones the smallest."""
    if most <= _ALL_TRIED:
        return min(range(most + 1), key=lambda number: (seconds_of(number), number))
    step = most / _ALL_TRIED
    tried = sorted({round(step * part) for part in range(_ALL_TRIED + 1)})
    width = -(-most // _ALL_TRIED) // 2
    while True:
        best = min(tried, key=lambda number: (seconds_of(number), number))
        if width < 1:
            return best
        tried = sorted({*tried, max(0, best - width), min(most, best + width)})
        width //= 2


def _ordered(timed: TimedPlan, model: ModelConfig, plan: Plan) -> list[tuple[Block, ...]]:
    """Blocks for whose gathers compute waits, most waited seconds a byte of a view first; those with one table are one."""
    waited: dict[Block, float] = {}
    for stage in _waited(timed):
        waited |= stage
    ends = (block("embed"), block("head"))
    groups: dict[tuple[Block, ...], float] = {}
    for each in (each for blocks in topology_of(model, plan).stage_blocks for each in blocks):
        group = ends if model.tied_embeddings and each in ends else (each,)
        nbytes = sum(flat_elements(model, plan, member) for member in group)
        groups[group] = sum(waited.get(member, 0.0) for member in group) / nbytes
    return sorted((group for group in groups if groups[group] > 0), key=lambda group: -groups[group])


def _waited(timed: TimedPlan) -> list[dict[Block, float]]:
    """By stage and block, the seconds of a steady step that compute waits for gathers of its view."""
    bubbles, found = Bubbles(timed.timeline), []
    for stage in range(len(timed.program.stages)):
        waited: dict[Block, float] = {}
        for number, seconds in bubbles.waited_for_ops(stage, Engine.COMPUTE).items():
            item = timed.timeline.instructions[number]
            if item.keyword == AllGather.keyword:
                for name in item.blocks:
                    owner = named_block(name)
                    waited[owner] = waited.get(owner, 0.0) + seconds / len(item.blocks)
        found.append(waited)
    return found


def _keeping(model: ModelConfig, plan: Plan, groups: list[tuple[Block, ...]]) -> Plan:
    """The plan with the views of some blocks kept whole."""
    kept = {each for group in groups for each in group}
    entries = [BlockLevel(kind, _KEPT) for kind in ("embed", "head") if block(kind) in kept]
    for kind in ("attention", "mlp"):
        layers = sorted(each.layer for each in kept if each.kind == kind and each.layer is not None)
        if len(layers) == model.layers:
            entries.append(BlockLevel(kind, _KEPT))
            continue
        for _, run in groupby(enumerate(layers), key=lambda item: item[1] - item[0]):
            found = [layer for _, layer in run]
            entries.append(BlockLevel(kind, _KEPT, found[0], found[-1]))
    return evolve(plan, zero_blocks=ZeroLevels(tuple(entries)) if entries else None)
