"""The sweep of `groups.py`: what is live from the lowest to the highest, section by section, and back where there is no room. Importing this module imports numba."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation.compiled import kernel
from ratrain.passes.memory.allocation.valleys import drawn
from ratrain.ratrain_ir.loops import part

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import Int64s


@kernel
def sweep_groups(
    begin: int, there: Int64s, born: Int64s, entering: Int64s, deaths: Int64s, sizes: Int64s, floor: Int64s, room: int,
    split: float, splits: np.ndarray, limit: int, depth: int, most: int, offsets: Int64s,
) -> bool:  # fmt: skip
    """Place what enters from section `begin` on under `room`; whether there was a way, in `limit` looks at holes.

    At most `most` live at once. `there` is what lives before, from the lowest to the highest, with offsets; entering[born[s] : born[s + 1]] are born at section s, the first to die first.
    """
    sections = len(born) - 1
    kept = np.zeros((depth, most), np.int64)
    counts = np.zeros(depth, np.int64)
    live = np.zeros(most, np.int64)
    ends = np.zeros((most + 1, 2), np.int64)
    chance = np.full(1, 88172645463325252, np.uint64)
    counts[begin % depth] = len(there)
    for at in range(len(there)):
        kept[begin % depth, at] = there[at]
    looked = np.zeros(1, np.int64)
    section, farthest, otherwise, failures = begin, begin, begin, 0
    while section < sections:
        count = counts[section % depth]
        for at in range(count):
            live[at] = kept[section % depth, at]
        by, near, loose = split, True, 0.0
        if section < otherwise:
            choice = drawn(chance)
            if choice < 0.5:
                by = splits[int(drawn(chance) * len(splits))]
                near = drawn(chance) < 0.5
                loose = 0.0 if choice < 0.3 else 0.3
        if looked[0] > limit:
            return False
        count = enter(
            section, entering[born[section] : born[section + 1]], live, count, ends, deaths, sizes, floor, room, by, near,
            loose, chance, looked, offsets,
        )  # fmt: skip
        if count >= 0:
            section += 1
            counts[section % depth] = count
            for at in range(count):
                kept[section % depth, at] = live[at]
            if section > farthest:
                farthest, failures = section, 0
        else:
            failures += 1
            earliest = max(begin, farthest - depth + 1)  # what is kept of sections before is overwritten
            back = (1.0 + min(section - earliest, 4 + failures // 4)) ** drawn(chance)
            otherwise = section + 1
            section = max(earliest, section - int(back))
    return True


@part
def enter(
    section: int, group: Int64s, live: Int64s, count: int, ends: Int64s, deaths: Int64s, sizes: Int64s, floor: Int64s, room: int,
    split: float, near: bool, loose: float, chance: np.ndarray, looked: Int64s, offsets: Int64s,
) -> int:  # fmt: skip
    """What lives at a section, from the lowest to the highest, instead of what lived before; how many there are, or -1 where one has no room."""
    left = 0
    for at in range(count):
        if deaths[live[at]] > section:
            live[left] = live[at]
            left += 1
    count = left
    groups = 0
    for at in range(len(group)):
        if at == 0 or deaths[group[at]] - section > split * (deaths[group[at - 1]] - section):
            ends[groups, 0] = at
            groups += 1
        ends[groups - 1, 1] = at + 1
    while groups > 0:
        chosen, most = 0, -1
        any_one = int(drawn(chance) * groups) if loose > 0.0 and drawn(chance) < loose else -1
        for at in range(groups):
            total = 0
            for place in range(ends[at, 0], ends[at, 1]):
                total += sizes[group[place]]
            if at == any_one or (any_one < 0 and total > most):
                chosen, most = at, total
        low, high = ends[chosen, 0], ends[chosen, 1]
        groups -= 1
        for at in range(chosen, groups):
            ends[at, 0], ends[at, 1] = ends[at + 1, 0], ends[at + 1, 1]
        looked[0] += count + 1
        lowest = 0
        for at in range(section, deaths[group[high - 1]]):
            lowest = max(lowest, floor[at])
        if put(group[low:high], most, live, count, deaths, sizes, lowest, room, near, offsets):
            count += high - low
        elif high - low == 1:
            return -1
        else:
            cut = (low + high) // 2
            if loose > 0.0 and drawn(chance) < loose:
                cut = low + 1 + int(drawn(chance) * (high - low - 1))
            else:
                widest = 1.0
                for at in range(low + 1, high):
                    times = (deaths[group[at]] - section) / (deaths[group[at - 1]] - section)
                    if times > widest:
                        widest, cut = times, at
            ends[groups, 0], ends[groups, 1] = low, cut
            ends[groups + 1, 0], ends[groups + 1, 1] = cut, high
            groups += 2
    return count


@part
def put(
    group: Int64s, total: int, live: Int64s, count: int, deaths: Int64s, sizes: Int64s, lowest: int, room: int,
    near: bool, offsets: Int64s,
) -> bool:  # fmt: skip
    """Put a group in one hole above the lowest offset that it may have, at the end of it beside which is what dies later; whether there is one.

    The smallest hole serves, or where deaths have to be near and much would be left, that with a neighbour that lives as long or nearly. The one above everything is the last.
    """
    never = 1 << 60
    last = deaths[group[-1]]
    best, least, soonest = -1, never, never
    end, under = lowest, never
    for at in range(count + 1):
        start, over = room, 0
        if at < count:
            start, over = offsets[live[at]], deaths[live[at]]
        rest = start - end - total
        if rest >= 0:
            sooner = max(0, last - max(under, over)) if near and rest * 64 > total else 0
            if at == count:
                sooner = never - 1
            if sooner < soonest or (sooner == soonest and rest < least):
                best, least, soonest = at, rest, sooner
        if at < count:
            end, under = max(lowest, start + sizes[live[at]]), over
    if best < 0:
        return False
    end, under = lowest, never
    if best > 0:
        end, under = max(lowest, offsets[live[best - 1]] + sizes[live[best - 1]]), deaths[live[best - 1]]
    start, over = room, -1
    if best < count:
        start, over = offsets[live[best]], deaths[live[best]]
    size = len(group)
    for at in range(count - 1, best - 1, -1):
        live[at + size] = live[at]
    upwards = under >= over
    offset = end if upwards else start - total
    for at in range(size):
        buffer = group[size - 1 - at] if upwards else group[at]
        offsets[buffer] = offset
        offset += sizes[buffer]
        live[best + at] = buffer
    return True
