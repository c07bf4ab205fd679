"""Which stages and replicas of a plan share which groups of clusters: a tile of the plan's P x D ranks for each kind of group."""

from __future__ import annotations

import re
from itertools import pairwise

from attrs import frozen

_TILE = re.compile(r"([a-z][a-z0-9_\-]*) ([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")


@frozen(order=True)
class Tile:
    """What one group of clusters holds: so many neighbouring stages of so many neighbouring replicas."""

    group: str
    stages: int
    replicas: int

    @property
    def clusters(self) -> int:
        """Clusters of the group that are used."""
        return self.stages * self.replicas

    def __str__(self) -> str:
        return f"{self.group} {self.stages}x{self.replicas}"


@frozen
class RankMapping:
    """The tiles of a plan, from the innermost group outwards; the outermost group holds all and has none.

    As text: `chip 1x4, node 2x8` puts four replicas of one stage on a chip, and two stages of eight replicas on a node.
    """

    tiles: tuple[Tile, ...]

    @classmethod
    def parse(cls, text: str) -> RankMapping | None:
        """The mapping that a text is, or None where it is none."""
        matches = [_TILE.fullmatch(part) for part in text.split(", ")]
        tiles = tuple(Tile(match[1], int(match[2]), int(match[3])) for match in matches if match is not None)
        return cls(tiles) if len(tiles) == len(matches) else None

    def __str__(self) -> str:
        return ", ".join(map(str, self.tiles))

    def error(self, pp: int, dp: int) -> str | None:
        """Why the tiles do not make up a plan of `pp` stages and `dp` replicas; None where they do."""
        names = [tile.group for tile in self.tiles]
        if len(set(names)) != len(names):
            return "a group has one tile, not two"
        for inner, outer in pairwise((*self.tiles, Tile("plan", pp, dp))):
            if outer.stages % inner.stages or outer.replicas % inner.replicas:
                return f"tiles '{inner}' do not make up '{outer}': stages and replicas must divide"
        return None

    def position(self, stage: int, replica: int, pp: int, dp: int) -> int:
        """Where a rank comes when the ranks of a group follow one another; within a tile, the replicas of a stage do."""
        position, scale = 0, 1
        for inner, outer in pairwise((Tile("", 1, 1), *self.tiles, Tile("", pp, dp))):
            across = outer.replicas // inner.replicas
            row = stage // inner.stages % (outer.stages // inner.stages)
            position += scale * (row * across + replica // inner.replicas % across)
            scale *= outer.clusters // inner.clusters
        return position

    def place(self, position: int, pp: int, dp: int) -> tuple[int, int]:
        """(stage, replica) of a position."""
        stage = replica = 0
        for inner, outer in pairwise((Tile("", 1, 1), *self.tiles, Tile("", pp, dp))):
            position, at = divmod(position, outer.clusters // inner.clusters)
            row, column = divmod(at, outer.replicas // inner.replicas)
            stage, replica = stage + row * inner.stages, replica + column * inner.replicas
        return stage, replica
