"""Shares of rows among expert ranks: each computes as many, with experts of its own and of at most one other rank.

n ranks hold E / n experts each, in order. Every rank's router sends T * k rows, so there are n * T * k in all. Rows of
a rank's experts stand in a list, by expert, then by the rank they come from, then in that rank's order. A rank with
more than T * k rows keeps the first ones, and gives runs from the end of its list to ranks with room. Each of these
takes one run, so that it needs copies of one other rank's experts alone. With loads 6, 1, 2 and room for 3 each:

    rank 0 keeps rows 0 1 2, gives row 3 to rank 2 and rows 4 5 to rank 1

That one donor is enough is Walker's alias construction (1977): as long as some rank has room, one has too many rows,
and it can fill the room; if it has room itself afterwards, it is filled in turn. So every rank has exactly T * k rows,
whatever the routers say.

With a capacity no rank gives rows away. Each sends to an expert as many rows as that, the first of its list for it, and
the expert's own rank computes all that come. With capacity 2 and choices 3, 0, 1 a rank sends 2, 0, 1 rows, and drops
one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Counts = NDArray[np.int32] | NDArray[np.int64]
    Numbers = NDArray[np.int64]


class Share(NamedTuple):
    """Rows that one rank computes: the first of its own list, and a run of another rank's."""

    kept: int
    donor: int | None
    start: int
    """first row of the donor's list that it takes"""
    stop: int


class Run(NamedTuple):
    """Neighbouring rows on the rank that computes them, which come from one rank and are of one expert."""

    origin: int
    expert: int
    first: int
    """place of the first row among those that its origin sends to this expert"""
    rows: int
    at: int
    """place of the first row on the rank that computes it"""
    copied: bool
    """of a copied expert"""


@frozen(eq=False)
class Routes:
    """Rows that travel between expert ranks, from the choices of all routers."""

    chosen: Counts
    """choices [n, E] of each rank for each expert"""
    sent: Counts
    """those of them whose rows are sent"""
    shares: list[Share]
    runs: list[list[Run]]
    """rows that each rank computes, in their order"""
    capacity: int | None
    """most rows that a rank sends to one expert; None: all"""

    @classmethod
    def of(cls, counts: Counts, capacity: int | None) -> Routes:
        """Return the routes of all rows, balanced, or of as many as a capacity says for each rank and expert."""
        sent = counts if capacity is None else np.minimum(counts, capacity)
        shares = balanced_shares(counts) if capacity is None else _own_shares(sent)
        return cls(counts, sent, shares, [runs_of(sent, shares, rank) for rank in range(len(counts))], capacity)

    def first_rows(self, origin: int) -> Numbers:
        """Return the place of the first row of each expert among the choices of a rank, sorted by expert."""
        first: Numbers = np.cumsum(self.chosen[origin], dtype=np.int64) - self.chosen[origin]
        return first

    def bounds(self, rank: int) -> Numbers:
        """Return where the rows of each expert begin on a rank: of its own, then of any copied ones; then their end."""
        ranks, experts = self.sent.shape
        bounds = bounds_of(self.sent, self.runs[rank])
        return bounds if self.capacity is None else bounds[: experts // ranks + 1]

    def dropped(self, origin: int) -> list[slice]:
        """Return the places of choices of a rank, sorted by expert, whose rows are not sent."""
        first, sent, chosen = self.first_rows(origin), self.sent[origin], self.chosen[origin]
        experts = np.flatnonzero(sent < chosen)
        return [slice(int(first[each] + sent[each]), int(first[each] + chosen[each])) for each in experts]


def _own_shares(counts: Counts) -> list[Share]:
    """Return the shares of ranks that compute all rows of their own experts, and no others."""
    ranks, experts = counts.shape
    loads = counts.reshape(ranks, ranks, experts // ranks).sum(axis=(0, 2), dtype=np.int64).tolist()
    return [Share(load, None, 0, 0) for load in loads]


def balanced_shares(counts: Counts) -> list[Share]:
    """Return the rows that each rank computes; `counts` [n, E] are the rows that each rank sends to each expert."""
    ranks, experts = counts.shape
    loads = counts.reshape(ranks, ranks, experts // ranks).sum(axis=(0, 2), dtype=np.int64).tolist()
    room = int(counts[0].sum())
    rest, ends = list(loads), list(loads)
    taken: dict[int, tuple[int, int, int]] = {}
    small = [rank for rank in range(ranks) if rest[rank] < room]
    large = [rank for rank in range(ranks) if rest[rank] > room]
    while small:
        taker, donor = small.pop(0), large[0]
        number = room - rest[taker]
        rest[donor] -= number
        ends[donor] -= number
        taken[taker] = (donor, ends[donor], ends[donor] + number)
        if rest[donor] <= room:
            large.pop(0)
            if rest[donor] < room:
                small.append(donor)
    return [Share(rest[rank], *taken.get(rank, (None, 0, 0))) for rank in range(ranks)]


def runs_of(counts: Counts, shares: list[Share], rank: int) -> list[Run]:
    """Return the rows that a rank computes, in their order: its own experts', then those of copied ones."""
    share = shares[rank]
    runs = _in_list(counts, rank, 0, share.kept, at=0, copied=False)
    if share.donor is not None:
        runs += _in_list(counts, share.donor, share.start, share.stop, at=share.kept, copied=True)
    return runs


def _in_list(counts: Counts, owner: int, start: int, stop: int, *, at: int, copied: bool) -> list[Run]:
    """Return the runs of a part of the list of rows of a rank's experts."""
    ranks, experts = counts.shape
    own = experts // ranks
    cells = counts[:, owner * own : (owner + 1) * own].T.reshape(-1).astype(np.int64)
    ends = np.cumsum(cells)
    begins = ends - cells
    low, high = np.maximum(begins, start), np.minimum(ends, stop)
    return [
        Run(
            origin=int(cell % ranks),
            expert=owner * own + int(cell // ranks),
            first=int(low[cell] - begins[cell]),
            rows=int(high[cell] - low[cell]),
            at=at + int(low[cell]) - start,
            copied=copied,
        )
        for cell in np.flatnonzero(high > low)
    ]


def bounds_of(counts: Counts, runs: list[Run]) -> Numbers:
    """Return where the rows of each expert begin on a rank: of its own experts, then of copied ones; then their end."""
    ranks, experts = counts.shape
    own = experts // ranks
    rows = np.zeros(2 * own, np.int64)
    for run in runs:
        rows[run.expert % own + own * run.copied] += run.rows
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)])
