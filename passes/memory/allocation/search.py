"""Exact search over canonical placements, for problems of a few hundred buffers packed to the last byte.

A placement is canonical when every buffer rests on the floor or on a buffer it meets, and buffers are placed in the order of
(offset, static rank). Every placement that fits has a canonical form that fits, so only those are tried (the idea of M. D. Moffitt,
MiniMalloc, ASPLOS 2023). Cut off are: sections where the floor and the bytes still to come exceed the capacity; buffers that
would start above the top another one could have; alternatives to a buffer that nothing can come on top of. As soon as no buffer crosses a boundary between sections, both sides are
searched on their own; when one of them fails, so does the choice that made it.

The stack is explicit: a frame is one placed buffer. It works on a *part* (buffers that are left of some sections, by rank) and leaves
parts, which frames further up the stack place one after another.

Loops stand where numpy has operations on slices, and numbers from arrays where literals would do: numba compiles the former in a fraction
of the time, and a function that is given literals once more for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation.compiled import kernel

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import Int64s

FOUND, EXHAUSTED, STOPPED = 1, 0, -1
"""A placement was found; there is none; the limit on nodes was reached."""
WIDTH_FIRST, AREA_SECOND, WIDTH_SECOND = 0, 1, 2
"""Static orders, decreasing: (width, area, total), (total, area, width), (total, width, area)."""

# Columns of frames: part, frame that left it, where the last choice was, lowest top, and what was in use before its choice;
# the parts its choice left; whether what it placed meets nothing that was left.
_PART, _PARENT, _OFFSET, _RANK, _TOP, _CHANGES, _MEMBERS, _PARTS, _NEXT, _LAST, _ALONE = range(11)
# Columns of parts: range of members, sections, and where the last choice before it was.
_START, _COUNT, _LOW, _HIGH, _AFTER_OFFSET, _AFTER_RANK = range(6)
# Kinds of change.
_FLOOR, _AHEAD, _LOWEST = range(3)


@kernel
def canonical_search(
    sizes: Int64s,
    first: Int64s,
    starts: Int64s,
    stops: Int64s,
    sections: int,
    capacity: int,
    ranking: int,
    rerank: bool,
    limit: int,
    offsets: Int64s,
) -> tuple[int, int]:
    """Look for a placement under `capacity`, trying at most `limit` nodes; what came of it, and the nodes tried.

    Buffer i fills the sections [starts[k], stops[k]) for k in [first[i], first[i + 1]). `ranking` is a static order; `rerank` ranks
    anew in every part that a split makes. Fills `offsets` where a placement is found.
    """
    count = len(sizes)
    hull = np.empty((count, 2), np.int64)
    widths = np.zeros(count, np.int64)
    ahead = np.zeros(sections, np.int64)  # bytes still to come in each section
    for i in range(count):
        hull[i, 0], hull[i, 1] = starts[first[i]], stops[first[i + 1] - 1]
        for k in range(first[i], first[i + 1]):
            widths[i] += stops[k] - starts[k]
            for s in range(starts[k], stops[k]):
                ahead[s] += sizes[i]
    if highest(ahead, 0, sections) > capacity:
        return EXHAUSTED, 0
    meets = meetings(first, starts, stops, sections)
    floor = np.zeros(sections, np.int64)
    lowest = np.zeros(count, np.int64)  # the offset each buffer would have now
    rests = np.zeros(sections, np.int64)
    crossed = np.zeros(sections + 1, np.int64)
    total = np.zeros(count, np.int64)
    trail = np.empty((count * (2 * sections + count) + 1, 3), np.int64)
    most = count * (count + 7) // 2 + sections
    members, ranks = np.empty(most, np.int64), np.empty(most, np.int64)
    parts = np.zeros((most, 6), np.int64)
    frames = np.zeros((count + 2, 11), np.int64)

    # Frame 0 places nothing: it only leaves the parts of the whole problem.
    for i in range(count):
        members[i] = i
    parts[0, _COUNT], parts[0, _HIGH] = count, sections
    bottom = frames[0]
    bottom[_PARENT], bottom[_RANK], bottom[_PARTS] = -1, -1, 1
    used, made = split(
        bottom[_PARENT],
        bottom[_OFFSET],
        bottom[_RANK],
        bottom,
        parts,
        bottom[_PARTS],
        members,
        ranks,
        count,
        hull,
        crossed,
    )
    rank_parts(bottom, parts, members, ranks, sizes, widths, first, starts, stops, ahead, total, ranking)
    frame, depth, nodes = 0, 1, 0
    changes = bottom[_CHANGES]
    while True:
        # Enter the next part that is left, of this frame or of the nearest frame below it that has one.
        while frames[frame, _NEXT] == frames[frame, _LAST]:
            frame = frames[frame, _PARENT]
            if frame < 0:
                return FOUND, nodes
            frames[frame, _NEXT] += 1
        enter(frames[depth], frame, frames[frame, _NEXT], changes, used, made, parts, members, lowest, sizes)
        depth += 1
        while True:
            frame = depth - 1
            top = frames[frame]
            changes = undo(top[_CHANGES], changes, trail, floor, ahead, lowest)
            choice = -1 if top[_ALONE] else next_choice(top, parts, members, ranks, lowest)
            if choice < 0:
                if top[_PARENT] == 0:
                    return EXHAUSTED, nodes
                depth = top[_PARENT] + 1
                continue
            if nodes == limit:
                return STOPPED, nodes
            nodes += 1
            buffer = members[choice]
            top[_OFFSET], top[_RANK] = lowest[buffer], ranks[choice]
            offsets[buffer] = lowest[buffer]
            changes = place(buffer, sizes, first, starts, stops, floor, ahead, trail, changes)
            part = parts[top[_PART]]
            top[_ALONE] = alone(buffer, part, members, meets)
            fits, changes = still_fits(
                buffer, part, members, sizes, first, starts, stops, meets, floor, ahead, lowest, rests, trail, changes,
                lowest[buffer], capacity,
            )  # fmt: skip
            if fits:
                break
        used, made = split(
            buffer, top[_OFFSET], top[_RANK], top, parts, top[_PARTS], members, ranks, top[_MEMBERS], hull, crossed
        )
        if rerank and top[_LAST] - top[_NEXT] > 1:
            rank_parts(top, parts, members, ranks, sizes, widths, first, starts, stops, ahead, total, ranking)


@kernel
def highest(values: Int64s, start: int, stop: int) -> int:
    """The largest of values [start, stop), none of which is below 0."""
    found = 0
    for k in range(start, stop):
        found = max(found, values[k])
    return found


@kernel
def meetings(first: Int64s, starts: Int64s, stops: Int64s, sections: int) -> np.ndarray:
    """Which buffers share a section with which."""
    count = len(first) - 1
    filled = np.zeros((count, sections), np.bool_)
    for i in range(count):
        for k in range(first[i], first[i + 1]):
            filled[i, starts[k] : stops[k]] = True
    meet = np.zeros((count, count), np.bool_)
    for i in range(count):
        for k in range(first[i], first[i + 1]):
            for j in range(count):
                for s in range(starts[k], stops[k]):
                    if filled[j, s]:
                        meet[i, j] = True
                        break
    return meet


@kernel
def enter(
    frame: Int64s, parent: int, part: int, changes: int, used: int, made: int, parts: Int64s, members: Int64s,
    lowest: Int64s, sizes: Int64s,
) -> None:  # fmt: skip
    """Begin a frame on a part."""
    frame[_PART], frame[_PARENT], frame[_CHANGES], frame[_MEMBERS], frame[_PARTS] = part, parent, changes, used, made
    frame[_OFFSET], frame[_RANK] = parts[part, _AFTER_OFFSET], parts[part, _AFTER_RANK]
    frame[_TOP], frame[_ALONE] = np.iinfo(np.int64).max, 0
    for k in range(parts[part, _START], parts[part, _START] + parts[part, _COUNT]):
        frame[_TOP] = min(frame[_TOP], lowest[members[k]] + sizes[members[k]])


@kernel
def next_choice(frame: Int64s, parts: Int64s, members: Int64s, ranks: Int64s, lowest: Int64s) -> int:
    """The member after the frame's last choice by (offset, rank) that starts below the lowest top, or -1."""
    part = parts[frame[_PART]]
    choice = -1
    for k in range(part[_START], part[_START] + part[_COUNT]):
        offset = lowest[members[k]]
        if offset >= frame[_TOP] or offset < frame[_OFFSET] or (offset == frame[_OFFSET] and ranks[k] <= frame[_RANK]):
            continue
        if choice >= 0:
            other = lowest[members[choice]]
            if offset > other or (offset == other and ranks[k] > ranks[choice]):
                continue
        choice = k
    return choice


@kernel
def alone(buffer: int, part: Int64s, members: Int64s, meets: Int64s) -> bool:
    """Whether no other member meets the buffer: then if this choice fails, so does every later one of the frame."""
    for k in range(part[_START], part[_START] + part[_COUNT]):
        if members[k] != buffer and meets[buffer, members[k]]:
            return False
    return True


@kernel
def undo(until: int, changes: int, trail: Int64s, floor: Int64s, ahead: Int64s, lowest: Int64s) -> int:
    """Take back changes; the number left."""
    while changes > until:
        changes -= 1
        kind, index, old = trail[changes]
        if kind == _FLOOR:
            floor[index] = old
        elif kind == _AHEAD:
            ahead[index] = old
        else:
            lowest[index] = old
    return until


@kernel
def noted(kind: int, index: int, old: int, trail: Int64s, changes: int) -> int:
    """Remember a value that is about to change; the new number of changes."""
    trail[changes, 0], trail[changes, 1], trail[changes, 2] = kind, index, old
    return changes + 1


@kernel
def place(
    buffer: int, sizes: Int64s, first: Int64s, starts: Int64s, stops: Int64s, floor: Int64s, ahead: Int64s,
    trail: Int64s, changes: int,
) -> int:  # fmt: skip
    """Put a buffer on the floors of its sections, the highest of which is its offset; the number of changes."""
    end = 0
    for k in range(first[buffer], first[buffer + 1]):
        for s in range(starts[k], stops[k]):
            end = max(end, floor[s] + sizes[buffer])
    for k in range(first[buffer], first[buffer + 1]):
        for s in range(starts[k], stops[k]):
            changes = noted(_FLOOR, s, floor[s], trail, changes)
            changes = noted(_AHEAD, s, ahead[s], trail, changes)
            floor[s] = end
            ahead[s] -= sizes[buffer]
    return changes


@kernel
def still_fits(
    buffer: int, part: Int64s, members: Int64s, sizes: Int64s, first: Int64s, starts: Int64s, stops: Int64s,
    meets: Int64s, floor: Int64s, ahead: Int64s, lowest: Int64s, rests: Int64s, trail: Int64s, changes: int,
    offset: int, capacity: int,
) -> tuple[bool, int]:  # fmt: skip
    """Raise what meets the buffer just placed at `offset`; whether all that is left may still fit, and the number of changes.

    What is left starts no lower than `offset`, so a section's next bytes start at the lowest offset of those it waits for.
    """
    end = offset + sizes[buffer]
    if end > capacity:
        return False, changes
    low, high = part[_LOW], part[_HIGH]
    rests[low:high] = capacity
    for k in range(part[_START], part[_START] + part[_COUNT]):
        other = members[k]
        if other == buffer:
            continue
        if meets[buffer, other] and lowest[other] < end:
            changes = noted(_LOWEST, other, lowest[other], trail, changes)
            lowest[other] = end
            if end + sizes[other] > capacity:
                return False, changes
        start = max(offset, lowest[other])
        for span in range(first[other], first[other + 1]):
            for s in range(starts[span], stops[span]):
                rests[s] = min(rests[s], start)
    for s in range(low, high):
        if ahead[s] > 0 and max(floor[s], rests[s]) + ahead[s] > capacity:
            return False, changes
    return True, changes


@kernel
def split(
    placed: int, offset: int, rank: int, frame: Int64s, parts: Int64s, made: int, members: Int64s, ranks: Int64s,
    used: int, hull: Int64s, crossed: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Leave a frame's members but `placed` as parts that share no section; how many members and parts are in use then."""
    part = parts[frame[_PART]]
    start, past, low, high = part[_START], part[_START] + part[_COUNT], part[_LOW], part[_HIGH]
    crossed[low : high + 1] = 0
    for k in range(start, past):
        other = members[k]
        if other != placed:
            crossed[hull[other, 0] + 1 : hull[other, 1]] = 1
    frame[_NEXT] = made
    begin = low
    while begin < high:
        end = begin + 1
        while end < high and crossed[end]:
            end += 1
        inside = used
        for k in range(start, past):
            other = members[k]
            if other != placed and begin <= hull[other, 0] < end:
                members[inside], ranks[inside] = other, ranks[k]
                inside += 1
        if inside > used:
            made_part = parts[made]
            made_part[_START], made_part[_COUNT], made_part[_LOW], made_part[_HIGH] = used, inside - used, begin, end
            made_part[_AFTER_OFFSET], made_part[_AFTER_RANK] = offset, rank
            made += 1
        used = inside
        begin = end
    frame[_LAST] = made
    return used, made


@kernel
def rank_parts(
    frame: Int64s, parts: Int64s, members: Int64s, ranks: Int64s, sizes: Int64s, widths: Int64s, first: Int64s,
    starts: Int64s, stops: Int64s, ahead: Int64s, total: Int64s, ranking: int,
) -> None:  # fmt: skip
    """Rank the members of each part a frame leaves, by what is still to come in their sections."""
    for p in range(frame[_NEXT], frame[_LAST]):
        start, past = parts[p, _START], parts[p, _START] + parts[p, _COUNT]
        parts[p, _AFTER_RANK] = -1
        for k in range(start, past):
            moved = members[k]
            total[moved] = 0
            for span in range(first[moved], first[moved + 1]):
                total[moved] = max(total[moved], highest(ahead, starts[span], stops[span]))
            hole = k
            while hole > start and precedes(moved, members[hole - 1], sizes, widths, total, ranking):
                members[hole] = members[hole - 1]
                hole -= 1
            members[hole] = moved
        for k in range(start, past):
            ranks[k] = k - start


@kernel
def precedes(one: int, other: int, sizes: Int64s, widths: Int64s, total: Int64s, ranking: int) -> bool:
    """Whether one buffer comes before another in a static order."""
    width = widths[one] - widths[other]
    area = sizes[one] * widths[one] - sizes[other] * widths[other]
    most = total[one] - total[other]
    if ranking == WIDTH_FIRST:
        order = width if width != 0 else (area if area != 0 else most)
    elif most != 0:
        order = most
    elif ranking == AREA_SECOND:
        order = area if area != 0 else width
    else:
        order = width if width != 0 else area
    return order > 0 or (order == 0 and one < other)
