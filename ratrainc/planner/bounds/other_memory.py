"""Bounds of plans that may use another memory for state, or for activations that wait for their backward.

DDR always holds views, gradients and the operands of a backward: that is what `granted` leaves of the columns, with the
least recovery. All other bytes of the bounds are somewhere. So, of the bytes live at an instant with everything in DDR,

- no more are elsewhere than that memory has room for;
- those that DDR has no room for are transferred once in the step: an update streams its state, and stored activations
  are fetched. So a step takes their bytes over the rate of the slower direction. (State that is updated in place is not
  transferred.)
- *recovery*: of S bytes stored in a step of T seconds, S <= rate * T. A layer recovers at least r(k) seconds for k
  bytes kept in DDR or elsewhere; r is convex, so for each line a + b k below it (b < 0) the sum over the n layers in
  flight is at least n a + b (F + S), with F bytes free if all state is elsewhere. So T >= W + n a + b (F + rate * T),
  where W is the work without recovery, or T >= (W + n a + b F) / (1 - b * rate).

Example: with W + n a = 10 s, b = -1 s/GB, F = 2 GB and 1 GB/s, T >= (10 - 2) / (1 + 1) = 4 s by recovery alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import evolve

from ratrain.passes.recovery.recompute import PEER
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrainc.planner.bounds.shape_columns import Columns, Numbers, OtherMemory, most_sum, unit_sum

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine


class Recovering(Protocol):
    """Bytes of stages with everything in DDR."""

    def peak_bytes(self) -> Numbers:
        """Return lower bounds on the peaks of the stages."""
        ...

    def recovery_on(self, slope: Numbers, intercept: Numbers, more: Numbers) -> Numbers:
        """Return a line below the recovery in a step, with `more` bytes left."""
        ...


def granted(whole: Columns, machine: Machine, memory: str) -> Columns:
    """Return the columns of shapes that may use a memory: `host`, `file`, or `peer`, the DDR of other stages."""
    if memory == PEER:
        # the room that other stages have is not known here: it counts as unlimited, and links as the fastest ones
        rate = max(group.link.bandwidth for group in machine.link_groups)
        other = OtherMemory(whole, np.inf, rate, 2 / rate, takes_state=False, streams=True)
    else:
        home = Home(memory)
        ways = [machine.store_bandwidth(home, fetches=fetches) for fetches in (False, True)]
        both_ways = sum(1 / way for way in ways)
        room = float(dict(machine.stores)[home])
        other = OtherMemory(whole, room, min(ways), both_ways, takes_state=True, streams=not machine.updates_in(home))
    nothing, flat = np.zeros_like(whole.held), np.zeros_like(whole.recovery_slope)
    left = evolve(whole, held=nothing, recovery_slope=flat, recovery_intercept=flat, other=other)
    if not other.takes_state:
        return left
    # state that streams is updated by the host, and compute does not wait for it
    tail = whole.tail - whole.tail_update
    return evolve(left, carried=whole.carried - whole.state, update=np.zeros_like(whole.update), tail=tail)


def all_offloaded(c: Columns) -> Columns:
    """Return the columns with all state, and no activations, in the other memory; the link carries it both ways."""
    assert c.other is not None
    whole, moved = c.other.whole, c.other.takes_state
    if not moved:
        return whole
    way = whole.state * c.other.both_ways
    return evolve(whole, carried=whole.carried - whole.state, update=np.zeros_like(whole.update), link=whole.link + way)


def with_other_memory(
    other: OtherMemory, layers: Numbers, memory: Recovering, seconds: Numbers, peak: Numbers
) -> tuple[Numbers, Numbers]:
    """Return step seconds and peaks from the bounds of granted columns; `memory` has the bytes with all in DDR."""
    c, state = other.whole, _state_there(other, layers)
    # what DDR has no room for crosses once, whatever else is chosen
    longest = np.maximum(seconds, crossing_bytes(other, layers, memory) / other.rate)
    work = unit_sum(c, c.micro_batches * (c.forward + c.backward), layers)
    for slope, intercept in zip(c.recovery_slope, c.recovery_intercept, strict=True):
        least = work + memory.recovery_on(slope, intercept, state)
        # a line's slope is at most 0, so the divisor is 1 or more
        np.maximum(longest, least / (1 - slope * other.rate), out=longest)
    return longest, np.maximum(peak, memory.peak_bytes() - other.room)


def crossing_bytes(other: OtherMemory, layers: Numbers, memory: Recovering) -> Numbers:
    """Return the bytes of stages that are transferred at least once in a step: those that DDR has no room for."""
    away = np.maximum(memory.peak_bytes() - other.whole.capacity, 0.0)
    return away if other.streams else np.maximum(away - _state_there(other, layers), 0.0)


def _state_there(other: OtherMemory, layers: Numbers) -> Numbers:
    """Return the most bytes of state of stages that may be in the memory."""
    c = other.whole
    of_stages = most_sum(c, c.state, layers)
    return np.minimum(of_stages, other.room) if other.takes_state else np.zeros_like(of_stages)
