"""Shared bandwidth: the flows through a resource get max-min fair rates, like water in connected vessels.

All rates rise together; a flow stops rising when it reaches its own limit or a resource it passes through is full. A change on one
resource reaches the resources that its flows also pass through, theirs in turn, and no others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrain_ir.support.loops import part
from ratrain.targets.simulator.event_heap import put
from ratrain.targets.simulator.run_state import CHANGED

if TYPE_CHECKING:
    from ratrain.targets.simulator.flat_program import Int64s, Records


@part
def start_flow(
    slots: Records, resources: Records, routes: Int64s, sizes: Int64s, slot: int, nbytes: float, route: int, now: float
) -> None:
    """Let bytes flow from now on; `share_anew` gives the rate."""
    slots[slot].active = 1
    slots[slot].remaining = nbytes
    slots[slot].rate = 0.0
    slots[slot].since = now
    slots[slot].route = route
    for at in range(routes.shape[1]):
        resource = routes[route, at]
        if resource >= 0:
            note_change(resources, sizes, resource)


@part
def end_flow(slots: Records, resources: Records, routes: Int64s, sizes: Int64s, slot: int) -> None:
    """All bytes of a slot have flowed."""
    slots[slot].active = 0
    route = slots[slot].route
    for at in range(routes.shape[1]):
        resource = routes[route, at]
        if resource >= 0:
            resources[resource].moved += slots[slot].remaining
            note_change(resources, sizes, resource)


@part
def note_change(resources: Records, sizes: Int64s, resource: int) -> None:
    """Rates around a resource are to be found anew before time goes on."""
    if resources[resource].changed_place < 0:
        resources[resource].changed_place = sizes[CHANGED]
        resources[sizes[CHANGED]].changed = resource
        sizes[CHANGED] += 1


@part
def share_anew(
    slots: Records, heap: Records, resources: Records, routes: Int64s, users: Int64s, sizes: Int64s, now: float
) -> None:
    """New rates for all flows that the changes reach."""
    count = reach(slots, resources, routes, users, sizes)
    changed = sizes[CHANGED]
    for place in range(changed):
        resource = resources[place].changed
        resources[resource].left = resources[resource].capacity
        resources[resource].flows = 0
    for place in range(count):
        route = slots[slots[place].reached].route
        for at in range(routes.shape[1]):
            resource = routes[route, at]
            if resource >= 0:
                resources[resource].flows += 1
    while count:
        level = np.inf
        for place in range(changed):
            resource = resources[place].changed
            if resources[resource].flows:
                level = min(level, resources[resource].left / resources[resource].flows)
        for place in range(count):
            level = min(level, slots[slots[place].reached].limit)
        count = settle(slots, heap, resources, routes, sizes, count, level, now)
    for place in range(changed):
        resources[resources[place].changed].changed_place = -1
    sizes[CHANGED] = 0


@part
def reach(slots: Records, resources: Records, routes: Int64s, users: Int64s, sizes: Int64s) -> int:
    """Collect the flows through changed resources, and note as changed whatever else these pass through."""
    count = place = 0
    while place < sizes[CHANGED]:
        resource = resources[place].changed
        for user in range(resources[resource].user_first, resources[resource].user_stop):
            slot = users[user]
            if not slots[slot].active:
                continue
            route = slots[slot].route
            passes, collected = False, False
            for at in range(routes.shape[1]):
                passes |= routes[route, at] == resource
            if not passes:
                continue
            for at in range(routes.shape[1]):
                other = routes[route, at]
                if other >= 0 and other != resource:
                    note_change(resources, sizes, other)
                    collected |= resources[other].changed_place < place
            if not collected:
                slots[count].reached = slot
                count += 1
        place += 1
    return count


@part
def settle(
    slots: Records,
    heap: Records,
    resources: Records,
    routes: Int64s,
    sizes: Int64s,
    count: int,
    level: float,
    now: float,
) -> int:
    """Give the flows that can rise no further than `level` that rate; the number of flows that can, which come first."""
    rising, end = 0, count
    while rising < end:
        slot = slots[rising].reached
        if slots[slot].limit <= level or is_full(slots, resources, routes, slot, level):
            end -= 1
            slots[rising].reached = slots[end].reached
            slots[end].reached = slot
        else:
            rising += 1
    for place in range(end, count):
        slot = slots[place].reached
        set_rate(slots, heap, resources, routes, sizes, slot, level, now)
        route = slots[slot].route
        for at in range(routes.shape[1]):
            resource = routes[route, at]
            if resource >= 0:
                resources[resource].left -= level
                resources[resource].flows -= 1
    return rising


@part
def is_full(slots: Records, resources: Records, routes: Int64s, slot: int, level: float) -> bool:
    """Whether a resource of a flow has no more than `level` for each flow that has no rate yet."""
    route = slots[slot].route
    for at in range(routes.shape[1]):
        resource = routes[route, at]
        if resource >= 0 and resources[resource].left / resources[resource].flows <= level:
            return True
    return False


@part
def set_rate(
    slots: Records, heap: Records, resources: Records, routes: Int64s, sizes: Int64s, slot: int, rate: float, now: float
) -> None:
    """Let a flow go on at a rate; one that keeps its rate is left as it is, and so is the time it ends."""
    if rate == slots[slot].rate:
        return
    flowed = min(slots[slot].remaining, slots[slot].rate * (now - slots[slot].since))
    route = slots[slot].route
    for at in range(routes.shape[1]):
        resource = routes[route, at]
        if resource >= 0:
            resources[resource].moved += flowed
    slots[slot].remaining -= flowed
    slots[slot].since = now
    slots[slot].rate = rate
    put(slots, heap, sizes, slot, now + slots[slot].remaining / rate)
