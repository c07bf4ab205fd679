"""Lower bounds of stages under any order, from the numbers that `held_passes.py` reads of the order.

`bounds.py` has tighter ones for 1F1B, and for the times of ZB-H1. A stage has n layers in V chunks, whose passes have
floor(n / V) layers at least. With f and b seconds of forward and backward a micro-batch, M micro-batches and R seconds
of recovery:

- *work*: the compute engine does M (f + b) + R and the updates.
- *stages before s* are passed by the first slice of the first micro-batch on its way to the first chunk of s, and by
  its gradient on the way back. If backwards are whole, all work of s lies between; if weight halves may come later,
  only its forwards surely do.
- *there and back*: the first slice passes all layers of all chunks and its gradient comes back, which is longer than
  the work of a stage if few micro-batches do not fill the pipeline.
- *collectives*: their engine works one after another, and so does the engine of tensor exchanges.
- *bytes*: at an instant of the order a number of passes is held, each with the inputs of its layers and, in slices,
  keys and values.
- *head*: when the head goes back, the passes held then hold all that they keep, since no layer has begun its backward;
  the head's view, gradient and workspace are live beside them. Of slices this is left out.
- *halves*: a pass whose weight half comes later holds the operands of both halves of a layer, and the results of the
  first half for the second, for all its layers, when the last of them has passed its gradient on.
- *slices*: gradients are reduced after the last slice of a micro-batch. When the second slice goes back, all layers of
  that pass have full gradients, and all slices but the first to go back are held.
- *recovery*: the free bytes of that instant, shared by the layers of the held passes, give their least recovery.
  Instants without a common pass add up; all other passes take the least there is.

With tensor-parallel ranks a pass may be merged with the next one, and backwards may be in halves: bytes and recovery
are the least under the ways to merge passes, and the weight halves of two passes may follow after the last gradient has
left.

If slices differ, each figure is that of the smallest slice, and the hull is that of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.config.types import ALIGNMENT_BYTES
from ratrain.ratrainc.planner.bounds.held_passes import held_passes
from ratrain.ratrainc.planner.bounds.pass_order import MERGINGS
from ratrain.ratrainc.planner.bounds.shape_columns import (
    Columns,
    Numbers,
    backward_bytes,
    evenest,
    head_backward_bytes,
    layer_sum,
    least_recovery,
    left_behind,
    raise_to_engines,
    stage_numbers,
    unit_sum,
    with_backward,
)
from ratrain.ratrainc.planner.space.units import EMBED, HEAD, LAYER

if TYPE_CHECKING:
    from collections.abc import Sequence


@frozen(eq=False)
class PlacedMemory:
    """Free bytes of stages at instants of their orders; axes as for `stage_bounds`."""

    c: Columns
    layers: Numbers
    back: Numbers
    """layers that have a backward, at least; `layers` itself if all have"""
    pass_layers: Numbers
    """least layers with a backward of each pass"""
    early_held: Numbers
    late_held: Numbers
    windows: Numbers
    head_held: Numbers
    head_windows: Numbers
    waiting_held: Numbers
    waits: Numbers
    early: Numbers
    """bytes left when the most passes are held"""
    late: Numbers
    """bytes left when all gradients are live too; infinite if never so"""
    headed: Numbers
    """bytes left when the head goes back and all gradients are live; infinite if never so"""
    between: Numbers
    """bytes left when the most passes are between the halves of their backwards"""
    waited: Numbers
    """bytes left when most passes are held or between these halves"""
    sliced: Numbers
    """bytes left when the second slice of a micro-batch goes back; infinite without slices"""
    others: tuple[PlacedMemory, ...] = ()
    """the same if passes are merged in another way"""

    @classmethod
    def of(cls, c: Columns, layers: Numbers) -> PlacedMemory:
        """Compute the bytes of stages; arguments as for `stage_bounds`."""
        first, *others = MERGINGS if c.has_exchanges and (c.merged > 0).any() else MERGINGS[:1]
        memory = cls.of_merging(c, layers, first)
        return evolve(memory, others=tuple(cls.of_merging(c, layers, merging) for merging in others))

    @classmethod
    def of_merging(cls, c: Columns, layers: Numbers, merging: str) -> PlacedMemory:
        """Compute the bytes of stages whose passes are merged in one way."""
        whole = ("early", "late", "windows", "headed", "head_windows", "returned")
        apart = ("pending", "pending_held", "waiting", "waiting_held", "waits")
        found = _of_stages(c, (*whole, *apart), layers, merging)
        early_held, late_held, windows, head_held, head_windows, returned = found[: len(whole)]
        pending, others, waiting, waiting_held, waits = found[len(whole) :]
        back = with_backward(c, layers)
        # which layers a chunk has is not known here, so they count as the least ones
        held = np.floor(layers / c.chunks) * c.held[LAYER] if c.is_chunked else layer_sum(c, c.held, layers)
        pass_layers = np.zeros_like(back) if c.is_chunked and back is not layers else np.floor(back / c.chunks)
        own = c.mlp_saved + c.mlp_ends + c.mlp_view
        own += 0.0 if c.has_halves else c.mlp_scratch + c.mlp_gradient
        final = own
        if c.has_exchanges:
            own, final = backward_bytes(c, own)
        if back is not layers:
            own, final = np.where(back > 0, own, 0.0), np.where(back > 0, final, 0.0)
        free = c.capacity - ALIGNMENT_BYTES - unit_sum(c, c.carried, layers)
        # the stage of an instant may have dropped these by then, so they count as free
        free[0] += c.embed_view  # nobody reads it after the last forward
        free[c.head_stage] += np.where(c.micro_batches > 2, 0.0, c.head_view)  # nor this after the head's last backward
        of_halves = pass_layers * (c.pending - c.layer_part)
        between = free - pending * of_halves - others * held
        waited = free - waiting * of_halves - waiting_held * held
        at_head = free - head_backward_bytes(c)
        free = free - own
        # the second of two merged slices may be done too
        sliced = free - (c.slices - 1 - c.merged) * held - pass_layers * c.sliced_gradients[LAYER] + c.mlp_gradient
        early = free - early_held * held
        gradients = unit_sum(c, c.gradients, layers)
        gradients[c.head_stage] -= np.where(c.micro_batches > 2, 0.0, c.gradients[HEAD])  # the head may be updated
        headed = at_head - head_held * held - gradients
        headed = np.where((head_held > 0) & (c.slices == 1), headed, np.inf)
        late = free - late_held * held - gradients
        late += np.where(c.micro_batches > 2, 0.0, own - final)
        late = np.where(late_held > 0, late, np.inf)
        sliced = np.where((returned > 0) & (not c.has_halves), sliced, np.inf)
        held_at = (early_held, late_held, windows, head_held, head_windows, waiting_held, waits)
        return cls(c, layers, back, pass_layers, *held_at, early, late, headed, between, waited, sliced)

    def peak_bytes(self) -> Numbers:
        """Return lower bounds on the peaks of the stages."""
        free = (self.early, self.late, self.headed, self.between, self.sliced)
        least: Numbers = self.c.capacity - np.minimum.reduce(np.broadcast_arrays(*free))
        for other in self.others:
            least = np.minimum(least, other.peak_bytes())
        return least

    def recovery(self) -> Numbers:
        """Return the least seconds of recovery of the stages in a step."""
        c = self.c
        least = c.micro_batches * c.slices * self.back * c.recovery_least
        # `late` and `headed` are infinite if there is no such instant; then there are no windows either
        late = self.more_than_least(self.late_held, np.where(np.isfinite(self.late), self.late, 0.0))
        more = np.maximum(self.more_than_least(self.early_held, self.early), self.windows * late)
        headed = np.where(np.isfinite(self.headed), self.headed, 0.0)
        at_head = np.where(np.isfinite(self.headed), self.more_than_least(self.head_held, headed, begun=0), 0.0)
        more = np.maximum(more, self.head_windows * at_head)
        if c.has_halves:  # no layer is at work then
            waited = self.more_than_least(self.waiting_held, self.waited, begun=0)
            more = np.maximum(more, self.waits * waited)
        total: Numbers = least + more
        if not self.others:
            return total
        # a way in which the stage does not fit is not taken, unless it fits in none
        fitting = np.full_like(total, np.inf)
        for memory, seconds in ((evolve(self, others=()), total), *((each, each.recovery()) for each in self.others)):
            fitting = np.minimum(fitting, np.where(memory.peak_bytes() <= c.capacity, seconds, np.inf))
        return np.where(np.isfinite(fitting), fitting, total)

    def recovery_on(self, slope: Numbers, intercept: Numbers, more: Numbers) -> Numbers:
        """Return a line below the recovery in a step, given that of a layer, with `more` bytes left at each instant."""
        c = self.c

        def more_than_least(held: Numbers, free: Numbers) -> Numbers:
            items = np.maximum(held * self.pass_layers - 1, 0.0)
            return items * (intercept - c.recovery_least) + slope * (free + more)

        late = self.windows * more_than_least(self.late_held, np.where(np.isfinite(self.late), self.late, 0.0))
        least = c.micro_batches * c.slices * self.back * c.recovery_least
        total: Numbers = least + np.maximum(more_than_least(self.early_held, self.early), late)
        for other in self.others:
            total = np.minimum(total, other.recovery_on(slope, intercept, more))
        return total

    def more_than_least(self, held: Numbers, free: Numbers, begun: int = 1) -> Numbers:
        """Return the recovery of held passes above the least, without layers that have `begun` their backward."""
        items = np.maximum(held * self.pass_layers - begun, 0.0)
        share = free / np.maximum(items, 1.0)
        more: Numbers = items * (least_recovery(self.c, share) - self.c.recovery_least)
        return more


def _of_stages(c: Columns, names: Sequence[str], layers: Numbers, merging: str) -> list[Numbers]:
    """Return fields of `HeldPasses` by name: stages along the first axis, shapes along the last."""
    used, place = np.unique(2 * c.order + (c.merged > 0), return_inverse=True)
    placements = [held_passes(c.schedule, c.orders[at // 2], merging if at % 2 else "none") for at in used.tolist()]
    tables = (np.array([[getattr(stage, name) for stage in stages] for stages in placements], float) for name in names)
    return [table.T[:, place].reshape(table.shape[1], *(1,) * (layers.ndim - 2), -1) for table in tables]


def placed_time(c: Columns, memory: PlacedMemory, before: Numbers) -> Numbers:
    """Return the seconds of stages: their longest chain, or a busier engine."""
    m, layers = c.micro_batches, memory.layers
    work = unit_sum(c, m * (c.forward + c.backward), layers) + memory.recovery()
    window = unit_sum(c, m * c.forward, layers) if c.has_halves else work - left_behind(c, layers)
    if not (c.has_halves or c.is_chunked):  # of few micro-batches exchanges may take longer than the work
        window = np.maximum(window, unit_sum(c, c.first_forward + c.first_backward, layers))
    longest: Numbers = window + _first_slice_way(c, before, stage_numbers(layers)) + c.tail[EMBED]
    longest = np.maximum(longest, first_slice_there_and_back(c))
    return raise_to_engines(c, longest, work, layers)


def _first_slice_way(c: Columns, before: Numbers, stage: Numbers) -> Numbers:
    """Return the seconds of the first slice to each stage's first chunk, and back if backwards are whole."""
    if c.overlaps_steps:
        return np.zeros_like(stage)
    columns = c.first_forward if c.has_halves else c.first_forward + c.first_backward
    # of n layers of a stage, its first chunk has (n - (V - 1)) / V or more
    passed = np.maximum(stage, (before - stage * (c.chunks - 1)) / c.chunks)
    up: Numbers = stage * (2 * c.message) + (columns[EMBED] + passed * columns[LAYER])
    up[0] = 0.0
    return up


def first_slice_there_and_back(c: Columns) -> Numbers:
    """Return the seconds of the first slice through all layers and of its gradient back, whatever the order.

    Left out are messages between the chunks of a stage, and backwards in halves: their input halves are timed with
    tensor-parallel ranks alone.
    """
    backward = c.first_backward * (c.merged if c.has_halves else 1.0)
    hops = 0.0 if c.overlaps_steps else 2 * c.message * (c.pp - 1)
    way: Numbers = c.in_one_step @ (c.first_forward + backward) + hops
    return way


def placed_shape_seconds(c: Columns) -> Numbers:
    """Return lower bounds of shapes under any cuts, by the heaviest stage, or by the filling and draining pipeline.

    With one chunk a stage, x seconds of a first slice there and back on a stage, and r M x of work before the last
    gradient leaves it, a step takes T >= r M x + the sum of x over the stages before. The largest of these is least if
    all are equal: T = X / (1 - (1 - 1 / (r M))^P) for X seconds in all. This holds for all units with the least r of
    them, and for layers alone: a gather of the embedding may take longer than its compute.
    """
    m, p = c.micro_batches, c.pp
    everything = c.everything
    busy: Numbers = np.maximum(m * evenest(c, c.forward + c.backward), first_slice_there_and_back(c))
    if c.has_halves or c.is_chunked or c.mix is not None:
        return busy
    first = c.first_forward + c.first_backward
    ratios = np.maximum((m * (c.forward + c.backward) - 2 * c.weight_half) / first, 1.0)
    longest = busy
    for passed, ratio in ((everything @ first, ratios.min(axis=0)), (c.layers * first[LAYER], ratios[LAYER])):
        longest = np.maximum(longest, passed / (1 - (1 - 1 / ratio) ** p) + c.tail[EMBED])
    return longest
