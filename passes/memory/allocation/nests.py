"""Nests: what a forward saves and its backward frees in the opposite order has one piece, and pieces that live at different times have one slot.

Of a nest's buffers each lives within the life of the one it is put on, so that what is free of the piece is one hole, at its top. Where the next
nest begins to be saved before the last bytes of the one before it are free, it stands in the slot upside down, and grows from the end that is free.

What is freed is wanted by what is large and lives shortly, views that are gathered and gradients that wait to be reduced. Where a hole lacks
less than a hundredth of such a buffer, the nest gets so many bytes more there, a *pad*: they are lost, and else the whole hole would be. The rest
comes by first fit, in the holes and above the nests, with kinds moved in the order (`alike.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field, frozen

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.alike import Kinds, move_kinds
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.problem import Int64s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Instance

_SHORT = 8
"""Sections: what lives no longer is in no nest."""
_DENSE = 0.9
"""Share of the time from its birth to its death in which a buffer lives at least, to be in a nest as if it lived all of it."""
_STAYS = 0.5
"""Share of all sections: what lives longer is in no nest, but below all where it lives at the peak."""
_PADS = 2
"""Pads of a nest: its first holes are there when most bytes live."""
_NEARLY = 0.01
"""Share of a buffer's size that a hole may lack to get a pad."""
_MOST_BUFFERS = 20_000
_MOST_PLACED = 400_000
"""Buffers that are placed in all, over all orders: half a second."""
_PATIENCE = 10
"""Orders in a row that gain nothing, after which it begins anew."""


@frozen(eq=False)
class Nest:
    """Buffers in the order in which they are put on each other, and where each begins and ends from the bottom up."""

    buffers: Int64s
    lows: Int64s
    highs: Int64s
    begin: int
    """The first section in which it lives."""
    reached: Int64s
    """What is taken with its pads, from that section on."""
    height: int


@define(eq=False)
class _Slot:
    """Bytes for one nest after another, and how much is taken from either end in each section."""

    start: int
    height: int
    taken: Int64s

    def put(self, nest: Nest, offsets: Int64s) -> bool:
        """Put a nest at an end where nothing is while it lives, if the other end leaves it room; whether there is one."""
        if nest.height != self.height:
            return False
        lives = slice(nest.begin, nest.begin + len(nest.reached))
        for end in range(2):
            mine, other = self.taken[end, lives], self.taken[1 - end, lives]
            if not mine.any() and int((other + nest.reached).max()) <= self.height:
                mine[:] = nest.reached
                offsets[nest.buffers] = self.start + (self.height - nest.highs if end else nest.lows)
                return True
        return False


def nests_in_slots(attempt: Attempt) -> None:
    """Put what is saved in slots, and try orders for the rest, while there is work left."""
    instance = attempt.instance
    if instance.sides.any() or instance.count > _MOST_BUFFERS:
        return
    births, widths = instance.births(), instance.widths()
    spans = instance.deaths() - births
    dense, stays = widths > _DENSE * spans, spans > _STAYS * instance.sections
    nested = dense & ~stays & (spans > _SHORT)
    below = ~(dense & ~stays) & instance.lives_in(int(instance.load().argmax()))
    moved = np.flatnonzero(~nested & ~below)
    offsets, base = _lowest(instance, np.flatnonzero(below))
    made = nests(instance, np.flatnonzero(nested), instance.sizes[moved])
    if not (len(moved) and _fill_slots(made, base, attempt.target(), instance.sections, offsets)):
        return
    kinds, ranks = _kinds(instance, moved)
    rest = Kinds(instance, np.flatnonzero(nested | below), offsets, moved, kinds)
    chance = np.random.default_rng(instance.count)
    left, tried = _MOST_PLACED // instance.count, 1
    while tried and left and not attempt.good():
        tried = move_kinds(attempt, "nests in slots", rest, ranks, chance, left, _PATIENCE)
        left -= tried


def nests(instance: Instance, chosen: Int64s, wanted: Int64s) -> list[Nest]:
    """The nests of some buffers, by their first births, with pads for buffers of the wanted sizes.

    A buffer is put on the top that dies soonest of those that live on when it dies; where there is none it begins a nest.
    """
    order = chosen[np.lexsort((-instance.deaths()[chosen], instance.births()[chosen]))].tolist()
    births, deaths = instance.births().tolist(), instance.deaths().tolist()
    made: list[_Pile] = []
    growing: list[_Pile] = []
    for buffer in order:
        for pile in growing:
            while pile.alive and deaths[pile.alive[-1]] <= births[buffer]:
                pile.alive.pop()
        growing = [pile for pile in growing if pile.alive]
        tops = [(deaths[pile.alive[-1]], place) for place, pile in enumerate(growing)]
        soonest = min((top for top in tops if top[0] >= deaths[buffer]), default=None)
        if soonest is None:
            growing.append(_Pile())
            made.append(growing[-1])
        (growing[-1] if soonest is None else growing[soonest[1]]).put(buffer)
    sizes = np.unique(wanted).tolist()
    return [_built(instance, pile, sizes) for pile in made]


@define(eq=False)
class _Pile:
    """A nest that grows: its buffers, on which of them each was put (-1: on the ground), and those that are alive."""

    buffers: list[int] = field(factory=list)
    under: list[int] = field(factory=list)
    alive: list[int] = field(factory=list)

    def put(self, buffer: int) -> None:
        self.buffers.append(buffer)
        self.under.append(self.alive[-1] if self.alive else -1)
        self.alive.append(buffer)


def _built(instance: Instance, pile: _Pile, wanted: list[int]) -> Nest:
    buffers = np.array(pile.buffers, np.int64)
    births, deaths, sizes = instance.births()[buffers], instance.deaths()[buffers], instance.sizes[buffers]
    pads = _pads(sizes.tolist(), deaths.tolist(), wanted)
    tops = {-1: 0}
    for buffer, under, size, pad in zip(pile.buffers, pile.under, sizes.tolist(), pads, strict=True):
        tops[buffer] = tops[under] + size + pad
    padded = np.array([tops[buffer] for buffer in pile.buffers], np.int64)
    highs = padded - np.array(pads, np.int64)
    begin = int(births.min())
    taken = np.zeros(int(deaths.max()) - begin, np.int64)
    for birth, death, top in zip((births - begin).tolist(), (deaths - begin).tolist(), padded.tolist(), strict=True):
        np.maximum(taken[birth:death], top, out=taken[birth:death])
    return Nest(buffers, highs - sizes, highs, begin, taken, int(taken.max()))


def _pads(sizes: list[int], deaths: list[int], wanted: list[int]) -> list[int]:
    """The bytes above each buffer of a nest that make what is free of it, when it is dead too, as large as one of the wanted sizes."""
    pads, left, hole = [0] * len(sizes), _PADS, 0
    for at in range(len(sizes) - 1, -1, -1):
        hole += sizes[at]
        if left == 0 or (at > 0 and deaths[at - 1] == deaths[at]):
            continue
        nearest = next((size for size in wanted if size >= hole), None)
        if nearest is not None and nearest - hole <= _NEARLY * nearest:
            pads[at] = nearest - hole
            left, hole = left - 1, 0
    return pads


def _fill_slots(made: list[Nest], base: int, room: int, sections: int, offsets: Int64s) -> bool:
    """Give nests their slots, which stand on each other from `base` up, and their buffers offsets; whether all end under `room`."""
    slots: list[_Slot] = []
    top = base
    for nest in made:
        if any(slot.put(nest, offsets) for slot in slots):
            continue
        slots.append(_Slot(top, nest.height, np.zeros((2, sections), np.int64)))
        slots[-1].put(nest, offsets)
        top += nest.height
        if top > room:
            return False
    return bool(made)


def _lowest(instance: Instance, chosen: Int64s) -> tuple[Int64s, int]:
    """Offsets, those of some buffers by first fit by size, and how high these are."""
    offsets = np.zeros(instance.count, np.int64)
    if not len(chosen):
        return offsets, 0
    part = instance.kept(chosen)
    offsets[chosen], height = placed_in_order(part, orders.by_size(part))
    return offsets, height


def _kinds(instance: Instance, moved: Int64s) -> tuple[Int64s, NDArray[np.float64]]:
    """The kind of each buffer that is moved: its size, how long it lives and what lives at its birth; and the place of each kind in the order by totals."""
    alike = np.stack((instance.sizes, instance.widths(), instance.load()[instance.births()]))[:, moved]
    kinds = np.unique(alike, axis=1, return_inverse=True)[1].reshape(-1)
    place = np.empty(instance.count, np.int64)
    place[orders.by_total(instance)] = np.arange(instance.count)
    first = np.full(int(kinds.max()) + 1, instance.count)
    np.minimum.at(first, kinds, place[moved])
    return kinds, first.argsort().argsort().astype(np.float64)
