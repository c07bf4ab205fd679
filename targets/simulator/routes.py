"""What bytes pass through on their way: a row of resources for each kind of way there is.

A stage has its DDR and, for each level of groups, a link outwards and one inwards. Groups with an uplink have two more, out and in,
that the stages in them share. A message passes through the sender's link outwards, the receiver's inwards, and the uplinks of all
groups it leaves and enters; a collective's bytes leave and enter at its own stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from ratrain.targets.simulator.flat_program import SEND, STREAMS, Float64s, Int64s

if TYPE_CHECKING:
    from ratrain.targets.machine.resource_work import Bandwidths
    from ratrain.targets.simulator.flat_program import FlatProgram, Records


@frozen(eq=False)
class Routes:
    """The resources of a program's stages, and the ways through them."""

    capacities: Float64s
    """by resource, in bytes a second"""
    rows: Int64s
    """[routes, resources of the longest], -1 where there is none; the first are of DDR bytes, by stage"""
    of_ops: Int64s
    """the route of an op's link bytes; -1 where it has none"""

    def users(self, flat: FlatProgram, slots: int, ddr_slot: int, link_slot: int) -> list[list[int]]:
        """By resource, the slots whose bytes may pass through it; a stream has so many `slots`, for DDR and link those two."""
        users: list[set[int]] = [set() for _ in self.capacities]
        for stream in range(len(flat.streams)):
            users[self.rows[stream // STREAMS, 0]].add(stream * slots + ddr_slot)
        linked = self.of_ops >= 0
        pairs = np.unique(flat.ops["stream"][linked] * len(self.rows) + self.of_ops[linked])
        for stream, route in zip(*np.divmod(pairs, len(self.rows)), strict=True):
            for resource in self.rows[route]:
                if resource >= 0:
                    users[resource].add(int(stream) * slots + link_slot)
        return [sorted(each) for each in users]


def own_resources(levels: int) -> int:
    """Resources of a stage alone: its DDR, and a link outwards and inwards of each level."""
    return 1 + 2 * levels


def routes_of(flat: FlatProgram, works: Records, bandwidths: Bandwidths) -> Routes:
    """The ways of a program's bytes."""
    stages, levels = len(flat.streams) // STREAMS, len(bandwidths.links)
    own = own_resources(levels)
    links = [level.bandwidth for level in bandwidths.links for _ in range(2)]
    capacities = [bandwidths.ddr, *links] * stages
    uplinks: dict[int, int] = {}
    for number, level in enumerate(bandwidths.links):
        if np.isfinite(level.uplink):
            uplinks[number] = len(capacities)
            capacities += [level.uplink] * (2 * -(-stages // level.stages))

    def way(source: int, target: int, number: int) -> list[int]:
        row = [source * own + 1 + 2 * number, target * own + 2 + 2 * number]
        for inner, first in uplinks.items():
            if inner < number:
                held = bandwidths.links[inner].stages
                row += [first + source // held * 2, first + target // held * 2 + 1]
        return row

    linked = np.flatnonzero(works["link_bytes"] > 0)
    sources = flat.ops["stream"][linked] // STREAMS
    targets = sources.copy()
    sends = flat.ops["mode"][linked] == SEND
    targets[sends] = flat.channels["receiver"][flat.ops["channel"][linked][sends]] // STREAMS
    kinds = (sources * stages + targets) * levels + works["link_level"][linked]
    distinct, of_kind = np.unique(kinds, return_inverse=True)
    ways = [[stage * own] for stage in range(stages)]
    ways += [way(kind // levels // stages, kind // levels % stages, kind % levels) for kind in distinct.tolist()]
    rows = np.full((len(ways), max(2, *map(len, ways))), -1, np.int64)
    for place, each in enumerate(ways):
        rows[place, : len(each)] = each
    of_ops = np.full(len(works), -1, np.int64)
    of_ops[linked] = stages + of_kind
    return Routes(np.array(capacities, float), rows, of_ops)
