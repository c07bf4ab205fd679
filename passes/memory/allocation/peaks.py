"""Where a placement is too high for a short time only, that time is placed again, and all else stays where it is.

Lengths that vary bring the live bytes near their maximum at a few moments, and only there is it hard to be near the bound. What lives
about such a moment, its *core*, is placed first, by a beam that begins with nothing in its way. Then come its *flanks*, before and after,
by first fit between the core and what stays: there are fewer bytes live, so what is lost between the two does no harm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.attempt import Attempt
from ratrain.passes.memory.allocation.beams import beams
from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.problem import Int64s

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import Instance

_CORES = (4000, 2000, 6000)
"""Buffers of a core, beside those that are too high: which is best differs from peak to peak."""
_FLANKS = (6000, 16_000)
"""Buffers of each flank."""
_APART = max(_CORES)
"""Peaks whose buffers are nearer to each other, in order of birth, are one."""
_WIDEST = 20_000
"""Buffers between the first and the last that is too high, of a peak that is short."""
_BEAM = (8, 8, 200)


@frozen(eq=False)
class _Window:
    """What lives within a time, to be placed again: of buffers `met`, those that are not `pinned`."""

    met: Int64s
    pinned: NDArray[np.bool_]
    """What lives beyond the time too, and stays."""


def lower_peaks(attempt: Attempt, name: str, offsets: Int64s) -> None:
    """Lower a placement of a plain instance where it is too high, the highest peak first, if all its peaks are short."""
    target = attempt.target()
    offsets = offsets.copy()
    peaks = _peaks(offsets + attempt.instance.sizes, target)
    if any(last - first > _WIDEST for first, last in peaks):
        return
    for first, last in peaks:
        lowered = _lower(attempt, offsets, first, last, target)
        if lowered is None:
            break
        target = max(target, lowered)  # what is left needs to be no lower than this
    attempt.offer(f"{name}, peaks again", offsets, int((offsets + attempt.instance.sizes).max()))


def _peaks(tops: Int64s, target: int) -> list[tuple[int, int]]:
    """The first and the last buffer of each peak above a height, buffers being in order of birth; the highest peak first."""
    over = np.flatnonzero(tops > target)
    pieces = np.split(over, np.flatnonzero(np.diff(over) > _APART) + 1)
    pieces.sort(key=lambda piece: -int(tops[piece].max(initial=0)))
    return [(int(piece[0]), int(piece[-1])) for piece in pieces if len(piece)]


def _lower(attempt: Attempt, offsets: Int64s, first: int, last: int, target: int) -> int | None:
    """Place a peak again, in `offsets`, by the first way that comes down to `target`, or else the best; its height, or None without work left."""
    instance = attempt.instance
    whole = _window(instance, first - _CORES[0] // 2 - max(_FLANKS), last + _CORES[0] // 2 + max(_FLANKS))
    best, height = offsets[whole.met], int((offsets + instance.sizes)[whole.met[~whole.pinned]].max(initial=0))
    met = whole.met
    if height <= target:
        return height
    for core in _CORES:
        middle = _window(instance, first - core // 2, last + core // 2)
        inner = _beamed(attempt, middle.met)
        if inner is None:
            break
        for flank in _FLANKS:
            window = _window(instance, first - core // 2 - flank, last + core // 2 + flank)
            places = np.searchsorted(window.met, middle.met)
            if _touch(instance, window, middle):
                continue
            start = offsets[window.met]
            start[places] = inner
            fixed = window.pinned.copy()
            fixed[places] = True
            part = instance.part(window.met)
            for order in (orders.by_total(part), orders.by_start(part)):
                if not attempt.afford(TREE_WORK * part.count):
                    break
                pinned_first = np.concatenate((order[fixed[order]], order[~fixed[order]]))
                placed, _ = placed_in_order(part, pinned_first, start, int(fixed.sum()))
                top = int((placed + part.sizes)[~window.pinned].max())
                if top < height:
                    best, height, met = placed, top, window.met
                if height <= target:
                    offsets[met] = best
                    return height
    offsets[met] = best
    return height


def _window(instance: Instance, first: int, last: int) -> _Window:
    """What lives between the births of two buffers."""
    births, deaths = instance.births(), instance.deaths()
    begin, end = births[max(0, first)], births[min(instance.count, last) - 1] + 1
    met = np.flatnonzero((births < end) & (deaths > begin))
    return _Window(met, (births[met] < begin) | (deaths[met] > end))


def _touch(instance: Instance, window: _Window, core: _Window) -> bool:
    """Whether what stays may live at the same time as something of the core."""
    stays = window.met[window.pinned]
    births, deaths = instance.births(), instance.deaths()
    begin, end = births[core.met].min(), deaths[core.met].max()
    return bool(((births[stays] < end) & (deaths[stays] > begin)).any())


def _beamed(attempt: Attempt, met: Int64s) -> Int64s | None:
    """Offsets of some buffers by themselves, by a beam; None without work left for it."""
    alone = Attempt.of(attempt.instance.part(met), attempt.base, attempt.room, attempt.effort, attempt.deadline)
    alone.bound, alone.work = attempt.bound, attempt.work
    stacked = alone.method
    beams(alone, *_BEAM, seed=1)
    attempt.work = alone.work
    return None if alone.method == stacked else alone.offsets
