"""Prices of collectives of tensor-parallel ranks and of replicas, against every message of all of them at once.

The price of one group comes from its members and their share of uplinks. Here all groups of a stage run together, each message by itself,
with the uplinks whole; so shares are not assumed.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve, frozen

from ratrain.ratrain_ir.config.rank_mapping import RankMapping, Tile
from ratrain.ratrain_ir.topology import Mesh
from ratrain.targets.machine.collective_cost import Algorithm, all_gathers, all_reduces, reduce_scatters
from ratrain.targets.machine.exchanges import Ints, Pattern
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.placement import Members, Placement
from tests.targets.simulator.message_rounds import message_seconds

NODES = str(Path(__file__).resolve().parents[3] / "examples" / "mt3000-nodes.toml")
MACHINES = ("mt3000", "mt3000-shared-port", NODES, "h100-node")
NBYTES = 1 << 20


@frozen
class Beside:
    """A pattern that several groups of members follow at once."""

    pattern: Pattern
    groups: tuple[tuple[int, ...], ...]
    """of each the places of its members, ascending"""

    def targets(self, number: int, count: int) -> Ints:
        """To whom each of all members sends."""
        found = np.full(count, -1, np.int64)
        for group in self.groups:
            own = self.pattern.targets(number, len(group))
            places = np.array(group)
            found[places] = np.where(own >= 0, places[own], -1)
        return found


def groups_of(placement: Placement, group: str) -> tuple[tuple[int, ...], ...]:
    """The places of the members of every group of a kind, of a plan of one stage."""
    mesh = placement.mesh
    mapping, whole = RankMapping(placement.tiles or ()), Tile("plan", 1, mesh.replicas, mesh.peers)
    place = {
        (r, p): mapping.position(0, r, p, whole) if placement.tiles else r * mesh.peers + p
        for r in range(mesh.replicas)
        for p in range(mesh.peers)
    }
    sides = range(mesh.replicas) if group == "tensor" else range(mesh.peers)
    return tuple(
        tuple(sorted(at for (r, p), at in place.items() if (r if group == "tensor" else p) == side)) for side in sides
    )


def together(way: Algorithm, placement: Placement, group: str, machine: Machine) -> float:
    """Seconds of a collective that all groups of a kind do at once."""
    groups = groups_of(placement, group)
    beside = Algorithm(way.name, tuple(evolve(each, pattern=Beside(each.pattern, groups)) for each in way.rounds))
    return message_seconds(beside, everybody(placement), machine)


def everybody(placement: Placement) -> Members:
    """All ranks, with the uplinks whole."""
    total = placement.mesh.size
    within = (*(min(each.clusters or total, total) for each in placement.groups[:-1]), total)
    uplinks = tuple(inf if each.uplink is None else each.uplink for each in placement.groups[:-1])
    return Members(within, tuple(each.link for each in placement.groups), uplinks)


def check(placement: Placement, group: str, machine: Machine) -> None:
    members = placement.members(group)
    ways = reduce_scatters(NBYTES / 2, 2, members, machine) + all_gathers(NBYTES, members, machine)
    for way in ways + all_reduces(NBYTES / 2, 2, members, machine):
        priced = sum(each.seconds(machine) for each in way.rounds)  # staging in chunks is no message
        assert message_seconds(way, members, machine) == pytest.approx(priced, rel=1e-9), (group, way.name)
        assert together(way, placement, group, machine) == pytest.approx(priced, rel=1e-9), (group, way.name)


@pytest.mark.parametrize("group", ["tensor", "replicas"])
@pytest.mark.parametrize("replicas", [1, 4, 16])
@pytest.mark.parametrize("peers", [2, 4, 8])
@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.sampled(2)
def test_prices_are_those_of_all_messages_of_all_groups(name: str, peers: int, replicas: int, group: str) -> None:
    if group == "replicas" and replicas == 1:
        return
    machine = load_machine(name)
    check(Placement(machine.link_groups, Mesh(1, replicas, peers, (0,)), None), group, machine)


@pytest.mark.parametrize("group", ["tensor", "replicas"])
@pytest.mark.parametrize(
    "tiles",
    [
        "chip 1x1x4, node 1x4x4",
        "chip 1x2x2, node 1x4x4",
        "chip 1x4x1, node 1x4x4",
        "chip 1x1x4, node 1x2x8",
        "chip 1x4x1, node 1x8x2",
    ],
)
def test_a_mapping_puts_peers_on_the_links_it_says(tiles: str, group: str) -> None:
    machine, mapping = load_machine(NODES), RankMapping.parse(tiles)
    assert mapping is not None
    check(Placement(machine.link_groups, Mesh(1, 16, 8, (0,)), mapping.tiles), group, machine)


@frozen
class ToTheNextStage:
    """Every rank of the first stage sends to the one of the second that has its place there."""

    ranks: int

    def targets(self, _number: int, count: int) -> Ints:
        """To whom each of all members sends."""
        members = np.arange(count)
        return np.where(members < self.ranks, members + self.ranks, -1)


@pytest.mark.parametrize("peers", [2, 4, 8])
@pytest.mark.parametrize("name", MACHINES)
def test_a_message_of_a_peer_has_its_share_while_all_of_its_stage_send(name: str, peers: int) -> None:
    machine = load_machine(name)
    placement = Placement(machine.link_groups, Mesh(2, 16, peers, (0, 1)), None)
    way = all_gathers(2 * NBYTES, Placement(machine.link_groups, Mesh(1, 1, 2, (0,)), None).members("tensor"), machine)[
        0
    ]
    rounds = evolve(way.rounds[0], count=1, message_bytes=NBYTES, pattern=ToTheNextStage(16 * peers))
    link = placement.message_link(placement.outermost)
    priced = link.latency + machine.message_cost + machine.round_skew + NBYTES / link.bandwidth
    simulated = message_seconds(Algorithm("message", (rounds,)), everybody(placement), machine)
    assert simulated == pytest.approx(priced, rel=1e-9)
    for level, each in zip(placement.link_levels(), placement.groups[:-1], strict=False):
        ranks = min(each.clusters or inf, 16 * peers)
        assert level.uplink == (inf if each.uplink is None else each.uplink / ranks)
        assert level.stages == 1


@pytest.mark.parametrize(
    ("peers", "replicas", "within"), [(2, 16, (2, 8, 16)), (3, 16, (1, 1, 16)), (6, 8, (1, 1, 8)), (8, 2, (1, 2, 2))]
)
def test_replicas_between_whose_peers_groups_end_are_apart(peers: int, replicas: int, within: tuple[int, ...]) -> None:
    """Where peers do not fill chips or nodes evenly, nothing is said of which replicas share one: their bytes cross what lies outside."""
    groups = load_machine(NODES).link_groups
    assert Placement(groups, Mesh(1, replicas, peers, (0,)), None).members("replicas").within == within
