"""Stage cuts: dynamic programming over (time, bytes) for the least lower bound, and lists of the next best cuts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import comb
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from ratrain.ratrainc.planner.bounds.bounds import plan_bounds, stage_bounds

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.bounds.columns import Columns, Numbers
    from ratrain.ratrainc.planner.space.space import Shape

ENUMERATED = 4096
"""Cuts of a shape that are listed one by one; of more, only those that dynamic programming and its neighbours find."""

_ROUNDING = 1e-9


@frozen(eq=False)
class BestCuts:
    """The least bound over all cuts of a shape, and the most even of the cuts that have it.

    Where no cuts fit, `seconds` is infinite, and `stage` and `short_bytes` say which stage lacks least, and how much.
    """

    seconds: float
    layers: tuple[int, ...]
    stage: int = 0
    short_bytes: float = 0.0
    peak_bytes: float = 0.0
    """lower bound on the highest peak of all stages, where they fit"""


def best_cuts(c: Columns, *, roomiest: bool = False) -> BestCuts:
    """The cuts of one shape (`c` has one row) whose lower bound is least; `roomiest`: whose highest peak is least."""
    stages, total = int(c.pp[0]), int(c.layers)
    most = total - stages + 1
    before = np.arange(total, dtype=float)[:, None, None]
    layers = np.broadcast_to(np.arange(1, most + 1, dtype=float)[:, None], (stages, 1, most, 1))
    of_stages = stage_bounds(c, before, layers)
    seconds, peaks = of_stages.seconds[..., 0], of_stages.peak_bytes[..., 0]
    each = int(c.chunks[0])
    if each > 1:  # of a layer at least
        seconds[..., : each - 1] = peaks[..., : each - 1] = np.inf
    least = _least_of_largest(seconds, total)
    if not np.isfinite(least):
        return _shortage(peaks, total, float(c.capacity[0]))
    if roomiest:
        least, seconds = (
            _least_of_largest(np.broadcast_to(peaks, seconds.shape), total),
            np.broadcast_to(peaks, seconds.shape),
        )
    fair = np.where(seconds <= least * (1 + _ROUNDING), seconds**2, np.inf)
    chosen = _least_sum(fair, total)
    bounds = plan_bounds(c, np.array([chosen], float))
    return BestCuts(float(bounds.seconds[0]), chosen, peak_bytes=float(bounds.peak_bytes.max()))


def _least_of_largest(costs: Numbers, total: int) -> float:
    """The least possible largest cost of a partition: costs [stage, layers before, layers - 1]."""
    reach = np.full(total + 1, np.inf)
    reach[0] = 0.0
    for stage_costs in costs:
        reach = _step(reach, stage_costs, np.maximum)[0]
    return float(reach[total])


def _least_sum(costs: Numbers, total: int) -> tuple[int, ...]:
    """The partition of least summed cost."""
    reach = np.full(total + 1, np.inf)
    reach[0] = 0.0
    choices = []
    for stage_costs in costs:
        reach, choice = _step(reach, stage_costs, np.add)
        choices.append(choice)
    layers = []
    at = total
    for choice in reversed(choices):
        layers.append(int(choice[at]))
        at -= layers[-1]
    return tuple(reversed(layers))


def _step(reach: Numbers, costs: Numbers, join: np.ufunc) -> tuple[Numbers, NDArray[np.intp]]:
    """Append a stage: the best value for each number of layers so far, and the layers of the stage that give it."""
    total, most = len(reach) - 1, costs.shape[1]
    value = join(reach[:total, None], costs)
    after = np.full((most, total + 1), np.inf)
    for layers in range(1, most + 1):
        after[layers - 1, layers:] = value[: total + 1 - layers, layers - 1]
    choice = after.argmin(axis=0)
    return after[choice, np.arange(total + 1)], choice + 1


def _shortage(peaks: Numbers, total: int, capacity: float) -> BestCuts:
    """The cuts that exceed the capacity least."""
    excess = np.maximum(peaks - capacity, 0.0)
    peaks = np.broadcast_to(excess, (peaks.shape[0], total, peaks.shape[2]))
    least = _least_of_largest(peaks, total)
    layers = _least_sum(np.where(peaks <= least * (1 + _ROUNDING), peaks, np.inf), total)
    before = np.cumsum((0, *layers[:-1]))
    lacking = [peaks[s, before[s], n - 1] for s, n in enumerate(layers)]
    return BestCuts(float("inf"), layers, int(np.argmax(lacking)), float(max(lacking)))


def cuts_of(layers: tuple[int, ...], shape: Shape | None = None) -> tuple[int, ...]:
    """The layer index where each later chunk starts, of so many layers a stage; where there is a shape, shared evenly by the stage's chunks.

    What is left over goes to the later chunks of a stage, which hold fewer passes, but last to that of the head.
    """
    if shape is None or shape.chunks == 1:
        return tuple(int(at) for at in np.cumsum(layers)[:-1])
    stages = shape.pipeline.chunk_stages
    last = len(stages) - 1
    sizes = [layers[stage] // shape.chunks for stage in stages]
    for stage, count in enumerate(layers):
        own = sorted(shape.pipeline.chunks_of(stage), key=lambda chunk: (chunk == last, -chunk))
        for chunk in own[: count % shape.chunks]:
            sizes[chunk] += 1
    return tuple(int(at) for at in np.cumsum(sizes)[:-1])


def partitions(total: int, stages: int, each: int = 1) -> Iterator[tuple[int, ...]]:
    """Every way to give each stage at least so many layers."""
    left = total - stages * (each - 1)
    for cuts in combinations(range(1, left), stages - 1):
        ends = (0, *cuts, left)
        yield tuple(b - a + each - 1 for a, b in pairwise(ends))


def partition_count(total: int, stages: int, each: int = 1) -> int:
    """Ways to give each stage at least so many layers."""
    return comb(total - stages * (each - 1) - 1, stages - 1)


def can_be_listed(total: int, stages: int, each: int = 1) -> bool:
    """Whether all cuts of a shape are listed one by one."""
    return partition_count(total, stages, each) <= ENUMERATED


def listed(c: Columns, candidates: list[tuple[int, ...]]) -> list[BestCuts]:
    """Cuts of one shape with their bounds, fastest first; those that cannot fit are left out. `c` has one row."""
    array = np.array(candidates, float)
    many = c.rows(np.zeros(len(candidates), np.intp))
    bounds = plan_bounds(many, array)
    peaks = bounds.peak_bytes.max(axis=1)
    order = np.argsort(bounds.seconds, kind="stable")
    return [
        BestCuts(float(bounds.seconds[i]), candidates[i], peak_bytes=float(peaks[i]))
        for i in order
        if np.isfinite(bounds.seconds[i])
    ]


def neighbours(layers: tuple[int, ...], each: int = 1) -> list[tuple[int, ...]]:
    """Cuts with one layer moved from one stage to another; each keeps at least so many."""
    shifted = []
    for source, target in combinations(range(len(layers)), 2):
        for a, b in ((source, target), (target, source)):
            if layers[a] > each:
                moved = list(layers)
                moved[a] -= 1
                moved[b] += 1
                shifted.append(tuple(moved))
    return shifted
