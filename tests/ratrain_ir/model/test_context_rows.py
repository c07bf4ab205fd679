"""Runs of tokens of context ranks: every token once, equal work under zigzag, what a window hides."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.plan import CONTEXT_LAYOUTS, Plan
from ratrain.ratrain_ir.model.context_rows import (
    holders,
    positions_of,
    run_of,
    sees,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    cp, layout, length = draw(st.integers(1, 8)), draw(st.sampled_from(CONTEXT_LAYOUTS)), draw(st.integers(1, 5))
    runs = cp * (2 if cp > 1 and layout == "zigzag" else 1)
    return Plan(1, 1, (), 1, 1, seq_len=runs * length, cp=cp, context_layout=layout)


def positions(plan: Plan, rank: int) -> list[int]:
    """The positions of a rank's tokens, in the order of its rows."""
    runs = [run_of(plan, rank, number) for number in range(plan.context_runs)]
    return [position for run in runs for position in positions_of(plan, run)]


@given(plans())
def test_every_token_is_on_one_rank(plan: Plan) -> None:
    every = [position for rank in range(plan.cp) for position in positions(plan, rank)]
    assert sorted(every) == list(range(plan.seq_len))
    for index, (rank, number) in enumerate(holders(plan)):
        assert run_of(plan, rank, number) == index


@given(plans())
def test_zigzag_ranks_attend_to_equally_many_keys(plan: Plan) -> None:
    areas = [sum(position + 1 for position in positions(plan, rank)) for rank in range(plan.cp)]
    assert sum(areas) == plan.seq_len * (plan.seq_len + 1) // 2
    if plan.cp > 1 and plan.context_layout == "zigzag":
        assert len(set(areas)) == 1


@given(plans(), st.none() | st.integers(1, 50), st.data())
def test_a_run_sees_another_where_a_query_sees_a_key(plan: Plan, window: int | None, data: st.DataObject) -> None:
    count = plan.cp * plan.context_runs
    queries, keys = (data.draw(st.integers(0, count - 1)) for _ in range(2))
    rows = [positions_of(plan, run) for run in (queries, keys)]
    expected = any(key <= query and (window is None or key > query - window) for query in rows[0] for key in rows[1])
    assert sees(window, *rows) is expected
