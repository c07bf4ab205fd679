"""Search exactly where the best placement is too high: in ranges of time that share no buffer, of at most 500 buffers.

The search (`valleys.py`) prunes by tightness: it may find a placement at the very bound, and none with a little slack.
So it tries a *ladder* of heights, from the wanted one to one byte less than now, with a limit on nodes that doubles
every round:

    height now         |  1,310,720   what greedy orders left
    one less           |              any gain
    halfway            |
    wanted             |  1,048,576   the capacity, or the bound: tried first, with most nodes
    proved impossible  |  1,042,432   raised by every search that ends without a placement

A search that ends without a placement proves its height impossible. When all heights below the present one are
impossible, that is the optimum.

The result does not depend on how a problem is written down. Buffers that fill a whole range go to its bottom, the
others are sorted by their lives and sizes, and of the two directions of time the one whose list sorts first is
searched.

Cost: at most `Effort.nodes` nodes, about 25,000 a second and more. Guarantee: a range keeps its placement or gets a
lower one; a height called impossible is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs import define

from ratrain.passes.memory.allocation.problem import Instance, Int64s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt

MOST_BUFFERS = 500
"""Largest range, in buffers, that is searched."""
_FIRST_LIMIT = 4096
"""Nodes of the first round; every further round has twice as many."""
_SLOWEST = 25_000
"""Nodes a second on a slow machine: no search begins that would run far beyond the outer limit."""
_LESS_LIKELY = 8
"""Factor by which heights other than the first of the ladder get fewer nodes."""


@define(eq=False)
class _Range:
    """Range of time that shares no buffer with others, and the limits of its height."""

    buffers: Int64s
    instance: Instance
    impossible: int
    """Lowest height that is not proved impossible; every height below is."""
    height: int


def search_exactly(attempt: Attempt) -> None:
    """Search the ranges that are too high, the highest first, as long as there are nodes left."""
    if attempt.instance.sides.any():
        return  # ranges of time are not independent then
    # Ranges share no buffer, so each is searched alone; the height is the maximum over all.
    overfull = [span for span in _ranges(attempt) if not _enough(attempt, span.height)]
    proved = attempt.bound
    for span in sorted(overfull, key=lambda each: -each.height):
        if len(span.buffers) <= MOST_BUFFERS:
            resident = span.instance.widths() == span.instance.sections
            if resident.any():
                _climb_above(attempt, span, resident)
            else:
                _climb(attempt, span)
            proved = max(proved, span.impossible)
    attempt.bound = min(attempt.height, proved)


def _enough(attempt: Attempt, height: int) -> bool:
    return height <= attempt.bound or (attempt.close(height) if attempt.room is None else height <= attempt.room)


def _ranges(attempt: Attempt) -> list[_Range]:
    """Return the ranges of an attempt, each with its buffers and present height."""
    instance = attempt.instance
    crossed = np.zeros(instance.sections + 1, np.int64)
    births, deaths = instance.births(), instance.deaths()
    # Count at each section the buffers that live across its beginning. Where there are none, a new range begins.
    np.add.at(crossed, births + 1, 1)
    np.subtract.at(crossed, deaths, 1)
    belongs = np.cumsum(np.cumsum(crossed)[:-1] == 0)[births]
    order = np.argsort(belongs, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(belongs[order])) + 1)
    tops = attempt.offsets + instance.sizes
    ranges = []
    for buffers in groups:
        part = instance.part(buffers)
        ranges.append(_Range(buffers, part, part.bound(), int(tops[buffers].max())))
    return ranges


def _climb_above(attempt: Attempt, span: _Range, resident: NDArray[np.bool_]) -> None:
    """Put buffers that fill the whole range at its bottom, which costs nothing, and search above.

    The rest may be several ranges.
    """
    part = span.instance
    below, above = np.flatnonzero(resident), np.flatnonzero(~resident)
    tops = np.cumsum(part.sizes[below])
    base = int(tops[-1])
    room = None if attempt.room is None else attempt.room - base
    # The rest starts stacked, at its greatest height, so any placement that is found counts.
    rest = type(attempt).of(part.part(above), attempt.base + base, room, attempt.effort, attempt.deadline)
    rest.nodes = attempt.nodes
    if rest.instance.count:
        search_exactly(rest)
    attempt.nodes = rest.nodes
    span.impossible = max(span.impossible, base + rest.bound)
    if base + rest.height < span.height:
        offsets = np.zeros(part.count, np.int64)
        offsets[below], offsets[above] = tops - part.sizes[below], rest.offsets + base
        _accept(attempt, span, offsets)


def _one_form(part: Instance) -> tuple[Instance, Int64s]:
    """Return an instance in one form, whatever the order of its buffers and the direction of its time.

    The second result has the former index of each buffer.
    """
    forms = []
    for forward in (True, False):
        keys = []
        for i in range(part.count):
            mine = range(part.first[i], part.first[i + 1])
            lives = [(int(part.starts[k]), int(part.stops[k])) for k in mine]
            if not forward:
                lives = [(part.sections - stop, part.sections - start) for start, stop in reversed(lives)]
            keys.append((lives, int(part.sizes[i])))
        order = sorted(range(part.count), key=keys.__getitem__)
        forms.append(([keys[i] for i in order], order))
    lives_and_sizes, order = min(forms)
    spans = [span for lives, _ in lives_and_sizes for span in lives]
    moved = np.array(order, np.int64)
    form = attrs.evolve(
        part,
        sizes=part.sizes[moved],
        sides=part.sides[moved],
        first=np.concatenate((np.zeros(1, np.int64), np.cumsum(np.diff(part.first)[moved]))),
        starts=np.array([start for start, _ in spans], np.int64),
        stops=np.array([stop for _, stop in spans], np.int64),
    )
    return form, moved


def _climb(attempt: Attempt, span: _Range) -> None:
    """Search on the ladder until the range is low enough, its height is proved the lowest, or the nodes are used up."""
    form, moved = _one_form(span.instance)
    rounds = 1
    while True:
        for rung, height in enumerate(_ladder(attempt, span)):
            if attempt.nodes <= 0 or attempt.late():
                return
            if span.impossible <= height < span.height:
                # The wanted height gets most nodes; the others may gain cheaply, or prove heights impossible.
                share = _FIRST_LIMIT * rounds // (1 if rung == 0 else _LESS_LIKELY)
                found = _search(attempt, span, form, height, share, rounds)
                if found is not None:
                    offsets = np.zeros(form.count, np.int64)
                    offsets[moved] = found
                    _accept(attempt, span, offsets)
                    if _enough(attempt, span.height):
                        return
        if _settled(attempt, span):
            return
        rounds *= 2


def _search(attempt: Attempt, span: _Range, form: Instance, height: int, share: int, seed: int) -> Int64s | None:
    """Search for a height with at most `share` nodes; return the offsets, or None if no placement was found."""
    from ratrain.passes.memory.allocation.valleys import EXHAUSTED, FOUND, search_valleys

    offsets = np.zeros(form.count, np.int64)
    limit = min(share, attempt.nodes, 1 + int(attempt.seconds() * _SLOWEST))
    ended, nodes = search_valleys(form, height, limit, seed, offsets)
    attempt.nodes -= max(1, nodes)
    if ended == EXHAUSTED:
        span.impossible = height + 1
    return offsets if ended == FOUND else None


def _settled(attempt: Attempt, span: _Range) -> bool:
    """Tell whether no lower height, or none that fits, is possible."""
    return span.impossible >= span.height or (attempt.room is not None and span.impossible > attempt.room)


def _accept(attempt: Attempt, span: _Range, offsets: Int64s) -> None:
    span.height = int((offsets + span.instance.sizes).max())
    whole = attempt.offsets.copy()
    whole[span.buffers] = offsets
    attempt.offer("exact search", whole, int((whole + attempt.instance.sizes).max()))
    attempt.offsets = whole  # better in this range, even where another one is as high


def _ladder(attempt: Attempt, span: _Range) -> list[int]:
    """List heights to try: just enough, the lowest not proved impossible, some between, and just less than now."""
    low, high = span.impossible, span.height - 1
    wanted = low if attempt.room is None else min(high, attempt.room)
    rungs = [wanted, low, (low + wanted) // 2, (low + high) // 2, high]
    return list(dict.fromkeys(rung for rung in rungs if low <= rung <= high))
