"""Choice of the blocks that keep their views whole in a plan with `zero = 3`, by simulated steps.

A block of level 2 is gathered once a step, and its view takes bytes all the time. It saves the time that compute waits
for its gathers under level 3. So blocks are ordered by waited seconds per byte, and prefixes of that order are tried:

    order      mlp.3  head  mlp.0  attention.2 ...
    prefixes   0 blocks: 12.0 s    1: 11.7 s    2: 11.5 s    3: 11.6 s      -> mlp.3 and head keep their views

Up to `_ALL_TRIED` blocks, every prefix is compiled, placed and simulated. With more, a grid of lengths is tried and
then refined around the best one, which takes about 8 + 2 log2(n / 8) steps. The best of the tried ones is taken.
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
"""Most blocks, or groups of blocks, of which every number is tried."""
_KEPT = 2
"""Level of a block whose view stays whole; its gradient is sharded all the same."""


@frozen
class LevelChoice:
    """The chosen levels, and the step times that decided."""

    levels: ZeroLevels | None
    """None: every view is gathered for each use"""
    kept: tuple[Block, ...]
    step_seconds: float
    gathered_seconds: float
    """seconds of a step with all views gathered for each use"""
    exposed_seconds: float
    """part of `gathered_seconds` in which compute waits for gathers, on the stage with most of it"""
    tried: int
    """number of steps that were simulated"""

    @property
    def words(self) -> str:
        """The choice in one line."""
        gathered = f"{self.gathered_seconds:.4g} s a step with all views gathered for each use"
        if self.levels is None:
            return (
                f"zero_blocks: none; {gathered}, of which {self.exposed_seconds:.3g} s wait for gathers "
                f"({self.tried} plans tried)"
            )
        return f'zero_blocks = "{self.levels}": {self.step_seconds:.4g} s; {gathered} ({self.tried} plans tried)'


def choose_levels(
    model: ModelConfig, plan: Plan, pipeline: str, machine: Machine, tell: Callable[[str], None] = lambda _: None
) -> LevelChoice:
    """Choose the levels of blocks of a plan with `zero = 3` that give the shortest step of all that are tried.

    `tell` hears each number of blocks before it is tried. Raises `DiagnosticError` RT064 if the plan leaves nothing to
    choose, and the pipeline's error if the plan does not fit even with all views gathered for each use.
    """
    if plan.zero_blocks is not None:
        fail("RT064", "the plan says zero_blocks: nothing is left to choose", help="leave them out of the plan")
    if plan.zero != 3 or plan.replicas == 1:
        text = (
            f"levels are chosen where views are gathered for each use: the plan has zero = {plan.zero} and "
            f"dp = {plan.dp}"
        )
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
    """Return the number from 0 to `most` with the least seconds of all that are tried; the smallest of equal ones."""
    if most <= _ALL_TRIED:
        return min(range(most + 1), key=lambda number: (seconds_of(number), number))
    step = most / _ALL_TRIED
    tried = sorted({round(step * part) for part in range(_ALL_TRIED + 1)})
    width = -(-most // _ALL_TRIED) // 2
    while True:  # halve the distance to the neighbours of the best number until it is 1
        best = min(tried, key=lambda number: (seconds_of(number), number))
        if width < 1:
            return best
        tried = sorted({*tried, max(0, best - width), min(most, best + width)})
        width //= 2


def _ordered(timed: TimedPlan, model: ModelConfig, plan: Plan) -> list[tuple[Block, ...]]:
    """Return groups of blocks for whose gathers compute waits, most waited seconds per element of the view first.

    Tied embeddings are one group of two blocks, since they share one table; all other groups are single blocks. Blocks
    in which nothing trains have no view to keep.
    """
    waited: dict[Block, float] = {}
    for stage in _waited(timed):
        waited |= stage
    ends = (block("embed"), block("head"))
    groups: dict[tuple[Block, ...], float] = {}
    for each in (each for blocks in topology_of(model, plan).stage_blocks for each in blocks):
        group = ends if model.tied_embeddings and each in ends else (each,)
        if elements := sum(flat_elements(model, plan, member) for member in group):
            groups[group] = sum(waited.get(member, 0.0) for member in group) / elements
    return sorted((group for group in groups if groups[group] > 0), key=lambda group: -groups[group])


def _waited(timed: TimedPlan) -> list[dict[Block, float]]:
    """Return, by stage and block, the seconds of a steady step for which compute waits for gathers of the block's view.

    A gather of several blocks counts equally for each.
    """
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
    """Return the plan with the views of some blocks kept whole; consecutive layers become one entry."""
    kept = {each for group in groups for each in group}
    entries = [BlockLevel(kind, _KEPT) for kind in ("embed", "head") if block(kind) in kept]
    for kind in ("attention", "mlp"):
        layers = sorted(each.layer for each in kept if each.kind == kind and each.layer is not None)
        if len(layers) == model.layers:
            entries.append(BlockLevel(kind, _KEPT))
            continue
        # in a run of consecutive layers, layer minus position is constant
        for _, run in groupby(enumerate(layers), key=lambda item: item[1] - item[0]):
            found = [layer for _, layer in run]
            entries.append(BlockLevel(kind, _KEPT, found[0], found[-1]))
    return evolve(plan, zero_blocks=ZeroLevels(tuple(entries)) if entries else None)
