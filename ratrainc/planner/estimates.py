"""A pessimistic closed form of the step time: nothing of the state's traffic, or of what tensor peers exchange, is hidden, and recovery stays inline.

Not a bound, not simulated.
"""

from __future__ import annotations

import attrs
import numpy as np

from ratrain.ratrainc.planner.bounds import plan_bounds, recovery_seconds
from ratrain.ratrainc.planner.columns import Columns, Numbers, unit_sum

_USABLE = 0.97
"""share of the capacity that is planned with: the rest is left to padding, transients and gaps between tensors"""


def plan_estimates(c: Columns, layers: Numbers) -> Numbers:
    """Estimated seconds of plans with equal numbers of stages, infinite where they may not fit. `layers` [plans, stages].

    Unequal stages take the sum of a micro-batch's times over all stages and M - 1 times the largest; then come all collectives and updates of
    the stage that has most of them. Chunks and slices shorten what is more than M times the largest.
    """
    usable = attrs.evolve(c, capacity=c.capacity * _USABLE)
    fits = np.isfinite(plan_bounds(usable, layers).seconds)
    by_stage = layers.T
    stages, m = len(by_stage), c.micro_batches
    each = (
        unit_sum(c.forward + c.backward + c.exchange, by_stage, c.head_stage) + recovery_seconds(usable, by_stage) / m
    )
    pipeline = each.sum(axis=0) + (m - 1) * each.max(axis=0)
    pipeline -= (each.sum(axis=0) - each.max(axis=0)) * (1 - 1 / (c.chunks * c.slices))
    messages = 2 * c.message * (stages - 1) * (1 + np.ceil(m / stages))
    traffic = unit_sum(c.link + c.update + m * c.link_each, by_stage, c.head_stage)
    return np.where(fits, pipeline + messages + traffic.max(axis=0) + c.tail[0], np.inf)
