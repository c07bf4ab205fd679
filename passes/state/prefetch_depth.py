"""Prefetch depth of views that are sharded within the step (ZeRO 3), which `joint-order` chooses for each stage.

    depth 1   compute   mlp.0 | attn.1 | (waits) | mlp.1      the gather hides behind attn.1 alone
              gather            [===== mlp.1 ====]
    depth 2   compute   mlp.0 | attn.1 | mlp.1                it hides behind two blocks, and its view lives longer
              gather    [===== mlp.1 ====]

A gather that starts one block ahead hides behind that block alone, and an attention is much shorter than the gather of
the mlp after it. A deeper prefetch hides more, but its views take bytes in which activations could be kept. So each
depth that shortens the stage's period, with nothing or with everything recomputed, is tried with the recomputation that
it would need, and the shortest period decides. Cost: two simulated lists per depth, and a choice of recovery for each
promising one.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from ratrain.passes.recovery.layer_choice import NOTHING, same_for_all
from ratrain.passes.recovery.rewriting import Rewriting, rewritten

if TYPE_CHECKING:
    from ratrain.passes.recovery.recompute import RecomputePass
    from ratrain.passes.trial.trial import Trials
    from ratrain.ratrain_ir.module import Stage

DEPTHS = (0, 1, 2, 3, 4)
"""Depths tried, in block ops; 0: right before the use."""
_WORTH = 5e-4
"""Relative gain of the period that a greater depth must show."""


def prefetch_depth(
    stage: Stage,
    trials: Trials,
    recovery: RecomputePass,
    give_order: Callable[[Stage, Trials, int], None],
) -> int:
    """Return the depth with the shortest period of a stage among those that fit; 0 if none fits.

    `recovery` chooses the recomputation under each depth; `give_order` gives a draft of the stage its order with a
    depth.
    """
    worth_trying: list[tuple[float, int, Stage]] = []
    shortest = [inf, inf]
    for depth in DEPTHS:
        trial = stage.draft()
        give_order(trial, trials, depth)
        # A layer that is recomputed as a whole needs the view of its attention earlier than one that is kept.
        periods = [trials.period(trial), trials.period(rewritten(trial, same_for_all(NOTHING)))]
        if any(period < least * (1 - _WORTH) for period, least in zip(periods, shortest, strict=True)):
            worth_trying.append((periods[0], depth, trial))
            shortest = list(map(min, periods, shortest))
    chosen, best = DEPTHS[0], inf
    for least, depth, trial in reversed(worth_trying):
        if least < best:  # `least` is a bound: recomputation only adds to it
            rewriting = Rewriting(trial)
            recovered, _ = rewriting.under(recovery.choice(rewriting, trials).of)
            seconds = trials.period(recovered)
            if seconds < best and trials.fits(recovered, 0.0, recovery.budget_within(trials)):
                chosen, best = depth, seconds
    return chosen
