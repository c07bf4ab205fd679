"""Bounds of plans that may use a memory beside DDR: state stays there from step to step, or what is kept for the backward waits there.

Whatever goes there, DDR holds views, gradients, and what a backward itself works on: that is what `granted` leaves of the columns, with no
more recovery than the least. What the bounds hold besides is somewhere, so that, of the bytes that are live at an instant when all are in DDR,

- no more are elsewhere than that memory has room for;
- those that DDR has no room for cross its ways once in the step: an update streams its state, what is stored is fetched. So a step takes their
  bytes over the rate of the slower way. (State that is updated where it is crosses nothing.)
- *recovery*: of S bytes that are stored in a step of T seconds, S <= rate * T. A layer recovers r(k) seconds at least, of k bytes kept in DDR or
  elsewhere; r is convex, so for each line a + b k below it (b < 0) the sum over the layers in flight is at least n a + b (F + S), of F bytes that are
  free with all state elsewhere. So T >= W + n a + b (F + rate * T), W being the work without recovery, or T >= (W + n a + b F) / (1 - b * rate).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from attrs import evolve

from ratrain.passes.recovery.recompute import PEER
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrainc.planner.bounds.columns import Columns, Numbers, OtherMemory, unit_sum

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine


class Recovering(Protocol):
    """The bytes of stages with all in DDR."""

    def peak_bytes(self) -> Numbers:
        """Least peaks."""
        ...

    def recovery_on(self, slope: Numbers, intercept: Numbers, more: Numbers) -> Numbers:
        """A line below the recovery in a step, with so many more bytes left."""
        ...


def granted(whole: Columns, machine: Machine, memory: str) -> Columns:
    """The columns of shapes that may use a memory: `host`, `file`, or the DDR of other stages, by its name."""
    if memory == PEER:
        rate = max(group.link.bandwidth for group in machine.link_groups)
        other = OtherMemory(whole, np.inf, rate, 2 / rate, takes_state=False, streams=True)
    else:
        home = Home(memory)
        ways = [machine.store_bandwidth(home, fetches=fetches) for fetches in (False, True)]
        both_ways = sum(1 / way for way in ways)
        room = float(dict(machine.stores)[home])
        other = OtherMemory(whole, room, min(ways), both_ways, takes_state=True, streams=not machine.updates_in(home))
    nothing = np.zeros_like(whole.activation)
    flat = np.zeros_like(whole.recovery_slope)
    left = evolve(
        whole, activation=nothing, always_kept=nothing, recovery_slope=flat, recovery_intercept=flat, other=other
    )
    if not other.takes_state:
        return left
    # the host updates what streams, and compute does not wait for it
    tail = whole.tail - whole.tail_update
    return evolve(left, carried=whole.carried - whole.state, update=np.zeros_like(whole.update), tail=tail)


def all_offloaded(c: Columns) -> Columns:
    """The columns of shapes that may use another memory, with all state there and nothing stored: its way there and back is the link's."""
    assert c.other is not None
    whole, moved = c.other.whole, c.other.takes_state
    if not moved:
        return whole
    way = whole.state * c.other.both_ways
    return evolve(whole, carried=whole.carried - whole.state, update=np.zeros_like(whole.update), link=whole.link + way)


def with_other_memory(
    other: OtherMemory, layers: Numbers, memory: Recovering, seconds: Numbers, peak: Numbers
) -> tuple[Numbers, Numbers]:
    """Step seconds and peaks of stages, `seconds` and `peak` being those of the granted columns, `memory` that with all in DDR."""
    c, state = other.whole, _state_there(other, layers)
    longest = np.maximum(seconds, crossing_bytes(other, layers, memory) / other.rate)
    work = unit_sum(c.micro_batches * (c.forward + c.backward), layers, c.head_stage)
    for slope, intercept in zip(c.recovery_slope, c.recovery_intercept, strict=True):
        least = work + memory.recovery_on(slope, intercept, state)
        np.maximum(longest, least / (1 - slope * other.rate), out=longest)
    return longest, np.maximum(peak, memory.peak_bytes() - other.room)


def crossing_bytes(other: OtherMemory, layers: Numbers, memory: Recovering) -> Numbers:
    """Bytes of stages that cross the memory's ways in a step, each of them once at least: those that DDR has no room for."""
    away = np.maximum(memory.peak_bytes() - other.whole.capacity, 0.0)
    return away if other.streams else np.maximum(away - _state_there(other, layers), 0.0)


def _state_there(other: OtherMemory, layers: Numbers) -> Numbers:
    """The most bytes of state of stages that may be in the memory."""
    c = other.whole
    of_stages = unit_sum(c.state, layers, c.head_stage)
    return np.minimum(of_stages, other.room) if other.takes_state else np.zeros_like(of_stages)
