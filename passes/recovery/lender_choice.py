"""How much a stage keeps with the stage that lends it bytes: as much as makes a step of the two shortest.

What moves costs the borrower no recovery, and the lender bytes in which it would keep something of its own. So the borrower's period falls with
the number of layers of micro-batches that go there, and the lender's grows. A step takes the longer of the two, and for filling and
draining the pipeline what one micro-batch takes on each. What goes there is of one choice: all that a layer keeps, or what saves most
seconds of recovery for a byte; both are tried.
"""

from __future__ import annotations

from functools import cache
from math import inf
from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.passes.recovery.guests import take_in
from ratrain.passes.recovery.recompute_choice import FEW, Chosen, Option, Shape, as_chosen, choose, kept_in_ddr, least
from ratrain.passes.recovery.rewriting import EVERYTHING, LayerChoice, Lender

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.passes.memory.trial import Trials
    from ratrain.passes.recovery.guests import UnitTimes
    from ratrain.ratrain_ir.module import Stage

_WORTH = 1e-3
"""What the longer period must gain to move anything at all."""


def choose_with_lender(stage: Stage, lender: Stage, trials: Trials, capacity: int, times: UnitTimes) -> Chosen:
    """The choice for a stage that may keep layers with another; that one chooses for itself when its list has the guests."""
    shape = Shape.of(stage, trials)
    alone = kept_in_ddr(stage, trials, capacity, shape, shape.none_stored)
    if alone.keeps_everything:
        return alone

    def step(mine: float, other: float) -> float:
        return max(mine, other) + (mine + other) / trials.module.plan.micro_batches

    before = step(trials.period(as_chosen(stage, trials, alone)), _period(lender, trials, capacity))
    best, best_seconds = alone, before * (1 - _WORTH)
    for choice in _choices(shape):
        guests = evolve(choice, home=Lender(lender.index))

        @cache
        def kept(count: int, guests: LayerChoice = guests) -> Chosen:
            return kept_in_ddr(stage, trials, capacity, shape, shape.stored(count, guests))

        @cache
        def seconds(count: int, kept: Callable[[int], Chosen] = kept) -> float:
            mine, other = as_chosen(stage, trials, kept(count)), lender.draft()
            take_in(other, mine, times)
            return step(trials.period(mine), _period(other, trials, capacity))

        def is_enough(count: int, kept: Callable[[int], Chosen] = kept) -> bool:
            return kept(count).keeps_the_rest

        found = _shortest(shape.items, is_enough, seconds)
        if found and seconds(found) < best_seconds:
            best, best_seconds = kept(found), seconds(found)
    return best


def _shortest(items: int, is_enough: Callable[[int], bool], seconds: Callable[[int], float]) -> int:
    """The number with the shortest step among some up to the least that is enough, and two beside the best of them."""
    enough = least(items, is_enough)
    grid = sorted({max(1, enough * share // FEW) for share in range(1, FEW + 1)})
    best = min(grid, key=seconds)
    at = grid.index(best)
    below, above = (grid[at - 1] if at else 0), (grid[at + 1] if at + 1 < len(grid) else best)
    return min((best, (below + best) // 2 or best, (best + above) // 2), key=seconds)


def _period(lender: Stage, trials: Trials, capacity: int) -> float:
    """Seconds from step to step of a stage that keeps what its guests leave room for; infinite where they leave too little."""
    chosen = as_chosen(lender, trials, choose(lender, trials, capacity))
    return trials.period(chosen) if trials.occupancy(chosen).peak_bytes(0) <= capacity else inf


def _choices(shape: Shape) -> list[LayerChoice]:
    """What may be kept of a layer with the lender: all; and what saves most seconds for a byte beyond what recovery starts from."""

    def worth(option: Option) -> float:
        least, *_ = shape.options[0]
        return (least.seconds - option.seconds) / (option.nbytes - least.nbytes)

    options = [option for option in shape.options[0][1:] if option.nbytes > shape.options[0][0].nbytes]
    best = max(options, key=worth, default=None)
    return list(dict.fromkeys([EVERYTHING, *([best.choice] if best else [])]))
