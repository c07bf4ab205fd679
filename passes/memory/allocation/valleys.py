"""Search exactly for placements that are full to the last byte, deciding section by section which buffer comes next.

Let each buffer rest on the ground or on another: every placement that fits can be pushed down to such a one. Then each
section has a lowest buffer still to come. The section is a *valley* if each buffer that could be it lives only in
sections where nothing starts lower:

    |XXX|       |XXXXX|
    |XXX|_______|XXXXX|    a buffer starts exactly on this floor, and nothing comes below it;
    |XXXXXXXXXXXXXXXXX|    or all start higher, and the section wastes bytes

The lowest section is always a valley. Any valley may be decided next, in any order, and the search exploits that
freedom:

- It decides the section with the fewest ways, and prefers sections where it failed before, and low ones.
- It explains a failure by sections, and jumps back over decisions that touch none of them.
- A section without a byte to waste lets buffers start at sums of sizes only. While few are left, these sums raise what
  rests on others.
- It restarts after few nodes (Luby's sequence), with other ways first, as bad luck rarely lasts over many short runs.

Cost: exponential at worst; a node costs some passes over the sections that its buffer touches. Guarantee: EXHAUSTED
proves that no placement fits the capacity, as all ways of a valley were tried or explained away.

The stack is explicit, and holds the whole state of each depth. A section's row of `line` holds its floor (`_FLOOR`),
the bytes still to come (`_AHEAD`), the lowest start of those (`_REST`), and how many of them start there (`_WAYS`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrain_ir.support.loops import compiled

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import Instance, Int64s

FOUND, EXHAUSTED, STOPPED = 1, 0, -1
"""Ends of a search: a placement was found; there is none (EXHAUSTED); the limit on nodes was reached (STOPPED)."""
_FLOOR, _AHEAD, _REST, _WAYS = range(4)
"""Rows of `line`; see the module docstring."""
_NEVER = 1 << 60
"""Height above any start."""
_FEW = 8
"""Most buffers left in a section for which sums of sizes are computed."""
_RUN = 1000
"""Nodes of the shortest run."""
_NOISE = 0.1
"""Largest distance by which chance moves a buffer among the ways, as a share of all buffers."""


def search_valleys(instance: Instance, capacity: int, limit: int, seed: int, offsets: Int64s) -> tuple[int, int]:
    """Look for a placement under `capacity` with at most `limit` nodes; return how it ended, and the nodes tried.

    Fills `offsets` if it ends with FOUND. `seed` orders equal choices: the same seed gives the same search.
    """
    counts = instance.stops - instance.starts
    # Flatten the intervals: `where` lists the sections of each buffer, `cover` the buffers of each section.
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    where = np.repeat(instance.starts, counts) + within
    at = np.concatenate((np.zeros(1, np.int64), np.cumsum(instance.widths())))
    owners = np.repeat(np.arange(instance.count), np.diff(at))
    cover = owners[np.argsort(where, kind="stable")]
    above = np.concatenate((np.zeros(1, np.int64), np.cumsum(np.bincount(where, minlength=instance.sections))))
    filled = np.zeros((instance.count, instance.sections), np.bool_)
    filled[owners, where] = True
    return valley_search(
        instance.sizes, at, where, above, cover, _steps(instance.sizes, filled), capacity,
        _standing(instance, filled), _NOISE, limit, _RUN, seed, _FEW, offsets,
    )  # fmt: skip


def _steps(sizes: Int64s, filled: np.ndarray) -> Int64s:
    """Return, by section, the least rise of its lowest start when nothing starts on its floor.

    The buffer must then rest on one that does not live in the section: the rise is the smallest size of these.
    """
    meets = filled.astype(np.float32) @ filled.astype(np.float32).T > 0
    steps = np.full(filled.shape[1], _NEVER, np.int64)
    for section, there in enumerate(filled.T):
        neighbours = meets[there].any(axis=0) & ~there
        steps[section] = sizes[neighbours].min(initial=_NEVER)
    return steps


def _standing(instance: Instance, filled: np.ndarray) -> np.ndarray:
    """Rank buffers among the ways, from 0 to 1: by width, then area, then the load of their fullest section."""
    load, widths = instance.load(), instance.widths()
    totals = np.where(filled, load, 0).max(axis=1)
    standing = np.empty(instance.count)
    standing[np.lexsort((totals, widths * instance.sizes, widths))] = np.arange(instance.count) / instance.count
    return standing


@compiled
def valley_search(
    sizes: Int64s, at: Int64s, where: Int64s, above: Int64s, cover: Int64s, steps: Int64s, capacity: int,
    standing: np.ndarray, noise: float, limit: int, shortest: int, seed: int, few: int, offsets: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Search in runs as long as Luby's sequence says: 1, 1, 2, 1, 1, 2, 4, 1, ... times the shortest.

    Returns the end of the search and the nodes tried. Buffer i fills the sections where[at[i] : at[i + 1]]; section s
    has the buffers cover[above[s] : above[s + 1]].
    """
    count, sections = len(sizes), len(steps)
    # A depth places a buffer or wastes bytes of a section. `run` stops if these do not suffice, so it stays sound.
    depths = 3 * count + sections + 8
    line = np.zeros((depths, 4, sections), np.int64)
    lowest = np.zeros((depths, count), np.int64)
    ways = np.zeros((depths, count + 1), np.int64)
    frames = np.zeros((depths, 3), np.int64)
    blamed = np.zeros((depths, sections), np.bool_)
    placed = np.zeros(count, np.bool_)
    failures = np.ones(sections)
    chance = np.full(1, seed * 2654435761 + 88172645463325252, np.uint64)
    likely = np.zeros(count + 1)
    nodes = 0
    u, v = 1, 1  # Knuth's formula for Luby's sequence: the values of v
    while nodes < limit:
        for i in range(count):
            likely[i] = standing[i] + noise * drawn(chance)
        most = min(shortest * v, limit - nodes)
        ended, tried = run(
            sizes, at, where, above, cover, steps, capacity, likely, most, few, line, lowest, ways, frames, blamed,
            placed, failures, offsets,
        )  # fmt: skip
        nodes += max(tried, 1)
        if ended != STOPPED:
            return ended, nodes
        if u & -u == v:
            u, v = u + 1, 1
        else:
            v *= 2
    return STOPPED, nodes


@compiled
def drawn(chance: np.ndarray) -> float:
    """Draw a number from 0 (inclusive) to 1 (exclusive) by Marsaglia's xorshift."""
    x = chance[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    chance[0] = x
    return float(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled
def run(
    sizes: Int64s, at: Int64s, where: Int64s, above: Int64s, cover: Int64s, steps: Int64s, capacity: int,
    likely: np.ndarray, limit: int, few: int, line: Int64s, lowest: Int64s, ways: Int64s, frames: Int64s,
    blamed: np.ndarray, placed: np.ndarray, failures: np.ndarray, offsets: Int64s,
) -> tuple[int, int]:  # fmt: skip
    """Search once from the start; return the end of the search and the nodes tried.

    A frame has a section, the number of its ways, and how many of them were tried.
    """
    count, sections = len(sizes), len(steps)
    left = np.full(1, count, np.int64)
    sums = np.zeros(1 << few, np.int64)
    short, hull = np.zeros(few, np.int64), np.zeros(2, np.int64)
    blame = np.zeros(sections, np.bool_)
    placed[:] = False
    line[0] = 0
    lowest[0] = 0
    for s in range(sections):
        for k in range(above[s], above[s + 1]):
            line[0, _AHEAD, s] += sizes[cover[k]]
        if line[0, _AHEAD, s] > capacity:
            return EXHAUSTED, 0
        rest(s, line[0], lowest[0], above, cover, placed)
    depth, nodes = 0, 0
    decide = True
    while True:
        if decide:
            if left[0] == 0:
                return FOUND, nodes
            frame = frames[depth]
            frame[0] = easiest(line[depth], lowest[depth], at, where, above, cover, placed, failures, capacity)
            frame[1] = list_ways(
                frame[0], line[depth], lowest[depth], sizes, at, where, above, cover, steps, placed, likely,
                ways[depth], blamed[depth], capacity,
            )  # fmt: skip
            frame[2] = 0
        frame = frames[depth]
        # All ways of this section failed: go back to a decision that shares the blame.
        if frame[1] == frame[2]:
            depth = jump_back(depth, frames, ways, at, where, blamed, placed, left)
            if depth < 0:
                return EXHAUSTED, nodes
            decide = False
            continue
        if nodes >= limit or depth + 1 >= len(frames):
            return STOPPED, nodes
        nodes += 1
        buffer = ways[depth, frame[2]]
        frame[2] += 1
        # Each depth has its own copy of the state, so going back costs nothing.
        line[depth + 1] = line[depth]
        lowest[depth + 1] = lowest[depth]
        if buffer >= 0:
            offsets[buffer] = line[depth, _REST, frame[0]]
            placed[buffer] = True
            left[0] -= 1
        decide = follow(
            buffer, frame[0], line[depth + 1], lowest[depth + 1], sizes, at, where, above, cover, steps, placed,
            failures, blame, hull, capacity, few, sums, short,
        )  # fmt: skip
        if decide:
            depth += 1
        else:
            if buffer >= 0:
                placed[buffer] = False
                left[0] += 1
            # The union over the failed ways explains the failure of the whole frame.
            blamed[depth] |= blame


@compiled
def rest(s: int, now: Int64s, low: Int64s, above: Int64s, cover: Int64s, placed: np.ndarray) -> None:
    """Store the lowest start of the buffers still to come in a section, and how many start there."""
    best, ways = _NEVER, 0
    for k in range(above[s], above[s + 1]):
        i = cover[k]
        if not placed[i]:
            if low[i] < best:
                best, ways = low[i], 1
            elif low[i] == best:
                ways += 1
    now[_REST, s], now[_WAYS, s] = best, ways


@compiled
def easiest(
    now: Int64s, low: Int64s, at: Int64s, where: Int64s, above: Int64s, cover: Int64s, placed: np.ndarray,
    failures: np.ndarray, capacity: int,
) -> int:  # fmt: skip
    """Choose the section of a valley to decide next: few ways, many failures, and low."""
    best, least = -1, np.inf
    for s in range(len(failures)):
        ways, start = now[_WAYS, s], now[_REST, s]
        if ways == 0:
            continue
        if start + 1 + now[_AHEAD, s] <= capacity:
            ways += 1  # one more way: wasting bytes
        worth = ways / failures[s] * (1.0 + start / capacity)
        if worth < least and in_valley(s, now, low, at, where, above, cover, placed):
            best, least = s, worth
    return best


@compiled
def in_valley(
    s: int, now: Int64s, low: Int64s, at: Int64s, where: Int64s, above: Int64s, cover: Int64s, placed: np.ndarray
) -> bool:
    """Tell whether a section is a valley: in no section of its lowest buffers does anything start lower."""
    start = now[_REST, s]
    for k in range(above[s], above[s + 1]):
        i = cover[k]
        if not placed[i] and low[i] == start:
            for j in range(at[i], at[i + 1]):
                if now[_REST, where[j]] != start:
                    return False
    return True


@compiled
def list_ways(
    s: int, now: Int64s, low: Int64s, sizes: Int64s, at: Int64s, where: Int64s, above: Int64s, cover: Int64s,
    steps: Int64s, placed: np.ndarray, likely: np.ndarray, ways: Int64s, blame: np.ndarray, capacity: int,
) -> int:  # fmt: skip
    """List the buffers that may start next in a section, likeliest first, then -1 for wasting bytes; return how many.

    Sets `blame` to the sections that rule out every other way.
    """
    start, found = now[_REST, s], 0
    higher = wasted(s, now, low, above, cover, steps, placed)
    blame[:] = False
    blame[s] = True
    for k in range(above[s], above[s + 1]):
        i = cover[k]
        if placed[i]:
            continue
        if low[i] > start:
            explain(i, higher, s, now, at, where, blame, capacity)
            continue
        # A buffer that starts here starts no lower; the reasons are part of any failure.
        explain(i, start, s, now, at, where, blame, capacity)
        for j in range(at[i], at[i + 1]):
            t = where[j]
            if now[_FLOOR, t] < start:  # nothing fits below the buffer there
                blame[t] = True
                for other in cover[above[t] : above[t + 1]]:
                    if not placed[other]:
                        explain(other, start, t, now, at, where, blame, capacity)
        # Insert by likelihood, unless a way with the same size and sections is listed already.
        hole = found
        while hole > 0 and likely[ways[hole - 1]] < likely[i]:
            hole -= 1
        if not listed_alike(i, ways, found, sizes, at, where):
            for j in range(found, hole, -1):
                ways[j] = ways[j - 1]
            ways[hole] = i
            found += 1
    # Wasting is a way only if the bytes still to come fit above.
    if higher + now[_AHEAD, s] <= capacity:
        ways[found] = -1
        found += 1
    return found


@compiled
def wasted(s: int, now: Int64s, low: Int64s, above: Int64s, cover: Int64s, steps: Int64s, placed: np.ndarray) -> int:
    """Return the least height of a section's floor if nothing starts at its lowest start."""
    start = now[_REST, s]
    higher = int(start + steps[s])
    for k in range(above[s], above[s + 1]):
        i = cover[k]
        if not placed[i] and low[i] > start:
            higher = min(higher, int(low[i]))
    return int(higher)


@compiled
def listed_alike(buffer: int, ways: Int64s, found: int, sizes: Int64s, at: Int64s, where: Int64s) -> bool:
    """Tell whether a listed way has the same size and sections, so that both lead to the same placements."""
    for k in range(found):
        i = ways[k]
        if sizes[i] == sizes[buffer] and at[i + 1] - at[i] == at[buffer + 1] - at[buffer]:
            alike = True
            for j in range(at[i + 1] - at[i]):
                if where[at[i] + j] != where[at[buffer] + j]:
                    alike = False
                    break
            if alike:
                return True
    return False


@compiled
def explain(
    buffer: int, start: int, prefer: int, now: Int64s, at: Int64s, where: Int64s, blame: np.ndarray, capacity: int
) -> None:
    """Blame sections because of which a buffer cannot start below `start`.

    One section with such a floor is enough, the nearest to `prefer`. Without one, all that may have raised it are
    blamed: its highest section, and those without a byte to waste.
    """
    if now[_FLOOR, prefer] >= start:
        blame[prefer] = True
        return
    best, highest = -1, where[at[buffer]]
    for k in range(at[buffer], at[buffer + 1]):
        t = where[k]
        if now[_FLOOR, t] >= start:
            if blame[t]:
                return
            if best < 0 or abs(t - prefer) < abs(best - prefer):
                best = t
        if now[_FLOOR, t] > now[_FLOOR, highest]:
            highest = t
    if best >= 0:
        blame[best] = True
        return
    blame[highest] = True
    for k in range(at[buffer], at[buffer + 1]):
        t = where[k]
        if now[_FLOOR, t] + now[_AHEAD, t] == capacity:
            blame[t] = True


@compiled
def follow(
    buffer: int, s: int, now: Int64s, low: Int64s, sizes: Int64s, at: Int64s, where: Int64s, above: Int64s,
    cover: Int64s, steps: Int64s, placed: np.ndarray, failures: np.ndarray, blame: np.ndarray, hull: Int64s,
    capacity: int, few: int, sums: Int64s, short: Int64s,
) -> bool:  # fmt: skip
    """Take a way and propagate its consequences; return whether the rest may still fit.

    If not, `blame` is set to the sections that prove it.
    """
    if buffer < 0:
        end = wasted(s, now, low, above, cover, steps, placed)
        now[_FLOOR, s] = end
        hull[0], hull[1] = s, s + 1
        if not lift(s, end, now, low, sizes, at, where, above, cover, placed, blame, hull, capacity):
            failures[s] += 1
            return False
    else:
        end = now[_REST, s] + sizes[buffer]
        for k in range(at[buffer], at[buffer + 1]):
            now[_FLOOR, where[k]] = end
            now[_AHEAD, where[k]] -= sizes[buffer]
        hull[0], hull[1] = where[at[buffer]], where[at[buffer + 1] - 1] + 1
        for k in range(at[buffer], at[buffer + 1]):
            if not lift(where[k], end, now, low, sizes, at, where, above, cover, placed, blame, hull, capacity):
                failures[where[k]] += 1
                return False
    # Repeat until nothing rises: new lowest starts may overfill a section, and full sections raise starts further.
    left, right = hull[0], hull[1]
    while left < right:
        for t in range(left, right):
            rest(t, now, low, above, cover, placed)
            if now[_WAYS, t] > 0 and now[_REST, t] + now[_AHEAD, t] > capacity:
                failures[t] += 1
                blame[:] = False
                blame[t] = True
                for k in range(above[t], above[t + 1]):
                    if not placed[cover[k]]:
                        explain(cover[k], capacity - now[_AHEAD, t] + 1, t, now, at, where, blame, capacity)
                return False
        begin, end = left, right
        left, right = len(failures), 0
        for t in range(begin, end):
            if now[_WAYS, t] == 0 or now[_FLOOR, t] + now[_AHEAD, t] < capacity:
                continue
            raised = full(t, now, low, sizes, above, cover, placed, few, sums, short)
            for k in range(raised):
                i = short[k]
                left, right = min(left, where[at[i]]), max(right, where[at[i + 1] - 1] + 1)
                if low[i] + sizes[i] > capacity:
                    failures[t] += 1
                    blame[:] = False
                    blame[t] = True
                    explain(i, _NEVER, t, now, at, where, blame, capacity)
                    return False
    return True


@compiled
def lift(
    s: int, end: int, now: Int64s, low: Int64s, sizes: Int64s, at: Int64s, where: Int64s, above: Int64s,
    cover: Int64s, placed: np.ndarray, blame: np.ndarray, hull: Int64s, capacity: int,
) -> bool:  # fmt: skip
    """Raise the buffers still to come in a section to its new floor.

    Return whether all of them end within the capacity.

    Widens `hull`, the range of sections that were touched.
    """
    for k in range(above[s], above[s + 1]):
        i = cover[k]
        if not placed[i] and low[i] < end:
            low[i] = end
            hull[0], hull[1] = min(hull[0], where[at[i]]), max(hull[1], where[at[i + 1] - 1] + 1)
            if end + sizes[i] > capacity:
                blame[:] = False
                explain(i, capacity - sizes[i] + 1, s, now, at, where, blame, capacity)
                return False
    return True


@compiled
def full(
    s: int, now: Int64s, low: Int64s, sizes: Int64s, above: Int64s, cover: Int64s, placed: np.ndarray, few: int,
    sums: Int64s, short: Int64s,
) -> int:  # fmt: skip
    """Raise starts in a section without a byte to waste to the next sum of other buffers' sizes.

    Return how many were raised.

    The raised ones are the first of `short`. With more than `few` buffers left nothing is raised.
    """
    left, floor = 0, now[_FLOOR, s]
    for k in range(above[s], above[s + 1]):
        i = cover[k]
        if not placed[i]:
            if left == few:
                return 0
            short[left] = i
            left += 1
    made, raised = False, 0
    for x in range(left):
        i = short[x]
        wanted = low[i] - floor
        if wanted <= 0:
            continue
        # All sums of subsets, indexed by bit masks; computed once, and only if some buffer starts above the floor.
        if not made:
            made = True
            for y in range(left):
                bit = 1 << y
                for z in range(bit):
                    sums[bit + z] = sums[z] + sizes[short[y]]
        nearest = _NEVER
        for z in range(1 << left):
            # The buffer cannot rest on itself, so sums that contain it are left out.
            if wanted <= sums[z] < nearest and not z & (1 << x):
                nearest = sums[z]
                if nearest == wanted:
                    break
        if nearest > wanted:
            low[i] = min(floor + nearest, _NEVER)
            short[raised], short[x] = i, short[raised]
            raised += 1
    return raised


@compiled
def jump_back(
    depth: int, frames: Int64s, ways: Int64s, at: Int64s, where: Int64s, blamed: np.ndarray, placed: np.ndarray,
    left: Int64s,
) -> int:  # fmt: skip
    """Take back decisions until one touches a section blamed for the failure at `depth`; return its depth, or -1.

    The blame is handed on to it.
    """
    blame = blamed[depth]
    while depth > 0:
        depth -= 1
        buffer = ways[depth, frames[depth, 2] - 1]
        touched = False
        if buffer < 0:
            touched = blame[frames[depth, 0]]
        else:
            placed[buffer] = False
            left[0] += 1
            for k in range(at[buffer], at[buffer + 1]):
                if blame[where[k]]:
                    touched = True
                    break
        if touched:
            blamed[depth] |= blame
            return depth
    return -1
