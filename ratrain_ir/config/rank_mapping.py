"""Mapping of a plan's ranks to groups of clusters: a tile of the plan's P x D x T ranks for each kind of group."""

from __future__ import annotations

import re
from itertools import pairwise

from attrs import frozen

_NUMBER = "([1-9][0-9]{0,5})"
_TILE = re.compile(rf"([a-z][a-z0-9_\-]*) {_NUMBER}x{_NUMBER}(?:x{_NUMBER})?")


@frozen(order=True)
class Tile:
    """Ranks of one group of clusters: a box of neighbouring stages x replicas x tensor-parallel ranks."""

    group: str
    stages: int
    replicas: int
    peers: int = 1

    @property
    def clusters(self) -> int:
        """Clusters that the group uses."""
        return self.stages * self.replicas * self.peers

    @property
    def clusters_of_a_stage(self) -> int:
        """Clusters of the group per stage."""
        return self.replicas * self.peers

    def __str__(self) -> str:
        peers = "" if self.peers == 1 else f"x{self.peers}"
        return f"{self.group} {self.stages}x{self.replicas}{peers}"


@frozen
class RankMapping:
    """Tiles of a plan from the innermost group outwards. The outermost group holds all ranks and has no tile.

    As text: `chip 1x4, node 2x8` puts four replicas of one stage on a chip, and two stages of eight replicas on a node;
    `chip 1x1x4` puts four tensor-parallel ranks on a chip.
    """

    tiles: tuple[Tile, ...]

    @classmethod
    def parse(cls, text: str) -> RankMapping | None:
        """Return the mapping that a text describes; None if it describes none."""
        matches = [_TILE.fullmatch(part) for part in text.split(", ")]
        tiles = tuple(
            Tile(match[1], int(match[2]), int(match[3]), int(match[4] or 1)) for match in matches if match is not None
        )
        return cls(tiles) if len(tiles) == len(matches) else None

    def __str__(self) -> str:
        return ", ".join(map(str, self.tiles))

    def error(self, pp: int, dp: int, tp: int = 1) -> str | None:
        """Return why the tiles do not fill a plan of `pp` x `dp` x `tp` ranks; None if they do."""
        names = [tile.group for tile in self.tiles]
        if len(set(names)) != len(names):
            return "a group has one tile, not two"
        for inner, outer in pairwise((*self.tiles, Tile("plan", pp, dp, tp))):
            if outer.stages % inner.stages or outer.replicas % inner.replicas or outer.peers % inner.peers:
                what = (
                    "stages and replicas"
                    if outer.peers == inner.peers
                    else "stages, replicas and tensor-parallel ranks"
                )
                return f"tiles '{inner}' do not make up '{outer}': {what} must divide"
        return None

    def position(self, stage: int, replica: int, peer: int, whole: Tile) -> int:
        """Return the number of a rank if the ranks of each group are numbered consecutively, innermost group first.

        `whole` is the tile of the whole plan. Within a tile tensor-parallel ranks vary fastest, then replicas, then
        stages.
        """
        # A number of mixed radix: one digit per level, innermost first, each the place of the inner tile in the outer.
        position, scale = 0, 1
        for inner, outer in pairwise((_ONE, *self.tiles, whole)):
            across, deep = outer.replicas // inner.replicas, outer.peers // inner.peers
            row = stage // inner.stages % (outer.stages // inner.stages)
            column = replica // inner.replicas % across
            position += scale * ((row * across + column) * deep + peer // inner.peers % deep)
            scale *= outer.clusters // inner.clusters
        return position

    def place(self, position: int, whole: Tile) -> tuple[int, int, int]:
        """Return (stage, replica, tensor-parallel rank) of a position: the inverse of `position`."""
        stage = replica = peer = 0
        for inner, outer in pairwise((_ONE, *self.tiles, whole)):
            position, at = divmod(position, outer.clusters // inner.clusters)
            at, depth = divmod(at, outer.peers // inner.peers)
            row, column = divmod(at, outer.replicas // inner.replicas)
            stage, replica = stage + row * inner.stages, replica + column * inner.replicas
            peer += depth * inner.peers
        return stage, replica, peer


_ONE = Tile("", 1, 1)
