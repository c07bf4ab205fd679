"""Where recovery stands: `recompute{placement=forward-side}` moves it into the pipeline's idle windows (FSR).

Inline, a layer is recovered right before its backward. Recovery needs no gradient, so it may run earlier: after the micro-batch's
forward, before its gradient arrives. That pays where the compute engine would wait for the gradient: before the first backward of
a stage (warm-up) and before those of the cool-down, when no forward is left to fill the gap. In the steady state there is nothing to
hide in, and recovery stays inline. At most (P - 1) recoveries a stage can be hidden this way.

What is recovered earlier lives longer. Layers move in the order backward needs them, as long as the exact live bytes, workspace
included, stay under the budget.
"""

from __future__ import annotations

from itertools import islice

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from ratrain.passes.memory.trial import Trials
from ratrain.ratrain_ir.blocks import gathers_within_step
from ratrain.ratrain_ir.module import Stage
from ratrain.ratrain_ir.ops import InputGradientOp, Op, Recompute
from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.types import aligned


def recover_forward_side(stage: Stage, trials: Trials, budget: int) -> int:
    """Move recovery ops of a stage ahead of the backward that waits for a gradient; how many were moved."""
    plan = trials.module.plan
    if plan.schedule is None or gathers_within_step(plan):
        return 0  # nothing is known of the windows, or the view a recovery reads is gathered only for its backward
    windows = SCHEDULES[plan.schedule].gradient_waits(plan.shape, stage.index)
    if not windows:
        return 0
    mover = _Mover(stage, trials, budget)
    for micro_batch in windows:
        mover.fill(micro_batch)
    mover.keep_what_fits()
    stage.ops = mover.rebuilt(len(mover.moved))
    return sum(len(ops) for ops in mover.moved.values())


@define(eq=False)
class _Mover:
    """Decides moves against the live-byte curve of the list as it was, then rebuilds the list once."""

    stage: Stage
    trials: Trials
    budget: int
    moved: dict[int, list[Op]] = field(factory=dict)
    """Recovery ops to stand before a micro-batch's first backward, in order."""
    lag: float = field(init=False)
    """seconds by which other engines may lag behind; recovery leaves the bytes for it"""
    curve: NDArray[np.int64] = field(init=False)

    def __attrs_post_init__(self) -> None:
        occupied = self.trials.occupancy(self.stage)
        self.lag = occupied.lag_within(self.budget)
        self.curve = occupied.within(self.lag).live_bytes

    def fill(self, micro_batch: int) -> None:
        """Move as many of a micro-batch's recoveries as the budget lets."""
        first: int | None = None
        """Position of the micro-batch's first backward."""
        chosen: list[Op] = []
        for position, op in enumerate(self.stage.ops):
            if isinstance(op, InputGradientOp) and op.micro_batch == micro_batch and first is None:
                first = position
            if type(op) is Recompute and op.micro_batch == micro_batch and first is not None:
                added = sum(aligned(t.type.nbytes) for t in op.writes)
                if int(self.curve[first : position + 1].max()) + added > self.budget:
                    break
                self.curve[first:position] += added
                chosen.append(op)
        if chosen:
            self.moved[micro_batch] = chosen

    def keep_what_fits(self) -> None:
        """Leave the windows that were filled last as they were, until the arena fits."""
        if not self.moved or not self.excess_bytes(len(self.moved)):
            return
        low, high = 0, len(self.moved) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if self.excess_bytes(middle) else (middle, high)
        self.moved = dict(islice(self.moved.items(), low))

    def rebuilt(self, windows: int) -> list[Op]:
        """The list with the moves of the first so many windows made."""
        waiting = dict(islice(self.moved.items(), windows))
        going = {id(op) for ops in waiting.values() for op in ops}
        ops: list[Op] = []
        for op in self.stage.ops:
            if isinstance(op, InputGradientOp) and op.micro_batch in waiting:
                ops.extend(waiting.pop(op.micro_batch))
            if id(op) not in going:
                ops.append(op)
        return ops

    def excess_bytes(self, windows: int) -> int:
        """The bytes by which the arena of the list with those moves made exceeds the budget."""
        return self.trials.excess_bytes(self.stage.draft(self.rebuilt(windows)), self.lag, self.budget)
