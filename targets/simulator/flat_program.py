"""A program as integer arrays: what the event loop and the walk over idle intervals run on.

Streams are numbered stage by stage, engines in the order of `ENGINES`; ops are numbered stream by stream. An op of a step is an
event; event e of op i in step k has the number k * ops + i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.messages import DIRECTIONS, Direction, engines_of, meets
from ratrain.ratrain_ir.ops import ENGINES, Group

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Hop, Topology
    from ratrain.targets.program.program import Instruction, Program

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
Records = NDArray[Any]

STREAMS = len(ENGINES)
"""Streams a stage has."""
_OF_STAGES = frozenset({Group.ENDS.value, Group.ALL.value})
"""Groups whose members are ranks of several stages; the replicas and the tensor peers of a stage take their steps together."""
ALONE, SEND, RECV, TOGETHER, NEVER = range(5)
"""How an op starts: by itself, as a message's end, with its partners on other stages, or not at all for lack of them."""


OP = np.dtype(
    [
        ("stream", np.int64),
        ("mode", np.int64),  # ALONE, SEND, RECV, TOGETHER or NEVER
        ("wait_first", np.int64),  # its waits, as a range of `FlatProgram.waits`
        ("wait_stop", np.int64),
        ("channel", np.int64),  # of sends and receives, -1 of others
        ("place", np.int64),  # its place among the messages of its channel in a step
        ("meeting", np.int64),  # of a collective across stages, -1 of others
    ]
)
WAIT = np.dtype([("stream", np.int64), ("count", np.int64), ("previous", np.int64)])
RANGE = np.dtype([("first", np.int64), ("stop", np.int64)])
CHANNEL = np.dtype(
    [
        ("sender", np.int64),  # the stream that sends
        ("receiver", np.int64),
        ("send_first", np.int64),  # its sends, as a range of `FlatProgram.sends`
        ("send_stop", np.int64),
        ("recv_first", np.int64),
        ("recv_stop", np.int64),
        ("meets", np.int64),  # whether both ends of its messages start and end together, whatever the mode of sends
    ]
)


class FlatProgram(NamedTuple):
    """One step of a program, as arrays of records: that is what compiled loops take quickly."""

    ops: Records
    streams: Records
    """the ops of each, as a range"""
    waits: Records
    channels: Records
    sends: Int64s
    recvs: Int64s
    meetings: Records
    """the members of each, as a range"""
    members: Int64s

    @property
    def last_ops(self) -> Int64s:
        """The last op of each stream that has any."""
        return self.streams["stop"][self.streams["stop"] > self.streams["first"]] - 1

    @property
    def first_ops(self) -> Int64s:
        """The first op of each stream that has any."""
        return self.streams["first"][self.streams["stop"] > self.streams["first"]]


def instructions_in_order(program: Program) -> list[Instruction]:
    """The instructions by op number."""
    return [item for stage in program.stages for engine in ENGINES for item in stage.streams[engine]]


def flatten(program: Program) -> FlatProgram:
    """The arrays of a program."""
    items = instructions_in_order(program)
    lengths = np.array([len(stage.streams[engine]) for stage in program.stages for engine in ENGINES], np.int64)
    ops = np.zeros(len(items), OP)
    ops["stream"] = np.repeat(np.arange(len(lengths)), lengths)
    ops["channel"] = ops["place"] = ops["meeting"] = -1
    streams = ops["stream"].tolist()
    numbers = {engine: index for index, engine in enumerate(ENGINES)}
    waits = [
        (stream - stream % STREAMS + numbers[wait.engine], wait.count, wait.previous_step)
        for item, stream in zip(items, streams, strict=True)
        for wait in item.waits
    ]
    own = _ranges(np.array([len(item.waits) for item in items], np.int64))
    ops["wait_first"], ops["wait_stop"] = own["first"], own["stop"]
    channels = _channels(items, streams, ops, program.topology)
    meetings = _meetings(items, streams, ops, program.topology)
    return FlatProgram(ops, _ranges(lengths), np.array(waits, WAIT), *channels, *meetings)


def _ranges(lengths: Int64s) -> Records:
    ranges = np.empty(len(lengths), RANGE)
    ranges["stop"] = np.cumsum(lengths)
    ranges["first"] = ranges["stop"] - lengths
    return ranges


def _lists(lists: list[list[int]]) -> tuple[Records, Int64s]:
    lengths = np.array([len(each) for each in lists], np.int64)
    return _ranges(lengths), np.array([i for each in lists for i in each], np.int64)


def _channels(
    items: list[Instruction], streams: list[int], ops: Records, topology: Topology
) -> tuple[Records, Int64s, Int64s]:
    """Sends and receives by channel."""
    numbers: dict[Hop, int] = {}
    sends: list[list[int]] = []
    recvs: list[list[int]] = []
    directions = dict(DIRECTIONS)
    for op, item in enumerate(items):
        direction = directions[item.keyword]
        if direction is None:
            continue
        key = item.hop(streams[op] // STREAMS, topology)
        if key is None:
            ops["mode"][op] = NEVER
            continue
        number = numbers.setdefault(key, len(numbers))
        if number == len(sends):
            sends.append([])
            recvs.append([])
        outwards = direction is Direction.OUT
        mine = sends[number] if outwards else recvs[number]
        ops["mode"][op], ops["channel"][op], ops["place"][op] = SEND if outwards else RECV, number, len(mine)
        mine.append(op)
    channels = np.empty(len(numbers), CHANNEL)
    engines = [engines_of(hop.channel.payload) for hop in numbers]
    pairs = list(zip(numbers, engines, strict=True))
    channels["sender"] = [hop.source * STREAMS + ENGINES.index(sender) for hop, (sender, _) in pairs]
    channels["receiver"] = [hop.target * STREAMS + ENGINES.index(receiver) for hop, (_, receiver) in pairs]
    channels["meets"] = [meets(hop.channel.payload) for hop in numbers]
    (send_ranges, all_sends), (recv_ranges, all_recvs) = _lists(sends), _lists(recvs)
    channels["send_first"], channels["send_stop"] = send_ranges["first"], send_ranges["stop"]
    channels["recv_first"], channels["recv_stop"] = recv_ranges["first"], recv_ranges["stop"]
    return channels, all_sends, all_recvs


def _meetings(items: list[Instruction], streams: list[int], ops: Records, topology: Topology) -> tuple[Records, Int64s]:
    """Collectives of several stages: the n-th of a group on each of its stages meet, if they are the same."""
    by_group: dict[str, list[list[int]]] = {}
    for op, item in enumerate(items):
        if item.group in _OF_STAGES:
            by_group.setdefault(item.group, [[] for _ in range(topology.stages)])[streams[op] // STREAMS].append(op)
    meetings: list[list[int]] = []
    for group, lists in by_group.items():
        members = topology.stages_of(Group(group), topology.first_stage)
        ops["mode"][[op for each in lists for op in each]] = NEVER
        for place in range(max(map(len, lists))):
            met = [lists[stage][place] for stage in members if place < len(lists[stage])]
            if len(met) == len(members) and len({items[op].title_without_blocks for op in met}) == 1:
                ops["mode"][met] = TOGETHER
                ops["meeting"][met] = len(meetings)
                meetings.append(met)
    return _lists(meetings)
