"""The wait graph: who waits for whom, who waits for ever, and the circle that says why.

A node is a place in a stream: an op of one of several steps, a cell of a table of actions, the instruction at which an
engine stands. An edge runs from what must have happened to what waits for it: from the one before in the stream, from
what a wait of an engine names, from the send to the receive of a message. Places that are passed together, as the ends
of a rendezvous or the members of a collective, are one node.

    rank 0:  recv b  <--  send b  :rank 1      `recv b` waits for `send b`, which stands behind `recv a`;
               |            ^                  that waits for `send a`, which stands behind `recv b`:
               v            |                  a circle of four
             send a  -->  recv a

What can happen does happen, whatever happens first: no timing makes a difference. So one sweep decides (Kahn, 1962):
cross out what waits for nothing that is left, until nothing can be crossed out. Exactly what is left waits for ever:
the circles, and what waits for them.

The sweep takes one visit an event and an edge, of arrays without an object for either; networkx looks for a circle, in
what hangs alone.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from attrs import define, field

from ratrain.ratrain_ir.support.loops import Allowance
from ratrain.ratrain_ir.support.native_loops import native

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]

_EDGES = 300_000
"""A fifth of a second of plain Python: less than it takes to compile the loop where it is not kept."""
ALLOWANCE = Allowance(_EDGES)
N = TypeVar("N", bound=Hashable)


@define(eq=False)
class WaitGraph:
    """The waits of many events, which are numbers from 0 on."""

    events: int
    one: Int64s = field(init=False)
    """by event the one that it is one with"""
    sources: list[Int64s] = field(factory=list)
    targets: list[Int64s] = field(factory=list)
    """ends of edges, some at a time"""

    def __attrs_post_init__(self) -> None:
        self.one = np.arange(self.events)

    def after(self, sources: Int64s, targets: Int64s) -> None:
        """Let each target wait for its source."""
        self.sources.append(sources)
        self.targets.append(targets)

    def together(self, events: Int64s, others: Int64s) -> None:
        """Make each event one with another, which must be one with none but itself."""
        self.one[events] = others

    def never(self) -> NDArray[np.bool_]:
        """Tell which events never happen."""
        return stuck_events(self.events, *self._edges())[self.one]

    def ends(self, seconds: Sequence[float]) -> list[float] | None:
        """Tell when each event ends that takes its seconds as soon as all that it waits for have ended; None where some never do.

        No events may be one. The first ones start at 0.
        """
        _, order, bounds, later = (array.tolist() for array in _swept(self.events, *self._edges()))
        found = [*seconds]
        for event in order:
            for target in later[bounds[event - 1] if event else 0 : bounds[event]]:
                found[target] = max(found[target], found[event] + seconds[target])
        return found if len(order) == self.events else None

    def circle(self) -> list[int]:
        """List events each of which waits for the next, the last for the first; none where all happen.

        A search in depth finds it, from the least event that never happens, always to the least that an event waits
        for.
        """
        sources, targets = self._edges()
        stuck = stuck_events(self.events, sources, targets)
        among = stuck[sources] & stuck[targets]
        waits: dict[int, list[int]] = {}
        for target, source in sorted(zip(targets[among].tolist(), sources[among].tolist(), strict=True)):
            waits.setdefault(target, []).append(source)
        return circle_of(waits)

    def _edges(self) -> tuple[Int64s, Int64s]:
        none = np.zeros(0, np.int64)
        sources, targets = (self.one[np.concatenate((none, *each))] for each in (self.sources, self.targets))
        return sources, targets


def circle_of(waits: Mapping[N, Collection[N]]) -> list[N]:
    """List nodes each of which waits for the next, the last for the first; none where nobody waits for ever.

    `waits` has of every node what it waits for. The circle is the first that a search in depth finds.
    """
    import networkx as nx

    try:
        return [edge[0] for edge in nx.find_cycle(_graph(waits))]
    except nx.NetworkXNoCycle:
        return []


def all_behind(waits: Mapping[N, Collection[N]], node: N) -> set[N]:
    """Return all others that wait for a node, directly or for one that does."""
    import networkx as nx

    found: set[N] = nx.ancestors(_graph(waits), node)
    return found


def _graph(waits: Mapping[N, Collection[N]]) -> Any:
    import networkx as nx  # a tenth of a second, which only what hangs takes

    graph: Any = nx.DiGraph()
    graph.add_nodes_from(waits)
    graph.add_edges_from((node, other) for node, others in waits.items() for other in others)
    return graph


def edge_ends(edges: Sequence[tuple[int, int]]) -> tuple[Int64s, Int64s]:
    """Return the sources and the targets of edges."""
    sources, targets = np.array(edges, np.int64).reshape(-1, 2).T
    return sources, targets


def stuck_events(events: int, sources: Int64s, targets: Int64s) -> NDArray[np.bool_]:
    """Tell which events never happen, where the source of each edge comes before its target."""
    stuck: NDArray[np.bool_] = _swept(events, sources, targets)[0] > 0
    return stuck


def _swept(events: int, sources: Int64s, targets: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Cross out what can happen: by event how many it still waits for; and what happens, in an order that keeps the edges.

    Then the edges: by event its end among the targets, which are put in the order of their sources.
    """
    later = targets[np.argsort(sources, kind="stable")]
    bounds = np.cumsum(np.bincount(sources, minlength=events))
    waiting = np.bincount(targets, minlength=events)
    first = np.flatnonzero(waiting == 0)
    ready, count = np.concatenate((first, np.zeros(events - len(first), np.int64))), len(first)
    if not ALLOWANCE.take(len(targets)):
        count = _compiled()(bounds, later, waiting, ready, count)
        return waiting, ready[:count], bounds, later
    left, order = waiting.tolist(), ready.tolist()
    count = drain(bounds.tolist(), later.tolist(), left, order, count)
    return np.array(left, np.int64), np.array(order[:count], np.int64), bounds, later


@cache
def _compiled() -> Any:
    return native(drain)


def drain(bounds: Any, later: Any, waiting: Any, ready: Any, count: int) -> int:
    """Fill `ready`, of which the first `count` are; how many are in it. Takes lists as well as arrays."""
    done = 0
    while done < count:
        event = ready[done]
        done += 1
        for place in range(0 if event == 0 else bounds[event - 1], bounds[event]):
            target = later[place]
            waiting[target] -= 1
            if waiting[target] == 0:
                ready[count] = target
                count += 1
    return count
