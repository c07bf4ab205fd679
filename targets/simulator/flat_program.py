"""A program as integer arrays, which the event loop and the walk over idle intervals run on.

Streams are numbered stage by stage, engines in the order of `ENGINES`; ops are numbered stream by stream. An op of a
step is an event; op i in step k is the event k * ops + i.
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
"""Streams of a stage, one for each engine."""
_OF_STAGES = frozenset({Group.ENDS.value, Group.ALL.value})
"""Groups whose members are ranks of several stages. Replicas and tensor ranks of one stage are alike, so they need no
meeting."""
_DIRECTIONS = tuple(Direction)
ALONE, SEND, RECV, TOGETHER, NEVER = range(5)
"""Modes of starting: alone, as an end of a message, together with partners on other stages, or never because a partner
is missing."""


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
        ("meets", np.int64),  # 1: both ends of its messages start and end together, whatever the mode of sends
    ]
)


class FlatProgram(NamedTuple):
    """One step of a program, as arrays of records, which compiled loops read quickly."""

    ops: Records
    streams: Records
    """the ops of each stream, as a range"""
    waits: Records
    channels: Records
    sends: Int64s
    recvs: Int64s
    meetings: Records
    """the members of each meeting (a collective across stages), as a range of `members`"""
    members: Int64s

    @property
    def last_ops(self) -> Int64s:
        """Last op of each stream that has any."""
        return self.streams["stop"][self.streams["stop"] > self.streams["first"]] - 1

    @property
    def first_ops(self) -> Int64s:
        """First op of each stream that has any."""
        return self.streams["first"][self.streams["stop"] > self.streams["first"]]


def flatten(columns: ProgramColumns, topology: Topology) -> FlatProgram:
    """Convert the columns of a program to the arrays of the event loop."""
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
    """Return consecutive ranges of the given lengths, from 0 on."""
    found = np.empty(len(lengths), RANGE)
    found["stop"] = np.cumsum(lengths)
    found["first"] = found["stop"] - lengths
    return found


def _lists(lists: list[list[int]]) -> tuple[Records, Int64s]:
    lengths = np.array([len(each) for each in lists], np.int64)
    return ranges(lengths), np.array([i for each in lists for i in each], np.int64)


def _channels(columns: ProgramColumns, ops: Records, topology: Topology) -> tuple[Records, Int64s, Int64s]:
    """Return channels with their sends and their receives, and fill `mode`, `channel` and `place` of these ops.

    Messages without a neighbour to go to get the mode NEVER.
    """
    rows = columns.instructions
    directions = {keyword: _DIRECTIONS.index(direction) for keyword, direction in DIRECTIONS.items() if direction}
    towards = columns.by_string(directions, rows[:, KEYWORD])
    messages = np.flatnonzero(towards >= 0)
    alike = [rows[messages, column] for column in (KEYWORD, VARIANT, PEER)]
    # The hop of a message is computed once for each class of equal ones: asking the topology for every message would
    # take most of the time.
    kinds, firsts = classes([columns.streams[messages] // STREAMS, rows[messages, FLAGS] // CHUNK, *alike])
    numbers: dict[Hop, int] = {}
    channel_of = np.full(len(firsts), -1, np.int64)
    for kind in np.argsort(firsts):  # in the order of their first op, so that numbers do not depend on the classes
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
    """Return collectives across stages and their members, and fill `mode` and `meeting` of these ops.

    The n-th collective of a group on each of its stages meet if all are there and have equal titles; others get the
    mode NEVER.
    """
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
