"""Collectives as explicit rounds of point-to-point messages: ring, tree and hierarchical, the cheapest is taken.

The machine has no collective library, so that a collective is what its messages cost: in a round every member sends one message
and receives one. With D members and n bytes in all (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005):

- ring: D - 1 rounds of n/D, over the link. For a reduction the same rounds also serve to hand each owner its part from every member
  (round r sends to the r-th neighbour), which lets it add in rank order and needs no more than the gradient's own width.
- tree: about log2 D rounds of n up to a root, then halves of what is left down again: few rounds, many bytes.
- hierarchical: a ring within each group of the innermost level, then one between groups at every level. What leaves a group are
  sums, which are f32.

Ring and tree take all their messages over the link of the innermost level that has all members in one group. Recursive halving
would have the ring's bytes in the tree's rounds, but its partners are far apart: no source says that the network carries all pairs
at full rate, so it is left out.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.targets.machine.link_groups import Link
from ratrain.targets.machine.resource_work import ResourceWork

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.machine.placement import Members

_SUM_BYTES = 4
"""Partial sums are f32."""


@frozen
class Rounds:
    """Equal rounds of a collective: every member sends a message and receives one."""

    count: int
    message_bytes: float
    level: int
    """of the links it goes over, from the inside"""
    link: Link
    staged: bool = False
    """received into staging buffers, a chunk at a time, and added from there"""

    def seconds(self, machine: Machine) -> float:
        """Seconds of all rounds.

        A staged message goes in chunks through two buffers: a chunk's latency hides behind the one before if that takes longer.
        """
        latency, bandwidth = self.link.latency, self.link.bandwidth
        chunk = machine["collective_chunk"]
        more = max(0, ceil(self.message_bytes / chunk) - 1) if self.staged else 0
        exposed = more * max(0.0, latency - chunk / bandwidth)
        return self.count * (latency + self.message_bytes / bandwidth + exposed)

    @property
    def nbytes(self) -> float:
        """Bytes a member sends in all rounds."""
        return self.count * self.message_bytes


@frozen
class Algorithm:
    """One way to do a collective."""

    name: str
    rounds: tuple[Rounds, ...]

    def seconds(self, machine: Machine) -> float:
        """Seconds of all rounds, one after the other."""
        return sum(each.seconds(machine) for each in self.rounds)

    def bytes_at(self, level: int) -> float:
        """Bytes a member sends over its link of a level."""
        return sum(each.nbytes for each in self.rounds if each.level == level)

    def work(self, machine: Machine, own_bytes: float) -> ResourceWork:
        """What a member does. `own_bytes`: its own tensors, read and written once.

        Staged bytes are written and read again to be added; others are read once more to be passed on. The link that others can be
        short of is that of the outermost level it takes.
        """
        level = max((each.level for each in self.rounds), default=0)
        ddr = own_bytes + sum(each.nbytes * (2 if each.staged else 1) for each in self.rounds)
        seconds = max(self.seconds(machine), ddr / machine["ddr_bandwidth"])
        return ResourceWork(seconds, ddr, self.bytes_at(level), level)


def reduce_scatters(elements: float, itemsize: float, members: Members) -> list[Algorithm]:
    """Ways to sum `elements` of `itemsize` bytes over the members, a part for each."""
    sums = elements * _SUM_BYTES
    far, link = members.level, members.links[members.level]
    up = Rounds(_depth(members.count), sums, far, link, staged=True)
    ways = [
        Algorithm("ring", _ring(elements * itemsize, members.count, far, link, staged=True)),
        Algorithm("tree", (up, *_halves(sums, members))),
    ]
    steps = members.steps()
    if len(steps) > 1:
        rounds: tuple[Rounds, ...] = ()
        summed = 1
        for level, count in steps:
            nbytes = elements * itemsize if summed == 1 else sums / summed
            rounds += _ring(nbytes, count, level, members.links[level], staged=True)
            summed *= count
        ways.append(Algorithm("hierarchical", rounds))
    return ways


def all_gathers(nbytes: float, members: Members) -> list[Algorithm]:
    """Ways to give every member all `nbytes`, of which each holds a part."""
    far, link = members.level, members.links[members.level]
    ways = [
        Algorithm("ring", _ring(nbytes, members.count, far, link, staged=False)),
        Algorithm("tree", (*_halves(nbytes, members), Rounds(_depth(members.count), nbytes, far, link))),
    ]
    steps = members.steps()
    if len(steps) > 1:
        rounds: tuple[Rounds, ...] = ()
        inside = members.count
        for level, count in reversed(steps):
            inside //= count
            rounds += _ring(nbytes / inside, count, level, members.links[level], staged=False)
        ways.append(Algorithm("hierarchical", rounds))
    return ways


def all_reduces(elements: float, itemsize: float, members: Members) -> list[Algorithm]:
    """Ways to give every member the sum: a reduction and a gather of the same kind; the tree's root sends the sum down whole."""
    scatters = reduce_scatters(elements, itemsize, members)
    gathers = all_gathers(elements * itemsize, members)
    ways = [Algorithm(one.name, one.rounds + other.rounds) for one, other in zip(scatters, gathers, strict=True)]
    far, depth = members.level, _depth(members.count)
    up = Rounds(depth, elements * _SUM_BYTES, far, members.links[far], staged=True)
    down = Rounds(depth, elements * itemsize, far, members.links[far])
    tree = Algorithm("tree", (up, down))
    return [tree if way.name == "tree" else way for way in ways]


def cheapest(ways: list[Algorithm], machine: Machine) -> Algorithm:
    """The way that takes least time; the first of equal ones."""
    return min(ways, key=lambda way: way.seconds(machine))


def _ring(nbytes: float, members: int, level: int, link: Link, *, staged: bool) -> tuple[Rounds, ...]:
    return (Rounds(members - 1, nbytes / members, level, link, staged),) if members > 1 else ()


def _halves(nbytes: float, members: Members) -> tuple[Rounds, ...]:
    """From a root to all, each its part, or back: half of what is left in each round, (D - 1)/D of it in all."""
    parts: list[Rounds] = []
    left = members.count
    while left > 1:
        parts.append(Rounds(1, nbytes * (left // 2) / members.count, members.level, members.links[members.level]))
        left -= left // 2
    return tuple(parts)


def _depth(members: int) -> int:
    """Rounds of a binary tree: ceil(log2 D)."""
    return (members - 1).bit_length()
