"""Give buffers with known lifetimes addresses in one arena, as low as can be found.

    problem = AllocationProblem(sizes, intervals, positions)
    placed = allocate(problem, capacity=20 << 30)
    assert not check_allocation(problem, placed.offsets)

Buffers that live the whole step go to the bottom, which costs nothing. Above them methods run from the cheapest to the
most expensive until one is within a thousandth of the bound. If a capacity is still exceeded, or an effort asks for it,
an exact search follows. docs/allocation.md has a picture of each method, and what each one buys.

The result depends on no hash order, no threads and no random state of the caller.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING

import attrs
import numpy as np

from ratrain.passes.memory.allocation.attempt import Attempt
from ratrain.passes.memory.allocation.bound import LowerBound, lower_bound
from ratrain.passes.memory.allocation.checker import Violation, check_allocation
from ratrain.passes.memory.allocation.effort import Effort
from ratrain.passes.memory.allocation.exact import search_exactly
from ratrain.passes.memory.allocation.nests import nests_in_slots
from ratrain.passes.memory.allocation.portfolio import COMPILED_FROM, large_portfolio
from ratrain.passes.memory.allocation.problem import Allocation, AllocationProblem, ProblemColumns, instance_of
from ratrain.passes.memory.allocation.slots import relays_in_slots, stacks_of_slots
from ratrain.passes.memory.allocation.small import small_portfolio, small_promotions
from ratrain.passes.memory.allocation.stacks import two_stacks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "Allocation",
    "AllocationProblem",
    "Effort",
    "LowerBound",
    "ProblemColumns",
    "Violation",
    "allocate",
    "check_allocation",
    "lower_bound",
]


def allocate(
    problem: AllocationProblem | ProblemColumns,
    *,
    capacity: int | None = None,
    effort: Effort | None = None,
    search: bool = True,
    trial: bool = False,
    all_or_nothing: bool = False,
) -> Allocation:
    """Place every buffer; deterministic, ties broken by start and then by order.

    `capacity` in bytes: search until it is reached. Without one, search only if an `effort` is given, until the gap is
    as small as the effort asks. `search`: False forbids any search. `trial`: end as soon as the capacity is reached,
    and leave out the most expensive methods. `all_or_nothing`: abandon placements that exceed the capacity, so a result
    above it may be higher than necessary. The caller compares `arena_bytes` with the capacity to see whether it was
    reached.
    """
    begin = perf_counter()
    searching = search and (capacity is not None or effort is not None)
    effort = effort or Effort()
    instance, kept = instance_of(problem)
    offsets = np.zeros(len(problem.sizes), np.int64)
    if instance.count == 0:
        return Allocation(offsets.tolist(), 0, method="nothing to place", seconds=perf_counter() - begin)
    # Work in multiples of the common divisor: equal problems at different scales get the same placement.
    unit = int(np.gcd.reduce(instance.sizes))
    instance = attrs.evolve(instance, sizes=instance.sizes // unit)
    # Buffers live in all sections stand at the bottom; all methods place only the rest, above `base`.
    whole = instance.widths() == instance.sections
    resident, passing = np.flatnonzero(whole), np.flatnonzero(~whole)
    tops = np.cumsum(instance.sizes[resident])
    base = int(tops[-1]) if len(tops) else 0
    offsets[kept[resident]] = (tops - instance.sizes[resident]) * unit
    attempt = Attempt.of(
        instance.part(passing),
        base,
        None if capacity is None else capacity // unit - base,
        effort,
        begin + effort.seconds,
        all_or_nothing=all_or_nothing,
    )
    _place(attempt, searching=searching, trial=trial)
    offsets[kept[passing]] = (attempt.offsets + base) * unit
    return Allocation(
        offsets.tolist(),
        (base + attempt.height) * unit,
        int(instance.load().max()) * unit,
        (base + attempt.bound) * unit,
        attempt.method,
        perf_counter() - begin,
    )


def _place(attempt: Attempt, *, searching: bool, trial: bool) -> None:
    """Run the methods for the instance's size until one is good enough.

    A trial also ends once the placement fits its capacity, or without one is within `_NEAR` of the bound: what dearer
    methods can still gain is less than a choice by its result can use.
    """
    if attempt.height == attempt.bound:
        return
    small = attempt.instance.count < COMPILED_FROM
    (small_portfolio if small else large_portfolio)(attempt)
    for method in _dearer(attempt, small=small, trial=trial):
        if attempt.good():
            break
        if trial and (attempt.close(attempt.height, _NEAR) if attempt.room is None else attempt.fits()):
            break
        method(attempt)
    if attempt.enough() or not searching:
        return
    if small:
        small_promotions(attempt)
    search_exactly(attempt)


_NEAR = 5e-4
"""Gap over the bound that is good enough for a trial."""


def _dearer(attempt: Attempt, *, small: bool, trial: bool) -> Iterator[Callable[[Attempt], None]]:
    """Yield the methods after the portfolio, from the cheapest to the most expensive.

    Trials are frequent, and do without the most expensive ones.
    """
    if not trial:
        yield Attempt.raise_bound
    if small:
        return
    yield stacks_of_slots
    if not (trial and attempt.all_or_nothing):
        yield two_stacks
    if not trial:
        yield nests_in_slots
        yield relays_in_slots
