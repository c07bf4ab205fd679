"""The exact search on what is overfull: connected ranges of time with at most a few hundred buffers.

The search prunes by tightness: it may find a placement at the very bound and none with a little slack. So a *ladder* of
heights between what is proved impossible and what must be beaten is tried, in every static order, in turn and with limits on
nodes that double. A search that ends without a placement proves its height impossible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define

from ratrain.passes.memory.allocation.problem import Instance, Int64s

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.attempt import Attempt

MOST_BUFFERS = 500
"""Buffers of a range that the search may take on."""
_FIRST_LIMIT = 4096
"""Nodes of the first round; they double with every round."""
_SLOWEST = 100_000
"""Nodes a second on a slow machine: no search is begun that would run far beyond the outer limit."""
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


def _climb(attempt: Attempt, span: _Range) -> None:
    """Search on the ladder until the range is low enough, its height is proved the lowest, or the nodes are used up."""
    from ratrain.passes.memory.allocation.search import (
        AREA_SECOND,
        EXHAUSTED,
        FOUND,
        WIDTH_FIRST,
        WIDTH_SECOND,
        canonical_search,
    )

    part = span.instance
    limit = _FIRST_LIMIT
    while True:
        for ranking in (AREA_SECOND, WIDTH_SECOND, WIDTH_FIRST):
            for rung, height in enumerate(_ladder(attempt, span)):
                for rerank in (True, False):
                    if attempt.nodes <= 0 or attempt.late() or _settled(attempt, span):
                        return
                    if not span.impossible <= height < span.height:
                        continue
                    share = limit // (1 if rung == 0 else _LESS_LIKELY) // (1 if rerank else 2)
                    offsets = np.zeros(part.count, np.int64)
                    ended, nodes = canonical_search(
                        part.sizes, part.first, part.starts, part.stops, part.sections, height, ranking, rerank,
                        min(share, attempt.nodes, 1 + int(attempt.seconds() * _SLOWEST)), offsets,
                    )  # fmt: skip
                    attempt.nodes -= max(1, nodes)
                    if ended == EXHAUSTED:
                        span.impossible = height + 1
                    elif ended == FOUND:
                        _accept(attempt, span, offsets)
                        if _enough(attempt, span.height):
                            return
        limit *= 2


def _settled(attempt: Attempt, span: _Range) -> bool:
    """Whether it is proved that no lower height, or none that fits, is possible."""
    return span.impossible >= span.height or (attempt.room is not None and span.impossible > attempt.room)


def _accept(attempt: Attempt, span: _Range, offsets: Int64s) -> None:
    span.height = int((offsets + span.instance.sizes).max())
    whole = attempt.offsets.copy()
    whole[span.buffers] = offsets
    attempt.offer("canonical search", whole, int((whole + attempt.instance.sizes).max()))
    attempt.offsets = whole  # better in this range, even where another one is as high


def _ladder(attempt: Attempt, span: _Range) -> list[int]:
    """Heights to try: just enough, the lowest that is not proved impossible, some between, and just less than now."""
    low, high = span.impossible, span.height - 1
    wanted = low if attempt.room is None else min(high, attempt.room)
    rungs = [wanted, low, (low + wanted) // 2, (low + high) // 2, high]
    return list(dict.fromkeys(rung for rung in rungs if low <= rung <= high))
