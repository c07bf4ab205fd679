"""Proof of progress: every op of every stage can run under any timing, across the end of a step too.

Two consecutive steps are unrolled into one wait graph. Engines take ops in list order. Ops wait for their dependences.
A collective is one event of all its members. A message is either buffered (the receive ends after its send) or
rendezvous (send and receive are one event; messages of remote buffers always are). The module makes progress exactly if
the graph has no cycle. A third step would repeat the second.

    stage 0, send engine:  a, then b       buffered:    recv b waits for send b, recv a for send a: no cycle
    stage 1, recv engine:  b, then a       rendezvous:  a comes before b, and b before a: a cycle

Cost: one visit of each op of two steps and of each edge (see `wait_graph`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.analysis.dependence import StageNumbers, ops_as_numbers
from ratrain.ratrain_ir.analysis.wait_graph import WaitGraph
from ratrain.ratrain_ir.ops.base import ENGINES, Direction, Group, Op
from ratrain.ratrain_ir.ops.collectives import AllReduce, AllReduceScalar
from ratrain.ratrain_ir.ops.messages import MessageOp, Recv, Send, meets, payload_of
from ratrain.ratrain_ir.process_pool import each_stage
from ratrain.ratrain_ir.topology import Hop

if TYPE_CHECKING:
    from ratrain.ratrain_ir.module import Module, Stage
    from ratrain.ratrain_ir.topology import Topology


@frozen
class Event:
    """Op of one stage in one of the two unrolled steps."""

    stage: int
    position: int
    step: int


def meeting_stages(op: Op, stage: Stage, topology: Topology) -> tuple[int, ...]:
    """Return the stages that meet in a collective that spans stages; none for any other op."""
    if not isinstance(op, AllReduce | AllReduceScalar) or op.group is Group.REPLICAS:
        return ()
    return topology.stages_of(op.group, stage.index)


Int64s = NDArray[np.int64]


@frozen(eq=False)
class StageEvents:
    """Events of a stage: event e is the op at position e of the first step, event `count` + e that of the second."""

    count: int
    """number of ops"""
    sources: Int64s
    """Edges within the stage, from an event to one that waits for it."""
    targets: Int64s
    meetings: Mapping[tuple[int, ...], Int64s]
    """positions of collectives in order, by the stages that meet"""
    sends: Mapping[Hop, Int64s]
    """positions of outgoing messages in order, by channel"""
    recvs: Mapping[Hop, Int64s]


def blocking_cycle(module: Module, *, rendezvous: bool) -> list[Event] | None:
    """Return a cycle of events, each of which waits for the next; None if the module makes progress.

    `rendezvous`: sends end only with their receives, not when their bytes are copied out.
    """
    events = each_stage(lambda stage: _stage_events(stage, module.topology), module.stages)
    return cycle_of(events, rendezvous=rendezvous)


def cycle_of(stages: Sequence[StageEvents], *, rendezvous: bool) -> list[Event] | None:
    """Return a cycle of events of some stages, each of which waits for the next; None if there is none."""
    firsts = np.cumsum([0, *(2 * stage.count for stage in stages)])
    graph = WaitGraph(int(firsts[-1]))

    def events(stage: int, positions: Int64s) -> Int64s:
        """List the events of ops of a stage in both steps."""
        found: Int64s = np.concatenate((positions, positions + stages[stage].count)) + firsts[stage]
        return found

    met: dict[tuple[int, ...], Int64s] = {}
    for index, stage in enumerate(stages):
        graph.add_waits(firsts[index] + stage.sources, firsts[index] + stage.targets)
        for key, positions in stage.meetings.items():
            # the k-th collectives of all stages that meet are one event, named by that of the first stage
            mine = events(index, positions)
            graph.merge(mine, met.setdefault(key, mine))
    for hop, sends in ((hop, sends) for stage in stages for hop, sends in stage.sends.items()):
        sent, received = events(hop.source, sends), events(hop.target, stages[hop.target].recvs[hop])
        if rendezvous or meets(hop.channel.payload):
            graph.merge(received, sent)
        else:
            graph.add_waits(sent, received)

    def event(node: int) -> Event:
        stage = int(np.searchsorted(firsts, node, side="right")) - 1
        step, position = divmod(node - int(firsts[stage]), stages[stage].count)
        return Event(stage, position, step)

    return [event(node) for node in graph.circle()] or None


def _stage_events(stage: Stage, topology: Topology) -> StageEvents:
    meetings: dict[tuple[int, ...], list[int]] = {}
    sends: dict[Hop, list[int]] = {}
    recvs: dict[Hop, list[int]] = {}
    for position, op in enumerate(stage.ops):
        if isinstance(op, MessageOp) and (hop := hop_of(op, stage, topology)) is not None:
            (sends if op.direction is Direction.OUT else recvs).setdefault(hop, []).append(position)
        elif key := meeting_stages(op, stage, topology):
            meetings.setdefault(key, []).append(position)
    return StageEvents(
        len(stage.ops), *stage_edges(ops_as_numbers(stage)), *(_arrays(each) for each in (meetings, sends, recvs))
    )


T = TypeVar("T", bound=Hashable)


def _arrays(lists: Mapping[T, list[int]]) -> dict[T, Int64s]:
    return {key: np.array(values, np.int64) for key, values in lists.items()}


def stage_edges(numbers: StageNumbers) -> tuple[Int64s, Int64s]:
    """Return (sources, targets) of the edges within a stage: engines' order and dependences, over two steps."""
    engines = np.array(numbers.swept.engines, np.int64)
    count = len(engines)
    sources, targets = [], []
    for engine in range(len(ENGINES)):
        order = np.flatnonzero(engines == engine)
        events = np.concatenate((order, order + count))
        sources.append(events[:-1])
        targets.append(events[1:])
    # Waits are known for the second step. Those on the same step hold in the first one too; those on the step before
    # have no counterpart there.
    kept, needed = (np.array(each, np.int64) for each in numbers.reduced_waits())
    waiting = np.repeat(np.arange(count), kept)
    same_step = needed >= count
    sources += [needed, needed[same_step] - count]
    targets += [count + waiting, waiting[same_step]]
    return np.concatenate(sources), np.concatenate(targets)


def hop_of(op: MessageOp, stage: Stage, topology: Topology) -> Hop | None:
    """Return the channel of a message; None if its peer is not a neighbour for its payload."""
    out = op.direction is Direction.OUT
    ends = (stage.index, op.peer) if out else (op.peer, stage.index)
    if isinstance(op, Send | Recv):
        return topology.hop(*ends, op.payload, op.chunk)
    payload = payload_of(op.keyword, "")
    assert payload is not None  # all messages but Send and Recv move remote buffers
    return topology.hop(*ends, payload)
