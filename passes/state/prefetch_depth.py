"""How far ahead views that are sharded within the step are gathered (ZeRO 3): what `joint-order` chooses for a stage.

A gather that starts one block ahead hides behind that block alone, and blocks differ: an attention is much shorter than the gather of the mlp after
it. Deeper prefetch hides more, and its views take bytes in which activations could be kept. So each depth that makes the stage's period
shorter, with nothing or everything recovered, is tried with what would have to be recovered under it, and the shortest period decides.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

from ratrain.passes.memory.overlap import step_period
from ratrain.passes.recovery.recompute import NOTHING, same_for_all
from ratrain.passes.recovery.recompute_choice import rewritten
from ratrain.passes.trial import trial_excess_bytes, with_workspace
from ratrain.ratrain_ir.module import Stage

if TYPE_CHECKING:
    from ratrain.passes.pass_base import PassContext
    from ratrain.passes.recovery.recompute import RecomputePass
    from ratrain.ratrain_ir.module import Module

DEPTHS = (0, 1, 2, 3, 4)
"""What is chosen from, in block ops; 0: right before the use."""
_WORTH = 5e-4
"""By how much of a period a greater depth must shorten it."""


def prefetch_depth(
    module: Module,
    stage: Stage,
    context: PassContext,
    recovery: RecomputePass,
    ordered: Callable[[Stage, int], None],
) -> int:
    """The depth with the shortest period of a stage of those that fit, 0 where none does; `ordered` gives a copy of the stage its order under a depth."""
    worth_trying: list[tuple[float, int, Stage]] = []
    shortest = [inf, inf]
    for depth in DEPTHS:
        trial = Stage(stage.index, dict(stage.tensors), list(stage.ops), stage.line)
        ordered(trial, depth)
        # a layer that is recovered as a whole needs the view of its attention earlier than one that is kept
        periods = [_period(module, trial, context), _period(module, rewritten(trial, same_for_all(NOTHING)), context)]
        if any(found < best * (1 - _WORTH) for found, best in zip(periods, shortest, strict=True)):
            worth_trying.append((periods[0], depth, trial))
            shortest = list(map(min, periods, shortest))
    chosen, best = DEPTHS[0], inf
    for least, depth, trial in reversed(worth_trying):
        if least < best:  # what is recovered comes on top
            choice_of, _ = recovery.choice(module, trial, context)
            recovered = rewritten(trial, choice_of)
            seconds = _period(module, recovered, context)
            if seconds < best and _fits(module, recovered, context, recovery.budget_within(context)):
                chosen, best = depth, seconds
    return chosen


def _period(module: Module, stage: Stage, context: PassContext) -> float:
    return step_period(module, with_workspace(module, stage, context), context)


def _fits(module: Module, stage: Stage, context: PassContext, budget: int) -> bool:
    return not trial_excess_bytes(module, stage, context, 0.0, budget)
