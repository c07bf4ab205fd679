"""Place by first fit in a given order, in near-linear time, with a tree over sections that keeps sorted taken ranges.

Every buffer is kept at the nodes that make up its sections (there are O(log sections) of them):

    sections   0 1 2 3 4 5 6 7       a buffer in sections 1-5 is kept at nodes {1}, {2,3}, {4,5}
                 [=][===][===]

A node has two lists of disjoint byte ranges: `over`, buffers that fill the node's sections entirely, and `within`,
every buffer kept at the node or below it. So a buffer meets in time exactly `within` of its own nodes and `over` of the
nodes above them. Neighbouring ranges join, so that well packed regions have short lists. Only nodes at which some
buffer is kept are ever met; the others, most of those near the root, have no lists, and `above` leads past them.

Cost: O(log sections) lists per interval, and a binary search and a shift in each. Guarantee: each offset is the lowest
that is free.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ratrain.ratrain_ir.support.loops import part
from ratrain.ratrain_ir.support.native_loops import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.problem import Instance, Int64s

FIRST_ROOM = 4
"""Ranges that a new list has room for; the room doubles when it is full."""
_RANGES = 64
"""Ranges for each buffer that the pool has space for at first; it is doubled where they are too few."""

FARTHEST = 1 << 62
"""Begin of the range behind the last one of a list."""

BEGIN, USED, ROOM, TURN = range(4)
"""Columns of a list's head: its first range in the pool, its ranges, those that there is space for, when it was met."""
LOW, HIGH = range(2)
"""Columns of a range: its first byte, and its exclusive end."""


class Tree(NamedTuple):
    """Lists of the nodes: 2v and 2v + 1 are `over` and `within` of node v; the last two hold the bytes of each side.

    All ranges live in one pool. A head, and a range, are a row each, so that one cache line has all of it.
    """

    heads: Int64s
    pool: Int64s
    above: Int64s
    """by node: the nearest ancestor at which some interval is kept; 0 if there is none"""
    is_used: NDArray[np.bool_]
    """by node: whether some interval is kept there"""


class Met(NamedTuple):
    """Lists that a buffer meets, and for each the range at which the search for a gap is, and where that begins."""

    lists: Int64s
    at: Int64s
    ahead: Int64s


class Buffers(NamedTuple):
    """Columns of an instance."""

    sizes: Int64s
    sides: Int64s
    first: Int64s
    starts: Int64s
    stops: Int64s


def first_fit(instance: Instance, order: Int64s, offsets: Int64s, pinned: int, limit: int) -> int:
    """Place buffers in `order`, each at the lowest offset that is free in all its sections; return the height.

    Fills `offsets`; the first `pinned` of the order have theirs already. Once a buffer ends at the `limit` or above, no
    later one is placed.
    """
    columns = instance.sizes, instance.sides, instance.first, instance.starts, instance.stops
    buffers = Buffers(*map(np.ascontiguousarray, columns))
    leaves = 1 << max(0, instance.sections - 1).bit_length()
    lists = 4 * leaves + 2
    met = Met(*(np.empty(lists, np.int64) for _ in range(3)))
    ranges = _RANGES * (len(order) + 1)
    while True:
        above, is_used = np.zeros(2 * leaves, np.int64), np.zeros(2 * leaves, np.bool_)
        tree = Tree(np.zeros((lists, 4), np.int64), np.empty((ranges, 2), np.int64), above, is_used)
        height = _loop()(np.ascontiguousarray(order), buffers, tree, met, leaves, offsets, pinned, limit)
        if height >= 0:
            return int(height)
        ranges *= 2


@cache
def _loop() -> Any:
    return native(placed)


def placed(order: Any, buffers: Any, tree: Any, met: Any, leaves: int, offsets: Any, pinned: int, limit: int) -> int:
    """Do the work of `first_fit` with an empty tree; return -1 where its pool has too few ranges."""
    find_used_nodes(leaves, buffers.starts, buffers.stops, tree.above, tree.is_used)
    top = 0
    free = 0
    for turn in range(len(order)):
        buffer = order[turn]
        size, side = buffers.sizes[buffer], buffers.sides[buffer]
        low = offsets[buffer]
        if turn >= pinned:
            count = 0
            for span in range(buffers.first[buffer], buffers.first[buffer + 1]):
                start, stop = buffers.starts[span], buffers.stops[span]
                count = meeting(start, stop, leaves, turn + 1, tree.above, tree.heads, met.lists, count)
            if side != 0:
                opposite = 4 * leaves + (1 if side > 0 else 0)
                if tree.heads[opposite, USED] > 0:
                    met.lists[count] = opposite
                    count += 1
            low = lowest_gap(size, met.lists, met.at, met.ahead, count, tree.heads, tree.pool)
        offsets[buffer] = low
        top = max(top, low + size)
        if top >= limit:
            break
        for span in range(buffers.first[buffer], buffers.first[buffer + 1]):
            # The nodes that make up [start, stop), from the leaves upwards: leaf s is node leaves + s, its parent half
            # of that.
            left, right = buffers.starts[span] + leaves, buffers.stops[span] + leaves
            while left < right:
                if left & 1:
                    node = left
                    left += 1
                elif right & 1:
                    right -= 1
                    node = right
                else:
                    left //= 2
                    right //= 2
                    continue
                free = keep(2 * node + (node >= leaves), low, low + size, tree.above, tree.heads, tree.pool, free)
                if free < 0:
                    return -1
        if side != 0:
            own = 4 * leaves + (0 if side > 0 else 1)
            free = keep(own, low, low + size, tree.above, tree.heads, tree.pool, free)
            if free < 0:
                return -1
    return top


@part
def keep(index: int, low: int, high: int, above: Int64s, heads: Int64s, pool: Int64s, free: int) -> int:
    """Add bytes [low, high) to a list, and from an `over` on to `within` of its node and of all used ancestors.

    A leaf has no `over`. Return the new end of the pool of ranges; -1 where it has too few.
    """
    sides = len(heads) - 2
    while index > 0:
        if free + 2 * heads[index, ROOM] + FIRST_ROOM > len(pool):
            return -1
        held, free = insert(index, low, high, heads, pool, free)
        if index >= sides:
            index = 0
        elif index & 1 == 0:
            index += 1
        else:  # used ancestors hold everything that a node holds
            parent = 0 if held else above[index // 2]
            index = 2 * parent + 1 if parent > 0 else 0
    return free


@part
def find_used_nodes(leaves: int, starts: Int64s, stops: Int64s, above: Int64s, is_used: NDArray[np.bool_]) -> None:
    """Find the nodes at which some interval is kept, and above each node the nearest of them."""
    for span in range(len(starts)):
        left, right = starts[span] + leaves, stops[span] + leaves
        while left < right:
            if left & 1:
                is_used[left] = True
                left += 1
            if right & 1:
                right -= 1
                is_used[right] = True
            left //= 2
            right //= 2
    for node in range(2, 2 * leaves):
        parent = node // 2
        above[node] = parent if is_used[parent] else above[parent]


@part
def meeting(
    start: int, stop: int, leaves: int, turn: int, above: Int64s, heads: Int64s, met: Int64s, count: int
) -> int:
    """Append to `met` the lists with buffers that live in sections [start, stop); return the new count."""
    left, right = start + leaves, stop + leaves
    while left < right:
        if left & 1:
            count = noted(2 * left + 1, turn, heads, met, count)
            left += 1
        if right & 1:
            right -= 1
            count = noted(2 * right + 1, turn, heads, met, count)
        left //= 2
        right //= 2
    # Ancestors of both ends: any node that covers a part of [start, stop) and more is above one of them.
    for end in range(2):
        bit = 0
        low = start if end == 0 else stop - 1
        node = low + leaves
        while above[node] > 0:
            parent = above[node]
            while node > parent:
                node //= 2
                bit += 1
            begin = low >> bit << bit
            if begin < start or begin + (1 << bit) > stop:
                if heads[2 * node, TURN] == turn:
                    break  # the other end has visited all from here up
                count = noted(2 * node, turn, heads, met, count)
    return count


@part
def noted(index: int, turn: int, heads: Int64s, met: Int64s, count: int) -> int:
    """Append a list to `met` unless it is empty or there already; return the new count."""
    if heads[index, TURN] != turn:
        heads[index, TURN] = turn
        if heads[index, USED] > 0:
            met[count] = index
            count += 1
    return count


@part
def lowest_gap(size: int, met: Int64s, at: Int64s, ahead: Int64s, count: int, heads: Int64s, pool: Int64s) -> int:
    """Return the lowest offset with `size` bytes that are free in each of the first `count` lists of `met`.

    Every list has a pointer `at` that only moves up, so the work is at most the number of ranges below the answer.
    `ahead` is where the range at the pointer begins: most lists are asked for nothing else.
    """
    for k in range(count):
        at[k] = heads[met[k], BEGIN]
        ahead[k] = pool[at[k], LOW]
    offset = 0
    # Round robin: `quiet` counts the lists in a row that leave the offset unchanged. Once all do, it is free in all.
    quiet = 0
    k = 0
    while quiet < count:
        quiet += 1
        if ahead[k] < offset + size:
            place, end = at[k], heads[met[k], BEGIN] + heads[met[k], USED]
            while place < end and pool[place, LOW] < offset + size:
                if pool[place, HIGH] > offset:
                    offset = pool[place, HIGH]
                    quiet = 1
                place += 1
            at[k] = place
            ahead[k] = pool[place, LOW] if place < end else FARTHEST
        k += 1
        if k == count:
            k = 0
    return offset


@part
def insert(index: int, low: int, high: int, heads: Int64s, pool: Int64s, free: int) -> tuple[bool, int]:
    """Add bytes [low, high) to a list; return whether it held them all already, and the new end of the pool of ranges.

    The caller has ensured that the pool has room for the list at twice its size.
    """
    begin, length = heads[index, BEGIN], heads[index, USED]
    end = begin + length
    left, right = begin, end
    while left < right:  # the first range that ends at or above `low`
        middle = (left + right) // 2
        if pool[middle, HIGH] < low:
            left = middle + 1
        else:
            right = middle
    if left < end and pool[left, LOW] <= low and pool[left, HIGH] >= high:
        return True, free
    after = left
    while after < end and pool[after, LOW] <= high:
        low, high = min(low, pool[after, LOW]), max(high, pool[after, HIGH])
        after += 1
    if after > left:
        pool[left, LOW], pool[left, HIGH] = low, high
        shift = after - left - 1
        if shift > 0:
            for k in range(after, end):
                pool[k - shift, LOW], pool[k - shift, HIGH] = pool[k, LOW], pool[k, HIGH]
            heads[index, USED] = length - shift
        return False, free
    # A full list moves to the end of the pool; its old place is lost.
    if length == heads[index, ROOM]:
        heads[index, ROOM] = max(FIRST_ROOM, 2 * length)
        for k in range(length):
            pool[free + k, LOW], pool[free + k, HIGH] = pool[begin + k, LOW], pool[begin + k, HIGH]
        heads[index, BEGIN] = free
        left += free - begin
        begin = free
        free += heads[index, ROOM]
    for k in range(begin + length, left, -1):
        pool[k, LOW], pool[k, HIGH] = pool[k - 1, LOW], pool[k - 1, HIGH]
    pool[left, LOW], pool[left, HIGH] = low, high
    heads[index, USED] = length + 1
    return False, free
