"""Lower bounds on step time and peak bytes in closed form, for whole arrays of plans.

They never exceed the figures of compiler and simulator.

For a stage s of P with f and b seconds of forward and backward a micro-batch, M micro-batches, k = min(P - s, M) in
flight, c seconds of a message, and D the seconds from the end of a forward on s to the arrival of its gradient (through
all later stages and back):

- *work*: the compute engine also does the recovery R and the updates: M (f + b) + R + updates.
- *waits*: the first backward waits D for the first forward, and before it there are only k forwards. The last backward
  waits D for the last forward, and between them there are only k - 1 backwards and the recovery r of those k
  micro-batches. So, if M > k, window >= M (f + b) + R + max(0, D - (k - 1) f) + max(0, D - (k - 1) b - r). Recovery
  before the first backward is not part of R: its result takes the bytes in which the same tensors could have been kept.
- *round trips*: forward m + k comes after backward m, so every k-th micro-batch makes a chain: ceil(M / k)(f + D + b).
- *state*: the first block of a stage is used in the next step only after its reduction, update and gather, which follow
  the window.
- *stages before s* are passed on the way down before the window, and up after it.
- *collectives*: their engine works one after another, and so does the engine of tensor exchanges.

Example: P = 2, M = 4, equal stages, no recovery, updates or messages, b = 2 f: D = 3 f on stage 0, k = 2, and the
window is 12 f + 2 f + f = 15 f, which is the step of 1F1B, (M + P - 1)(f + b).

With tensor-parallel ranks a micro-batch's way through a stage takes f' forward and b' back: its compute (only the input
halves of backwards that may be in halves) and its exchanges, which nothing hides from the micro-batch itself. D is the
sum of such ways; a round trip takes f' + D + max(b, b'), the last one b'. Passes of different micro-batches may be
merged if one follows the other in the order, but never a backward with the forward behind it. So before the first
backward there are still only k forwards, and with k = 1 the last forward of a stage stands alone: its f' - f are waited
for each time. Weight halves of two micro-batches may follow after the last gradient has left, so the window may be
shorter by these (by one layer's if k = 1); and when a backward begins, only k - 1 micro-batches are surely in flight if
k > 1.

Where layers differ, f, b and bytes are those of the layers that a stage has (`layer_mix.py`). A stage below the lowest
layer with a backward only goes forward: it waits for nothing, and may begin the next step while later stages go back.
So its work counts, and ways down and up, waits and round trips are those of the stages from that layer on.

R follows from bytes. When a backward begins, all k micro-batches in flight hold what they keep, together with the
state, the gradients and the operands of this backward. The rest of the capacity, shared evenly by all layers in flight,
gives the least recovery on the convex hull of all choices (a convex function of the bytes: sharing evenly is the
optimum of the relaxation in which choices may be mixed).
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import frozen

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES
from ratrain.ratrainc.planner.bounds.other_memory import crossing_bytes, with_other_memory
from ratrain.ratrainc.planner.bounds.placed_bounds import (
    PlacedMemory,
    first_slice_there_and_back,
    placed_shape_seconds,
    placed_time,
)
from ratrain.ratrainc.planner.bounds.shape_columns import (
    Columns,
    Numbers,
    backward_bytes,
    evenest,
    excess_sum,
    head_backward_bytes,
    layer_sum,
    least_bytes,
    least_recovery,
    left_behind,
    most,
    raise_to_engines,
    stage_numbers,
    surely_held,
    unit_sum,
    with_backward,
)
from ratrain.ratrainc.planner.space.units import EMBED, EXCESS, HEAD, LAYER


@frozen(eq=False)
class StageBounds:
    """Lower bounds of stages: the step seconds each implies, infinite if it cannot fit, and its peak bytes."""

    seconds: Numbers
    peak_bytes: Numbers


def stage_bounds(c: Columns, before: Numbers, layers: Numbers) -> StageBounds:
    """Bound stages that have `layers` layers, at least one, after `before` layers of earlier stages.

    The first axis of `layers` has all stages of a plan in order, the last one the shapes of `c`. Arguments broadcast.
    """
    c = c.within(before, layers)
    memory = _memory(c, layers)
    seconds, peak = _with_other_memory(c, layers, _seconds(c, memory, before), memory.peak_bytes())
    return StageBounds(np.where(peak <= c.capacity, seconds, np.inf), peak)


def least_stage_seconds(c: Columns, before: Numbers, layers: Numbers) -> Numbers:
    """Return the step seconds that stages imply with at least `before` layers before them; infinite if they cannot fit.

    They bound as `stage_bounds` does, whose arguments they take, but leave out round trips and waits: these get
    shorter with more layers before a stage.
    """
    c = c.anywhere(layers, before)
    memory = _memory(c, layers)
    if isinstance(memory, PlacedMemory):
        longest = _seconds(c, memory, before)
    else:
        work = unit_sum(c, c.micro_batches * (c.forward + c.backward), layers) + memory.recovery()
        longest = _way_up(c, before, stage_numbers(layers)) + (work - left_behind(c, layers)) + c.tail[EMBED]
        raise_to_engines(c, longest, work, layers)
    longest, peak = _with_other_memory(c, layers, longest, memory.peak_bytes())
    return np.where(peak <= c.capacity, longest, np.inf)


def _with_other_memory(c: Columns, layers: Numbers, seconds: Numbers, peak: Numbers) -> tuple[Numbers, Numbers]:
    """Tighten bounds of stages (step seconds, peak bytes) by the bytes that left DDR for another memory.

    Columns with such a memory (`Columns.other`) have only what stays in DDR in any case, so the given bounds are low;
    they are raised to what `other_memory.py` proves. Without one both are returned as they are.
    """
    if c.other is None:
        return seconds, peak
    return with_other_memory(c.other, layers, _memory(c.other.whole, layers), seconds, peak)


def _memory(c: Columns, layers: Numbers) -> _Memory | PlacedMemory:
    return _Memory.of(c, layers) if c.in_order else PlacedMemory.of(c, layers)


def _seconds(c: Columns, memory: _Memory | PlacedMemory, before: Numbers) -> Numbers:
    if isinstance(memory, PlacedMemory) and not c.is_one_chunk_order:
        return placed_time(c, memory, before)
    seconds = _time(c, memory, before)
    return seconds if c.in_order else np.maximum(seconds, first_slice_there_and_back(c))


def _time(c: Columns, memory: _Memory | PlacedMemory, before: Numbers) -> Numbers:
    """Return the seconds of the longest chain (up, window and tail), or of a busier engine."""
    m, layers = c.micro_batches, memory.layers
    work = unit_sum(c, m * (c.forward + c.backward), layers) + memory.recovery()
    outside = _way_up(c, before, stage_numbers(layers))
    after = left_behind(c, layers)
    if isinstance(memory, _Memory):
        window = _window_in_order(c, memory, _trip(c, outside, before, stage_numbers(layers)), work)
        outside = outside + c.tail[EMBED]
        np.maximum(outside[1:], c.tail[LAYER], out=outside[1:])  # a later stage's first block is an attention
    else:
        window = unit_sum(c, m * c.forward, layers)  # weight halves may run while earlier stages go on
        window[0] = (work - after)[0]
        outside += c.tail[EMBED]
    return raise_to_engines(c, outside + window, work, layers)


def _way_up(c: Columns, before: Numbers, stage: Numbers) -> Numbers:
    """Return the seconds of one micro-batch in the stages before each: both ways under 1F1B, else one."""
    columns = c.forward_way + c.backward_way if c.in_order else c.forward_way
    if c.overlaps_steps:
        return _way_up_from_gradients(c, columns)
    up: Numbers = stage * (2 * c.message) + (columns[EMBED] + before * columns[LAYER])
    if c.span is not None:
        up = up + excess_sum(columns, c.span.before)
    up[0] = 0.0
    return up


def _way_up_from_gradients(c: Columns, columns: Numbers) -> Numbers:
    """Return the seconds of a micro-batch in the stages before each, from the lowest layer with a backward on."""
    assert c.mix is not None
    assert c.span is not None
    passed = np.stack([n * back for n, back in zip(c.span.before, c.mix.goes_back, strict=True)])
    layers = passed.sum(axis=0)
    up: Numbers = (layers > 0) * (2 * c.message) + layers * columns[LAYER] + excess_sum(columns, passed)
    return up


def _trip(c: Columns, outside: Numbers, before: Numbers, stage: Numbers) -> Numbers:
    """Return the seconds from the start of a stage's first forward until its gradient has been computed."""
    if not c.overlaps_steps:
        return c.there_and_back - outside
    # gradients stop at the first stage with a backward, so messages back count from this stage on
    both, from_here = c.forward_way + c.backward_way, 2 * c.message * (c.pp - 1 - stage)
    assert c.span is not None
    passed = (stage > 0) * (both[EMBED] + before * both[LAYER] + excess_sum(both, c.span.before))
    trip: Numbers = c.everything @ both - passed + from_here
    return trip


def _window_in_order(c: Columns, memory: _Memory, trip: Numbers, work: Numbers) -> Numbers:
    """Return the seconds from the first forward to the last gradient under 1F1B: work and waits, or round trips.

    A round trip takes `trip` = f + D + b seconds, with tensor-parallel ranks f' + D + b'.
    """
    f, b = unit_sum(c, c.forward, memory.layers), unit_sum(c, c.backward, memory.layers)
    others = memory.flight - 1
    if c.has_exchanges:
        return _window_with_exchanges(c, memory, trip, work)
    down = trip - f
    down -= b
    window = down - others * f  # the wait before the first backward
    np.maximum(window, 0.0, out=window)
    window += work
    at_the_end = np.subtract(down, others * b, out=down)
    at_the_end -= memory.window_recovery
    np.maximum(at_the_end, 0.0, out=at_the_end)
    at_the_end *= np.minimum(memory.windows, 1.0)  # if all are in flight together, the last forward does not wait
    window += at_the_end
    trips = (memory.windows + 1) * trip
    trips = trips + (memory.rest - 1) * f
    return _of_stages_with_backward(memory, np.maximum(window, trips), work)


def _of_stages_with_backward(memory: _Memory, window: Numbers, work: Numbers) -> Numbers:
    """Return the windows of stages that wait for gradients, and the work alone of those that only go forward."""
    if memory.back is memory.layers:
        return window
    found: Numbers = np.where(memory.back > 0, window, work)
    found[-1] = window[-1]  # the head goes back
    return found


def _window_with_exchanges(c: Columns, memory: _Memory, trip: Numbers, work: Numbers) -> Numbers:
    """Return the same for shapes with tensor-parallel or context ranks: a way, f' or b', differs from work, f or b."""
    f, b = unit_sum(c, c.forward, memory.layers), unit_sum(c, c.backward, memory.layers)
    exchanged = unit_sum(c, c.forward_way, memory.layers) - f  # for a micro-batch on its way forward
    if c.overlaps_steps:
        ahead = np.minimum(_exchange_ahead(c), exchanged)
        exchanged, trip = exchanged - ahead, trip - ahead
    way_back = unit_sum(c, c.backward_way, memory.layers)
    others = memory.flight - 1
    down = trip - f - exchanged - way_back
    window = work + np.maximum(down + exchanged - others * f, 0.0)
    waits = np.maximum(down - others * b - memory.window_recovery, 0.0)
    window += waits * np.minimum(memory.windows, 1.0)
    alone = others == 0
    window += alone * (c.micro_batches - 1) * exchanged
    window -= np.where(alone, most(c.weight_half), left_behind(c, memory.layers))
    trips = (memory.windows + 1) * trip + memory.windows * np.maximum(b - way_back, 0.0)
    trips = trips + np.maximum((memory.rest - 1) * f - exchanged, 0.0)
    return _of_stages_with_backward(memory, np.maximum(window, trips), work)


def _exchange_ahead(c: Columns) -> Numbers:
    """Return the seconds of exchanges at most with which a stage's forward may begin beside the backward before it.

    The backward of a stage ends with the exchange of its input's gradient, which the next exchange waits for. That of
    the first stage with a backward ends with compute.
    """
    assert c.mix is not None
    assert c.span is not None
    is_first = c.span.before[c.mix.goes_back].sum(axis=0) == 0
    seconds: Numbers = is_first * most(c.forward_way - c.forward)
    return seconds


@frozen(eq=False)
class _Memory:
    """Free bytes of stages under 1F1B at two instants, each the start of a backward.

    Early: the first backward, when no gradient is live yet. Late: any other with as many in flight, or the second if
    all are. The backward is that of the last mlp, of the scores below it or of the head, whichever needs most.
    """

    c: Columns
    layers: Numbers
    back: Numbers
    """layers that have a backward; `layers` itself if all have"""
    flight: Numbers
    """micro-batches in flight"""
    held: Numbers
    """micro-batches in flight that surely hold all that they keep when a backward begins"""
    windows: Numbers
    """whole groups of micro-batches in flight together, after the first group"""
    rest: Numbers
    """micro-batches of the first group"""
    early: Numbers
    late: Numbers
    updated: Numbers
    """extra bytes of the last stage in its last micro-batch: the head may be updated before the last mlp's backward"""

    @classmethod
    def of(cls, c: Columns, layers: Numbers) -> _Memory:
        """Compute the bytes of stages; arguments as for `stage_bounds`."""
        m = c.micro_batches
        places = len(layers) - stage_numbers(layers)
        flight = np.minimum(places, m)
        sure = surely_held(c, flight)
        windows = np.floor((m - 1) / flight)
        # by a micro-batch in flight, whatever is recovered
        held = layer_sum(c, c.held, layers) + c.documents
        held[0] += c.tokens
        own = final = c.mlp_scratch + c.mlp_saved + c.mlp_ends + c.mlp_gradient + c.mlp_view
        if c.has_exchanges:
            own, final = backward_bytes(c, own)
        back = with_backward(c, layers)
        if back is not layers:
            own, final = np.where(back > 0, own, 0.0), np.where(back > 0, final, 0.0)
        free = c.capacity - ALIGNMENT_BYTES - own - unit_sum(c, c.carried, layers)  # the loss scale takes an alignment
        head = head_backward_bytes(c)
        if back is not layers:
            own, final = np.broadcast_to(own, free.shape), np.broadcast_to(final, free.shape)
            of_last, ended = own[-1], final[-1]
        else:
            of_last, ended = own, final
        free[-1] -= np.maximum(head - of_last, 0.0)
        largest = np.maximum(of_last, head)
        ended = ended - c.head_view  # nobody reads it after the head's last backward
        updated = largest - np.maximum(ended - c.gradients[HEAD], head)
        early = free - sure * held
        early[0] += np.where(windows[0] > 0, 0.0, c.embed_view)  # nobody reads it after the last forward
        early[-1] += np.where(m > 1, 0.0, largest - np.maximum(ended, head))
        late = free
        late -= surely_held(c, np.minimum(places, m - 1)) * held
        late -= unit_sum(c, c.gradients, layers)
        late += np.where(m == 2, own - final, 0.0)  # the second micro-batch is the last
        return cls(c, layers, back, flight, sure, windows, m - windows * flight, early, late, updated)

    def peak_bytes(self) -> Numbers:
        """Return lower bounds on the peaks of the stages."""
        m = self.c.micro_batches
        late = self.late.copy()
        late[0] += np.where(m - self.flight[0] >= 2, 0.0, self.c.embed_view)
        late[-1] += np.where(m > 2, 0.0, self.updated)
        late[..., m == 1] = np.inf  # the only backward is the first
        if self.c.has_exchanges:  # the second may be merged with it
            late[np.broadcast_to((m == 2) & (self.c.merged > 0) & (self.flight > 1), late.shape)] = np.inf
        np.minimum(late, self.early, out=late)
        return np.subtract(self.c.capacity, late, out=late)

    def recovery(self) -> Numbers:
        """Return the seconds of recovery in a step, summed over windows of micro-batches in flight together.

        Bytes that are free in the last window alone are shared by all windows: by convexity the sum gets no larger.
        """
        seconds = self.windows * self.window_recovery
        seconds += self.of_window(self.rest, self.early)
        return seconds

    @cached_property
    def window_recovery(self) -> Numbers:
        """Seconds of recovery in each window but the first."""
        return self.of_window(self.flight, self.free_in_windows())

    def free_in_windows(self) -> Numbers:
        """Return the bytes left in each window but the first."""
        late = self.late.copy()
        late[0] += self.c.embed_view / np.maximum(self.windows[0], 1.0)
        late[-1] += self.updated / np.maximum(self.windows[-1], 1.0)
        return late

    def recovery_on(self, slope: Numbers, intercept: Numbers, more: Numbers) -> Numbers:
        """Return a line below the recovery in a step, given that of a layer, with `more` bytes left in each window."""

        def of_window(count: Numbers, free: Numbers) -> Numbers:
            sure = np.minimum(count, self.held) * self.back - 1
            rest = (count * self.back - sure) * self.c.recovery_least
            return self.where_it_recovers(sure * intercept + slope * (free + more) + rest)

        return self.windows * of_window(self.flight, self.free_in_windows()) + of_window(self.rest, self.early)

    def of_window(self, count: Numbers, free: Numbers) -> Numbers:
        """Return the least seconds of recovery of `count` micro-batches in flight together.

        The layer that begins its backward is whole. Micro-batches that are not surely held take the least there is.
        """
        c = self.c
        sure = np.minimum(count, self.held) if c.has_exchanges else count
        layers = sure * self.back
        layers -= 1
        share = free / np.maximum(layers, 1.0)
        seconds = least_recovery(c, share)
        seconds *= layers
        seconds += c.recovery_least
        if c.has_exchanges:
            seconds += (count - sure) * self.back * c.recovery_least
        return self.where_it_recovers(seconds)

    def where_it_recovers(self, seconds: Numbers) -> Numbers:
        """Return seconds of recovery, without those of stages that only go forward."""
        return seconds if self.back is self.layers else np.where(self.back > 0, seconds, 0.0)


def recovery_seconds(c: Columns, layers: Numbers, merging: str | None = None) -> Numbers:
    """Return the least seconds of recovery of the stages of plans in a step; `layers` [stages, plans].

    Without a `merging`, passes may be merged in any way. With one, the seconds are infinite where a stage then does not
    fit.
    """
    c = c.cut(layers)
    if merging is None or c.in_order:
        return _memory(c, layers).recovery()
    memory = PlacedMemory.of_merging(c, layers, merging)
    return np.where(memory.peak_bytes() <= c.capacity, memory.recovery(), np.inf)


def transfer_seconds(c: Columns, layers: Numbers) -> Numbers:
    """Return the least seconds of transfers to another memory; 0 without one. Axes as for `recovery_seconds`."""
    c = c.cut(layers)
    if c.other is None:
        return np.zeros_like(layers)
    return crossing_bytes(c.other, layers, _memory(c.other.whole, layers)) / c.other.rate


def plan_bounds(c: Columns, layers: Numbers) -> StageBounds:
    """Bound plans of equally many stages: seconds [plans], peak bytes [plans, stages]. `layers` [plans, stages]."""
    plans, stages = layers.shape
    seconds, peaks = np.empty(plans), np.empty((stages, plans))
    before = np.tri(stages, k=-1)  # ones: the layers of earlier stages count
    step = max(1, _BLOCK // stages)
    for start in range(0, plans, step):
        rows = slice(start, start + step)
        part = np.ascontiguousarray(layers[rows].T)
        chosen = c.rows(rows).within(before @ part, part)
        memory = _memory(chosen, part)
        longest, peak = _seconds(chosen, memory, before @ part), memory.peak_bytes()
        longest, peak = _with_other_memory(chosen, part, longest, peak)
        peaks[:, rows] = peak
        found = longest.max(axis=0)
        if c.mix is not None:  # a stage whose layers are not known is bounded by less than all together
            found = np.maximum(found, shape_bounds(chosen))
        seconds[rows] = np.where(peak.max(axis=0) <= chosen.capacity, found, np.inf)
    return StageBounds(seconds, peaks.T)


_BLOCK = 12288
"""Stages bounded together, few enough that intermediate arrays stay in the cache."""


def _recovering_rows(c: Columns) -> list[int]:
    """Return the rows of a column that stand for layers with a backward: of all, or of some classes."""
    if c.mix is None or c.mix.all_go_back:
        return [LAYER]
    return [EXCESS + at for at, back in enumerate(c.mix.goes_back) if back]


def shape_bounds(c: Columns) -> Numbers:
    """Return lower bounds of the step seconds of shapes under any cuts; infinite if the state alone exceeds all memory.

    With a seconds of forward and backward for the whole model, x of a stage and b of its backward: a stage hides no
    more of the others than its own k - 1 forwards before its first backward, and as many backwards before its last. So
    the step is at least a + (M - 1) b for each stage, some of which has a P-th of all or, as layers are whole, more. If
    M > P, it is at least (M - k) x + a and the excess of later stages. The largest of these is least if all stages are
    equal, a + (M - 1) a / P; a heavier stage may have less, as it hides the later ones. With tensor-parallel ranks it
    is only known that stages are passed before a stage's work and after it (`placed_shape_seconds`), and that every
    P-th micro-batch's round trip makes a chain.
    """
    m, p = c.micro_batches, c.pp
    everything = c.everything
    units = c.forward + c.backward
    both = everything @ units
    heaviest = evenest(c, units)
    if c.overlaps_steps:
        # a stage's backwards lie on the way back; stages that only go forward wait for nothing
        last = (m - 1) * evenest(c, c.backward) * (1 - c.merged) * c.in_order
        drained = c.in_one_step @ (c.first_forward + c.first_backward) + last
    elif c.in_order:
        last = np.maximum(np.where(m > p, both / p, 0.0), evenest(c, c.backward))
        drained = both + (m - 1) * last + 2 * c.message * (p - 1) + c.tail[EMBED]
        trips = np.ceil(m / p) * c.there_and_back + c.tail[EMBED]
        drained = np.where(c.merged > 0, np.maximum(placed_shape_seconds(c), trips), np.maximum(drained, trips))
    else:
        drained = placed_shape_seconds(c)
        if c.is_one_chunk_order:
            drained = np.maximum(m * heaviest, first_slice_there_and_back(c))
    recovering = units.copy()
    recovering[_recovering_rows(c)] += c.slices * c.recovery_least
    busy = evenest(c, m * recovering + c.update)
    link = (everything @ c.link + m * (everything @ c.link_each)) / p
    tensor = m * (everything @ c.exchange) / p
    longest = np.maximum(np.maximum(drained, busy), np.maximum(link, tensor))
    return np.where(least_bytes(c) <= c.capacity, longest, np.inf)
