"""Lower bounds of plans by the order of their passes: the time of a step when every pass takes its least time.

`bounds.py` and `placed_bounds.py` add up what a stage does and what surely lies before and after it. But stages also
wait for each other in the middle of a step. Example: in a steady turn of V-Min on two stages the last one has two
forwards, two weight halves and two input halves. The gradient for the first of these comes from the other stage, which
needs the output of the second forward for it; where weight halves are short, it is late in every turn. So the passes of
all stages run here, each when its stage is free and its input has come:

    out = max(input, stage free) + way            stage free = max(input, stage free) + compute

Recovery that bytes demand follows the first backward of a stage: before it, its result would take the bytes in which
the same tensors could have been kept. So from that backward on the stage has all its later passes, its recovery and its
updates to do. No gather or reduction is counted. Recovery stands in backwards and in their waits: none fills the
exchanges within a forward that is merged with no other pass.

A step is repeated, and the next one begins on each stage where this one ends. The stages' times from end to end differ
at first. The least of them is a bound on the time of a step in the long run: if all stages are at least x s later after
one step, then so they are after each.

With tensor-parallel and context ranks a micro-batch's way through a pass is compute and exchanges, which nothing hides
from the micro-batch itself; but its first exchange may run while the pass before it computes, and its last while the
next one does. `overlap-tensor` may have merged pairs of neighbouring passes, in one of three ways
(`pass_order.MERGINGS`). The least time under these counts. A pair begins when the first input of the two is there and
the pass before both is done. The second pass ends after all compute of both, but for one weight half.

Cost: linear in passes and plans, some nanoseconds each; finding the order takes longer, once for each pipeline.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.support.native_loops import native
from ratrain.ratrainc.planner.bounds.bounds import recovery_seconds
from ratrain.ratrainc.planner.bounds.pass_order import FORWARD, MERGINGS, PassOrder, pass_order
from ratrain.ratrainc.planner.bounds.shape_columns import Columns, Numbers, excess_sum, most, unit_sum
from ratrain.ratrainc.planner.space.units import EMBED, HEAD, LAYER

_STEPS = 3
"""Steps after which stages that wait for each other have found their pace, mostly."""
_MOST_PASSES = 50_000
"""Passes of a pipeline that is too long to be ordered, which takes a second."""
_EARLY = -1e300
"""Time of an input that is there from the beginning."""


def order_seconds(c: Columns, layers: Numbers) -> Numbers:
    """Return lower bounds of the step seconds of plans, 0 where none is known; `layers` [plans, stages].

    Nothing is known for slices, and for layers without a backward.
    """
    found = np.zeros(len(layers))
    if c.overlaps_steps:
        return found
    for number in np.unique(c.order):
        pipeline = c.orders[number]
        rows = np.flatnonzero(c.order == number)
        passes = 3 * pipeline.micro_batches * pipeline.stages * pipeline.chunks
        if pipeline.slices > 1 or passes > _MOST_PASSES:
            continue
        own, of_plans = c.rows(rows), layers[rows]
        mergings = MERGINGS if own.merged.any() else MERGINGS[:1]
        afters = [_after(own, of_plans, merging) for merging in mergings]
        orders = [pass_order(c.schedule, pipeline, merging) for merging in mergings]
        ways = [_of_order(own, of_plans, *each, pipeline) for each in zip(afters, orders, strict=True)]
        least = np.min(ways, 0)
        found[rows] = np.where(np.isfinite(least), least, 0.0)
    return found


def _after(c: Columns, layers: Numbers, merging: str) -> Numbers:
    """Return the seconds of recovery and updates of stages after their first backward; infinite if plans do not fit."""
    stages = layers.T
    # what is recovered in any case may be so before the first backward
    more = (recovery_seconds(c, stages, merging) - c.micro_batches * stages * c.recovery_least).clip(0.0)
    return (more + unit_sum(c.cut(stages), c.update, stages)).T


def chunk_layers(layers: Numbers, pipeline: PipelineShape) -> Numbers:
    """Share the layers of stages evenly by their chunks: [plans, stages] to [plans, chunks].

    The remainder goes to later chunks, which hold fewer passes, and to the chunk of the head last.
    """
    stages = pipeline.chunk_stages
    last = len(stages) - 1
    sizes = layers[:, list(stages)] // pipeline.chunks
    for stage in range(pipeline.stages):
        own = sorted(pipeline.chunks_of(stage), key=lambda chunk: (chunk == last, -chunk))
        for place, chunk in enumerate(own):
            sizes[:, chunk] += place < layers[:, stage] % pipeline.chunks
    return sizes


def _of_order(c: Columns, layers: Numbers, after: Numbers, order: PassOrder, pipeline: PipelineShape) -> Numbers:
    """Return the bounds of plans of one order; `after` has what stages do after their first backward but passes."""
    times = _times(c, chunk_layers(layers, pipeline).T)
    found = np.zeros(len(layers))
    step: Any = _step
    state, made = np.zeros((_FIELDS, pipeline.stages)), np.zeros(len(order.stage))
    for plan in range(len(layers)):
        of_plan = np.ascontiguousarray(times[..., plan])
        state[_AFTER] = after[plan]
        found[plan] = step(*_arrays(order), of_plan, float(c.message[plan]), _STEPS, state, made)
    return found


def prepare() -> None:
    """Compile the loop, or load it, so that no limit on computing time counts that."""
    order, step = pass_order("1f1b", PipelineShape(1, 1)), cast("Any", _step)
    step(*_arrays(order), np.zeros((4, 5, 1)), 0.0, 1, np.zeros((_FIELDS, 1)), np.zeros(len(order.stage)))


def _arrays(order: PassOrder) -> tuple[Any, ...]:
    return order.stage, order.kind, order.chunk, order.source, order.sent, order.joins, order.alone


_COMPUTE, _WAY, _UNTIL_OUT, _OVERLAP = range(4)
"""Seconds of a pass: its compute, the way of its micro-batch, the compute before its output, and the exchanges that may
run while its neighbours compute."""


def _times(c: Columns, chunks: Numbers) -> Numbers:
    """Return the seconds of passes [quantity, kind, chunk, plan]; `chunks` [chunk, plan] are the layers of chunks."""
    before = np.cumsum(chunks, axis=0) - chunks
    counts = None if c.mix is None else c.mix.between(before, chunks)

    def total(column: Numbers) -> Numbers:
        seconds: Numbers = chunks * column[LAYER]
        if counts is not None:
            seconds = seconds + excess_sum(column, counts)
        seconds[0] += column[EMBED]
        seconds[-1] += column[HEAD]
        return seconds

    def at_ends(exchanged: Numbers) -> Numbers:
        """Return the exchanges of one unit, of each kind of unit that a chunk has."""
        seconds = np.tile(most(exchanged), (len(chunks), 1))
        seconds[0] += exchanged[EMBED]
        seconds[-1] += exchanged[HEAD]
        return seconds

    passed = np.where(c.merged > 0, np.minimum(c.backward, c.input_half), c.backward)
    forward, back = total(c.forward), total(c.backward)
    there, returned = c.forward_way - c.forward, c.backward_way - passed
    half, other_half = total(c.input_half), total(c.parameter_half)
    half_way = np.minimum(half, back) + total(returned)
    both = np.minimum(back, half + other_half)
    last_half = np.where(c.merged > 0, most(c.parameter_half), 0.0)
    none = np.zeros_like(forward)
    overlaps = [at_ends(there), *[at_ends(returned)] * 2, none, at_ends(returned)]
    return np.array(
        [
            [forward, back, half, other_half, both],
            [total(c.forward_way), total(c.backward_way), half_way, none, half_way],
            [forward, np.maximum(back - last_half, 0.0), half, none, np.minimum(half, back)],
            overlaps,
        ]
    )


_FREE, _FREE_BEFORE, _INPUT, _BUSY, _COMPUTED, _BEGUN, _BACK, _AFTER = range(8)
"""State of a stage: when it is free behind the last pass and behind the one before it; the last pass's input, its
compute and when all but its last exchange is done; when the stage began this step; when it can have done all passes
from its first backward on; its recovery and updates."""
_FIELDS = 8


@native
def _step(
    stages: Any,
    kinds: Any,
    chunks: Any,
    sources: Any,
    sent: Any,
    joins: Any,
    alone: Any,
    times: Any,
    message: float,
    steps: int,
    state: Any,
    made: Any,
) -> float:
    """Return the least time of any stage from the end of a step to the end of the next; the most of some steps.

    `times` are those of `_times`, of one plan. `state` has the recovery and updates of stages; else it and `made`, the
    outputs of passes, are written over.
    """
    state[:_AFTER] = 0.0
    found = 0.0
    for _ in range(steps):
        for stage in range(state.shape[1]):
            state[_BEGUN, stage] = state[_FREE, stage]
            state[_BACK, stage] = _EARLY
        for at in range(len(stages)):
            stage, kind, chunk = stages[at], kinds[at], chunks[at]
            source = sources[at]
            given = _EARLY if source < 0 else made[source] + sent[at] * message
            compute, way = times[_COMPUTE, kind, chunk], times[_WAY, kind, chunk]
            overlap = times[_OVERLAP, kind, chunk]
            free = state[_FREE, stage]
            until_out = times[_UNTIL_OUT, kind, chunk]
            if joins[at]:
                before = state[_FREE_BEFORE, stage]
                begin = max(before, min(state[_INPUT, stage], given)) + state[_BUSY, stage]
                start = max(given, begin)
                out = max(given + way, before + way - overlap, begin + until_out)
                apart = max(given, before) + way - overlap
                end = max(begin + compute, apart, state[_COMPUTED, stage])
            else:
                start = max(given, free)
                out = max(given + max(way, until_out), free + max(way - overlap, until_out))
                end = start + max(way - overlap, compute)
            if kind != FORWARD and state[_BACK, stage] == _EARLY:
                state[_BACK, stage] = start
            if state[_BACK, stage] > _EARLY:
                state[_BACK, stage] += max(compute, way - overlap) if alone[at] else compute
            made[at] = out
            state[_FREE_BEFORE, stage] = free
            state[_FREE, stage] = end
            state[_INPUT, stage] = given
            state[_BUSY, stage] = compute
            state[_COMPUTED, stage] = out - overlap
        least = -_EARLY
        for stage in range(state.shape[1]):
            recovered = state[_BACK, stage] + state[_AFTER, stage]
            state[_FREE, stage] = max(state[_FREE, stage], recovered)
            least = min(least, state[_FREE, stage] - state[_BEGUN, stage])
        found = max(found, least)
    return found
