"""The mappings that are considered for a plan's ranks: for each group of clusters the largest tiles of stages x replicas that fill it evenly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.frontend.rank_mapping import Tile
from ratrain.targets.machine.link_groups import are_uniform

if TYPE_CHECKING:
    from ratrain.targets.machine.link_groups import LinkGroup

Tiles = tuple[Tile, ...]


def tilings(pp: int, dp: int, clusters: int, groups: Sequence[LinkGroup]) -> list[Tiles]:
    """The tiles of each mapping of `pp` stages x `dp` replicas to a machine of so many clusters.

    A tile that is part of a larger one for the same group is left out. Where links are equal, or no tiles fill the groups that there
    are, the only entry is empty: no mapping.
    """
    if are_uniform(groups):
        return [()]
    all_tiles: list[Tiles] = [()]
    for level in range(len(groups) - 1):
        all_tiles = [
            (*tiles, tile) for tiles in all_tiles for tile in _next_tiles(tiles, pp, dp, clusters, groups[: level + 1])
        ]
    return all_tiles or [()]


def _next_tiles(inner: Tiles, pp: int, dp: int, clusters: int, groups: Sequence[LinkGroup]) -> list[Tile]:
    """The tiles for the last of some groups, each of whole tiles of the group before."""
    below = inner[-1] if inner else Tile("", 1, 1)
    size, name = groups[-1].clusters or clusters, groups[-1].name
    room = size // (groups[-2].clusters or 1) if inner else size
    there = max(1, clusters // size)
    fitting = {
        (below.stages * stages, below.replicas * replicas)
        for stages in divisors(pp // below.stages)
        for replicas in divisors(dp // below.replicas)
        if stages * replicas <= room and pp * dp <= there * below.clusters * stages * replicas
    }
    largest = [
        (stages, replicas)
        for stages, replicas in fitting
        if not any(s % stages == r % replicas == 0 and (s, r) != (stages, replicas) for s, r in fitting)
    ]
    return [Tile(name, stages, replicas) for stages, replicas in sorted(largest)]


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
