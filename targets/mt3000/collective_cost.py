"""Collectives as explicit rounds of point-to-point messages: ring, tree and hierarchical, the cheapest is taken.

The machine has no collective library, so that a collective is what its messages cost: in a round every member sends one message
and receives one. With D members and n bytes in all (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH", 2005):

- ring: D - 1 rounds of n/D, over the link. For a reduction the same rounds also serve to hand each owner its part from every member
  (round r sends to the r-th neighbour), which lets it add in rank order and needs no more than the gradient's own width.
- tree: about log2 D rounds of n up to a root, then halves of what is left down again: few rounds, many bytes.
- hierarchical: a ring among the clusters of each chip, one between chips. What leaves a chip are sums, which are f32.

Members fill chips in rank order. Recursive halving would have the ring's bytes in the tree's rounds, but its partners are far
apart: no source says that the network carries all pairs at full rate, so it is left out.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from attrs import frozen

from targets.resource_work import ResourceWork

if TYPE_CHECKING:
    from targets.mt3000.machine import Machine

_SUM_BYTES = 4
"""Partial sums are f32."""


@frozen
class Rounds:
    """Equal rounds of a collective: every member sends a message and receives one."""

    count: int
    message_bytes: float
    on_chip: bool = False
    staged: bool = False
    """received into staging buffers, a chunk at a time, and added from there"""

    def seconds(self, machine: Machine) -> float:
        """Seconds of all rounds.

        A staged message goes in chunks through two buffers: a chunk's latency hides behind the one before if that takes longer.
        """
        latency = machine.chip_latency if self.on_chip else machine["link_latency"]
        bandwidth = machine.chip_bandwidth if self.on_chip else machine["link_bandwidth"]
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

    def work(self, machine: Machine, own_bytes: float) -> ResourceWork:
        """What a member does. `own_bytes`: its own tensors, read and written once.

        Staged bytes are written and read again to be added; others are read once more to be passed on.
        """
        link = sum(each.nbytes for each in self.rounds if not each.on_chip)
        ddr = own_bytes + sum(each.nbytes * (2 if each.staged else 1) for each in self.rounds)
        return ResourceWork(max(self.seconds(machine), ddr / machine["ddr_bandwidth"]), ddr, link)


def reduce_scatters(elements: float, itemsize: float, members: int, on_chip: int) -> list[Algorithm]:
    """Ways to sum `elements` of `itemsize` bytes over the members, a part for each; `on_chip` of them share a chip."""
    sums = elements * _SUM_BYTES
    ways = [
        Algorithm("ring", _ring(elements * itemsize, members, on_chip=on_chip == members, staged=True)),
        Algorithm("tree", (Rounds(_depth(members), sums, staged=True), *_halves(sums, members))),
    ]
    if 1 < on_chip < members:
        within = _ring(elements * itemsize, on_chip, on_chip=True, staged=True)
        between = _ring(sums / on_chip, members // on_chip, on_chip=False, staged=True)
        ways.append(Algorithm("hierarchical", (*within, *between)))
    return ways


def all_gathers(nbytes: float, members: int, on_chip: int) -> list[Algorithm]:
    """Ways to give every member all `nbytes`, of which each holds a part; `on_chip` of them share a chip."""
    ways = [
        Algorithm("ring", _ring(nbytes, members, on_chip=on_chip == members, staged=False)),
        Algorithm("tree", (*_halves(nbytes, members), Rounds(_depth(members), nbytes))),
    ]
    if 1 < on_chip < members:
        between = _ring(nbytes / on_chip, members // on_chip, on_chip=False, staged=False)
        within = _ring(nbytes, on_chip, on_chip=True, staged=False)
        ways.append(Algorithm("hierarchical", (*between, *within)))
    return ways


def all_reduces(elements: float, itemsize: float, members: int, on_chip: int) -> list[Algorithm]:
    """Ways to give every member the sum: a reduction and a gather of the same kind; the tree's root sends the sum down whole."""
    scatters = reduce_scatters(elements, itemsize, members, on_chip)
    gathers = all_gathers(elements * itemsize, members, on_chip)
    ways = [Algorithm(one.name, one.rounds + other.rounds) for one, other in zip(scatters, gathers, strict=True)]
    down = Rounds(_depth(members), elements * itemsize)
    tree = Algorithm("tree", (Rounds(_depth(members), elements * _SUM_BYTES, staged=True), down))
    return [tree if way.name == "tree" else way for way in ways]


def cheapest(ways: list[Algorithm], machine: Machine) -> Algorithm:
    """The way that takes least time; the first of equal ones."""
    return min(ways, key=lambda way: way.seconds(machine))


def members_on_chip(members: int, machine: Machine) -> int:
    """How many of neighbouring ranks share a chip: all or a whole chip where they fill chips evenly, else one by itself."""
    size = machine.clusters_per_chip
    if size % members == 0:
        return members
    return size if members % size == 0 else 1


def _ring(nbytes: float, members: int, *, on_chip: bool, staged: bool) -> tuple[Rounds, ...]:
    return (Rounds(members - 1, nbytes / members, on_chip, staged),) if members > 1 else ()


def _halves(nbytes: float, members: int) -> tuple[Rounds, ...]:
    """From a root to all, each its part, or back: half of what is left in each round, (D - 1)/D of it in all."""
    parts: list[Rounds] = []
    left = members
    while left > 1:
        parts.append(Rounds(1, nbytes * (left // 2) / members))
        left -= left // 2
    return tuple(parts)


def _depth(members: int) -> int:
    """Rounds of a binary tree: ceil(log2 D)."""
    return (members - 1).bit_length()
