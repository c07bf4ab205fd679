"""Addresses: placing buffers with known lifetimes in one arena, as low as can be found.

    problem = AllocationProblem(sizes, intervals, positions)
    placed = allocate(problem, capacity=20 << 30)
    assert not check_allocation(problem, placed.offsets)

What lives the whole step goes to the bottom, which costs nothing. Above it a portfolio of methods runs from the cheapest to the
dearest until one is within a thousandth of the bound, to which holes in lives add where that is asked; where a capacity is still
exceeded, or an effort asks for it, search goes on.
Nothing depends on hash order, threads or the caller's random state.
"""

from __future__ import annotations

from time import perf_counter

import attrs
import numpy as np

from ratrain.passes.memory.allocation.alike import move_alike
from ratrain.passes.memory.allocation.attempt import Attempt
from ratrain.passes.memory.allocation.bound import LowerBound, lower_bound
from ratrain.passes.memory.allocation.checker import Violation, check_allocation
from ratrain.passes.memory.allocation.effort import Effort
from ratrain.passes.memory.allocation.exact import search_exactly
from ratrain.passes.memory.allocation.nests import nests_in_slots
from ratrain.passes.memory.allocation.portfolio import (
    COMPILED_FROM,
    large_portfolio,
    more_beams,
    promotions,
    small_portfolio,
    small_promotions,
)
from ratrain.passes.memory.allocation.problem import Allocation, AllocationProblem, instance_of
from ratrain.passes.memory.allocation.relay_slots import relays_in_slots
from ratrain.passes.memory.allocation.slots import stacks_of_slots
from ratrain.passes.memory.allocation.stacks import two_stacks

__all__ = [
    "Allocation",
    "AllocationProblem",
    "Effort",
    "LowerBound",
    "Violation",
    "allocate",
    "check_allocation",
    "lower_bound",
]


def allocate(
    problem: AllocationProblem,
    *,
    capacity: int | None = None,
    effort: Effort | None = None,
    search: bool = True,
    trial: bool = False,
    all_or_nothing: bool = False,
) -> Allocation:
    """Place every buffer; deterministic, ties broken by start and then by order.

    Beyond the portfolio there is search: for a `capacity` in bytes, until it is reached; without one only when an `effort` is given,
    until the gap is as small as that asks for; and none unless `search`. A `trial` ends with the portfolio where that fits. Whether a capacity was reached is for the caller to see from `arena_bytes`; where it
    is `all_or_nothing`, methods are given up that exceed it, and what is found then may exceed it by more bytes than there need be.
    """
    begin = perf_counter()
    searching = search and (capacity is not None or effort is not None)
    effort = effort or Effort()
    instance, kept = instance_of(problem)
    offsets = np.zeros(len(problem.sizes), np.int64)
    if instance.count == 0:
        return Allocation(offsets.tolist(), 0, method="nothing to place", seconds=perf_counter() - begin)
    unit = int(np.gcd.reduce(instance.sizes))
    instance = attrs.evolve(instance, sizes=instance.sizes // unit)
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
    """Run the methods that suit the instance's size."""
    if attempt.height == attempt.bound:
        return
    small = attempt.instance.count < COMPILED_FROM
    if small:
        small_portfolio(attempt)
    else:
        large_portfolio(attempt)
    if not trial:
        attempt.raise_bound()
    for method in (stacks_of_slots, two_stacks):
        if not small and not attempt.good() and not (trial and (attempt.all_or_nothing or attempt.fits())):
            method(attempt)
    for method in (nests_in_slots, relays_in_slots, move_alike):
        if not small and not attempt.good() and not trial:
            method(attempt)
    if attempt.enough() or not searching:
        return
    if small:
        small_promotions(attempt)
    search_exactly(attempt)
    if not small:
        more_beams(attempt)
        promotions(attempt)
