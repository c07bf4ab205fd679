"""Stage cuts: dynamic programming for the least lower bound of a shape, and lists of the next best cuts.

The program appends stages one by one. For each number of layers so far it keeps the best value, the least possible
maximum of the stages' bounds; the value for all layers is the least bound of the shape. A second pass finds the most
even of the cuts that have it. Example: bounds of 1, 2, 3 s for 1, 2, 3 layers on two stages give, for 4 layers, 2 s and
the cuts (2, 2). Cost: P n^2 for P stages and n layers.

The bound by the order of passes (`order_bounds.py`) is one of all stages together, which no such program can minimise.
It is asked of every cut that is below what the most even one takes; these are few, as layers are whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise
from math import comb
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ratrain.ratrainc.planner.bounds.bounds import StageBounds, plan_bounds, stage_bounds
from ratrain.ratrainc.planner.bounds.order_bounds import chunk_layers, order_seconds

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.bounds.shape_columns import Columns, Numbers
    from ratrain.ratrainc.planner.space.space import Shape

ENUMERATED = 4096
"""Most cuts of a shape that are listed one by one; of more, dynamic programming finds some, with their neighbours."""

_ROUNDING = 1e-9
_IN_ORDER = 256
"""Most cuts of a shape whose order of passes is asked for a bound."""
_HALVINGS = 16


@frozen(eq=False)
class BestCuts:
    """The least bound over all cuts of a shape, and the most even of the cuts that have it.

    If no cuts fit, `seconds` is infinite, and `stage` and `short_bytes` tell the stage that lacks least, and how much.
    """

    seconds: float
    layers: tuple[int, ...]
    stage: int = 0
    short_bytes: float = 0.0
    peak_bytes: float = 0.0
    """lower bound on the highest peak of all stages, if they fit"""


def best_cuts(c: Columns, *, roomiest: bool = False) -> BestCuts:
    """Return the cuts of one shape (`c` has one row) of least lower bound, or, if `roomiest`, of least highest peak."""
    stages, total = int(c.pp[0]), int(c.layers)
    # every other stage has a layer, so no stage has more than this
    most = total - stages + 1
    # axes: stage, layers before it, its own layers - 1, the one shape
    before = np.arange(total, dtype=float)[:, None, None]
    layers = np.broadcast_to(np.arange(1, most + 1, dtype=float)[:, None], (stages, 1, most, 1))
    of_stages = stage_bounds(c, before, layers)
    seconds, peaks = of_stages.seconds[..., 0], of_stages.peak_bytes[..., 0]
    each = int(c.chunks[0])
    if each > 1:  # each chunk has at least one layer
        seconds[..., : each - 1] = peaks[..., : each - 1] = np.inf
    least = _least_of_largest(seconds, total)
    if not np.isfinite(least):
        return _shortage(peaks, total, float(c.capacity[0]))
    if roomiest:
        seconds = np.broadcast_to(peaks, seconds.shape)
        least = _least_of_largest(seconds, total)
    # Many cuts share the least maximum. Of these, the least sum of squares is the most even; the tolerance keeps those
    # whose sums differ by rounding alone.
    fair = np.where(seconds <= least * (1 + _ROUNDING), seconds**2, np.inf)
    chosen = _least_sum(fair, total)
    if roomiest:
        bounds = plan_bounds(c, np.array([chosen], float))
        return BestCuts(float(bounds.seconds[0]), chosen, peak_bytes=float(bounds.peak_bytes.max()))
    return _best_in_order(c, seconds, chosen)


def _best_in_order(c: Columns, seconds: Numbers, even: tuple[int, ...]) -> BestCuts:
    """Return the cuts of one shape of least bound by stages and by the order of passes.

    `seconds` are the bounds of stages [stage, layers before, layers - 1]; `even` are the best cuts by these alone.
    """
    total = int(c.layers)
    upper = with_order(c, np.array([even], float))
    # cuts with a stage at or above this are not better
    limit = _highest_limit(seconds, total, float(upper.seconds[0]))
    others = [cuts for cuts in _below(seconds, total, limit) if cuts != even]
    found = with_order(c, np.array([even, *others], float)) if others else upper
    best = int(found.seconds.argmin())
    # where more cuts are below `upper` than are listed, those that are not have the limit as their bound
    least = min(float(found.seconds[best]), limit)
    return BestCuts(least, (even, *others)[best], peak_bytes=float(found.peak_bytes[best].max()))


def with_order(c: Columns, layers: Numbers) -> StageBounds:
    """Bound plans of one shape (`c` has one row) by stages and by the order of passes; `layers` [plans, stages]."""
    many = c.rows(np.zeros(len(layers), np.intp))
    bounds = plan_bounds(many, layers)
    return evolve(bounds, seconds=np.maximum(bounds.seconds, order_seconds(many, layers)))


def _highest_limit(seconds: Numbers, total: int, upper: float) -> float:
    """Return the highest limit up to `upper` below which few partitions are, found by halving."""
    if _count_below(seconds, total, upper) <= _IN_ORDER:
        return upper
    low, high = 0.0, upper
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        few = _count_below(seconds, total, middle) <= _IN_ORDER
        low, high = (middle, high) if few else (low, middle)
    return low


def _count_below(seconds: Numbers, total: int, limit: float) -> float:
    """Count the partitions whose stages all are below a limit."""
    reach = np.zeros(total + 1)
    reach[0] = 1.0
    for stage_seconds in seconds:
        # stages of the first axis that depend on no layers before them have one row for all
        below = np.broadcast_to(stage_seconds < limit, (total, stage_seconds.shape[1]))
        after = np.zeros(total + 1)
        for layers in range(1, below.shape[1] + 1):
            after[layers:] += reach[: total + 1 - layers] * below[: total + 1 - layers, layers - 1]
        reach = after
    return float(reach[total])


def _below(seconds: Numbers, total: int, limit: float) -> list[tuple[int, ...]]:
    """List the partitions whose stages all are below a limit."""
    parts: list[tuple[int, ...]] = [()]
    ends = _ends_below(seconds, total, limit)
    for stage, stage_seconds in enumerate(seconds):
        below = np.broadcast_to(stage_seconds < limit, (total, stage_seconds.shape[1]))
        parts = [
            (*part, int(layers) + 1)
            for part in parts
            for layers in np.flatnonzero(below[sum(part)])
            if sum(part) + layers + 1 <= total and ends[stage + 1][sum(part) + layers + 1]
        ]
    return parts


def _ends_below(seconds: Numbers, total: int, limit: float) -> list[NDArray[np.bool_]]:
    """Tell for each number of stages and of layers so far if the later stages can have the rest, all below a limit."""
    can = np.zeros(total + 1, bool)
    can[total] = True
    found = [can]
    for stage_seconds in seconds[::-1]:
        below = np.broadcast_to(stage_seconds < limit, (total, stage_seconds.shape[1]))
        before = np.zeros(total + 1, bool)
        for layers in range(1, below.shape[1] + 1):
            before[: total + 1 - layers] |= below[: total + 1 - layers, layers - 1] & found[-1][layers:]
        found.append(before)
    return found[::-1]


def _least_of_largest(costs: Numbers, total: int) -> float:
    """Return the least possible maximum cost of a partition; costs [stage, layers before, layers - 1]."""
    reach = np.full(total + 1, np.inf)
    reach[0] = 0.0
    for stage_costs in costs:
        reach = _step(reach, stage_costs, np.maximum)[0]
    return float(reach[total])


def _least_sum(costs: Numbers, total: int) -> tuple[int, ...]:
    """Return the partition of least summed cost."""
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
    """Append a stage; return the best value for each number of layers so far, and the stage's layers that give it."""
    total, most = len(reach) - 1, costs.shape[1]
    value = join(reach[:total, None], costs)
    after = np.full((most, total + 1), np.inf)
    # a stage of n layers leads from k layers so far to k + n
    for layers in range(1, most + 1):
        after[layers - 1, layers:] = value[: total + 1 - layers, layers - 1]
    choice = after.argmin(axis=0)
    return after[choice, np.arange(total + 1)], choice + 1


def _shortage(peaks: Numbers, total: int, capacity: float) -> BestCuts:
    """Return the cuts that exceed the capacity least."""
    excess = np.maximum(peaks - capacity, 0.0)
    # the bytes of a stage do not depend on the layers before it, which the dynamic program has an axis for
    peaks = np.broadcast_to(excess, (peaks.shape[0], total, peaks.shape[2]))
    least = _least_of_largest(peaks, total)
    layers = _least_sum(np.where(peaks <= least * (1 + _ROUNDING), peaks, np.inf), total)
    before = np.cumsum((0, *layers[:-1]))
    lacking = [peaks[s, before[s], n - 1] for s, n in enumerate(layers)]
    return BestCuts(float("inf"), layers, int(np.argmax(lacking)), float(max(lacking)))


def cuts_of(layers: tuple[int, ...], shape: Shape | None = None) -> tuple[int, ...]:
    """Return the layer index where each later chunk starts, from the layers of each stage.

    With a shape, a stage's layers are shared evenly by its chunks (`chunk_layers`).
    """
    if shape is None or shape.chunks == 1:
        return tuple(int(at) for at in np.cumsum(layers)[:-1])
    sizes = chunk_layers(np.array([layers], float), shape.pipeline)[0]
    return tuple(int(at) for at in np.cumsum(sizes)[:-1])


def partitions(total: int, stages: int, each: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield every way to give each stage at least `each` layers."""
    left = total - stages * (each - 1)
    # each stage gets each - 1 layers in advance; the rest is cut into parts of one or more
    for cuts in combinations(range(1, left), stages - 1):
        ends = (0, *cuts, left)
        yield tuple(b - a + each - 1 for a, b in pairwise(ends))


def partition_count(total: int, stages: int, each: int = 1) -> int:
    """Count the ways to give each stage at least `each` layers."""
    return comb(total - stages * (each - 1) - 1, stages - 1)


def can_be_listed(total: int, stages: int, each: int = 1) -> bool:
    """Return True if all cuts of a shape are few enough to be listed one by one."""
    return partition_count(total, stages, each) <= ENUMERATED


def listed(c: Columns, candidates: list[tuple[int, ...]]) -> list[BestCuts]:
    """Return cuts of one shape with their bounds, fastest first, without those that cannot fit. `c` has one row."""
    bounds = with_order(c, np.array(candidates, float))
    peaks = bounds.peak_bytes.max(axis=1)
    order = np.argsort(bounds.seconds, kind="stable")
    return [
        BestCuts(float(bounds.seconds[i]), candidates[i], peak_bytes=float(peaks[i]))
        for i in order
        if np.isfinite(bounds.seconds[i])
    ]


def neighbours(layers: tuple[int, ...], each: int = 1) -> list[tuple[int, ...]]:
    """Return the cuts with one layer moved from one stage to another; each stage keeps at least `each` layers."""
    shifted = []
    for source, target in combinations(range(len(layers)), 2):
        for a, b in ((source, target), (target, source)):
            if layers[a] > each:
                moved = list(layers)
                moved[a] -= 1
                moved[b] += 1
                shifted.append(tuple(moved))
    return shifted
