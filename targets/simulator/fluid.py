"""Shared bandwidth: the flows through a resource get max-min fair rates, like water in connected vessels.

Progressive filling (Bertsekas and Gallager, Data Networks): all rates rise together. A flow stops rising when it
reaches its own limit or when a resource it passes through is full; the others go on. Example: flows a and b share a
link of 10, and b and c share one of 4:

    link 1 (10):  a b      level 2: link 2 is full, b and c settle at 2
    link 2  (4):    b c    level 8: link 1 is full, a settles at 8

Rates are recomputed only around a change: from a changed resource to all that its flows also pass through, from these
to theirs, and so on. All other flows keep their rates, and the events of their ends stay where they are. Each round of
filling settles at least one flow, so that a recomputation costs at most O(flows (flows + resources)) of the part that
is reached.

Guarantee: no flow can get a higher rate without lowering one that is not higher.
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
    """Let `nbytes` bytes flow along a route from `now` on; `recompute_rates` gives the rate."""
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
    """End the flow of a slot: count its last bytes as moved and mark its resources as changed."""
    slots[slot].active = 0
    route = slots[slot].route
    for at in range(routes.shape[1]):
        resource = routes[route, at]
        if resource >= 0:
            resources[resource].moved += slots[slot].remaining
            note_change(resources, sizes, resource)


@part
def note_change(resources: Records, sizes: Int64s, resource: int) -> None:
    """Mark a resource as changed: rates around it are recomputed before time goes on."""
    if resources[resource].changed_place < 0:
        resources[resource].changed_place = sizes[CHANGED]
        resources[sizes[CHANGED]].changed = resource
        sizes[CHANGED] += 1


@part
def recompute_rates(
    slots: Records, heap: Records, resources: Records, routes: Int64s, users: Int64s, sizes: Int64s, now: float
) -> None:
    """Recompute the rates of all flows that the changed resources reach, and empty the list of changes."""
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
    # The first `count` reached flows are still without a rate. Every round gives at least one of them its rate: `level`
    # is the least value at which some limit or some resource stops a flow, computed by the same division as in
    # `is_full`, so that the comparison there is exact.
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
    """Collect in `reached` the flows through changed resources and return their number.

    All other resources on their routes are marked as changed in turn.
    """
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
                    # A flow is met once for each changed resource on its route. It counts at the first one: if another
                    # of its resources stands earlier in the list of changes, it has been collected there.
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
    """Give rate `level` (bytes/s) to the flows that stop there: at their own limit, or at a full resource.

    The first `count` places of `reached` are the flows without a rate. Those that go on are moved to the front; return
    their number. The others' rates are taken from the resources on their routes, and their ends move in the heap.
    """
    rising, end = 0, count
    # All flows are judged before any bandwidth is taken away: `left` and `flows` must stay those that `level` was
    # computed from.
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
    """Return whether a resource on a flow's route has at most `level` for each of its flows without a rate."""
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
    """Let a flow go on at another rate: count the bytes that have flowed so far and move the event of its end.

    If the rate is unchanged, nothing is touched: the time of its end keeps its exact bits.
    """
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
