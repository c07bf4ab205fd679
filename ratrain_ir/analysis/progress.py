"""Progress: whether every op of every stage can run, whatever the timing, across the end of a step.

Two consecutive steps are unrolled into one event graph: engines take ops in list order, ops wait for their dependences, a
collective is one event of all its members, and a message is either buffered (the receive ends after its send) or rendezvous
(send and receive are one event; those of guests always are). The program makes progress exactly when the graph has no cycle; a
third step is the second's image.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from ratrain.ratrain_ir.analysis.dependence import stage_waits
from ratrain.ratrain_ir.messages import DIRECTIONS, Direction, meets, payload_of
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops import AllReduce, AllReduceScalar, Engine, Group, MessageOp, Op, Recv, Release, Send

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Hop, Topology


@frozen
class Event:
    """An op of one stage in one of the two unrolled steps."""

    stage: int
    position: int
    step: int


def meeting_stages(op: Op, stage: Stage, topology: Topology) -> tuple[int, ...]:
    """The stages that meet in a collective that spans stages; none for any other op."""
    if not isinstance(op, AllReduce | AllReduceScalar) or op.group is Group.REPLICAS:
        return ()
    return topology.stages_of(op.group, stage.index)


def blocking_cycle(module: Module, *, rendezvous: bool) -> list[Event] | None:
    """A cycle of events each of which waits for the next, or None where the program makes progress."""
    return _EventGraph(module, rendezvous).cycle()


@define(eq=False)
class _EventGraph:
    module: Module
    rendezvous: bool
    first: list[int] = field(factory=list)
    representative: list[int] = field(factory=list)
    edges: dict[int, set[int]] = field(factory=lambda: defaultdict(set))
    """From an event to those that wait for it."""

    def __attrs_post_init__(self) -> None:
        total = 0
        for stage in self.module.stages:
            self.first.append(total)
            total += 2 * len(stage.ops)
        self.representative = list(range(total))
        self.join_collectives()
        self.join_messages()
        for stage in self.module.stages:
            self.add_stage(stage)

    def node(self, stage: int, position: int, step: int) -> int:
        return self.representative[self.first[stage] + step * len(self.module.stages[stage].ops) + position]

    def merge(self, nodes: list[tuple[int, int]], step: int) -> None:
        """Make events one. Called before any edge exists."""
        ids = [self.first[s] + step * len(self.module.stages[s].ops) + p for s, p in nodes]
        for other in ids[1:]:
            self.representative[other] = ids[0]

    def join_collectives(self) -> None:
        queues: dict[Hashable, list[list[tuple[int, int]]]] = {}
        seen: dict[tuple[int, Hashable], int] = defaultdict(int)
        topology = self.module.topology
        for stage in self.module.stages:
            for position, op in enumerate(stage.ops):
                key = meeting_stages(op, stage, topology)
                if key:
                    index = seen[stage.index, key]
                    seen[stage.index, key] += 1
                    queue = queues.setdefault(key, [])
                    if index == len(queue):
                        queue.append([])
                    queue[index].append((stage.index, position))
        for queue in queues.values():
            for nodes in queue:
                for step in (0, 1):
                    self.merge(nodes, step)

    def join_messages(self) -> None:
        apart: list[tuple[Place, Place]] = []
        for hop, (sends, recvs) in channels(self.module).items():
            pairs = zip(sends, recvs, strict=True)
            if not (self.rendezvous or meets(hop.channel.payload)):
                apart += pairs
                continue
            for send, recv in pairs:
                for step in (0, 1):
                    self.merge([send, recv], step)
        for send, recv in apart:
            for step in (0, 1):
                self.edges[self.node(*send, step)].add(self.node(*recv, step))

    def add_stage(self, stage: Stage) -> None:
        waits = stage_waits(stage)
        last: dict[Engine, int] = {}
        for step in (0, 1):
            for position, op in enumerate(stage.ops):
                if type(op) is Release:
                    continue
                event = self.node(stage.index, position, step)
                if op.engine in last:
                    self.add_edge(last[op.engine], event)
                last[op.engine] = event
                for wait in waits[position]:
                    before = step - wait.previous_step
                    if before >= 0:
                        self.add_edge(self.node(stage.index, wait.position, before), event)

    def add_edge(self, source: int, target: int) -> None:
        self.edges[source].add(target)

    def cycle(self) -> list[Event] | None:
        """Kahn's algorithm; what remains holds a cycle, found by walking back."""
        waiting = [0] * len(self.representative)
        for targets in self.edges.values():
            for target in targets:
                waiting[target] += 1
        ready = [n for n, r in enumerate(self.representative) if n == r and waiting[n] == 0]
        remaining = sum(1 for n, r in enumerate(self.representative) if n == r)
        while ready:
            event = ready.pop()
            remaining -= 1
            for target in self.edges.get(event, ()):
                waiting[target] -= 1
                if waiting[target] == 0:
                    ready.append(target)
        return None if remaining == 0 else self.walk_back(waiting)

    def walk_back(self, waiting: list[int]) -> list[Event]:
        stuck = {n for n, r in enumerate(self.representative) if n == r and waiting[n] > 0}
        before: dict[int, int] = {}
        for source in sorted(self.edges):
            if source in stuck:
                for target in self.edges[source]:
                    if target in stuck:
                        before.setdefault(target, source)
        event = min(before)
        path: list[int] = []
        index: dict[int, int] = {}
        while event not in index:
            index[event] = len(path)
            path.append(event)
            event = before[event]
        return [self.event(node) for node in path[index[event] :]]

    def event(self, node: int) -> Event:
        stage = max(s for s, first in enumerate(self.first) if first <= node)
        step, position = divmod(node - self.first[stage], len(self.module.stages[stage].ops))
        return Event(stage, position, step)


Place = tuple[int, int]


def channels(module: Module) -> dict[Hop, tuple[list[Place], list[Place]]]:
    """Sends and receives of each channel, as (stage, position), in order; those that name no neighbour are left out."""
    places: dict[Hop, tuple[list[Place], list[Place]]] = {}
    topology = module.topology
    directions = DIRECTIONS.by_kind
    for stage in module.stages:
        for position, op in enumerate(stage.ops):
            direction = directions[type(op)]
            if direction is not None and isinstance(op, MessageOp):
                hop = hop_of(op, stage, topology)
                if hop is not None:
                    mine = places.setdefault(hop, ([], []))[direction is Direction.IN]
                    mine.append((stage.index, position))
    return places


def hop_of(op: MessageOp, stage: Stage, topology: Topology) -> Hop | None:
    """The channel of a message; None where its peer is no neighbour for what it carries."""
    out = DIRECTIONS.by_kind[type(op)] is Direction.OUT
    ends = (stage.index, op.peer) if out else (op.peer, stage.index)
    if isinstance(op, Send | Recv):
        return topology.hop(*ends, op.payload, op.chunk)
    payload = payload_of(op.keyword, "")
    assert payload is not None  # of what no pipeline message is
    return topology.hop(*ends, payload)
