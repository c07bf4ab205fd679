"""Shares of rows among expert ranks: exactly as many for each, from one donor at most, every row once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ratrain.targets.program.expert_balance import balanced_shares, bounds_of, runs_of


@st.composite
def counts_of_routers(draw: st.DrawFn) -> np.ndarray:
    """Draw the rows that n ranks send to n * m experts, as many each; many routers are far from balanced."""
    ranks, own = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    rows = draw(st.integers(0, 60))
    counts = np.zeros((ranks, ranks * own), np.int32)
    hot = draw(st.lists(st.integers(0, ranks * own - 1), min_size=1, max_size=4))
    for origin in range(ranks):
        among = hot if draw(st.booleans()) else range(ranks * own)
        chosen = draw(st.lists(st.sampled_from(list(among)), min_size=rows, max_size=rows))
        np.add.at(counts[origin], chosen, 1)
    return counts


@given(counts_of_routers())
def test_each_rank_computes_as_many_rows_and_every_row_is_computed_once(counts: np.ndarray) -> None:
    ranks, experts = counts.shape
    shares, room = balanced_shares(counts), int(counts[0].sum())
    computed = np.zeros_like(counts)
    seen: set[tuple[int, int, int]] = set()
    for rank in range(ranks):
        runs, at = runs_of(counts, shares, rank), 0
        for run in runs:
            assert run.at == at
            at += run.rows
            computed[run.origin, run.expert] += run.rows
            rows = {(run.origin, run.expert, run.first + number) for number in range(run.rows)}
            assert not rows & seen
            seen |= rows
            owner = run.expert // (experts // ranks)
            assert owner == (shares[rank].donor if run.copied else rank)
        assert at == room
        bounds = bounds_of(counts, runs)
        assert bounds[0] == 0
        assert bounds[-1] == room
        assert (np.diff(bounds) >= 0).all()
    assert (computed == counts).all()


def test_a_rank_with_too_many_rows_gives_runs_from_its_end() -> None:
    counts = np.array([[2, 0, 1], [3, 0, 0], [1, 1, 1]])
    shares = balanced_shares(counts)
    assert [share.kept for share in shares] == [3, 1, 2]
    assert [(share.donor, share.start, share.stop) for share in shares] == [(None, 0, 0), (0, 4, 6), (0, 3, 4)]
