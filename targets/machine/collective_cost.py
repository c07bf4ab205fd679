"""Cost of collectives as explicit rounds of point-to-point messages; of a machine's algorithms the cheapest is taken.

In a round a member sends one message and receives one. With D members and n bytes in all (Thakur, Rabenseifner and
Gropp, "Optimization of Collective Communication Operations in MPICH", 2005):

- ring: D - 1 rounds of n/D, to the neighbour. A reduction passes partial sums on, which are f32.
- pairwise: D - 1 rounds of n/D, in round r to the r-th neighbour. In a reduction every member hands each owner its
  part, at the gradient's own width; the owner adds the parts in rank order.
- recursive: ceil(log2 D) rounds in which a member's data doubles, from a neighbour to half of all. In a reduction the
  order is reversed: the data that a member adds up halves, and partial sums are f32.
- tree: ceil(log2 D) rounds of n up to a root, then down again in halves: few rounds, many bytes.
- pairwise by groups, of parts that differ by receiver: first with all of the own group, then with all of the others.
- hierarchical: one of ring, pairwise and recursive within each group of the innermost level, then one between groups
  at every level. Only sums, which are f32, leave a group.

A round ends when its slowest message has arrived. It takes the latency of the outermost link in use, the host's work
for a message, the skew of a round, and the bytes at the pace of the narrowest place: an own link, or an uplink by the
messages that share it. Example, a gather by a ring of 4 members in 2 groups of 2, n/4 bytes a round:

    0 -> 1 => 2 -> 3 => 0      each group sends one message (=>) out: a round takes n/4 / min(link, uplink)

The cost is computed in O(algorithms x rounds), without looking at single members (closed forms in `exchanges`). Seconds
never fall with more bytes, or with more members of full groups, so that bounds of the planner may rely on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.targets.machine.exchanges import Circle, Climb, Pattern, Shift, doublings
from ratrain.targets.machine.resource_work import Flow, ResourceWork

if TYPE_CHECKING:
    from ratrain.targets.machine.machine import Machine
    from ratrain.targets.machine.placement import Members

_SUM_BYTES = 4
"""Bytes of an element of partial sums: f32, or as wide as the summed type where that is wider."""


@frozen
class Rounds:
    """Rounds of a collective whose messages are equal and cross equal links."""

    count: int
    pattern: Pattern
    message_bytes: float
    latency: float
    """seconds, of the outermost link in use"""
    byte_seconds: float
    """seconds of a byte at the narrowest place"""
    on_links: tuple[float, ...]
    """by level, the part of its messages that a member sends over its link there: the mean if all members have their
    turn, else the most"""
    on_uplinks: tuple[float, ...]
    """by level, the part of its messages that leaves its group there, the mean of the group's members"""
    staged: bool
    """received into staging buffers, a chunk at a time, and added from there"""

    @property
    def nbytes(self) -> float:
        """Bytes a member sends in all rounds."""
        return self.count * self.message_bytes

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of all rounds, as if no message took more than one chunk."""
        return self.count * (_overhead(self, machine) + machine.round_skew + self.message_bytes * self.byte_seconds)

    def exposed(self, machine: Machine) -> float:
        """Return the overhead seconds of staged chunks after the first that nothing hides.

        A chunk's overhead hides behind the bytes of the chunk before if those take longer. Less than 0 where messages
        are smaller than a chunk.
        """
        chunk = machine["collective_chunk"]
        each = max(0.0, _overhead(self, machine) - chunk * self.byte_seconds)
        return self.count * (self.message_bytes / chunk - 1) * each if self.staged else 0.0


def _overhead(rounds: Rounds, machine: Machine) -> float:
    """Return the seconds of a message in addition to its bytes."""
    return rounds.latency + machine.message_cost


@frozen
class Algorithm:
    """One algorithm of a collective, as its rounds."""

    name: str
    rounds: tuple[Rounds, ...]

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of all rounds, one after the other.

        They never fall with more bytes, or with more members of full groups.
        """
        exposed = sum(each.exposed(machine) for each in self.rounds)
        # Rounds of small messages have a negative `exposed`. Only the sum is cut off at 0: if each round were, the
        # total would jump where a message grows over a chunk.
        return sum(each.seconds(machine) for each in self.rounds) + max(0.0, exposed)

    def bytes_at(self, level: int) -> float:
        """Return the bytes a member sends over its link of a level, the most of all members."""
        return sum(each.nbytes * each.on_links[level] for each in self.rounds)

    def uplink_bytes(self, level: int) -> float:
        """Return the bytes a member sends out of its group of a level, the mean of the group's members."""
        return sum(each.nbytes * each.on_uplinks[level] for each in self.rounds)

    def ddr_bytes(self, own_bytes: float) -> float:
        """Return the bytes a member reads and writes: its own tensors once, and the bytes that arrive.

        Staged bytes are written and read to be added; others are read once more to be passed on.
        """
        return own_bytes + sum(each.nbytes * (2 if each.staged else 1) for each in self.rounds)

    def work(self, machine: Machine, own_bytes: float) -> ResourceWork:
        """Return the work of a member; `own_bytes` of its own tensors are read and written once."""
        ddr = self.ddr_bytes(own_bytes)
        seconds = max(self.seconds(machine), ddr / machine["ddr_bandwidth"])
        levels = range(len(machine.link_groups))
        links = [Flow(self.bytes_at(level), level) for level in levels]
        uplinks = [Flow(self.uplink_bytes(level), None, (level,)) for level in levels[:-1]]
        flows = tuple(flow for flow in (*links, *uplinks) if flow.nbytes > 0)
        return ResourceWork(seconds, ddr, sum(each.nbytes for each in self.rounds), flows)


def reduce_scatters(elements: float, itemsize: float, members: Members, machine: Machine) -> list[Algorithm]:
    """Return the machine's algorithms to sum `elements` of `itemsize` bytes over the members, with a part for each."""
    own, sums = elements * itemsize, elements * max(itemsize, _SUM_BYTES)
    whole = Circle(members.count)
    ways = _flat_ways(_REDUCTIONS, own, sums, whole, members, machine)
    if "tree" in machine.collectives:
        ways.append(Algorithm("tree", _up(sums, members, staged=True) + _down(sums, members)))
    if "hierarchical" in machine.collectives and len(members.steps()) > 1:
        steps, stride = [], 1
        # From the inside out. Members of a group first sum their own gradients, then sums go on at the level above: of
        # each, a member holds 1/stride.
        for _, places in members.steps():
            nbytes = own if stride == 1 else sums / stride
            steps.append((nbytes, sums / stride, Circle(places, stride)))
            stride *= places
        ways.append(_hierarchical(_REDUCTIONS, steps, members, machine))
    return ways


def all_gathers(nbytes: float, members: Members, machine: Machine) -> list[Algorithm]:
    """Return the machine's algorithms to give every member all `nbytes`, of which each holds a part."""
    ways = _flat_ways(_GATHERS, nbytes, nbytes, Circle(members.count), members, machine)
    if "tree" in machine.collectives:
        ways.append(Algorithm("tree", _up_in_halves(nbytes, members) + _broadcast(nbytes, members)))
    if "hierarchical" in machine.collectives and len(members.steps()) > 1:
        # From the outside in, the reverse of a reduction: a part crosses the outer links once, and multiplies inside.
        places = [count for _, count in members.steps()]
        strides = list(accumulate(places, int.__mul__, initial=1))
        steps = [
            (nbytes / stride, nbytes / stride, Circle(count, stride))
            for count, stride in zip(reversed(places), reversed(strides[:-1]), strict=True)
        ]
        ways.append(_hierarchical(_GATHERS, steps, members, machine))
    return ways


def all_reduces(elements: float, itemsize: float, members: Members, machine: Machine) -> list[Algorithm]:
    """Return the machine's algorithms to give every member the sum: a reduction and a gather, or a tree.

    The root of the tree sends the sum down whole.
    """
    scatter = cheapest(reduce_scatters(elements, itemsize, members, machine), machine)
    gather = cheapest(all_gathers(elements * itemsize, members, machine), machine)
    name = scatter.name if scatter.name == gather.name else f"{scatter.name} + {gather.name}"
    ways = [Algorithm(name, scatter.rounds + gather.rounds)]
    if "tree" in machine.collectives:
        sums = elements * max(itemsize, _SUM_BYTES)
        ways.append(Algorithm("tree", _up(sums, members, staged=True) + _broadcast(elements * itemsize, members)))
    return ways


def neighbours(nbytes: float, distance: int, messages: int, members: Members) -> Algorithm:
    """Return the exchange of members with those up to a distance before them, on any machine.

    A member gets `messages` of `nbytes` from each distance. Under zigzag one of two comes from behind; a round to one
    side takes as long as one to the other. Members at the ends send less, which is not counted.
    """
    circle = Circle(members.count)
    rounds = (_rounds(messages, Shift(circle, each), nbytes, members, staged=False) for each in range(1, distance + 1))
    return Algorithm("neighbours", tuple(rounds))


def all_to_all(nbytes: float, members: Members, *, staged: bool) -> Algorithm:
    """Return the exchange in which each member gives every other a part of its own, on any machine.

    A member's parts are `nbytes` in all. `staged`: they are summed where they arrive, as the quantised parts of
    gradients are; sums on the way would have to be unpacked, added and packed again by each member they pass.
    """
    return Algorithm("pairwise", _pairwise_rounds(nbytes, Circle(members.count), members, staged=staged))


def all_to_alls(nbytes: float, members: Members) -> list[Algorithm]:
    """Return the orders in which each member may give every other a part of its own `nbytes`, on any machine.

    Of members in several groups each may first meet those of its own group, then all of the others in turn. Round the
    circle of all members, in contrast, rounds to near partners cross the links between groups as well.
    """
    ways = [all_to_all(nbytes, members, staged=False)]
    if len(members.steps()) > 1:
        rounds, stride = [], 1
        for _, places in members.steps():
            shift = Shift(Circle(places, stride), 1, step=1, turns=stride)
            count, part = (places - 1) * stride, nbytes / members.count
            rounds.append(_rounds(count, shift, part, members, staged=False, in_turn=True))
            stride *= places
        ways.append(Algorithm("pairwise by groups", tuple(rounds)))
    return ways


def copied_shards(
    elements: float,
    itemsizes: tuple[float, float],
    group: Members,
    copies: Members,
    machine: Machine,
    own_bytes: float,
) -> Algorithm:
    """Return the reduction into shards of which each group of members has a copy: within groups, then over copies.

    `elements` are summed; `itemsizes` are the bytes of a summed element and of an element of a shard. Only sums, which
    are f32, leave a group.
    """
    itemsize, part_itemsize = itemsizes
    within = cheapest(reduce_scatters(elements, itemsize, group, machine), machine, own_bytes)
    part = elements / group.count
    scatter = cheapest(reduce_scatters(part, max(itemsize, _SUM_BYTES), copies, machine), machine)
    gather = cheapest(all_gathers(part * part_itemsize, copies, machine), machine)
    name = f"{within.name}, then {scatter.name} + {gather.name} of copies"
    return Algorithm(name, within.rounds + scatter.rounds + gather.rounds)


def scalar_all_reduces(nbytes: float, members: Members, machine: Machine) -> list[Algorithm]:
    """Return the machine's algorithms to give every member the sum of numbers: a gather of all of them, or a tree."""
    ways = all_gathers(nbytes * members.count, members, machine)
    if "tree" in machine.collectives:
        trees = _up(nbytes, members, staged=False) + _broadcast(nbytes, members)
        ways = [*(way for way in ways if way.name != "tree"), Algorithm("tree", trees)]
    return ways


def cheapest(ways: Sequence[Algorithm], machine: Machine, own_bytes: float = 0.0) -> Algorithm:
    """Return the algorithm that takes least time, DDR included, then least time of links; the first of equal ones."""

    def seconds(way: Algorithm) -> tuple[float, float]:
        links = way.seconds(machine)
        return max(links, way.ddr_bytes(own_bytes) / machine["ddr_bandwidth"]), links

    return min(ways, key=seconds)


_Rounds = tuple[Rounds, ...]
_FlatWay = Callable[[float, float, Circle, "Members"], _Rounds]
"""Rounds among a circle of members, given the bytes of their data and of sums of it."""


def _flat_ways(
    kinds: dict[str, _FlatWay], own: float, sums: float, circle: Circle, members: Members, machine: Machine
) -> list[Algorithm]:
    chosen = [(name, rounds_of) for name, rounds_of in kinds.items() if name in machine.collectives]
    return [Algorithm(name, rounds_of(own, sums, circle, members)) for name, rounds_of in chosen]


def _hierarchical(
    kinds: dict[str, _FlatWay], steps: Sequence[tuple[float, float, Circle]], members: Members, machine: Machine
) -> Algorithm:
    """Return the cheapest flat algorithm of every step, one after the other."""
    ways = [cheapest(_flat_ways(kinds, *step, members, machine), machine) for step in steps]
    rounds = tuple(rounds for way in ways for rounds in way.rounds)
    return Algorithm(f"hierarchical ({', '.join(way.name for way in ways)})", rounds)


def _ring_rounds(nbytes: float, circle: Circle, members: Members, *, staged: bool) -> _Rounds:
    places = circle.places
    if places == 1:
        return ()
    return (_rounds(places - 1, Shift(circle, 1), nbytes / places, members, staged=staged),)


def _pairwise_rounds(nbytes: float, circle: Circle, members: Members, *, staged: bool) -> _Rounds:
    """Return the rounds of a pairwise exchange, near partners first and last.

    Distances at which some messages stay within an inner group are rounds of their own, as each crosses other links.
    All distances in between are one `Rounds`.
    """
    places = circle.places
    # At a distance of `near` or more, both ways round the circle, no message stays within an inner group: these rounds
    # are all alike.
    near = max((1, *(group // circle.stride for group in members.within if group < circle.span)))
    alone = [*range(1, near), *range(places - near + 1, places)]
    together = [(near, places - 2 * near + 1)] if near < places else []
    parts = sorted([*((distance, 1) for distance in alone), *together])
    return tuple(
        _rounds(count, Shift(circle, distance, 1), nbytes / places, members, staged=staged, in_turn=True)
        for distance, count in parts
    )


def _recursive_rounds(nbytes: float, circle: Circle, members: Members, *, staged: bool) -> _Rounds:
    part = nbytes / circle.places
    rounds = [
        _rounds(1, Shift(circle, distance), part * parts, members, staged=staged)
        for distance, parts in doublings(circle.places)
    ]
    return tuple(reversed(rounds) if staged else rounds)


_REDUCTIONS: dict[str, _FlatWay] = {
    "pairwise": lambda own, _sums, circle, members: _pairwise_rounds(own, circle, members, staged=True),
    "ring": lambda _own, sums, circle, members: _ring_rounds(sums, circle, members, staged=True),
    "recursive": lambda _own, sums, circle, members: _recursive_rounds(sums, circle, members, staged=True),
}
_GATHERS: dict[str, _FlatWay] = {
    "ring": lambda own, _sums, circle, members: _ring_rounds(own, circle, members, staged=False),
    "pairwise": lambda own, _sums, circle, members: _pairwise_rounds(own, circle, members, staged=False),
    "recursive": lambda own, _sums, circle, members: _recursive_rounds(own, circle, members, staged=False),
}
"""Flat algorithms of gathers. The first of equally cheap ones is taken, as of reductions."""


def _up(nbytes: float, members: Members, *, staged: bool) -> _Rounds:
    """Return the rounds that take all bytes from everyone to a root, added on the way."""
    climbs = [Climb(members.count, distance) for distance, _ in doublings(members.count)]
    return tuple(_rounds(1, climb, nbytes, members, staged=staged) for climb in climbs)


def _up_in_halves(nbytes: float, members: Members) -> _Rounds:
    """Return the rounds that take each member's part to a root."""
    return tuple(
        _rounds(1, Climb(members.count, distance), nbytes * parts / members.count, members, staged=False)
        for distance, parts in doublings(members.count)
    )


def _down(nbytes: float, members: Members) -> _Rounds:
    """Return the rounds that take each member's part from a root to it."""
    return tuple(
        _rounds(1, Climb(members.count, distance, down=True), nbytes * parts / members.count, members, staged=False)
        for distance, parts in reversed(doublings(members.count))
    )


def _broadcast(nbytes: float, members: Members) -> _Rounds:
    """Return the rounds that take all bytes from a root to everyone."""
    return tuple(
        _rounds(1, Climb(members.count, distance, down=True), nbytes, members, staged=False)
        for distance, _ in reversed(doublings(members.count))
    )


def _rounds(
    count: int, pattern: Pattern, message_bytes: float, members: Members, *, staged: bool, in_turn: bool = False
) -> Rounds:
    """Return `count` rounds of a pattern; with `in_turn` each member is at every place over all rounds."""
    shares = pattern.shares(members.within)
    used = [level for level, share in enumerate(shares) if share > 0]
    leaving = [pattern.leaving(group) for group in members.within[:-1]]
    # All messages of a round end together: the slowest own link decides, or the uplink by which a group's messages
    # leave.
    own = max(1 / members.links[level].bandwidth for level in used)
    shared = max((out / uplink for out, uplink in zip(leaving, members.uplinks, strict=True)), default=0.0)
    return Rounds(
        count,
        pattern,
        message_bytes,
        max(members.links[level].latency for level in used),
        max(own, shared),
        tuple(shares) if in_turn else tuple(float(share > 0) for share in shares),
        tuple(out / group for out, group in zip(leaving, members.within, strict=False)),
        staged,
    )
