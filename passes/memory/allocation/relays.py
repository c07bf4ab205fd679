"""Find relays: buffers that free bytes bit by bit, and buffers of other sizes that take them over, filling one piece.

Tensors that a forward saves for one layer die at two ops of its backward: two large tensors and a small one, then four
small ones. Gradients of weights are born at the same ops, with as many bytes, but the other way round:

    piece |  ---- 16 ----| |---- 43 ----       the first in the order of their deaths: one hole that grows
          |  ---- 16 ----| |---- 43 ----
          |  ---- 43 --| |------ 16 ----       the others fill it from that end, in the order of their births
          |  ---- 43 --| |------ 16 ----
          +------------------------------ time

The steps (`RelayFinder`):

1. At each birth, group the buffers born there by death; a relay's first half dies within a few sections.
2. Its second half is born in those sections and dies at about one section, with equal bytes. One buffer too many may be
   trimmed.
3. Even out: stacks of slots (`slots.py`) are as high as the live bytes if each size has equally many buffers whenever
   the memory is full. So at all such times there are equally many relays of a shape. One too many is dropped. Where one
   is missing, as at the begin and the end of a step, first halves stand alone.

Cost: about the square of the buffers born at one section, over all sections. Guarantee: no relay keeps bytes that are
not free (`_fits`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.passes.memory.allocation.problem import Int64s

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ratrain.passes.memory.allocation.problem import Instance

Shape = tuple[tuple[int, int], ...]
"""Death, counted from the first one, and size of each of the first buffers; ascending."""

_WIDTHS = (2, 3, 4)
"""Sections that a relay may take to hand over, tried in this order."""
_SMALL = 32
"""Factor by which the largest buffer exceeds the smallest that may be in a relay."""
_USUAL = 0.2
"""Share of the full sections in which a number of relays is usual.

The smallest such number counts: dropping one too many is easier than finding another.
"""
_FULL = 0.002
"""Share of the most live bytes that a full section may lack."""


@frozen(eq=False)
class Relay:
    """Buffers that take over each other's bytes."""

    first: Int64s
    then: Int64s
    """Buffers born where the first die; none where the first stand alone."""
    nbytes: int
    """Bytes of the piece."""

    @property
    def buffers(self) -> Int64s:
        """All buffers, the first before the others."""
        return np.concatenate((self.first, self.then))


def full_sections(instance: Instance) -> NDArray[np.bool_]:
    """Tell which sections have nearly the most live bytes."""
    load = instance.load()
    found: NDArray[np.bool_] = load >= load.max() * (1 - _FULL)
    return found


class RelayFinder:
    """Finder of the relays of an instance."""

    def __init__(self, instance: Instance, bound: int) -> None:
        self.births, self.deaths, self.sizes = instance.births(), instance.deaths(), instance.sizes
        self.born, self.dead, self.size = self.births.tolist(), self.deaths.tolist(), self.sizes.tolist()
        without_holes = np.diff(instance.first) == 1
        self.large = without_holes & (self.sizes * _SMALL >= self.sizes.max())
        self.free = self.large.copy()
        self.load = instance.load()
        self.bound = bound
        self.full = np.flatnonzero(full_sections(instance))
        self.by_birth: dict[int, list[int]] = defaultdict(list)
        for buffer in np.flatnonzero(self.free).tolist():
            self.by_birth[self.born[buffer]].append(buffer)
        self.shapes: dict[Shape, list[Relay]] = defaultdict(list)
        for relay in self._relays():
            self.shapes[self._shape(relay)].append(relay)

    def _relays(self) -> list[Relay]:
        """Collect relays, the narrowest hand-over first.

        Buffers of one birth come before those of two, and complete sets before sets without one buffer. Without narrow
        relays no wide ones are tried.
        """
        found: list[Relay] = []
        dying = [self._dying(apart) for apart in (0, 1)]
        for width in _WIDTHS:
            for of_births in dying:
                for trimmed in (False, True):
                    for of_birth in of_births:
                        found += self._of_one_birth(of_birth, width, trimmed=trimmed)
            if not found:
                break
        return found

    def _dying(self, apart: int) -> list[dict[int, list[int]]]:
        """Group buffers born at a section, or up to `apart` before it, by death; one group for each birth.

        A group counts if two of its deaths are near each other and something is born at the earlier one.
        """
        found = []
        for birth in sorted(self.by_birth):
            dying: dict[int, list[int]] = defaultdict(list)
            for buffer in self._born_about(birth, apart):
                dying[self.dead[buffer]].append(buffer)
            times = sorted(dying)
            if any(after - begin < _WIDTHS[-1] and begin in self.by_birth for begin, after in pairwise(times)):
                found.append({time: dying[time] for time in times})
        return found

    def _born_about(self, birth: int, apart: int) -> Iterator[int]:
        """Yield the free buffers born at a section, or up to `apart` before it."""
        for earlier in range(apart + 1):
            for buffer in self.by_birth.get(birth - earlier, ()):
                if self.free[buffer]:
                    yield buffer

    def _of_one_birth(self, dying: dict[int, list[int]], width: int, *, trimmed: bool) -> Iterator[Relay]:
        """Yield relays whose first half dies within `width` sections.

        The second half is born in these sections and dies at about one section.
        """
        after = 0
        for begin, later in pairwise(dying):
            # A hand-over needs two deaths close together, a birth at the first of them, and no overlap with the last
            # relay found.
            if begin < after or later - begin >= width or begin not in self.by_birth:
                continue
            sections = range(begin, begin + width)
            first = [buffer for section in sections for buffer in dying.get(section, ()) if self.free[buffer]]
            born = [buffer for section in sections for buffer in self.by_birth.get(section, ()) if self.free[buffer]]
            # Buffers that die within the hand-over are passing through; only the others can be the second half.
            stay = [buffer for buffer in born if self.dead[buffer] >= begin + width]
            for end in sorted({self.dead[buffer] for buffer in stay if self.born[buffer] == begin}):
                then = [buffer for buffer in stay if abs(self.dead[buffer] - end) <= 1]
                relay = self._relay(*self._trimmed(first, then)) if trimmed else self._relay(first, then)
                if relay is not None and self._fits(relay):
                    self.free[relay.buffers] = False
                    after = begin + width
                    yield relay
                    break

    def _trimmed(self, first: list[int], then: list[int]) -> tuple[list[int], list[int]]:
        """Drop one buffer, if that makes the bytes before and after equal; else return both lists unchanged."""
        over = self._nbytes(first) - self._nbytes(then)
        longer = first if over > 0 else then
        for buffer in reversed(longer):
            if self.size[buffer] == abs(over):
                rest = [other for other in longer if other != buffer]
                return (rest, then) if over > 0 else (first, rest)
        return first, then

    def _nbytes(self, buffers: list[int]) -> int:
        return sum(self.size[buffer] for buffer in buffers)

    def _relay(self, first: list[int], then: list[int]) -> Relay | None:
        """Return a relay, or None if the buffers are not one.

        A relay has equal bytes before and after, several deaths, births and sizes; and its births never need more bytes
        than its deaths have freed.
        """
        if self._nbytes(first) != self._nbytes(then):
            return None
        ends, begins = [self.dead[buffer] for buffer in first], [self.born[buffer] for buffer in then]
        if len(set(ends)) < 2 or len(set(begins)) < 2 or len(set(self._sizes(first + then))) < 2:
            return None
        for section in set(begins):
            freed = sum(self.size[buffer] for buffer, end in zip(first, ends, strict=True) if end <= section)
            taken = sum(self.size[buffer] for buffer, begin in zip(then, begins, strict=True) if begin <= section)
            if taken > freed:
                return None
        return self._made(first, then)

    def _made(self, first: list[int], then: list[int]) -> Relay:
        return Relay(np.array(first, np.int64), np.array(then, np.int64), self._nbytes(first))

    def _fits(self, relay: Relay) -> bool:
        """Tell whether the bytes that a relay keeps idle are free: the load with them stays within the bound."""
        buffers = relay.buffers
        begin, end = int(self.births[buffers].min()), int(self.deaths[buffers].max())
        change = np.zeros(end - begin + 1, np.int64)
        np.add.at(change, self.births[buffers] - begin, self.sizes[buffers])
        np.subtract.at(change, self.deaths[buffers] - begin, self.sizes[buffers])
        # As one piece a relay takes all its bytes from the first birth to the last death.
        idle = relay.nbytes - np.cumsum(change)[:-1]
        return bool((self.load[begin:end] + idle).max() <= self.bound)

    def evened(self, shapes: int) -> list[Relay]:
        """Choose relays of the `shapes` heaviest shapes, equally many at each full section.

        One too many is dropped; where one is missing, a first half stands for it.
        """
        # By total bytes of all relays of a shape; the shape itself breaks ties, so the result does not depend on dict
        # order.
        heaviest = sorted(self.shapes, key=lambda shape: (-_shape_bytes(shape) * len(self.shapes[shape]), shape))[
            :shapes
        ]
        # Buffers of other shapes are free again, to stand alone where a relay is missing.
        self.free = self.large.copy()
        for shape in heaviest:
            for relay in self.shapes[shape]:
                self.free[relay.buffers] = False
        chosen: list[Relay] = []
        dropped: list[Relay] = []
        for shape in sorted(heaviest, key=_shape_bytes, reverse=True):
            more, fewer = self._even(shape, self.shapes[shape], dropped)
            chosen += more
            dropped += fewer
        return chosen

    def _sizes(self, buffers: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted(self.size[buffer] for buffer in buffers))

    def _shape(self, relay: Relay) -> Shape:
        begin = int(self.deaths[relay.first].min())
        return tuple(sorted((self.dead[buffer] - begin, self.size[buffer]) for buffer in relay.first.tolist()))

    def _even(self, shape: Shape, relays: list[Relay], larger: list[Relay]) -> tuple[list[Relay], list[Relay]]:
        """Choose relays of a shape until they are equally many at all full sections; return chosen and dropped ones.

        `larger`: dropped relays of larger shapes, from which missing ones may be cut.
        """
        chosen, dropped = [], []
        spans = [self._full_sections(relay) for relay in relays]
        there = np.zeros(len(self.full), np.int64)
        for low, high in spans:
            there[low:high] += 1
        shares = np.bincount(there) / len(there)
        # The smallest number of relays that holds in a fifth of the full sections, or the most frequent one.
        usual = int(np.argmax(shares >= min(_USUAL, shares.max())))
        ends = [int(self.deaths[relay.then].max()) for relay in relays]
        for place in sorted(range(len(relays)), key=lambda place: (spans[place][0], -ends[place])):
            low, high = spans[place]
            if high > low and there[low:high].min() > usual:
                there[low:high] -= 1
                self.free[relays[place].buffers] = True
                dropped.append(relays[place])
            else:
                chosen.append(relays[place])
        usual_life = int(np.median([self._life(relay) for relay in relays]))
        spare = [cut for relay in larger if (cut := self._cut(relay, shape)) is not None]
        spare += sorted(self._alone(shape), key=lambda relay: abs(self._life(relay) - usual_life))
        for relay in spare:
            low, high = self._full_sections(relay)
            if high > low and there[low:high].max() < usual and self.free[relay.buffers].all() and self._fits(relay):
                there[low:high] += 1
                self.free[relay.buffers] = False
                chosen.append(relay)
        return chosen, dropped

    def _cut(self, relay: Relay, shape: Shape) -> Relay | None:
        """Cut a relay to a smaller shape, dropping equal sizes from its second half.

        None if it does not contain the shape.
        """
        rest = Counter(self._shape(relay))
        rest.subtract(shape)
        if min(rest.values()) < 0:
            return None
        begin = int(self.deaths[relay.first].min())
        first, then = relay.first.tolist(), sorted(relay.then.tolist(), key=self.born.__getitem__)
        for kind in rest.elements():
            first.remove(next(buffer for buffer in first if (self.dead[buffer] - begin, self.size[buffer]) == kind))
            same = next((buffer for buffer in then if self.size[buffer] == kind[1]), None)
            if same is None:
                return None
            then.remove(same)
        return self._relay(first, then)

    def _life(self, relay: Relay) -> int:
        """Return the sections from the last birth of the first half to its first death."""
        return int(self.deaths[relay.first].min() - self.births[relay.first].max())

    def _full_sections(self, relay: Relay) -> tuple[int, int]:
        """Return the range of full sections in which a relay lives, as indices into `full`."""
        low, high = np.searchsorted(self.full, (self.births[relay.buffers].min(), self.deaths[relay.buffers].max()))
        return int(low), int(high)

    def _alone(self, shape: Shape) -> Iterator[Relay]:
        """Yield buffers of one birth, or of two next to each other, that have a shape, as relays of their own."""
        for birth in sorted(self.by_birth):
            for apart in (0, 1):
                bag: dict[tuple[int, int], list[int]] = defaultdict(list)
                for buffer in self._born_about(birth, apart):
                    bag[self.dead[buffer], self.size[buffer]].append(buffer)
                # A shape counts deaths from the first one: try each death as that first one.
                for begin in sorted({dead for dead, _ in bag}):
                    needed = Counter((begin + dead, size) for dead, size in shape)
                    if all(len(bag.get(kind, ())) >= count for kind, count in needed.items()):
                        first = [buffer for kind, count in needed.items() for buffer in bag[kind][:count]]
                        yield self._made(first, [])


def _shape_bytes(shape: Shape) -> int:
    return sum(size for _, size in shape)
