"""Runs of tokens of context ranks: every token once, equal work under zigzag, what a window hides."""

from __future__ import annotations

from itertools import product

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_keys import CONTEXT_LAYOUTS
from ratrain.ratrain_ir.model.context_rows import (
    earlier_runs,
    held_runs,
    holders,
    positions_of,
    run_of,
    runs_by_holder,
    sees,
    shared_rows,
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


@given(plans(), st.integers(1, 3))
def test_rows_of_all_ranks_are_all_tokens_in_the_order_of_positions(plan: Plan, sequences: int) -> None:
    plan = evolve(plan, micro_batch_size=sequences)
    places: list[int] = []
    for rank in range(plan.cp):
        own = [row for run in shared_rows(plan, rank) for row in range(run.own.start, run.own.stop)]
        assert own == list(range(sequences * plan.seq_len // plan.cp))
        whole = [row for run in shared_rows(plan, rank) for row in range(run.whole.start, run.whole.stop)]
        expected = [
            sequence * plan.seq_len + position
            for number in range(plan.context_runs)
            for sequence in range(sequences)
            for position in positions_of(plan, run_of(plan, rank, number))
        ]
        assert whole == expected
        places += whole
    assert sorted(places) == list(range(sequences * plan.seq_len))


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


@given(plans(), st.none() | st.integers(1, 50))
def test_a_rank_gathers_every_run_that_it_sees_and_no_other_under_a_window(plan: Plan, window: int | None) -> None:
    reach = earlier_runs(plan, window)
    every = [positions_of(plan, run) for run in range(plan.cp * plan.context_runs)]
    for rank in range(plan.cp):
        held = held_runs(plan, window, rank)
        assert len(held) == plan.context_runs * (plan.cp if reach is None else reach + 1)
        for number in range(plan.context_runs):
            own = run_of(plan, rank, number)
            seen = {run for run, keys in enumerate(every) if sees(window, every[own], keys)}
            of_own = held if reach is None else held[number * (reach + 1) : (number + 1) * (reach + 1)]
            assert seen <= {*of_own}
            assert reach is None or seen == {*of_own} - {None}
    assert reach is None or reach + 1 < plan.cp


@given(plans(), st.none() | st.integers(1, 50))
def test_parts_of_a_gradient_are_summed_from_the_last_viewer_on(plan: Plan, window: int | None) -> None:
    found = runs_by_holder(plan, window)
    assert len({(each.rank, each.place) for each in found}) == len(found)
    for each in found:
        assert held_runs(plan, window, each.rank)[each.place] == run_of(plan, each.holder, each.number)
    assert [(each.holder, each.number) for each in found] == sorted((each.holder, each.number) for each in found)
    reach = earlier_runs(plan, window)
    for holder, number in product(range(plan.cp), range(plan.context_runs)):
        viewers = [each for each in found if each[:2] == (holder, number)]
        if reach is None:
            assert [each.rank for each in viewers] == [*reversed(range(plan.cp))]
        else:
            own, last = run_of(plan, holder, number), plan.cp * plan.context_runs - 1
            runs = [run_of(plan, each.rank, each.place // (reach + 1)) for each in viewers]
            assert runs == [*range(min(own + reach, last), own - 1, -1)]
