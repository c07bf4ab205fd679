"""Who sends to whom in a round of a collective, and which groups of clusters that crosses.

Members are numbered so that those of one group are neighbours: of a level's groups of w, member i is in group i // w. From a pattern
follow the messages of its rounds and, in closed form, how many of them leave a group: what a round costs, and what a simulation of
every message, or a transport, would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]


@frozen
class Circle:
    """Members that are `stride` apart, so many `places` of them; the members that lie between form circles of their own beside it."""

    places: int
    stride: int = 1

    @property
    def span(self) -> int:
        """Members from one circle to the next beyond it and those beside it."""
        return self.places * self.stride


@frozen
class Shift:
    """Every member sends to the place of its circle that is `distance` further on; each round `step` further than the one before."""

    circle: Circle
    distance: int
    step: int = 0

    def targets(self, number: int, count: int) -> Ints:
        """Of round `number`: to whom each of `count` members sends."""
        members = np.arange(count)
        places, stride = self.circle.places, self.circle.stride
        place = members // stride % places
        return members + ((place + self.distance + number * self.step) % places - place) * stride

    def leaving(self, group: int) -> int:
        """Messages of a round that leave one group of so many members; of rounds with a step all are alike, or this is of the first."""
        places, stride = self.circle.places, self.circle.stride
        if group >= self.circle.span:
            return 0
        return group if group <= stride else stride * min(self.distance, places - self.distance, group // stride)

    def shares(self, within: Sequence[int]) -> tuple[float, ...]:
        """By level, the part of the messages that stays within a group of `within[level]` members and leaves those of the level below."""
        out = [1.0, *(self.leaving(group) / group for group in within)]
        return tuple(below - above for below, above in pairwise(out))


@frozen
class Climb:
    """A round of a binomial tree: every second member of those that are `distance` apart sends to the one before; down, it receives."""

    members: int
    distance: int
    down: bool = False

    def targets(self, number: int, count: int) -> Ints:
        """Of round `number`, all being alike: to whom each of `count` members sends, -1 where to nobody."""
        del number
        members = np.arange(count)
        place = members % (2 * self.distance)
        if self.down:
            found = np.where((place == 0) & (members + self.distance < count), members + self.distance, -1)
        else:
            found = np.where(place == self.distance, members - self.distance, -1)
        return found

    def leaving(self, group: int) -> int:
        """Messages of a round that leave one group of so many members, at most."""
        return int(group < self.members and group % (2 * self.distance) != 0)

    def shares(self, within: Sequence[int]) -> tuple[float, ...]:
        """By level, 1 where messages stay within a group of `within[level]` members and leave those of the level below, else 0."""
        below = (1, *within)
        return tuple(
            float(inner < group and self.distance < group and self.leaving(inner) > 0)
            for inner, group in zip(below, within, strict=False)
        )


Pattern: TypeAlias = Shift | Climb


def doublings(places: int) -> list[tuple[int, int]]:
    """(distance, parts that a message has) of the rounds in which what each of so many has doubles, until it has all parts.

    Whoever has the parts of the 2^k places from its own on gets those of the next ones: all it lacks in the last round. So any number
    will do, in ceil(log2 places) rounds and places - 1 parts (Bruck et al., 1997).
    """
    distances = [1 << k for k in range((places - 1).bit_length())]
    return [(distance, min(distance, places - distance)) for distance in distances]
