"""Search for tile sizes: candidates are sorted by an estimate of their time, the most promising are timed.

    candidates (hundreds of tile sizes) -> sorted by estimate (closed form) -> first 4 that fit -> tile_time -> fastest

The search is deterministic and cached by shape and machine. The estimate ignores part of the time, so the result is a
good schedule, not provably the best. The cost is an estimate a candidate, and the build and timing of `_TIMED`
schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from ratrain.targets.mt3000.tiling.attention import (
    PARTS,
    AttentionShape,
    attention_bound_seconds,
    attention_candidates,
    attention_schedule,
)
from ratrain.targets.mt3000.tiling.gemm import GemmShape, gemm_bound_seconds, gemm_candidates, gemm_schedule
from ratrain.targets.mt3000.tiling.tile_timing import TileTime, tile_time

if TYPE_CHECKING:
    from ratrain.targets.mt3000.tiles.tile_schedule import TileSchedule
    from ratrain.targets.mt3000.tiling.core import Cluster

_TIMED = 4
"""Candidates that are built and timed."""
Tiles = TypeVar("Tiles")


@cache
def gemm_tiles(shape: GemmShape, cluster: Cluster) -> TileSchedule:
    """Return the schedule of a matrix product.

    Raises ValueError where the cluster's memories hold no tile of it.
    """
    return _best(
        gemm_candidates(shape, cluster.memories),
        lambda tiles: gemm_bound_seconds(shape, tiles, cluster),
        lambda tiles: gemm_schedule(shape, tiles, cluster.memories),
        cluster,
    )


@cache
def attention_tiles(kernel: str, shape: AttentionShape, cluster: Cluster) -> TileSchedule:
    """Return the schedule of a part of attention.

    Raises ValueError where the cluster's memories hold no tile of it.
    """
    part = PARTS[kernel]
    return _best(
        attention_candidates(shape, cluster.memories),
        lambda tiles: attention_bound_seconds(part, shape, tiles, cluster),
        lambda tiles: attention_schedule(part, shape, tiles, cluster.memories),
        cluster,
    )


@cache
def timed(schedule: TileSchedule, cluster: Cluster) -> TileTime:
    """Return the time of a schedule (`tile_time`), computed once."""
    return tile_time(schedule, cluster)


def _best(
    candidates: Iterable[Tiles],
    bound: Callable[[Tiles], float],
    build: Callable[[Tiles], TileSchedule | None],
    cluster: Cluster,
) -> TileSchedule:
    """Return the fastest of the few most promising schedules; the first of equal ones."""
    # Building is lazy: a candidate that does not fit costs a layout only, and does not use up one of the `_TIMED`
    # places.
    ordered = sorted(candidates, key=bound)
    promising = islice((schedule for schedule in map(build, ordered) if schedule is not None), _TIMED)
    best = min(promising, key=lambda schedule: tile_time(schedule, cluster).seconds, default=None)
    if best is None:
        raise ValueError("no tile of it fits the on-chip memories")
    return best
