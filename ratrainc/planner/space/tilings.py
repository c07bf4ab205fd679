"""Rank mappings that are considered for a plan, as tiles of stages x replicas for each group of clusters.

Only the largest tiles that fill a group evenly count. Tensor-parallel ranks exchange most, so they are placed first: a
tile has as many of them as fit into a group, and stages x replicas share the rest. Example: 4 stages x 2 replicas on
chips of 4 clusters give the tiles 2 x 2 and 4 x 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.config.rank_mapping import Tile
from ratrain.targets.machine.link_groups import are_uniform

if TYPE_CHECKING:
    from ratrain.targets.machine.link_groups import LinkGroup

Tiles = tuple[Tile, ...]


def tilings(pp: int, dp: int, clusters: int, groups: Sequence[LinkGroup], tp: int = 1) -> list[Tiles]:
    """Return the tiles of each mapping of `pp` stages x `dp` replicas x `tp` ranks to `clusters` clusters.

    Tiles that are part of a larger one for the same group are left out. If links are equal, or no tiles fill the
    groups, the only entry is the empty tuple: no mapping.
    """
    if are_uniform(groups):
        return [()]
    all_tiles: list[Tiles] = [()]
    whole = Tile("plan", pp, dp, tp)
    for level in range(len(groups) - 1):
        all_tiles = [
            (*tiles, tile) for tiles in all_tiles for tile in _next_tiles(tiles, whole, clusters, groups[: level + 1])
        ]
    return all_tiles or [()]


def _next_tiles(inner: Tiles, whole: Tile, clusters: int, groups: Sequence[LinkGroup]) -> list[Tile]:
    """Return the tiles for the last of `groups`, each made of whole tiles of the group before it."""
    below = inner[-1] if inner else Tile("", 1, 1)
    size, name = groups[-1].clusters or clusters, groups[-1].name
    room = size // (groups[-2].clusters or 1) if inner else size
    there = max(1, clusters // size)
    peers = max(number for number in divisors(whole.peers // below.peers) if number <= room)
    fitting = {
        (below.stages * stages, below.replicas * replicas)
        for stages in divisors(whole.stages // below.stages)
        for replicas in divisors(whole.replicas // below.replicas)
        if stages * replicas * peers <= room and whole.clusters <= there * below.clusters * stages * replicas * peers
    }
    largest = [
        (stages, replicas)
        for stages, replicas in fitting
        if not any(s % stages == r % replicas == 0 and (s, r) != (stages, replicas) for s, r in fitting)
    ]
    return [Tile(name, stages, replicas, below.peers * peers) for stages, replicas in sorted(largest)]


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
