"""The exact search on what is overfull: connected ranges of time with at most a few hundred buffers.

Searches prune by tightness: they may find a placement at the very bound and none with a little slack. So a *ladder* of
heights between what is proved impossible and what must be beaten is tried, by the canonical search in every static order and by the search
in valleys, in turn and with limits on nodes that double. A search that ends without a placement proves its height impossible.

What is searched is the same however the problem was written down: what fills a whole range is put at its bottom, the order of buffers is
that of their lives and sizes, and of the two directions of time one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np
from attrs import define

from ratrain.passes.memory.allocation.problem import Instance, Int64s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt

_Search = Callable[[int, int, Int64s], tuple[int, int]]
"""A search for a height with so many nodes, which fills in offsets: what came of it, and the nodes it took."""

MOST_BUFFERS = 500
"""Buffers of a range that the search may take on."""
_FIRST_LIMIT = 4096
"""Nodes of the first round; they double with every round."""
_SLOWEST = 100_000
"""Nodes a second on a slow machine: no search is begun that would run far beyond the outer limit."""
_DEARER = 4
"""A node of the search in valleys takes as long as so many of the canonical search."""
_LESS_LIKELY = 8
"""Heights other than the first on the ladder get so many times fewer nodes."""


@define(eq=False)
class _Range:
    """A range of time that shares no buffer with others, and what is known of its height."""

    buffers: Int64s
    instance: Instance
    impossible: int
    """Heights under this one are impossible."""
    height: int


def search_exactly(attempt: Attempt) -> None:
    """Replace the placements of overfull ranges by ones found by search, as far as the nodes last."""
    if attempt.instance.sides.any():
        return  # ranges of time are not independent then
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
    instance = attempt.instance
    crossed = np.zeros(instance.sections + 1, np.int64)
    births, deaths = instance.births(), instance.deaths()
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
    """Put what fills the whole range at its bottom, which costs nothing, and search above it: in several ranges, it may be."""
    part = span.instance
    below, above = np.flatnonzero(resident), np.flatnonzero(~resident)
    tops = np.cumsum(part.sizes[below])
    base = int(tops[-1])
    room = None if attempt.room is None else attempt.room - base
    # What is stacked is as high as it can be: a range is kept as soon as it is lower.
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
    """The same instance whatever the order of its buffers and the direction of its time; and where each buffer was."""
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
    limit = _FIRST_LIMIT
    while True:
        for search, share in _searches(form, limit):
            for rung, height in enumerate(_ladder(attempt, span)):
                if attempt.nodes <= 0 or attempt.late():
                    return
                if span.impossible <= height < span.height:
                    found = _search(attempt, span, search, height, share // (1 if rung == 0 else _LESS_LIKELY))
                    if found is not None:
                        offsets = np.zeros(form.count, np.int64)
                        offsets[moved] = found
                        _accept(attempt, span, offsets)
                        if _enough(attempt, span.height):
                            return
            if _settled(attempt, span):
                return
        limit *= 2


def _searches(form: Instance, limit: int) -> Iterator[tuple[_Search, int]]:
    """The searches of a round, and how many nodes each may take."""
    from ratrain.passes.memory.allocation.search import AREA_SECOND, WIDTH_FIRST, WIDTH_SECOND, canonical_search
    from ratrain.passes.memory.allocation.valleys import search_valleys

    def canonical(ranking: int, height: int, nodes: int, offsets: Int64s, *, rerank: bool) -> tuple[int, int]:
        return canonical_search(
            form.sizes, form.first, form.starts, form.stops, form.sections, height, ranking, rerank, nodes, offsets
        )

    def valleys(height: int, nodes: int, offsets: Int64s) -> tuple[int, int]:
        ended, tried = search_valleys(form, height, max(1, nodes // _DEARER), limit // _FIRST_LIMIT, offsets)
        return ended, tried * _DEARER

    for ranking in (AREA_SECOND, WIDTH_SECOND, WIDTH_FIRST):
        yield partial(canonical, ranking, rerank=True), limit
        yield partial(canonical, ranking, rerank=False), limit // 2
    yield valleys, limit * _DEARER


def _search(attempt: Attempt, span: _Range, search: _Search, height: int, share: int) -> Int64s | None:
    """Let a search have its share of nodes for a height; the placement it found, if any."""
    from ratrain.passes.memory.allocation.search import EXHAUSTED, FOUND

    offsets = np.zeros(span.instance.count, np.int64)
    ended, nodes = search(height, min(share, attempt.nodes, 1 + int(attempt.seconds() * _SLOWEST)), offsets)
    attempt.nodes -= max(1, nodes)
    if ended == EXHAUSTED:
        span.impossible = height + 1
    return offsets if ended == FOUND else None


def _settled(attempt: Attempt, span: _Range) -> bool:
    """Whether it is proved that no lower height, or none that fits, is possible."""
    return span.impossible >= span.height or (attempt.room is not None and span.impossible > attempt.room)


def _accept(attempt: Attempt, span: _Range, offsets: Int64s) -> None:
    span.height = int((offsets + span.instance.sizes).max())
    whole = attempt.offsets.copy()
    whole[span.buffers] = offsets
    attempt.offer("exact search", whole, int((whole + attempt.instance.sizes).max()))
    attempt.offsets = whole  # better in this range, even where another one is as high


def _ladder(attempt: Attempt, span: _Range) -> list[int]:
    """Heights to try: just enough, the lowest that is not proved impossible, some between, and just less than now."""
    low, high = span.impossible, span.height - 1
    wanted = low if attempt.room is None else min(high, attempt.room)
    rungs = [wanted, low, (low + wanted) // 2, (low + high) // 2, high]
    return list(dict.fromkeys(rung for rung in rungs if low <= rung <= high))
