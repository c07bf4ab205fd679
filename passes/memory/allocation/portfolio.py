"""Methods from the cheapest to the dearest, until one is good enough.

Pipelines give large and easy problems: sweeps in time or one of a few greedy orders come within a thousandth of the bound, but no
method does everywhere. Where sweeps tear holes that later cannot be used (split backwards, lengths that vary), a beam of sweeps
finds policies that do not, forwards or backwards in time. A beam is at its best on a few thousand buffers: where a sweep is too high
for short times only, as with lengths that vary, it places these times alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.effort import TREE_WORK
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.small import greedy, neighbours

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Int64s

COMPILED_FROM = 1024
"""Buffers from which on compiled loops are worth importing the compiler."""
_SHORT_SHARES = (0.0, 0.5, 0.8, 0.95, 0.99)
"""Shares of the buffers that a two-ended sweep takes for short-lived."""
_FIRST_BEAM = (8, 8, 200)
_MORE_BEAMS = ((8, 32, 100), (8, 32, 200), (16, 32, 200))
"""Beams: sweeps kept, tries for each, pieces of time at least."""
_PROMOTIONS = 20
_SMALL_PROMOTIONS = 20


def small_portfolio(attempt: Attempt) -> None:
    """Greedy orders in plain Python."""
    instance = attempt.instance
    sizes, meets = instance.sizes.tolist(), neighbours(instance)

    def candidates() -> Iterator[tuple[str, Int64s, bool]]:
        largest = orders.by_size(instance)
        yield "best fit by size", largest, True
        yield "first fit by size", largest, False
        yield "first fit by start", orders.by_start(instance), False
        for name, order in orders.costly_orders(instance):
            yield f"first fit by {name}", order, False

    for name, order, best in candidates():
        offsets = greedy(order.tolist(), sizes, meets, best=best)
        _offer_list(attempt, name, offsets, sizes)
        if attempt.good() or attempt.late():
            return


def small_promotions(attempt: Attempt) -> None:
    """Place again with buffers that stick out above the bound earlier in the order."""
    sizes, meets = attempt.instance.sizes.tolist(), neighbours(attempt.instance)
    chance = random.Random(attempt.instance.count)  # noqa: S311 - the same numbers every time are the point
    order = np.argsort(attempt.offsets, kind="stable").tolist()
    offsets = attempt.offsets.tolist()
    for _ in range(_SMALL_PROMOTIONS):
        if attempt.enough() or attempt.late():
            return
        rank = {buffer: float(place) for place, buffer in enumerate(order)}
        for buffer in order:
            if offsets[buffer] + sizes[buffer] > attempt.bound:
                rank[buffer] *= chance.random()
        order.sort(key=rank.__getitem__)
        offsets = greedy(order, sizes, meets, best=False)
        _offer_list(attempt, "first fit with promotions", offsets, sizes)


def large_portfolio(attempt: Attempt) -> None:
    """Compiled sweeps, greedy orders and a first beam."""
    instance = attempt.instance
    if instance.plain:
        in_time = _sweeps(attempt)
        _lower_peaks(attempt, in_time)
    if not attempt.good() and attempt.afford(TREE_WORK * instance.count):
        _tree(attempt, "first fit by size", orders.by_size(instance))
    if not attempt.good():
        _by_start(attempt)
    if instance.plain and not attempt.good():
        from ratrain.passes.memory.allocation.beams import beams

        beams(attempt, *_FIRST_BEAM, seed=1)
    if attempt.good():
        return
    for name, order in orders.costly_orders(instance):
        if not attempt.afford(TREE_WORK * instance.count):
            return
        _tree(attempt, f"first fit by {name}", order)
        if attempt.good():
            return


def more_beams(attempt: Attempt) -> None:
    """Wider beams, while there is work left."""
    if attempt.instance.plain:
        from ratrain.passes.memory.allocation.beams import beams

        for seed, (width, tries, pieces) in enumerate(_MORE_BEAMS, 2):
            if attempt.enough():
                return
            beams(attempt, width, tries, pieces, seed=seed)


def promotions(attempt: Attempt) -> None:
    """Place again with buffers that stick out above the bound earlier in the order, while there is work left."""
    instance = attempt.instance
    chance = np.random.default_rng(instance.count)
    offsets = attempt.offsets
    rank = np.empty(instance.count)
    rank[np.lexsort((np.arange(instance.count), offsets))] = np.arange(instance.count)
    for _ in range(_PROMOTIONS):
        if attempt.enough() or not attempt.afford(TREE_WORK * instance.count):
            return
        out = np.flatnonzero(offsets + instance.sizes > attempt.bound)
        rank[out] *= chance.random(len(out))
        order = np.argsort(rank, kind="stable")
        rank[order] = np.arange(instance.count)
        offsets, height = placed_in_order(instance, order)
        attempt.offer("first fit with promotions", offsets, height)


def _lower_peaks(attempt: Attempt, in_time: Int64s) -> None:
    """Of time-order first fit, which leaves its flanks room, and of the best sweep."""
    best = attempt.method, attempt.offsets
    for name, offsets in (("time-order first fit", in_time), best):
        if attempt.good():
            return
        from ratrain.passes.memory.allocation.peaks import lower_peaks

        lower_peaks(attempt, name, offsets)


def _sweeps(attempt: Attempt) -> Int64s:
    """Two-ended sweeps, and with no short-lived buffers time-order first and best fit; the first of them."""
    from ratrain.passes.memory.allocation.sweep import HIGHEST, LOWEST, TIGHTEST, sweep

    instance = attempt.instance
    events, widths = instance.events(), instance.widths()
    first = attempt.offsets
    for share in _SHORT_SHARES:
        short = (widths <= np.quantile(widths, share)) if share else np.zeros(instance.count, np.bool_)
        for wanted in (LOWEST, TIGHTEST):
            if attempt.good() or not attempt.afford(instance.count):
                return first
            offsets = np.empty(instance.count, np.int64)
            policy = np.array([wanted, HIGHEST])
            height = sweep(events, instance.sizes, short.astype(np.int64), policy, attempt.bound, offsets)
            fit = "best" if wanted == TIGHTEST else "first"
            name = f"two-ended sweep, {share:.0%} short, {fit} fit" if share else f"time-order {fit} fit"
            attempt.offer(name, offsets, height)
            if not share and wanted == LOWEST:
                first = offsets
    return first


def _by_start(attempt: Attempt) -> None:
    """First fit by start; where each buffer has one interval and no side a sweep gives the same, for less."""
    instance, name = attempt.instance, "first fit by start"
    if not instance.plain:
        if attempt.afford(TREE_WORK * instance.count):
            _tree(attempt, name, orders.by_start(instance))
    elif attempt.afford(instance.count):
        from ratrain.passes.memory.allocation.sweep import LOWEST, sweep

        offsets = np.empty(instance.count, np.int64)
        events, alike = instance.events(longest_first=True), np.zeros(instance.count, np.int64)
        height = sweep(events, instance.sizes, alike, np.array([LOWEST]), attempt.bound, offsets)
        attempt.offer(name, offsets, height)


def _tree(attempt: Attempt, name: str, order: Int64s) -> None:
    """First fit in an order, as long as it may be of use."""
    offsets, height = placed_in_order(attempt.instance, order, limit=attempt.of_use_below())
    attempt.offer(name, offsets, height)


def _offer_list(attempt: Attempt, name: str, offsets: list[int], sizes: list[int]) -> None:
    height = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
    attempt.offer(name, np.array(offsets, np.int64), height)
