"""A pessimistic closed form of the step time: nothing of the state's traffic, or of what tensor peers exchange, is hidden, and recovery stays inline.

Not a bound, not simulated.
"""

from __future__ import annotations

import numpy as np

from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrainc.planner.bounds.bounds import plan_bounds, recovery_seconds
from ratrain.ratrainc.planner.bounds.columns import EMBED, Columns, Numbers, least_recovery, unit_sum
from ratrain.ratrainc.planner.bounds.other_memory import all_offloaded

_USABLE = 0.97
"""share of the capacity that is planned with: the rest is left to padding, transients and gaps between tensors"""


def plan_estimates(c: Columns, layers: Numbers) -> Numbers:
    """Estimated seconds of plans with equal numbers of stages, infinite where they may not fit. `layers` [plans, stages].

    Unequal stages take the sum of a micro-batch's times over all stages and M - 1 times the largest; then come all collectives and updates of
    the stage that has most of them. Chunks and slices shorten what is more than M times the largest. With another memory: with all state there, or
    nothing.
    """
    if c.other is not None:
        offloaded = plan_estimates(all_offloaded(c), layers)
        fits = np.isfinite(plan_bounds(c.with_capacity(c.capacity * _USABLE), layers).seconds)
        return np.minimum(plan_estimates(c.other.whole, layers), np.where(fits, offloaded, np.inf))
    usable = c.with_capacity(c.capacity * _USABLE)
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


def shape_guesses(c: Columns) -> Numbers:
    """About how many seconds shapes take, infinite where they hardly fit: with even stages, after the first of them, which holds most.

    Only the order in which shapes are looked at follows from it.
    """
    units = np.array([1.0, c.layers, 1.0])
    m, p = c.micro_batches, c.pp
    layers = c.layers / p
    held = np.minimum(np.minimum(p * SCHEDULES[c.schedule].held, m) * layers, m * layers)
    held = np.where(c.slices > 1, (p + c.slices - 1) * layers, held)  # of layers of passes
    working = c.mlp_saved + c.mlp_ends + c.mlp_view + c.mlp_scratch + c.mlp_gradient
    if c.has_halves:
        working = working + layers * c.pending / c.chunks
    working = working + (c.slices > 1) * (units @ c.sliced_gradients) / p
    state = (units @ (c.carried + c.gradients * (m > 1))) / p
    free = _USABLE * c.capacity - state - working - held * (c.activation + c.always_kept)
    recovery = m * c.slices * layers * least_recovery(c, free / np.maximum(held - 1, 1.0))
    work = (m * (units @ (c.forward + c.backward)) + units @ c.update) / p
    way = (units @ (c.forward_way + c.backward_way) + recovery * p / m) * (p - 1) / p
    bubble = way * SCHEDULES[c.schedule].bubble / (c.chunks * c.slices) + 2 * c.message * (p - 1) * c.chunks
    link = (units @ c.link + m * (units @ c.link_each)) / p
    longest = np.maximum(work + recovery + bubble + 0.5 * m * (units @ c.exchange) / p, link)
    return np.where(free > 0, longest + c.tail[EMBED], np.inf)
