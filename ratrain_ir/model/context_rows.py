"""Rows of a context rank: which tokens of every sequence it computes, and where gathered keys lie.

Context ranks share the tokens of a sequence, or of a slice of it. It is cut into runs of equal length, in the order of
positions; a rank holds one run (`contiguous`), or an early and a late one (`zigzag`), so that under a causal mask all
ranks attend to equally many keys:

    4 ranks, zigzag:   run 0 1 2 3 4 5 6 7        4 ranks, contiguous:   run 0 1 2 3
                  rank 0 1 2 3 3 2 1 0                              rank 0 1 2 3

A tensor of a micro-batch has the rank's first run of all its sequences, then its second run of them; so each run is a
tensor of neighbouring rows, as that of a slice is. Keys of all ranks lie in rank order, each rank's as it has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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


def sees(window: int | None, queries: range, keys: range) -> bool:
    """Tell whether some query of a run of positions attends to keys of another under the causal mask and a window."""
    return keys.start < queries.stop and (window is None or keys.stop > queries.start - window + 1)
