"""The mappings that are considered for a plan's ranks: for each group of clusters the largest tiles of stages x replicas that fill it evenly.

Tensor peers, who exchange most, sit together first: of each group a tile has as many of them as fit, and stages x replicas share what is left.
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
    """The tiles of each mapping of `pp` stages x `dp` replicas x `tp` tensor peers to a machine of so many clusters.

    A tile that is part of a larger one for the same group is left out. Where links are equal, or no tiles fill the groups that there
    are, the only entry is empty: no mapping.
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
    """The tiles for the last of some groups, each of whole tiles of the group before."""
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
    """The divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
