"""A program as integer arrays: what the event loop and the walk over idle intervals run on.

Streams are numbered stage by stage, engines in the order of `ENGINES`; ops are numbered stream by stream. An op of a step is an
event; event e of op i in step k has the number k * ops + i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.ops.base import ENGINES, Direction, Group
from ratrain.ratrain_ir.ops.kinds import DIRECTIONS
from ratrain.ratrain_ir.ops.messages import engines_of, meets
from ratrain.targets.program.columns import (
    CHUNK,
    COUNT,
    ENGINE,
    FLAGS,
    GROUP,
    KEYWORD,
    PEER,
    PREVIOUS,
    VARIANT,
    WAITS,
    ProgramColumns,
    classes,
)

if TYPE_CHECKING:
    from ratrain.ratrain_ir.topology import Hop, Topology

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
Records = NDArray[Any]

STREAMS = len(ENGINES)
"""Streams a stage has."""
_OF_STAGES = frozenset({Group.ENDS.value, Group.ALL.value})
"""Groups whose members are ranks of several stages; the replicas and the tensor peers of a stage take their steps together."""
_DIRECTIONS = tuple(Direction)
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


def flatten(columns: ProgramColumns, topology: Topology) -> FlatProgram:
    """The arrays of a program."""
    ops = np.zeros(len(columns), OP)
    ops["stream"] = columns.streams
    ops["channel"] = ops["place"] = ops["meeting"] = -1
    ops["wait_stop"] = columns.wait_stops
    ops["wait_first"] = columns.wait_stops - columns.instructions[:, WAITS]
    waits = np.empty(len(columns.waits), WAIT)
    stages = np.repeat(columns.streams // STREAMS, columns.instructions[:, WAITS])
    waits["stream"] = stages * STREAMS + columns.waits[:, ENGINE]
    waits["count"], waits["previous"] = columns.waits[:, COUNT], columns.waits[:, PREVIOUS]
    channels = _channels(columns, ops, topology)
    meetings = _meetings(columns, ops, topology)
    return FlatProgram(ops, ranges(columns.lengths.ravel()), waits, *channels, *meetings)


def ranges(lengths: Int64s) -> Records:
    """Ranges of such lengths, one behind the other."""
    found = np.empty(len(lengths), RANGE)
    found["stop"] = np.cumsum(lengths)
    found["first"] = found["stop"] - lengths
    return found


def _lists(lists: list[list[int]]) -> tuple[Records, Int64s]:
    lengths = np.array([len(each) for each in lists], np.int64)
    return ranges(lengths), np.array([i for each in lists for i in each], np.int64)


def _channels(columns: ProgramColumns, ops: Records, topology: Topology) -> tuple[Records, Int64s, Int64s]:
    """Sends and receives by channel."""
    rows = columns.instructions
    directions = {keyword: _DIRECTIONS.index(direction) for keyword, direction in DIRECTIONS.items() if direction}
    towards = columns.by_string(directions, rows[:, KEYWORD])
    messages = np.flatnonzero(towards >= 0)
    alike = [rows[messages, column] for column in (KEYWORD, VARIANT, PEER)]
    kinds, firsts = classes([columns.streams[messages] // STREAMS, rows[messages, FLAGS] // CHUNK, *alike])
    numbers: dict[Hop, int] = {}
    channel_of = np.full(len(firsts), -1, np.int64)
    for kind in np.argsort(firsts):  # channels are numbered as they are met
        op = int(messages[firsts[kind]])
        hop = columns.instruction(op).hop(int(columns.streams[op]) // STREAMS, topology)
        if hop is not None:
            channel_of[kind] = numbers.setdefault(hop, len(numbers))
    found = channel_of[kinds]
    ops["mode"][messages[found < 0]] = NEVER
    of_channels, lists = [], []
    for mode, direction in ((SEND, Direction.OUT), (RECV, Direction.IN)):
        mine = (found >= 0) & (towards[messages] == _DIRECTIONS.index(direction))
        order = np.argsort(found[mine], kind="stable")
        listed, channel = messages[mine][order], found[mine][order]
        held = ranges(np.bincount(channel, minlength=len(numbers)))
        ops["mode"][listed], ops["channel"][listed] = mode, channel
        ops["place"][listed] = np.arange(len(listed)) - held["first"][channel]
        of_channels.append(held)
        lists.append(listed)
    channels = np.empty(len(numbers), CHANNEL)
    engines = [engines_of(hop.channel.payload) for hop in numbers]
    pairs = list(zip(numbers, engines, strict=True))
    channels["sender"] = [hop.source * STREAMS + ENGINES.index(sender) for hop, (sender, _) in pairs]
    channels["receiver"] = [hop.target * STREAMS + ENGINES.index(receiver) for hop, (_, receiver) in pairs]
    channels["meets"] = [meets(hop.channel.payload) for hop in numbers]
    for name, held in zip(("send", "recv"), of_channels, strict=True):
        channels[f"{name}_first"], channels[f"{name}_stop"] = held["first"], held["stop"]
    return channels, lists[0], lists[1]


def _meetings(columns: ProgramColumns, ops: Records, topology: Topology) -> tuple[Records, Int64s]:
    """Collectives of several stages: the n-th of a group on each of its stages meet, if they are the same."""
    across = np.flatnonzero(columns.where(columns.instructions[:, GROUP], *_OF_STAGES))
    items = {op: columns.instruction(op) for op in across.tolist()}
    by_group: dict[str, list[list[int]]] = {}
    for op, item in items.items():
        by_group.setdefault(item.group, [[] for _ in range(topology.stages)])[columns.streams[op] // STREAMS].append(op)
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
