"""Routes of bytes: a row of the resources that a flow passes through, for each distinct route of a program.

Resources are numbered in this order, with `own_resources` = 1 + 2 L of each stage for L levels of groups:

    stage 0: DDR | out 0 | in 0 | out 1 | in 1 ...   stage 1: ...      links of the stage, by level
    level 1: group 0 out | in | group 1 out | in ...                   uplinks, of levels that have one
    stage 0: a resource for each path to or from another memory ...    store paths

A message passes through the sender's link outwards, the receiver's link inwards, and the uplinks of all groups that it
leaves and enters. The bytes of a collective leave and enter at its own stage: on the link of each level, and through
the uplinks of its own groups.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field, frozen

from ratrain.targets.machine.resource_work import Bandwidths, StorePath
from ratrain.targets.program.columns import classes
from ratrain.targets.simulator.flat_program import SEND, STREAMS, Float64s, Int64s, Records, ranges

if TYPE_CHECKING:
    from ratrain.targets.machine.resource_work import Flow
    from ratrain.targets.simulator.flat_program import FlatProgram
    from ratrain.targets.simulator.op_works import OpWorks

FLOW = np.dtype([("nbytes", np.float64), ("route", np.int64)])


@frozen(eq=False)
class Routes:
    """Resources of a program's stages, and the routes through them."""

    capacities: Float64s
    """bytes a second, by resource"""
    rows: Int64s
    """[routes, resources of the longest route], -1 behind the end; the first rows are for DDR bytes, by stage"""
    flows: Records
    """bytes on links, with their routes"""
    of_ops: Records
    """the flows of each op, as a range of `flows`"""

    @property
    def most_flows(self) -> int:
        """Number of flows of the op that has most."""
        return int((self.of_ops["stop"] - self.of_ops["first"]).max(initial=0))

    def users(self, flat: FlatProgram, slots: int, ddr_slot: int, link_slot: int) -> list[list[int]]:
        """Return by resource, ascending, the slots whose bytes may pass through it.

        A stream has `slots` slots in a row: `ddr_slot` is the place of its DDR bytes, `link_slot` the first of its
        flows on links.
        """
        users: list[set[int]] = [set() for _ in self.capacities]
        for stream in range(len(flat.streams)):
            users[self.rows[stream // STREAMS, 0]].add(stream * slots + ddr_slot)
        counts = self.of_ops["stop"] - self.of_ops["first"]
        places = np.arange(len(self.flows)) - np.repeat(self.of_ops["first"], counts)
        used = np.repeat(flat.ops["stream"], counts) * slots + link_slot + places
        pairs = np.unique(used * len(self.rows) + self.flows["route"])
        for slot, route in zip(*np.divmod(pairs, len(self.rows)), strict=True):
            for resource in self.rows[route]:
                if resource >= 0:
                    users[resource].add(int(slot))
        return [sorted(each) for each in users]


def own_resources(levels: int) -> int:
    """Return the number of resources that a stage has alone: its DDR, and a link outwards and inwards of each level."""
    return 1 + 2 * levels


def routes_of(flat: FlatProgram, works: OpWorks, bandwidths: Bandwidths) -> Routes:
    """Return the routes of a program's bytes, given the works of its ops."""
    ways = _Ways(len(flat.streams) // STREAMS, bandwidths)
    targets = flat.ops["stream"] // STREAMS
    sends = flat.ops["mode"] == SEND
    targets[sends] = flat.channels["receiver"][flat.ops["channel"][sends]] // STREAMS
    moving = np.flatnonzero(np.array([bool(work.flows) for work in works.distinct], np.bool_)[works.numbers])
    stages = flat.ops["stream"][moving] // STREAMS
    kinds, firsts = classes([works.numbers[moving], stages, targets[moving]])
    found: list[list[tuple[float, int]]] = [[] for _ in firsts]
    for kind in np.argsort(firsts):  # in the order of their first op
        op, stage = moving[firsts[kind]], int(stages[firsts[kind]])
        routes = [
            (flow.nbytes, ways.number(stage, int(targets[op]), flow))
            for flow in works.distinct[works.numbers[op]].flows
        ]
        found[kind] = [(nbytes, route) for nbytes, route in routes if route >= 0]
    lengths = np.array([len(each) for each in found], np.int64)
    counts = np.zeros(len(flat.ops), np.int64)
    counts[moving] = lengths[kinds]
    of_ops = ranges(counts)
    places = np.arange(counts.sum()) - np.repeat(of_ops["first"], counts)
    of_kinds = np.repeat((np.cumsum(lengths) - lengths)[kinds], lengths[kinds])
    flows = np.array([flow for each in found for flow in each], FLOW)[of_kinds + places]
    return Routes(np.array(ways.capacities, float), ways.rows(), flows, of_ops)


@define
class _Ways:
    """Resources of a number of stages, and the distinct routes through them, numbered as they are met."""

    stages: int
    bandwidths: Bandwidths
    capacities: list[float] = field(init=False)
    uplinks: dict[int, int] = field(init=False)
    """of the levels that have uplinks: the first of their resources"""
    ways: list[list[int]] = field(init=False)
    first_path: int = field(init=False)
    paths: dict[StorePath, int] = field(init=False)
    """the place of each path to or from another memory among the paths of a stage"""
    numbers: dict[tuple[int, int, int | None, tuple[int, ...], StorePath | None], int] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        own = own_resources(len(self.bandwidths.links))
        links = [level.bandwidth for level in self.bandwidths.links for _ in range(2)]
        self.capacities = [self.bandwidths.ddr, *links] * self.stages
        self.uplinks = {}
        for number, level in enumerate(self.bandwidths.links):
            if np.isfinite(level.uplink):
                self.uplinks[number] = len(self.capacities)
                self.capacities += [level.uplink] * (2 * -(-self.stages // level.stages))
        self.first_path = len(self.capacities)
        self.paths = {path: place for place, path in enumerate(self.bandwidths.paths)}
        self.capacities += [*self.bandwidths.paths.values()] * self.stages
        self.ways = [[stage * own] for stage in range(self.stages)]

    def number(self, source: int, target: int, flow: Flow) -> int:
        """Return the row of a flow from a stage to a stage; -1 where no resource on its way is limited."""
        key = source, target, flow.link, flow.uplinks, flow.path
        found = self.numbers.get(key)
        if found is None:
            way = self.way(source, target, flow)
            found = self.numbers[key] = len(self.ways) if way else -1
            if way:
                self.ways.append(way)
        return found

    def way(self, source: int, target: int, flow: Flow) -> list[int]:
        """Return the resources that bytes pass through, numbered as in this module; none where nothing is limited."""
        own, row = own_resources(len(self.bandwidths.links)), []
        if flow.path is not None:
            return (
                [self.first_path + source * len(self.paths) + self.paths[flow.path]] if flow.path in self.paths else []
            )
        if flow.link is not None:
            # Behind the DDR, each level has a link outwards (odd places) and one inwards (even places).
            row += [source * own + 1 + 2 * flow.link, target * own + 2 + 2 * flow.link]
        for level in flow.uplinks:
            if level in self.uplinks:
                first, held = self.uplinks[level], self.bandwidths.links[level].stages
                # Neighbouring stages share a group of `held` stages, which has two uplinks: out at the sender's group,
                # in at the receiver's.
                row += [first + source // held * 2, first + target // held * 2 + 1]
        return row

    def rows(self) -> Int64s:
        """Return the routes as `Routes.rows`."""
        rows = np.full((len(self.ways), max(2, *map(len, self.ways))), -1, np.int64)
        for place, each in enumerate(self.ways):
            rows[place, : len(each)] = each
        return rows
