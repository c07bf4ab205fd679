"""Wait graph: which events wait for which, which never happen, and a cycle that explains why.

A node is a place in a stream: an op of one of several steps, a cell of a table of actions, the instruction at which an
engine stands. An edge runs from an event that must happen first to one that waits for it: from the node before in the
stream, from the target of an engine's wait, from the send to the receive of a message. Places that are passed together,
such as the ends of a rendezvous or the members of a collective, are one node.

    rank 0:  recv b  <--  send b  :rank 1      `recv b` waits for `send b`, which stands behind `recv a`;
               |            ^                  that waits for `send a`, which stands behind `recv b`:
               v            |                  a cycle of four
             send a  -->  recv a

An event that can happen does happen, whatever happens before it, so timing makes no difference and one sweep decides
(Kahn, 1962): repeatedly remove an event that waits for nothing that remains. The events that remain never happen: they
are on a cycle, or wait for one.

Cost: one visit of each event and edge, on arrays without objects. networkx looks for a cycle among the remaining events
only.
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
"""Edges swept in plain Python: a fifth of a second, less than compiling the loop takes if it is not cached."""
ALLOWANCE = Allowance(_EDGES)
N = TypeVar("N", bound=Hashable)


@define(eq=False)
class WaitGraph:
    """Waits between `events` events, which are the numbers from 0 on."""

    events: int
    representative: Int64s = field(init=False)
    """by event, the event that represents it: itself, or the one it is merged into"""
    sources: list[Int64s] = field(factory=list)
    targets: list[Int64s] = field(factory=list)
    """ends of edges, in batches"""

    def __attrs_post_init__(self) -> None:
        self.representative = np.arange(self.events)

    def add_waits(self, sources: Int64s, targets: Int64s) -> None:
        """Add edges: each target waits for its source."""
        self.sources.append(sources)
        self.targets.append(targets)

    def merge(self, events: Int64s, others: Int64s) -> None:
        """Merge each event into another, which must not itself be merged into a third."""
        self.representative[events] = others

    def never(self) -> NDArray[np.bool_]:
        """Return an array that marks the events that never happen."""
        return stuck_events(self.events, *self._edges())[self.representative]

    def ends(self, seconds: Sequence[float]) -> list[float] | None:
        """Return the end of each event if it starts as soon as its predecessors have ended; None if some never happen.

        `seconds` are the durations of the events. The first ones start at 0. No events may be merged.
        """
        _, order, bounds, later = (array.tolist() for array in _swept(self.events, *self._edges()))
        # longest path: `order` has each event behind all its predecessors, so found[event] is final when it is read
        found = [*seconds]
        for event in order:
            for target in later[bounds[event - 1] if event else 0 : bounds[event]]:
                found[target] = max(found[target], found[event] + seconds[target])
        return found if len(order) == self.events else None

    def circle(self) -> list[int]:
        """Return a cycle of events, each of which waits for the next, the last for the first; empty if all happen.

        Deterministic: a depth-first search from the least event that never happens, which tries least events first.
        """
        sources, targets = self._edges()
        stuck = stuck_events(self.events, sources, targets)
        among = stuck[sources] & stuck[targets]
        waits: dict[int, list[int]] = {}
        for target, source in sorted(zip(targets[among].tolist(), sources[among].tolist(), strict=True)):
            waits.setdefault(target, []).append(source)
        return circle_of(waits)

    def _edges(self) -> tuple[Int64s, Int64s]:
        # An edge between two events that are merged into one becomes a loop: that event never happens, as it should.
        none = np.zeros(0, np.int64)
        sources, targets = (self.representative[np.concatenate((none, *each))] for each in (self.sources, self.targets))
        return sources, targets


def circle_of(waits: Mapping[N, Collection[N]]) -> list[N]:
    """Return a cycle of nodes, each of which waits for the next, the last for the first; empty if there is none.

    `waits` lists for each node the nodes it waits for. The result is the first cycle of a depth-first search.
    """
    import networkx as nx

    try:
        return [edge[0] for edge in nx.find_cycle(_graph(waits))]
    except nx.NetworkXNoCycle:
        return []


def all_behind(waits: Mapping[N, Collection[N]], node: N) -> set[N]:
    """Return all other nodes that wait for a node, directly or through others."""
    import networkx as nx

    found: set[N] = nx.ancestors(_graph(waits), node)
    return found


def _graph(waits: Mapping[N, Collection[N]]) -> Any:
    import networkx as nx  # takes a tenth of a second, so only when something hangs

    graph: Any = nx.DiGraph()
    graph.add_nodes_from(waits)
    graph.add_edges_from((node, other) for node, others in waits.items() for other in others)
    return graph


def edge_ends(edges: Sequence[tuple[int, int]]) -> tuple[Int64s, Int64s]:
    """Return the sources and the targets of (source, target) pairs as two arrays."""
    sources, targets = np.array(edges, np.int64).reshape(-1, 2).T
    return sources, targets


def stuck_events(events: int, sources: Int64s, targets: Int64s) -> NDArray[np.bool_]:
    """Return an array that marks the events that never happen, if the source of each edge comes before its target."""
    stuck: NDArray[np.bool_] = _swept(events, sources, targets)[0] > 0
    return stuck


def _swept(events: int, sources: Int64s, targets: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Run Kahn's sweep; return (waiting, order, bounds, later).

    `waiting`: by event, how many predecessors remain. `order`: the events that happen, each behind its predecessors.
    `later`: the targets of all edges, sorted by source. `bounds`: by event, its exclusive end in `later`.
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
    """Extend `ready`, whose first `count` entries are filled, by all events that can happen; return the new count.

    Takes lists as well as arrays.
    """
    done = 0
    while done < count:
        event = ready[done]
        done += 1
        # parallel edges are counted in `waiting` and removed here one by one, so they do no harm
        for place in range(0 if event == 0 else bounds[event - 1], bounds[event]):
            target = later[place]
            waiting[target] -= 1
            if waiting[target] == 0:
                ready[count] = target
                count += 1
    return count
