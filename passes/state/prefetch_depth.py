"""How far ahead views that are sharded within the step are gathered (ZeRO 3): what `joint-order` chooses for a stage.

A gather that starts one block ahead hides behind that block alone, and blocks differ: an attention is much shorter than the gather of the mlp after
it. Deeper prefetch hides more, and its views take bytes in which activations could be kept. So each depth that makes the stage's period
shorter, with nothing or everything recovered, is tried with what would have to be recovered under it, and the shortest period decides.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from ratrain.passes.recovery.rewriting import NOTHING, Rewriting, rewritten, same_for_all

if TYPE_CHECKING:
    from ratrain.passes.memory.trial import Trials
    from ratrain.passes.recovery.recompute import RecomputePass
    from ratrain.ratrain_ir.module import Stage

DEPTHS = (0, 1, 2, 3, 4)
"""What is chosen from, in block ops; 0: right before the use."""
_WORTH = 5e-4
"""By how much of a period a greater depth must shorten it."""


def prefetch_depth(
    stage: Stage,
    trials: Trials,
    recovery: RecomputePass,
    give_order: Callable[[Stage, Trials, int], None],
) -> int:
    """The depth with the shortest period of a stage of those that fit, 0 where none does; `give_order` gives a draft of the stage its order under a depth."""
    worth_trying: list[tuple[float, int, Stage]] = []
    shortest = [inf, inf]
    for depth in DEPTHS:
        trial = stage.draft()
        give_order(trial, trials, depth)
        # a layer that is recovered as a whole needs the view of its attention earlier than one that is kept
        periods = [trials.period(trial), trials.period(rewritten(trial, same_for_all(NOTHING)))]
        if any(period < least * (1 - _WORTH) for period, least in zip(periods, shortest, strict=True)):
            worth_trying.append((periods[0], depth, trial))
            shortest = list(map(min, periods, shortest))
    chosen, best = DEPTHS[0], inf
    for least, depth, trial in reversed(worth_trying):
        if least < best:  # what is recovered comes on top
            rewriting = Rewriting(trial)
            recovered, _ = rewriting.under(recovery.choice(rewriting, trials).of)
            seconds = trials.period(recovered)
            if seconds < best and trials.fits(recovered, 0.0, recovery.budget_within(trials)):
                chosen, best = depth, seconds
    return chosen
