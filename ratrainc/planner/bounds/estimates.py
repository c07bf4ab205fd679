"""Estimates of the step time: a pessimistic closed form of plans, and guesses that put shapes in order.

The closed form hides nothing of tensor exchanges, and keeps recovery inline. It hides the state's traffic behind the
compute of its stage, but for a share. Example: 0.46 s of compute and 0.45 s of reductions and gathers are estimated as
0.46 + 0.1 x 0.45 = 0.51 s, not as 0.91 s; simulated they take 0.53 s. It is neither a bound nor simulated.
"""

from __future__ import annotations

import numpy as np

from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrainc.planner.bounds.bounds import plan_bounds, recovery_seconds
from ratrain.ratrainc.planner.bounds.other_memory import all_offloaded
from ratrain.ratrainc.planner.bounds.shape_columns import Columns, Numbers, least_recovery, unit_sum
from ratrain.ratrainc.planner.space.plan_families import AHEAD
from ratrain.ratrainc.planner.space.units import EMBED

_USABLE = 0.97
"""Share of the capacity to plan with: the rest is for padding, transients and gaps between tensors."""

_EXPOSED_EXCHANGES, _EXPOSED_AHEAD = 0.5, 0.1
"""Shares of exchanges that are assumed not to be hidden; under `AHEAD` each stands next to another's compute."""
_EXPOSED = 0.1
"""Share of the state's traffic that no compute hides: first gathers and last reductions of a step."""


def plan_estimates(c: Columns, layers: Numbers) -> Numbers:
    """Estimate the seconds of plans of equally many stages; infinite if they may not fit. `layers` [plans, stages].

    Unequal stages take the sum of a micro-batch's times over all stages plus M - 1 times the largest, then updates and
    what its compute does not hide of all collectives, of the stage that has most of them. Chunks and slices shorten the
    part beyond M times the largest, but a slice still passes all chunks one after another. With another memory, all
    state is there or nothing is.
    """
    if c.other is not None:
        offloaded = plan_estimates(all_offloaded(c), layers)
        fits = np.isfinite(plan_bounds(c.with_capacity(c.capacity * _USABLE), layers).seconds)
        return np.minimum(plan_estimates(c.other.whole, layers), np.where(fits, offloaded, np.inf))
    by_stage = layers.T
    c = c.cut(by_stage)
    usable = c.with_capacity(c.capacity * _USABLE)
    fits = np.isfinite(plan_bounds(usable, layers).seconds)
    stages, m = len(by_stage), c.micro_batches
    each = unit_sum(c, c.forward + c.backward + c.exchange, by_stage) + recovery_seconds(usable, by_stage) / m
    pipeline = each.sum(axis=0) + (m - 1) * each.max(axis=0)
    pipeline -= (each.sum(axis=0) - each.max(axis=0)) * (1 - 1 / (c.chunks * c.slices))
    pipeline = np.maximum(pipeline, each.sum(axis=0) / c.slices)
    messages = 2 * c.message * (stages - 1) * (1 + np.ceil(m / stages))
    traffic = unit_sum(c, c.link + m * c.link_each, by_stage)
    exposed = np.maximum(traffic - m * each, _EXPOSED * traffic) + unit_sum(c, c.update, by_stage)
    return np.where(fits, pipeline + messages + exposed.max(axis=0) + c.tail[0], np.inf)


def cuts_estimate(c: Columns, layers: tuple[int, ...]) -> float:
    """Estimate the seconds of one plan; `c` has the one row of its shape, `layers` the layers of each stage."""
    return float(plan_estimates(c, np.array([layers], float))[0])


def shape_guesses(c: Columns) -> Numbers:
    """Guess the seconds of shapes with even stages, from the first, which holds most; infinite if they hardly fit.

    Guesses only decide the order in which shapes are looked at.
    """
    units = c.everything
    m, p = c.micro_batches, c.pp
    layers = c.layers / p
    # passes in flight on the first stage, as layers: the schedule's multiple of P, at most all micro-batches
    held = np.minimum(np.minimum(p * SCHEDULES[c.schedule].held, m) * layers, m * layers)
    held = np.where(c.slices > 1, (p + c.slices - 1) * layers, held)  # of layers of passes
    working = np.maximum(c.mlp_saved + c.mlp_ends + c.mlp_view + c.mlp_scratch + c.mlp_gradient, c.attention_scores)
    if c.has_halves:
        working = working + layers * c.pending / c.chunks
    working = working + (c.slices > 1) * (units @ c.sliced_gradients) / p
    state = (units @ (c.carried + c.gradients * (m > 1))) / p
    free = _USABLE * c.capacity - state - working - held * (units @ c.held) / c.layers
    recovery = m * c.slices * layers * least_recovery(c, free / np.maximum(held - 1, 1.0))
    work = (m * (units @ (c.forward + c.backward)) + units @ c.update) / p
    way = (units @ (c.forward_way + c.backward_way) + recovery * p / m) * (p - 1) / p
    bubble = way * SCHEDULES[c.schedule].bubble / (c.chunks * c.slices) + 2 * c.message * (p - 1) * c.chunks
    link = (units @ c.link + m * (units @ c.link_each)) / p
    exposed = _EXPOSED_AHEAD if c.schedule == AHEAD else _EXPOSED_EXCHANGES
    longest = np.maximum(work + recovery + bubble + exposed * m * (units @ c.exchange) / p, link)
    # few micro-batches do not fill a long pipeline; weight halves are assumed to delay gradients then
    there_and_back = units @ (c.first_forward + c.first_backward)
    longest = np.maximum(longest, there_and_back + recovery * p / (m * c.slices))
    return np.where(free > 0, longest + c.tail[EMBED], np.inf)
