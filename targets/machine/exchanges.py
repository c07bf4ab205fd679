"""Patterns of collectives: who sends to whom in a round, and how many of these messages leave a group of clusters.

Members are numbered so that members of one group are neighbours: with groups of w on a level, member i is in group i //
w. A pattern gives the messages of its rounds one by one, for a simulation or a transport, and in closed form the number
that leaves a group, for the cost:

    Shift(Circle(6), 1), groups of 3:    0 -> 1 -> 2 => 3 -> 4 -> 5 => 0    one message (=>) leaves each group
    Climb(6, 1), up:                     1 -> 0    3 -> 2    5 -> 4
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
    """Circle of `places` members that are `stride` apart; the members in between form circles of their own."""

    places: int
    stride: int = 1

    @property
    def span(self) -> int:
        """Members that the interleaved circles take together: a circle and the `stride` - 1 next to it."""
        return self.places * self.stride


@frozen
class Shift:
    """Round in which every member sends to the place of its circle that is `distance` further on.

    In a series of rounds the distance grows by `step` every `turns` rounds. In each of these rounds a member sends to
    another of the `stride` members that stand at that place.
    """

    circle: Circle
    distance: int
    step: int = 0
    turns: int = 1

    def targets(self, number: int, count: int) -> Ints:
        """Return the target of each of `count` members in round `number`."""
        members = np.arange(count)
        places, stride = self.circle.places, self.circle.stride
        place, inner = members // stride % places, members % stride
        distance, turn = self.distance + number // self.turns * self.step, number % self.turns
        return members + ((place + distance) % places - place) * stride + (inner + turn) % stride - inner

    def leaving(self, group: int) -> int:
        """Return the number of a round's messages that leave one group of `group` members.

        With a step the number is that of the first round; the caller puts only rounds with equal numbers together.
        """
        places, stride = self.circle.places, self.circle.stride
        if group >= self.circle.span:
            return 0
        # Of a group that spans several places, `distance` places at its end send out, unless the way round is shorter
        # or the group is.
        return group if group <= stride else stride * min(self.distance, places - self.distance, group // stride)

    def shares(self, within: Sequence[int]) -> tuple[float, ...]:
        """Return by level the part of the messages that leaves groups of the level below and stays in one of its own.

        A group of a level has `within[level]` members.
        """
        out = [1.0, *(self.leaving(group) / group for group in within)]
        return tuple(below - above for below, above in pairwise(out))


@frozen
class Climb:
    """Round of a binomial tree: among members `distance` apart, every second one sends to the one before it.

    With `down` the message goes the other way.
    """

    members: int
    distance: int
    down: bool = False

    def targets(self, number: int, count: int) -> Ints:
        """Return the target of each of `count` members, -1 for none; all rounds are alike."""
        del number
        members = np.arange(count)
        place = members % (2 * self.distance)
        if self.down:
            found = np.where((place == 0) & (members + self.distance < count), members + self.distance, -1)
        else:
            found = np.where(place == self.distance, members - self.distance, -1)
        return found

    def leaving(self, group: int) -> int:
        """Return the most messages of a round that leave one group of `group` members: 0 or 1."""
        return int(group < self.members and group % (2 * self.distance) != 0)

    def shares(self, within: Sequence[int]) -> tuple[float, ...]:
        """Return by level 1 if messages leave groups of the level below and stay in one of this level, else 0.

        A group of a level has `within[level]` members.
        """
        below = (1, *within)
        return tuple(
            float(inner < group and self.distance < group and self.leaving(inner) > 0)
            for inner, group in zip(below, within, strict=False)
        )


Pattern: TypeAlias = Shift | Climb


def doublings(places: int) -> list[tuple[int, int]]:
    """Return (distance, parts of a message) of the rounds in which each of `places` members doubles its parts.

    A member that has the parts of the 2^k places from its own on gets the parts of the next places; in the last round
    only the missing ones. This works for any number of places, in ceil(log2 places) rounds and places - 1 parts (Bruck
    et al., 1997).
    """
    distances = [1 << k for k in range((places - 1).bit_length())]
    return [(distance, min(distance, places - distance)) for distance in distances]
