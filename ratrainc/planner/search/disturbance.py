"""Disturbance of a simulated step: one stage that is slow, and times that vary."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.ops.base import Direction
from ratrain.ratrain_ir.ops.kinds import DIRECTIONS
from ratrain.targets.simulator.timed_run import simulate

if TYPE_CHECKING:
    from ratrain.targets.program.instruction import Instruction
    from ratrain.targets.simulator.figures import StepFigures
    from ratrain.targets.simulator.timeline import Timeline

SLOWER = 1.10
"""Factor on the compute of the slow stage."""
JITTER = 0.05
"""Standard deviation of each instruction's time, as a fraction of it."""
_SEEDS = (1, 2, 3)


@frozen
class Disturbance:
    """Seconds of a step with the busiest stage a tenth slower, and with times varied by 5 % (mean of a few seeds)."""

    slow_stage_seconds: float
    jitter_seconds: float


def disturbance_of(timeline: Timeline, figures: StepFigures) -> Disturbance:
    """Simulate a step again with other times of its instructions; streams and waits stay the same.

    The undisturbed times are the given timeline's, so they include the cost of sharing DDR and links.
    """
    # a message takes its time at the sender; a receive counted too would pay for it twice
    took = {
        id(span.instruction): span.end - span.start
        for engines in timeline.spans
        for spans in engines.values()
        for span in spans
        if DIRECTIONS[span.instruction.keyword] is not Direction.IN
    }
    busiest = max(range(len(figures.stages)), key=lambda stage: figures.stages[stage].busy_seconds)

    def seconds(factor_of: Callable[[int, Instruction], float]) -> float:
        run = simulate(timeline.program, lambda s, item: took.get(id(item), 0.0) * factor_of(s, item))
        return run.step_seconds

    undisturbed = seconds(lambda _stage, _item: 1.0)
    if not undisturbed:
        return Disturbance(0.0, 0.0)
    slow = seconds(lambda s, item: SLOWER if s == busiest and _computes(item) else 1.0)
    varied = fmean(seconds(_jitter(seed)) for seed in _SEEDS)
    # fixed times need not give the given step exactly, so results are scaled by their ratio
    scale = figures.step_seconds / undisturbed
    return Disturbance(slow * scale, varied * scale)


def _computes(instruction: Instruction) -> bool:
    """Return True if an instruction runs the kernels of a block."""
    return instruction.routine is not None


def _jitter(seed: int) -> Callable[[int, Instruction], float]:
    """Return random factors around one, drawn anew for each execution of an instruction."""
    random = np.random.default_rng(seed)
    return lambda _stage, _item: max(0.0, 1.0 + JITTER * float(random.standard_normal()))
