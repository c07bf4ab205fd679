"""Progress: whether every op of every stage can run, whatever the timing, across the end of a step.

Two consecutive steps are unrolled into one event graph: engines take ops in list order, ops wait for their dependences, a
collective is one event of all its members, and a message is either buffered (the receive ends after its send) or rendezvous
(send and receive are one event; those of guests always are). The program makes progress exactly when the graph has no cycle; a
third step is the second's image.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.dependence import StageNumbers, stage_numbers
from ratrain.ratrain_ir.analysis.progress_sweep import stuck_events
from ratrain.ratrain_ir.messages import DIRECTIONS, Direction, meets, payload_of
from ratrain.ratrain_ir.module import Module, Stage
from ratrain.ratrain_ir.ops import ENGINES, AllReduce, AllReduceScalar, Group, MessageOp, Op, Recv, Send

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


Place = tuple[int, int]
"""(stage, position) of an op."""
Int64s = NDArray[np.int64]


def blocking_cycle(
    module: Module, *, rendezvous: bool, numbers: Callable[[Stage], StageNumbers] = stage_numbers
) -> list[Event] | None:
    """A cycle of events each of which waits for the next, or None where the program makes progress.

    `numbers` has the numbers of a stage where they are known already.
    """
    return _EventGraph(module, rendezvous, numbers).cycle()


@define(eq=False)
class _EventGraph:
    module: Module
    rendezvous: bool
    numbers: Callable[[Stage], StageNumbers]
    first: list[int] = field(factory=list)
    representative: Int64s = field(init=False)
    """by event the one that it is one with"""
    sources: list[Int64s] = field(factory=list)
    targets: list[Int64s] = field(factory=list)
    """Edges, from an event to one that waits for it, some at a time."""

    def __attrs_post_init__(self) -> None:
        total = 0
        for stage in self.module.stages:
            self.first.append(total)
            total += 2 * len(stage.ops)
        self.representative = np.arange(total)
        self.join_collectives()
        self.join_messages()
        for stage in self.module.stages:
            self.add_stage(stage)

    def nodes(self, places: list[Place], step: int) -> Int64s:
        """The events of ops of some stages in a step."""
        ids = [self.first[s] + step * len(self.module.stages[s].ops) + p for s, p in places]
        return np.array(ids, np.int64)

    def merge(self, meetings: list[tuple[Place, list[Place]]]) -> None:
        """Make events one, each with some others. No event is merged twice."""
        for step in (0, 1):
            kept = self.nodes([place for place, others in meetings for _ in others], step)
            self.representative[self.nodes([place for _, others in meetings for place in others], step)] = kept

    def join_collectives(self) -> None:
        queues: dict[Hashable, list[list[Place]]] = {}
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
        self.merge([(nodes[0], nodes[1:]) for queue in queues.values() for nodes in queue])

    def join_messages(self) -> None:
        apart: list[tuple[Place, Place]] = []
        together: list[tuple[Place, list[Place]]] = []
        for hop, (sends, recvs) in channels(self.module).items():
            pairs = zip(sends, recvs, strict=True)
            if self.rendezvous or meets(hop.channel.payload):
                together += [(send, [recv]) for send, recv in pairs]
            else:
                apart += pairs
        self.merge(together)
        for step in (0, 1):
            self.add_edges(self.nodes([send for send, _ in apart], step), self.nodes([recv for _, recv in apart], step))

    def add_stage(self, stage: Stage) -> None:
        numbers = self.numbers(stage)
        first, count = self.first[stage.index], len(stage.ops)
        engines = np.array(numbers.swept.engines, np.int64)
        for engine in range(len(ENGINES)):
            order = np.flatnonzero(engines == engine)
            events = first + np.concatenate((order, order + count))
            self.add_edges(events[:-1], events[1:])
        kept, needed = (np.array(each, np.int64) for each in numbers.reduced_waits())
        waiting = np.repeat(np.arange(count), kept)
        self.add_edges(first + needed, first + count + waiting)
        same_step = needed >= count
        self.add_edges(first + needed[same_step] - count, first + waiting[same_step])

    def add_edges(self, sources: Int64s, targets: Int64s) -> None:
        self.sources.append(self.representative[sources])
        self.targets.append(self.representative[targets])

    def cycle(self) -> list[Event] | None:
        """What never happens holds a cycle, found by walking back."""
        if not self.sources:
            return None
        sources, targets = np.concatenate(self.sources), np.concatenate(self.targets)
        stuck = stuck_events(len(self.representative), sources, targets)
        if not stuck.any():
            return None
        among = stuck[sources] & stuck[targets]
        return self.walk_back(sorted(zip(sources[among].tolist(), targets[among].tolist(), strict=True)))

    def walk_back(self, edges: list[tuple[int, int]]) -> list[Event]:
        before: dict[int, int] = {}
        for source, target in edges:
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
