"""Methods from the cheapest to the dearest, until one is good enough.

Pipelines give large and easy problems: sweeps in time or one of a few greedy orders come within a thousandth of the bound, but no
method does everywhere. Where sweeps tear holes that later cannot be used (split backwards, lengths that vary), a beam of sweeps
finds policies that do not, forwards or backwards in time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.small import greedy, neighbours

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Instance, Int64s

COMPILED_FROM = 1024
"""Buffers from which on compiled loops are worth importing the compiler."""
TREE_WORK = 50
"""Placing a buffer in the tree costs as much as so many placements of a sweep."""
_SHORT_SHARES = (0.0, 0.5, 0.8, 0.95, 0.99)
"""Shares of the buffers that a two-ended sweep takes for short-lived."""
_KINDS = 8
"""Classes by lifetime, each with its own policy in a beam."""
_FIRST_BEAM = (8, 8, 200)
_MORE_BEAMS = ((8, 32, 100), (8, 32, 200), (16, 32, 200))
"""Beams: sweeps kept, tries for each, pieces of time at least."""
_PIECE = 1000
"""Buffers of a piece of time, where that makes more pieces: on a million buffers shorter pieces gain half a percent."""
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
        _sweeps(attempt)
    for name, ordered in (("size", orders.by_size), ("start", orders.by_start)):
        if attempt.good() or not attempt.afford(TREE_WORK * instance.count):
            break
        _tree(attempt, f"first fit by {name}", ordered(instance))
    if instance.plain and not attempt.good():
        _beams(attempt, *_FIRST_BEAM, seed=1)
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
        for seed, (width, tries, pieces) in enumerate(_MORE_BEAMS, 2):
            if attempt.enough():
                return
            _beams(attempt, width, tries, pieces, seed=seed)


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
        offsets = _tree(attempt, "first fit with promotions", order)


def _sweeps(attempt: Attempt) -> None:
    """Two-ended sweeps, and with no short-lived buffers time-order first and best fit."""
    from ratrain.passes.memory.allocation.sweep import HIGHEST, LOWEST, TIGHTEST, sweep

    instance = attempt.instance
    events, widths = _events(instance, backwards=False), instance.widths()
    for share in _SHORT_SHARES:
        short = (widths <= np.quantile(widths, share)) if share else np.zeros(instance.count, np.bool_)
        for wanted in (LOWEST, TIGHTEST):
            if attempt.good() or not attempt.afford(instance.count):
                return
            offsets = np.empty(instance.count, np.int64)
            policy = np.array([wanted, HIGHEST])
            height = sweep(events, instance.sizes, short.astype(np.int64), policy, attempt.bound, offsets)
            fit = "best" if wanted == TIGHTEST else "first"
            name = f"two-ended sweep, {share:.0%} short, {fit} fit" if share else f"time-order {fit} fit"
            attempt.offer(name, offsets, height)


def _beams(attempt: Attempt, width: int, tries: int, pieces: int, *, seed: int) -> None:
    """A beam of sweeps forwards and one backwards."""
    from ratrain.passes.memory.allocation.sweep import beam_sweep

    instance = attempt.instance
    widths = instance.widths()
    borders = np.unique(np.quantile(widths, np.linspace(0, 1, _KINDS + 1)[1:-1]))
    classes = np.searchsorted(borders, widths, "right")
    for backwards in (False, True):
        if attempt.enough() or attempt.good() or not attempt.afford(width * tries * instance.count):
            return
        events = _events(instance, backwards=backwards)
        cuts = np.unique(np.linspace(0, len(events), max(pieces, instance.count // _PIECE) + 1).astype(np.int64))
        offsets = np.empty(instance.count, np.int64)
        height = beam_sweep(
            events, instance.sizes, classes, len(borders) + 1, attempt.bound, cuts, width, tries, seed, offsets
        )
        attempt.offer("beam of sweeps, backwards" if backwards else "beam of sweeps", offsets, height)


def _events(instance: Instance, *, backwards: bool) -> Int64s:
    """Births b and deaths ~b in the order of time: of one section, deaths first."""
    births, deaths = instance.births(), instance.deaths()
    if backwards:
        births, deaths = instance.sections - deaths, instance.sections - births
    count = instance.count
    order = np.argsort(np.concatenate((deaths, births)), kind="stable")
    return np.concatenate((~np.arange(count), np.arange(count)))[order]


def _tree(attempt: Attempt, name: str, order: Int64s) -> Int64s:
    from ratrain.passes.memory.allocation.tree import first_fit

    part = attempt.instance
    offsets = np.empty(part.count, np.int64)
    height = first_fit(order, part.sizes, part.sides, part.first, part.starts, part.stops, part.sections, offsets)
    attempt.offer(name, offsets, height)
    return offsets


def _offer_list(attempt: Attempt, name: str, offsets: list[int], sizes: list[int]) -> None:
    height = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
    attempt.offer(name, np.array(offsets, np.int64), height)
