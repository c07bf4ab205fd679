"""The search for tiles: candidates in order of a bound, the best of them timed. Deterministic, and cached by shape and machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from ratrain.targets.mt3000.tiling.attention import (
    FORWARD,
    KEY_GRADIENT,
    PARTS,
    QUERY_GRADIENT,
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
    """The schedule of a matrix product.

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
    """The schedule of a part of attention.

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
    """`tile_time`, once for a schedule."""
    return tile_time(schedule, cluster)


def _best(
    candidates: Iterable[Tiles],
    bound: Callable[[Tiles], float],
    build: Callable[[Tiles], TileSchedule | None],
    cluster: Cluster,
) -> TileSchedule:
    """The fastest of the few that promise most; of equals the first."""
    ordered = sorted(candidates, key=bound)
    promising = islice((schedule for schedule in map(build, ordered) if schedule is not None), _TIMED)
    best = min(promising, key=lambda schedule: tile_time(schedule, cluster).seconds, default=None)
    if best is None:
        raise ValueError("no tile of it fits the on-chip memories")
    return best


ATTENTION_BACKWARD = (QUERY_GRADIENT.kernel, KEY_GRADIENT.kernel)
"""The two halves, in order."""
ATTENTION_FORWARD = (FORWARD.kernel,)
