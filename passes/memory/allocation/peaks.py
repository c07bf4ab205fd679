r"""Place again the short times at which a sweep is too high, and leave everything else in place.

Lengths that vary bring the live bytes near their maximum at a few moments, and only there is it hard to stay near the
bound:

    height |      __                 __         the sweep
           |..___/..\____..____...__/..\__      the bound
           |
           +--- flank [core] flank ----------- time

Buffers that live about such a moment, its *core*, are placed first, with nothing in their way, by a *beam* of sweeps.
Its *flanks*, before and after, follow by first fit between the core and the fixed rest. Fewer bytes live there, so
bytes lost between the two do no harm.

A beam sweeps forwards in time, or backwards. At the end of each piece of time it keeps the best few of many sweeps;
each of them goes on with its own policy and with changed ones (`sweep.py`).

Cost: for a peak up to three cores of some thousand buffers, 64 sweeps each, and twelve first fits of flanks. Nothing is
done if a peak is long. Guarantee: no buffer outside of a window moves, and no window becomes higher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.problem import Int64s

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Instance

_CORES = (4000, 2000, 6000)
"""Buffers of a core in addition to those that are too high; the best number differs from peak to peak."""
_FLANKS = (6000, 16_000)
"""Buffers of each flank."""
_APART = max(_CORES)
"""Distance between peaks, in buffers by birth, below which they are one."""
_WIDEST = 20_000
"""Longest peak that is placed again, from its first buffer too high to its last."""
_KEPT, _TRIES = 8, 8
"""Sweeps that a beam keeps, and tries made from each."""
_PIECES = 200
"""Pieces of time of a beam."""
_CLASSES = 8
"""Classes of buffers by lifetime, each with its own policy in a sweep."""


@frozen(eq=False)
class _Window:
    """Buffers that live within a range of time; those in `met` that are not `pinned` are placed again."""

    met: Int64s
    pinned: NDArray[np.bool_]
    """True for buffers that live beyond the time too, and stay."""


def lower_peaks(attempt: Attempt, name: str, offsets: Int64s) -> None:
    """Lower a placement of a plain instance where it is too high, the highest peak first.

    Nothing is done if a peak is long.
    """
    target = attempt.target()
    offsets = offsets.copy()
    peaks = _peaks(offsets + attempt.instance.sizes, target)
    if any(last - first > _WIDEST for first, last in peaks):
        return
    for first, last in peaks:
        lowered = _lower(attempt, offsets, first, last, target)
        if lowered is None:
            break
        target = max(target, lowered)  # the other peaks need to be no lower than this
    attempt.offer(f"{name}, peaks again", offsets, int((offsets + attempt.instance.sizes).max()))


def _peaks(tops: Int64s, target: int) -> list[tuple[int, int]]:
    """Return the first and last buffer, by birth, of each peak above a height; the highest peak first."""
    over = np.flatnonzero(tops > target)
    pieces = np.split(over, np.flatnonzero(np.diff(over) > _APART) + 1)
    pieces.sort(key=lambda piece: -int(tops[piece].max(initial=0)))
    return [(int(piece[0]), int(piece[-1])) for piece in pieces if len(piece)]


def _lower(attempt: Attempt, offsets: Int64s, first: int, last: int, target: int) -> int | None:
    """Place a peak again in `offsets`; return its height, or None without work left.

    The first placement down to `target` is taken, else the best.
    """
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
            # The beam placed the core with nothing in its way; next to a pinned buffer its offsets could collide.
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
                # The core and what stays keep their offsets; first fit fills the flanks between them.
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
    """Collect the buffers that live between the births of two buffers."""
    births, deaths = instance.births(), instance.deaths()
    begin, end = births[max(0, first)], births[min(instance.count, last) - 1] + 1
    # Buffers are sorted by birth, so indices into `births` bound a range of time.
    met = np.flatnonzero((births < end) & (deaths > begin))
    return _Window(met, (births[met] < begin) | (deaths[met] > end))


def _touch(instance: Instance, window: _Window, core: _Window) -> bool:
    """Tell whether a pinned buffer may live at the same time as a buffer of the core."""
    stays = window.met[window.pinned]
    births, deaths = instance.births(), instance.deaths()
    begin, end = births[core.met].min(), deaths[core.met].max()
    return bool(((births[stays] < end) & (deaths[stays] > begin)).any())


def _beamed(attempt: Attempt, met: Int64s) -> Int64s | None:
    """Place some buffers on their own, by a beam forwards and one backwards; None without work left."""
    from ratrain.passes.memory.allocation.sweep import beam_sweep

    part = attempt.instance.part(met)
    widths = part.widths()
    # Classes by quantiles of lifetime, so that each has about as many buffers.
    borders = np.unique(np.quantile(widths, np.linspace(0, 1, _CLASSES + 1)[1:-1]))
    classes = np.searchsorted(borders, widths, "right")
    best, lowest = None, 0
    for backwards in (False, True):
        good = best is not None and attempt.close(lowest) and (attempt.room is None or lowest <= attempt.room)
        if good or not attempt.afford(_KEPT * _TRIES * part.count):
            break
        events = part.events(backwards=backwards)
        cuts = np.unique(np.linspace(0, len(events), _PIECES + 1).astype(np.int64))
        offsets = np.empty(part.count, np.int64)
        height = beam_sweep(
            events, part.sizes, classes, len(borders) + 1, attempt.bound, cuts, _KEPT, _TRIES, 1, offsets
        )
        if best is None or height < lowest:
            best, lowest = offsets, height
    return best
