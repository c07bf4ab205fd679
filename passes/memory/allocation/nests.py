"""Place what a forward saves and its backward frees in the opposite order as one piece, a *nest*.

Nests that live at different times share a slot.

Each buffer of a nest lives within the life of the one it is put on, so the free bytes of the piece are one hole, at its
top:

    slot  |      ______          what is saved last is freed first
          |   ___|____|___
          | __|__________|___
          | |_______________|    free: one hole above, growing as backward frees
          +------------------- time

The next nest may begin to be saved before the last bytes of this one are free. Then it stands in the slot upside down,
and grows from the end that is free.

Large buffers with short lives need the hole: views that are gathered, gradients that wait to be reduced. If a hole
lacks less than a hundredth of such a buffer, the nest gets that many bytes more there, a *pad*. A pad is lost, but
without it the whole hole would be. All other buffers come by first fit, in the holes and above the nests, with kinds
moved in the order (`alike.py`).

Cost: about 400,000 placements by first fit, half a second, for each choice of nests. Guarantee: none; the lowest
placement counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field, frozen

from ratrain.passes.memory.allocation import orders
from ratrain.passes.memory.allocation.alike import BufferKinds, move_kinds
from ratrain.passes.memory.allocation.placing import placed_in_order
from ratrain.passes.memory.allocation.problem import Int64s

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.attempt import Attempt
    from ratrain.passes.memory.allocation.problem import Instance

_SHORT = (7, 12)
"""Longest lives, in sections, that are in no nest. The first serves, unless gradients wait longer to be reduced."""
_DENSE = 0.9
"""Smallest share of its span that a buffer in a nest lives; it is placed as if it lived all of it."""
_STAYS = 0.5
"""Largest share of all sections that a buffer in a nest spans.

A longer one that lives at the peak goes below everything.
"""
_PADS = 2
"""Most pads of a nest: its first holes exist when most bytes live."""
_NEARLY = 0.01
"""Largest share of a buffer's size that a hole with a pad lacks."""
_MOST_BUFFERS = 20_000
"""Most buffers of an instance; with more there would be too few orders."""
_MOST_PLACED = 400_000
"""Most buffers to place over all orders of one choice of nests: half a second."""
_PATIENCE = 10
"""Orders in a row without a gain, after which the search of orders starts again."""


@frozen(eq=False)
class Nest:
    """Buffers in the order in which they are put on each other, with the low and high end of each, from 0 up."""

    buffers: Int64s
    lows: Int64s
    highs: Int64s
    begin: int
    """First section in which it lives."""
    reached: Int64s
    """Bytes taken in each section from `begin` on, pads included."""
    height: int


@define(eq=False)
class _Slot:
    """Bytes for one nest after another.

    `taken` has a row for each end, bottom and top: the bytes taken from it in each section.
    """

    start: int
    height: int
    taken: Int64s

    def put(self, nest: Nest, offsets: Int64s) -> bool:
        """Put a nest at an end that is free while it lives, if the other end leaves room.

        Return whether there is one.
        """
        if nest.height != self.height:
            return False
        lives = slice(nest.begin, nest.begin + len(nest.reached))
        for end in range(2):
            mine, other = self.taken[end, lives], self.taken[1 - end, lives]
            # The two ends may each hold one nest at a time, as long as they do not touch.
            if not mine.any() and int((other + nest.reached).max()) <= self.height:
                mine[:] = nest.reached
                offsets[nest.buffers] = self.start + (self.height - nest.highs if end else nest.lows)
                return True
        return False


def nests_in_slots(attempt: Attempt) -> None:
    """Offer placements with nests in slots and several orders for the rest, while there is work left."""
    instance = attempt.instance
    if instance.sides.any() or instance.count > _MOST_BUFFERS:
        return
    spans = instance.deaths() - instance.births()
    # Nests hold buffers that live nearly from birth to death and not for most of the step. Others that live at the peak
    # would tear holes if they came last, so they go to the bottom.
    held = (instance.widths() > _DENSE * spans) & (spans <= _STAYS * instance.sections)
    below = ~held & instance.lives_in(int(instance.load().argmax()))
    last = 0
    for short in _SHORT:
        nested = held & (spans > short)
        count = int(np.count_nonzero(nested))
        if not attempt.good() and count != last:
            last = count
            _place(attempt, nested, below)


def _place(attempt: Attempt, nested: NDArray[np.bool_], below: NDArray[np.bool_]) -> None:
    """Place some buffers below everything, nests above them, and the rest in several orders.

    The likeliest number of pads gets half of the orders, the next one half of the others, and so on.
    """
    instance = attempt.instance
    moved = np.flatnonzero(~nested & ~below)
    piles = piled(instance, np.flatnonzero(nested))
    if not piles or not len(moved):
        return
    ways = _ways(attempt, piles, moved, *_lowest(instance, np.flatnonzero(below)))
    if not ways:
        return
    kinds, ranks = _kinds(instance, moved)
    chance = np.random.default_rng(instance.count)
    left = _MOST_PLACED // instance.count
    while ways:
        rest = BufferKinds(instance, np.flatnonzero(nested | below), ways.pop(), moved, kinds)
        mine, tried = left // 2 if ways else left, 1
        left -= mine
        while tried and not attempt.good():
            tried = move_kinds(attempt, "nests in slots", rest, ranks, chance, mine, _PATIENCE)
            mine -= tried


def _ways(attempt: Attempt, piles: list[Pile], moved: Int64s, offsets: Int64s, base: int) -> list[Int64s]:
    """Return offsets with nests above `base` for each number of pads, the likeliest last.

    Likeliest is the largest number of pads whose bytes may be lost; before it come smaller numbers, and first of all
    one pad too many. The nest that a backward empties while most bytes live loses no pad.
    """
    instance, room = attempt.instance, attempt.target()
    wanted = np.unique(instance.sizes[moved]).tolist()
    ways: list[Int64s] = []
    reached: list[int] = []
    for pads in range(_PADS + 1):
        made = (nest_of(instance, pile, wanted, pads) for pile in piles)
        filled, slots = _filled(made, offsets, base, room, instance.sections)
        top = slots[-1].start + slots[-1].height
        # Leave the highest slot out, for the nest that a backward empties at the peak: its pads cost nothing.
        top_of_others = top - max(slot.height for slot in slots)
        if top > room or top_of_others in reached:
            break
        reached.append(top_of_others)
        if top_of_others - reached[0] > room - attempt.bound:
            return [filled, *ways]
        ways.append(filled)
    return ways


@define(eq=False)
class Pile:
    """Nest without addresses.

    `under` has for each buffer the one that it is put on (-1: the ground); `alive` has the buffers alive at the present
    end.
    """

    buffers: list[int] = field(factory=list)
    under: list[int] = field(factory=list)
    alive: list[int] = field(factory=list)

    def put(self, buffer: int) -> None:
        """Put a buffer on the last one alive."""
        self.buffers.append(buffer)
        self.under.append(self.alive[-1] if self.alive else -1)
        self.alive.append(buffer)


def piled(instance: Instance, chosen: Int64s) -> list[Pile]:
    """Return nests made of some buffers, in the order of their first births.

    A buffer goes on a top that outlives it, the one that dies soonest. Without any it begins a nest.
    """
    # Of buffers born together the longest life comes first: it is the lowest, and the others live within it.
    order = chosen[np.lexsort((-instance.deaths()[chosen], instance.births()[chosen]))].tolist()
    births, deaths = instance.births().tolist(), instance.deaths().tolist()
    made: list[Pile] = []
    growing: list[Pile] = []
    for buffer in order:
        for pile in growing:
            while pile.alive and deaths[pile.alive[-1]] <= births[buffer]:
                pile.alive.pop()
        growing = [pile for pile in growing if pile.alive]
        tops = [(deaths[pile.alive[-1]], place) for place, pile in enumerate(growing)]
        # The tightest fit: a top that dies much later is kept for longer lives.
        soonest = min((top for top in tops if top[0] >= deaths[buffer]), default=None)
        if soonest is None:
            growing.append(Pile())
            made.append(growing[-1])
        (growing[-1] if soonest is None else growing[soonest[1]]).put(buffer)
    return made


def nest_of(instance: Instance, pile: Pile, wanted: list[int], most: int) -> Nest:
    """Return a pile as a nest with addresses from 0 up.

    Up to `most` holes, from the top down, get a pad: the few bytes that they lack for a buffer of one of the sizes
    `wanted` (bytes, ascending).
    """
    buffers = np.array(pile.buffers, np.int64)
    births, deaths, sizes = instance.births()[buffers], instance.deaths()[buffers], instance.sizes[buffers]
    pads = _pads(sizes.tolist(), deaths.tolist(), wanted, most)
    tops = {-1: 0}
    for buffer, under, size, pad in zip(pile.buffers, pile.under, sizes.tolist(), pads, strict=True):
        tops[buffer] = tops[under] + size + pad
    padded = np.array([tops[buffer] for buffer in pile.buffers], np.int64)
    highs = padded - np.array(pads, np.int64)
    begin = int(births.min())
    # In each section the nest reaches up to its highest live buffer; freed bytes below a live one stay taken.
    taken = np.zeros(int(deaths.max()) - begin, np.int64)
    for birth, death, top in zip((births - begin).tolist(), (deaths - begin).tolist(), padded.tolist(), strict=True):
        np.maximum(taken[birth:death], top, out=taken[birth:death])
    return Nest(buffers, highs - sizes, highs, begin, taken, int(taken.max()))


def _pads(sizes: list[int], deaths: list[int], wanted: list[int], most: int) -> list[int]:
    """Return the bytes above each buffer that make the hole left by its death as large as a wanted size."""
    pads, hole = [0] * len(sizes), 0
    for at in range(len(sizes) - 1, -1, -1):
        # From the top down: buffers that die before the one below form one growing hole. A pad uses the hole up.
        hole += sizes[at]
        if most == 0 or (at > 0 and deaths[at - 1] == deaths[at]):
            continue
        nearest = next((size for size in wanted if size >= hole), None)
        if nearest is not None and nearest - hole <= _NEARLY * nearest:
            pads[at] = nearest - hole
            most, hole = most - 1, 0
    return pads


def _filled(made: Iterable[Nest], offsets: Int64s, base: int, room: int, sections: int) -> tuple[Int64s, list[_Slot]]:
    """Put nests in slots that stand on each other from `base` up; return all offsets, and the slots.

    It ends early once a slot ends above `room`.
    """
    offsets, top = offsets.copy(), base
    slots: list[_Slot] = []
    for nest in made:
        if any(slot.put(nest, offsets) for slot in slots):
            continue
        slots.append(_Slot(top, nest.height, np.zeros((2, sections), np.int64)))
        slots[-1].put(nest, offsets)
        top += nest.height
        if top > room:
            break
    return offsets, slots


def _lowest(instance: Instance, chosen: Int64s) -> tuple[Int64s, int]:
    """Place some buffers by first fit by size; return the offsets of all, and the height of the placed ones."""
    offsets = np.zeros(instance.count, np.int64)
    if not len(chosen):
        return offsets, 0
    part = instance.kept(chosen)
    offsets[chosen], height = placed_in_order(part, orders.by_size(part))
    return offsets, height


def _kinds(instance: Instance, moved: Int64s) -> tuple[Int64s, NDArray[np.float64]]:
    """Group the moved buffers by size, length of life and load at birth.

    Returns the kind of each, and each kind's rank in the order by totals.
    """
    # These three say which tensor of the schedule a buffer is, whatever its micro-batch.
    alike = np.stack((instance.sizes, instance.widths(), instance.load()[instance.births()]))[:, moved]
    kinds = np.unique(alike, axis=1, return_inverse=True)[1].reshape(-1)
    place = np.empty(instance.count, np.int64)
    place[orders.by_total(instance)] = np.arange(instance.count)
    first = np.full(int(kinds.max()) + 1, instance.count)
    np.minimum.at(first, kinds, place[moved])
    return kinds, first.argsort().argsort().astype(np.float64)
