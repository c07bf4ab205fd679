"""Place buffers in the order of time, with a list of free bytes sorted by address: one sweep, near-linear.

    event            holes (free ranges by address)
    birth of a, 4    [4, end)
    birth of b, 2    [6, end)
    death of a       [0, 4) [6, end)
    birth of c, 3    [3, 4) [6, end)          LOWEST puts c at 0

How a buffer takes its hole is a *policy* of its class (classes go by lifetime): the lowest that is large enough, the
smallest, or the highest below a target. Two-ended placement is the policy that keeps short-lived buffers together under
the target. A beam of sweeps changes the policies as it goes and keeps the ones that need the least height and tear the
fewest holes.

Cost: events times holes at worst, near-linear in practice; a beam runs `width` x `tries` sweeps. Guarantee: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrain_ir.support.loops import compiled

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import Int64s

LOWEST, HIGHEST, TIGHTEST = 0, 1, 2
POLICIES = 3
"""Number of policies."""
ENDLESS = 1 << 62
"""End of the last hole."""
_MULTIPLIER, _INCREMENT, _MASK = 1103515245, 12345, (1 << 31) - 1
"""Constants of a linear congruential generator: the same numbers on every machine, and no global state."""


@compiled
def sweep(events: Int64s, sizes: Int64s, classes: Int64s, policy: Int64s, target: int, offsets: Int64s) -> int:
    """Place buffers as they are born; fill `offsets` and return the height.

    `events` are buffers in the order of time, b for a birth and ~b for a death. `policy` is by class.
    """
    room = most_live(events) + 2
    lows, highs = np.zeros(room, np.int64), np.zeros(room, np.int64)
    highs[0] = ENDLESS
    slots = np.arange(len(sizes))
    _, top = swept(
        events, 0, len(events), sizes, slots, classes, policy, target, lows, highs, 1, 0, offsets, np.empty(0, np.int64)
    )
    return top


@compiled
def swept(
    events: Int64s, begin: int, end: int, sizes: Int64s, slots: Int64s, classes: Int64s, policy: Int64s, target: int,
    lows: Int64s, highs: Int64s, holes: int, top: int, held: Int64s, born: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Continue a sweep from event `begin` to `end`, exclusive; return the new number of holes and the new height.

    `held` has the offset of each live buffer at its slot. Offsets are also listed in `born`, unless it is empty.
    """
    births = 0
    for k in range(begin, end):
        event = events[k]
        if event < 0:
            low = held[slots[~event]]
            holes = give_back(low, low + sizes[~event], lows, highs, holes)
            continue
        size = sizes[event]
        wanted = policy[classes[event]]
        chosen, low = -1, 0
        # From the top hole down, and never above `target`; if nothing fits below the target, the lowest hole is taken
        # instead.
        if wanted == HIGHEST:
            for h in range(holes - 1, -1, -1):
                high = min(highs[h], target)
                if high - lows[h] >= size:
                    chosen, low = h, high - size
                    break
        if chosen < 0:
            for h in range(holes):
                width = highs[h] - lows[h]
                if width >= size and (chosen < 0 or width < highs[chosen] - lows[chosen]):
                    chosen, low = h, lows[h]
                    # The first hole is the lowest; the tightest needs all holes, unless one fits exactly. The last hole
                    # always fits.
                    if wanted != TIGHTEST or width == size:
                        break
        held[slots[event]] = low
        if len(born) > 0:
            born[births] = low
        births += 1
        top = max(top, low + size)
        holes = take(chosen, low, low + size, lows, highs, holes)
    return holes, top


@compiled
def give_back(low: int, high: int, lows: Int64s, highs: Int64s, holes: int) -> int:
    """Join freed bytes [low, high) to the holes next to them; return the new number of holes."""
    left, right = 0, holes
    while left < right:  # the first hole that starts at or above `low`
        middle = (left + right) // 2
        if lows[middle] < low:
            left = middle + 1
        else:
            right = middle
    below = left > 0 and highs[left - 1] == low
    above = left < holes and lows[left] == high
    if below and above:
        highs[left - 1] = highs[left]
        return removed(left, lows, highs, holes)
    if below:
        highs[left - 1] = high
        return holes
    if above:
        lows[left] = low
        return holes
    for k in range(holes, left, -1):
        lows[k], highs[k] = lows[k - 1], highs[k - 1]
    lows[left], highs[left] = low, high
    return holes + 1


@compiled
def take(chosen: int, low: int, high: int, lows: Int64s, highs: Int64s, holes: int) -> int:
    """Take bytes [low, high) out of the hole `chosen`; return the new number of holes."""
    if low > lows[chosen] and high < highs[chosen]:
        for k in range(holes, chosen + 1, -1):
            lows[k], highs[k] = lows[k - 1], highs[k - 1]
        lows[chosen + 1], highs[chosen + 1] = high, highs[chosen]
        highs[chosen] = low
        return holes + 1
    if low > lows[chosen]:
        highs[chosen] = low
    elif high < highs[chosen]:
        lows[chosen] = high
    else:
        return removed(chosen, lows, highs, holes)
    return holes


@compiled
def removed(gone: int, lows: Int64s, highs: Int64s, holes: int) -> int:
    """Close the place of a hole; return the new number of holes."""
    for k in range(gone, holes - 1):
        lows[k], highs[k] = lows[k + 1], highs[k + 1]
    return holes - 1


@compiled
def most_live(events: Int64s) -> int:
    """Count the most buffers that live at once."""
    live, most = 0, 0
    for event in events:
        live += 1 if event >= 0 else -1
        most = max(most, live)
    return most


@compiled
def slots_of(events: Int64s, count: int) -> Int64s:
    """Give each of `count` buffers a slot until it dies; there are as many slots as buffers live at once."""
    slots = np.zeros(count, np.int64)
    free = np.arange(most_live(events))[::-1].copy()
    left = len(free)
    for event in events:
        if event < 0:
            free[left] = slots[~event]
            left += 1
        else:
            left -= 1
            slots[event] = free[left]
    return slots


@compiled
def draw(state: Int64s, choices: int) -> int:
    """Draw a number from 0 to `choices` - 1; advances the generator."""
    state[0] = (state[0] * _MULTIPLIER + _INCREMENT) & _MASK
    # The low bits of such a generator repeat after few draws.
    return int(state[0] >> 8) % choices


@compiled
def mutate(policy: Int64s, state: Int64s) -> None:
    """Change a policy for one or two classes, or now and then for all of them."""
    kinds = len(policy)
    if draw(state, 4) > 0:
        for _ in range(1 + draw(state, 2)):
            policy[draw(state, kinds)] = draw(state, POLICIES)
    elif draw(state, 2) > 0:
        for k in range(kinds):
            policy[k] = draw(state, POLICIES)
    else:
        short = draw(state, kinds + 1)
        for k in range(kinds):
            policy[k] = HIGHEST if k < short else (LOWEST, TIGHTEST)[draw(state, 2)]


@compiled
def same_holes(one: int, other: int, lows: Int64s, highs: Int64s, holes: Int64s, tops: Int64s) -> bool:
    """Tell whether two sweeps have come to the same height and the same holes."""
    if holes[one] != holes[other] or tops[one] != tops[other]:
        return False
    used = holes[one]
    return bool((lows[one, :used] == lows[other, :used]).all() and (highs[one, :used] == highs[other, :used]).all())


@compiled
def beam_sweep(
    events: Int64s, sizes: Int64s, classes: Int64s, kinds: int, target: int, cuts: Int64s, width: int, tries: int,
    seed: int, offsets: Int64s,
) -> int:  # fmt: skip
    """Sweep piece by piece with many policies, keep the best `width` at each cut; fill `offsets` and return the height.

    `cuts` are positions in `events`. From each kept sweep `tries` go on, one with its own policy and the others with
    changed ones. Better is a smaller height above `target`, then fewer holes.
    """
    slots = slots_of(events, len(sizes))
    live = most_live(events)
    room, made, pieces = live + 2, width * tries, len(cuts) - 1
    # Two generations of sweeps, at index 0 and 1 in turn: the kept ones, and the tries made from them.
    lows, highs = np.zeros((2, made, room), np.int64), np.zeros((2, made, room), np.int64)
    held = np.zeros((2, made, live), np.int64)
    holes, tops = np.zeros((2, made), np.int64), np.zeros((2, made), np.int64)
    policies = np.zeros((2, made, kinds), np.int64)
    first_born = np.zeros(pieces + 1, np.int64)
    for g in range(pieces):
        first_born[g + 1] = first_born[g] + (events[cuts[g] : cuts[g + 1]] >= 0).sum()
    born = np.zeros((made, (first_born[1:] - first_born[:-1]).max() + 1), np.int64)
    # Offsets of each piece, for the sweeps kept at its end, and which kept sweep of the piece before each one came
    # from: `follow_back` reads the offsets of the best sweep off these.
    history = np.zeros((width, len(sizes)), np.int64)
    came_from = np.zeros((pieces, width), np.int64)
    kept = np.zeros(width, np.int64)
    state = np.full(1, seed, np.int64)
    now, alive = 0, 1
    highs[0, 0, 0], holes[0, 0] = ENDLESS, 1
    for g in range(pieces):
        then = 1 - now
        count = 0
        for a in range(alive):
            parent = kept[a]
            used = holes[now, parent]
            for t in range(tries):
                # Element by element: assigning slices costs seconds of compile time, for checks that shapes agree.
                for hole in range(used):
                    lows[then, count, hole], highs[then, count, hole] = (
                        lows[now, parent, hole],
                        highs[now, parent, hole],
                    )
                for place in range(held.shape[2]):
                    held[then, count, place] = held[now, parent, place]
                for place in range(policies.shape[2]):
                    policies[then, count, place] = policies[now, parent, place]
                if t > 0:
                    mutate(policies[then, count], state)
                holes[then, count], tops[then, count] = swept(
                    events, cuts[g], cuts[g + 1], sizes, slots, classes, policies[then, count], target,
                    lows[then, count], highs[then, count], used, tops[now, parent], held[then, count], born[count],
                )  # fmt: skip
                count += 1
        now, alive = then, 0
        taken = np.zeros(count, np.bool_)
        for _ in range(count):
            best = -1
            for c in range(count):
                if taken[c]:
                    continue
                above = max(tops[now, c], target)
                if best < 0 or (above, holes[now, c]) < (max(tops[now, best], target), holes[now, best]):
                    best = c
            taken[best] = True
            # Two sweeps with the same holes and height go on alike: keep one.
            fresh = True
            for a in range(alive):
                fresh = fresh and not same_holes(best, kept[a], lows[now], highs[now], holes[now], tops[now])
            if fresh:
                came_from[g, alive] = best // tries
                for place in range(first_born[g], first_born[g + 1]):
                    history[alive, place] = born[best, place - first_born[g]]
                kept[alive] = best
                alive += 1
                if alive == width:
                    break
    follow_back(events, cuts, first_born, came_from, history, offsets)
    return int(tops[now, kept[0]])


@compiled
def follow_back(
    events: Int64s, cuts: Int64s, first_born: Int64s, came_from: Int64s, history: Int64s, offsets: Int64s
) -> None:
    """Fill `offsets` with the offsets of the sweep that ended best."""
    at = 0
    for g in range(len(cuts) - 2, -1, -1):
        place = first_born[g]
        for k in range(cuts[g], cuts[g + 1]):
            if events[k] >= 0:
                offsets[events[k]] = history[at, place]
                place += 1
        at = came_from[g, at]
