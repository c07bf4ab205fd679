"""Rows of a context rank: which tokens of every sequence it computes, and where gathered keys lie.

Context ranks share the tokens of a sequence, or of a slice of it. It is cut into runs of equal length, in the order of
positions; a rank holds one run (`contiguous`), or an early and a late one (`zigzag`), so that under a causal mask all
ranks attend to equally many keys:

    4 ranks, zigzag:   run 0 1 2 3 4 5 6 7        4 ranks, contiguous:   run 0 1 2 3
                  rank 0 1 2 3 3 2 1 0                              rank 0 1 2 3

A tensor of a micro-batch has the rank's first run of all its sequences, then its second run of them; so each run is a
tensor of neighbouring rows, as that of a slice is. Gathered keys are those of all runs, in rank order, each rank's as
it has them. Where a window hides most of them, a rank gathers less: for each run of its own those that it sees.

    8 ranks, contiguous, a window that reaches into the run before:   rank 5 holds keys of runs   4 5
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan


def run_length(plan: Plan) -> int:
    """Return the tokens of a run; of a whole sequence, or slice, without context ranks."""
    return plan.seq_len // (plan.cp * plan.context_runs)


def run_of(plan: Plan, rank: int, number: int) -> int:
    """Return the index, in the order of positions, of a rank's run with a number: 0, or 1 under zigzag."""
    return 2 * plan.cp - 1 - rank if number else rank


def positions_of(plan: Plan, run: int) -> range:
    """Return the positions of a run in its sequence."""
    first = plan.first_position + run * run_length(plan)
    return range(first, first + run_length(plan))


def holders(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Return the (rank, number) of each run, in the order of positions."""
    held = [(rank, number) for rank in range(plan.cp) for number in range(plan.context_runs)]
    return tuple(sorted(held, key=lambda each: run_of(plan, *each)))


@cache
def earlier_runs(plan: Plan, window: int | None) -> int | None:
    """Return how many runs before its own a run of queries sees, at most; None if ranks gather the keys of all runs.

    They do without a window, where it reaches over nearly all runs, and of slices, whose keys later slices see too.
    """
    if window is None or plan.whole.slices:
        return None
    reach = -(-(window - 1) // run_length(plan))
    return reach if reach + 1 < plan.cp else None


@cache
def held_runs(plan: Plan, window: int | None, rank: int) -> tuple[int | None, ...]:
    """Return the index of each run of keys that a rank gathers, in the order of rows.

    None stands for rows that nothing fills: there is no run before the first.
    """
    reach = earlier_runs(plan, window)
    numbers = range(plan.context_runs)
    if reach is None:
        return tuple(run_of(plan, each, number) for each in range(plan.cp) for number in numbers)
    own = [run_of(plan, rank, number) for number in numbers]
    return tuple(run if run >= 0 else None for last in own for run in range(last - reach, last + 1))


class SharedRows(NamedTuple):
    """Tokens of one sequence that a context rank holds as neighbouring rows."""

    own: slice
    """rows of the rank's tensors"""
    whole: slice
    """rows of a tensor of all tokens, one sequence after the other"""


@cache
def shared_rows(plan: Plan, rank: int) -> tuple[SharedRows, ...]:
    """Return where the rows of a rank's tensors lie in a tensor of all tokens of a micro-batch; no slices."""
    length, sequences = run_length(plan), plan.micro_batch_size
    found = []
    for number in range(plan.context_runs):
        for sequence in range(sequences):
            own = (number * sequences + sequence) * length
            whole = sequence * plan.seq_len + run_of(plan, rank, number) * length
            found.append(SharedRows(slice(own, own + length), slice(whole, whole + length)))
    return tuple(found)


class HeldRun(NamedTuple):
    """Rows of one rank's gathered keys that hold a run of another rank, or its own."""

    holder: int
    """the rank whose tokens they are"""
    number: int
    """the number of the run among the holder's"""
    rank: int
    """the rank that holds them gathered"""
    place: int
    """their place among the runs that it holds"""


@cache
def runs_by_holder(plan: Plan, window: int | None) -> tuple[HeldRun, ...]:
    """Return the gathered runs of keys of all ranks, by holder and number; later viewers come first, as slices do.

    The order in which parts of a run's gradient are summed is that of the list: the last rank's first, or where ranks
    gather what they see, that of the last run of queries.
    """
    places = holders(plan)
    found = [
        HeldRun(*places[run], rank, place)
        for rank in range(plan.cp)
        for place, run in enumerate(held_runs(plan, window, rank))
        if run is not None
    ]
    if (reach := earlier_runs(plan, window)) is None:
        return tuple(sorted(found, key=lambda each: (each.holder, each.number, -each.rank)))

    def viewer(each: HeldRun) -> int:
        return run_of(plan, each.rank, each.place // (reach + 1))

    return tuple(sorted(found, key=lambda each: (each.holder, each.number, -viewer(each))))


def sees(window: int | None, queries: range, keys: range) -> bool:
    """Tell whether some query of a run of positions attends to keys of another under the causal mask and a window."""
    return keys.start < queries.stop and (window is None or keys.stop > queries.start - window + 1)
