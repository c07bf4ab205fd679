"""Which ranks of a plan share which groups of clusters: a tile of the plan's P x D x T ranks for each kind of group."""

from __future__ import annotations

import re
from itertools import pairwise

from attrs import frozen

_NUMBER = "([1-9][0-9]{0,5})"
_TILE = re.compile(rf"([a-z][a-z0-9_\-]*) {_NUMBER}x{_NUMBER}(?:x{_NUMBER})?")


@frozen(order=True)
class Tile:
    """What one group of clusters holds: so many neighbouring stages of so many neighbouring replicas, and of these so many tensor peers."""

    group: str
    stages: int
    replicas: int
    peers: int = 1

    @property
    def clusters(self) -> int:
        """Clusters of the group that are used."""
        return self.stages * self.replicas * self.peers

    @property
    def clusters_of_a_stage(self) -> int:
        """Those of one stage."""
        return self.replicas * self.peers

    def __str__(self) -> str:
        peers = "" if self.peers == 1 else f"x{self.peers}"
        return f"{self.group} {self.stages}x{self.replicas}{peers}"


@frozen
class RankMapping:
    """The tiles of a plan, from the innermost group outwards; the outermost group holds all and has none.

    As text: `chip 1x4, node 2x8` puts four replicas of one stage on a chip, and two stages of eight replicas on a node;
    `chip 1x1x4` puts four tensor peers on a chip.
    """

    tiles: tuple[Tile, ...]

    @classmethod
    def parse(cls, text: str) -> RankMapping | None:
        """The mapping that a text is, or None where it is none."""
        matches = [_TILE.fullmatch(part) for part in text.split(", ")]
        tiles = tuple(
            Tile(match[1], int(match[2]), int(match[3]), int(match[4] or 1)) for match in matches if match is not None
        )
        return cls(tiles) if len(tiles) == len(matches) else None

    def __str__(self) -> str:
        return ", ".join(map(str, self.tiles))

    def error(self, pp: int, dp: int, tp: int = 1) -> str | None:
        """Why the tiles do not make up a plan of `pp` stages, `dp` replicas and `tp` tensor peers; None where they do."""
        names = [tile.group for tile in self.tiles]
        if len(set(names)) != len(names):
            return "a group has one tile, not two"
        for inner, outer in pairwise((*self.tiles, Tile("plan", pp, dp, tp))):
            if outer.stages % inner.stages or outer.replicas % inner.replicas or outer.peers % inner.peers:
                what = "stages and replicas" if outer.peers == inner.peers else "stages, replicas and tensor peers"
                return f"tiles '{inner}' do not make up '{outer}': {what} must divide"
        return None

    def position(self, stage: int, replica: int, peer: int, whole: Tile) -> int:
        """Where a rank of a plan comes when the ranks of a group follow one another; within a tile tensor peers do, then the replicas of a stage."""
        position, scale = 0, 1
        for inner, outer in pairwise((_ONE, *self.tiles, whole)):
            across, deep = outer.replicas // inner.replicas, outer.peers // inner.peers
            row = stage // inner.stages % (outer.stages // inner.stages)
            column = replica // inner.replicas % across
            position += scale * ((row * across + column) * deep + peer // inner.peers % deep)
            scale *= outer.clusters // inner.clusters
        return position

    def place(self, position: int, whole: Tile) -> tuple[int, int, int]:
        """(stage, replica, tensor peer) of a position."""
        stage = replica = peer = 0
        for inner, outer in pairwise((_ONE, *self.tiles, whole)):
            position, at = divmod(position, outer.clusters // inner.clusters)
            at, depth = divmod(at, outer.peers // inner.peers)
            row, column = divmod(at, outer.replicas // inner.replicas)
            stage, replica = stage + row * inner.stages, replica + column * inner.replicas
            peer += depth * inner.peers
        return stage, replica, peer


_ONE = Tile("", 1, 1)
