"""Placement of a plan's ranks in the groups of a machine's clusters, and the links that their traffic crosses.

With a mapping, its tiles decide. Without one, tensor-parallel ranks are neighbours, then the replicas of a stage; they
fill groups in rank order where they fill them evenly. Messages between stages then cross the outermost group:

    3 stages x 4 replicas, groups of 2:    @0: [0 1] [2 3]   @1: [4 5] [6 7]   @2: [8 9] [10 11]
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from ratrain.ratrain_ir.config.rank_mapping import Tile
from ratrain.ratrain_ir.ops.base import Group
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrain_ir.topology import Mesh, mesh_of
from ratrain.targets.machine.link_groups import Link, LinkGroup
from ratrain.targets.machine.resource_work import LinkLevel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrain_ir.config.rank_mapping import RankMapping
    from ratrain.targets.machine.machine import Machine


@frozen
class Members:
    """Members of a collective, counted by the groups they share."""

    within: tuple[int, ...]
    """members in one group of each level, from the inside out; the last number is all"""
    links: tuple[Link, ...]
    """by level, the link of a message that leaves a group of the level below and stays in one of this level"""
    uplinks: tuple[float, ...] = ()
    """by level but the outermost, bytes a second by which the members in one group leave it together, while like
    collectives do the same"""

    @property
    def count(self) -> int:
        """Number of all members."""
        return self.within[-1]

    @property
    def level(self) -> int:
        """Innermost level that has all of them in one group."""
        return self.within.index(self.count)

    def steps(self) -> list[tuple[int, int]]:
        """Return (level, number of groups of the level below that meet there), for levels where more than one meet."""
        below = (1, *self.within)
        return [(level, now // below[level]) for level, now in enumerate(self.within) if now > below[level]]


@frozen
class Placement:
    """Ranks of a plan in the groups of a machine, whose levels count from the inside."""

    groups: tuple[LinkGroup, ...]
    mesh: Mesh
    tiles: tuple[Tile, ...] | None
    """of all levels but the outermost; None: the plan has no mapping"""

    @property
    def outermost(self) -> int:
        """Level that holds all ranks."""
        return len(self.groups) - 1

    def level_between(self, stage: int, other: int) -> int:
        """Return the innermost level whose groups hold both of two stages of a replica."""
        tiles = self.tiles or ()
        held = (level for level, tile in enumerate(tiles) if stage // tile.stages == other // tile.stages)
        return next(held, self.outermost)

    def members(self, group: str) -> Members:
        """Return the members of a collective by the name of its group (the values of `Group`).

        `replicas`, `shards` and `views` are replicas of a stage that share state, `parts` is one of each view group in
        a shard group; `context` those that share sequences, `experts` those that share out experts, `copies` one of
        each group of these. `tensor` is the peers of a stage, `ends` both ends of a replica, `all` all ranks.
        """
        if group == Group.PARTS.value:
            return self._one_of_each(Group.VIEWS, Group.SHARDS)
        if group == Group.COPIES.value:
            return self._one_of_each(Group.EXPERTS, Group.REPLICAS)
        if group == "ends":
            ends = self.mesh.stages_of(Group.ENDS, self.mesh.first_stage)
            level = self.level_between(ends[0], ends[-1])
            return self._members(tuple(1 if at < level else len(ends) for at in range(len(self.groups))))
        within = self.filled(Group(group), self.mesh.group_size(Group(group)))
        return self._members(within, whole=group == "all")

    @property
    def copies(self) -> Members:
        """Replicas of a stage that hold the same shard: one of each shard group."""
        return self._one_of_each(Group.SHARDS, Group.REPLICAS)

    def _one_of_each(self, part: Group, whole: Group) -> Members:
        """Return one member of each group `part` that makes up a group `whole`."""
        counts = [self.filled(each, self.mesh.group_size(each)) for each in (whole, part)]
        within = [max(1, every // mine) for every, mine in zip(*counts, strict=True)]
        return self._members((*within[:-1], counts[0][-1] // counts[1][-1]))

    def _members(self, within: tuple[int, ...], *, whole: bool = False) -> Members:
        """Return members, given their number in one group of each level, while all like collectives run.

        These are the collectives of a stage, or with `whole` of the mesh; they share the uplinks.
        """
        uplinks = [
            math.inf if each.uplink is None else each.uplink * mine / max(mine, sending)
            for each, mine, sending in zip(self.groups[:-1], within, self.senders(whole=whole), strict=False)
        ]
        return Members(within, tuple(each.link for each in self.groups), tuple(uplinks))

    def filled(self, of: Group, count: int) -> tuple[int, ...]:
        """Return by level how many of the `count` members of a group of ranks are in one group of clusters.

        Without a mapping tensor-parallel ranks are next to each other, then the replicas of a stage.
        """
        if self.tiles is not None:
            parts = {Group.ALL: "clusters", Group.TENSOR: "peers"}
            if of in (Group.CONTEXT, Group.EXPERTS, Group.SHARDS, Group.VIEWS):
                return (*(math.gcd(tile.replicas, count) for tile in self.tiles), count)
            return (*(getattr(tile, parts.get(of, "replicas")) for tile in self.tiles), count)
        of_replicas = (Group.REPLICAS, Group.CONTEXT, Group.EXPERTS, Group.SHARDS, Group.VIEWS)
        apart = self.mesh.peers if of in of_replicas else 1
        counts = [1]
        # Replicas are `peers` ranks apart. A level counts only if members fill its groups evenly; else they gain
        # nothing by it, and the number of the level below holds.
        for group in self.groups[:-1]:
            room = group.clusters or count * apart
            size = room // apart if room % apart == 0 else int(apart % room == 0)
            fills = size and (size % count == 0 or count % size == 0)
            counts.append(min(size, count) if fills else counts[-1])
        return (*counts[1:], count)

    def senders(self, *, whole: bool = False) -> tuple[int, ...]:
        """Return the clusters of a group of each level but the outermost that send at once when a stage, or all, do.

        These are replicas and their peers. Without a mapping, replicas that do not fill groups evenly count as if all
        clusters of the group sent.
        """
        if self.tiles is not None:
            return tuple(tile.clusters if whole else tile.clusters_of_a_stage for tile in self.tiles)
        count = self.mesh.size if whole else self.mesh.replicas * self.mesh.peers
        sizes = [group.clusters or self.mesh.size for group in self.groups[:-1]]
        return tuple(
            min(size, count) if size % count == 0 or count % size == 0 else min(size, self.mesh.size) for size in sizes
        )

    def link_levels(self) -> tuple[LinkLevel, ...]:
        """Return by level the bandwidth of links and uplinks that one replica of each stage has."""
        inner = [
            LinkLevel(group.link.bandwidth, count, math.inf if group.uplink is None else group.uplink / sending)
            for group, count, sending in zip(self.groups, self.stages(), self.senders(), strict=False)
        ]
        return (*inner, LinkLevel(self.groups[-1].link.bandwidth))

    def stages(self) -> list[int]:
        """Return by level but the outermost how many neighbouring stages share a group."""
        if self.tiles is not None:
            return [tile.stages for tile in self.tiles]
        sizes, ranks = (
            [group.clusters or self.mesh.size for group in self.groups[:-1]],
            self.mesh.replicas * self.mesh.peers,
        )
        return [1 if size % ranks else size // ranks for size in sizes]

    def message_link(self, level: int) -> Link:
        """Return the link of a message between stages at a level.

        Its bandwidth is at most an even share of the uplinks on its way, as all replicas of its stage send theirs.
        """
        link = self.groups[level].link
        inner = zip(self.groups[:level], self.senders(), strict=False)
        shares = [group.uplink / count for group, count in inner if group.uplink is not None]
        return evolve(link, bandwidth=min(link.bandwidth, *shares)) if shares else link


def placement_of(plan: Plan, machine: Machine) -> Placement:
    """Return the placement of a plan's ranks on a machine.

    Raises `DiagnosticError` RT064 where the plan's mapping is not for the groups of the machine, or needs larger ones.
    """
    return _placement(mesh_of(plan), plan.mapping, machine.link_groups, machine.name)


@lru_cache(maxsize=256)
def _placement(mesh: Mesh, mapping: RankMapping | None, groups: tuple[LinkGroup, ...], machine: str) -> Placement:
    most = groups[-1].clusters
    if most is not None and mesh.size > most:
        fail("RT064", f"{mesh.words} are {mesh.size} clusters: the machine {machine} has {most}")
    if mapping is None:
        return Placement(groups, mesh, None)
    wanted, given = [group.name for group in groups[:-1]], [tile.group for tile in mapping.tiles]
    if given != wanted:
        fail(
            "RT064",
            f"the plan maps its ranks to {', '.join(given)}, but the groups of the machine {machine} are "
            f"{', '.join(group.name for group in groups)}",
            help=f"remove the key parallel.mapping, or give it tiles for {', '.join(wanted)}; 'ratrainc plan --like "
            "P.toml' finds a mapping for this machine"
            if wanted
            else "remove the key parallel.mapping: all links are equal",
        )
    tiles = mapping.tiles if most is None else (*mapping.tiles, Tile("plan", mesh.stages, mesh.replicas, mesh.peers))
    if (wrong := overfull(groups, tiles)) is not None:
        fail("RT064", f"the mapping '{mapping}' does not fit {machine}: {wrong}")
    return Placement(groups, mesh, mapping.tiles)


def overfull(groups: Sequence[LinkGroup], tiles: Sequence[Tile]) -> str | None:
    """Return why a tile is larger than its group, counted in groups of the level below; None where all fit."""
    size, clusters, unit = 1, 1, "clusters"
    for group, tile in zip(groups, tiles, strict=False):
        room = (group.clusters or 0) // size
        if tile.clusters // clusters > room:
            return f"'{tile}' takes {tile.clusters // clusters} {unit}, one {group.name} has {room}"
        size, clusters, unit = size * room, tile.clusters, f"groups '{group.name}'"
    return None
