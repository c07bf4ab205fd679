"""What lint says a schedule is worth: the step's time, the bubble and what is in flight, against a run that shares nothing with it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.analysis.actions import actions_of_orders, compute_only, parse_torch_csv, read_torch_csv
from ratrain.ratrain_ir.analysis.schedule_worth import (
    UNIT_TIMES,
    PassTimes,
    in_flight_on_ranks,
    in_flight_on_stages,
    step_time,
)
from ratrain.ratrain_ir.schedules.named import SCHEDULES, most_held
from tests.ratrain_ir.schedules.unit_time import orders_of, run, shape_of
from tests.ratrain_ir.verifier.schedule_tables import ROOT


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12), st.integers(2, 4))
def test_the_step_and_what_is_in_flight_are_those_of_another_run(
    kind: str, stages: int, micro_batches: int, slices: int
) -> None:
    shape = shape_of(kind, stages, micro_batches, slices=slices if kind == "seq1f1b" else 1)
    orders = orders_of(kind, shape)
    table, expected = actions_of_orders(orders), run(orders, shape)
    found = step_time(table, UNIT_TIMES)
    assert found.seconds == expected.makespan
    assert list(found.busy.values()) == expected.busy
    assert in_flight_on_ranks(table) == [most_held(kind, shape, stage) for stage in range(stages)]


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (4, 8), (5, 7)])
def test_given_times_have_their_closed_form(stages: int, micro_batches: int) -> None:
    times = PassTimes(3.0, 7.0, 2.0)
    for kind, seconds in (
        ("1f1b", (micro_batches + stages - 1) * 10.0),
        ("zb-h1", micro_batches * 10.0 + (stages - 1) * (3 + 5 - 2)),
    ):
        shape = shape_of(kind, stages, micro_batches)
        assert step_time(actions_of_orders(orders_of(kind, shape)), times).seconds == seconds


def test_messages_gathers_and_idle_cells_take_no_time() -> None:
    lowered = read_torch_csv(str(ROOT / "tests/data/schedules/1f1b_lowered.csv"))
    assert lowered.is_lowered
    step = step_time(lowered, UNIT_TIMES)
    assert step == step_time(compute_only(lowered), UNIT_TIMES)
    assert (step.seconds, step.bubble_fraction, step.bubble_to_work) == (9.0, pytest.approx(1 / 3), 0.5)
    idle = parse_torch_csv("0F0,,,0F1,,0B0,,0B1\n", "s.csv")
    assert step_time(idle, UNIT_TIMES).bubble_fraction == 0.0


def test_ranks_without_actions_are_not_idle() -> None:
    table = parse_torch_csv("\n0F0,(0F1;0B0)OVERLAP_F_B,0B1\n", "s.csv")
    step = step_time(table, UNIT_TIMES)
    assert (step.seconds, step.busy, step.bubble_fraction) == (6.0, {1: 6.0}, 0.0)
    assert (in_flight_on_ranks(table), in_flight_on_stages(table)) == ([0, 2], {0: 2})


def test_stages_of_one_rank_are_told_apart() -> None:
    table = parse_torch_csv("0F0,0F1,1F0,1I0,0I0,1F1,1I1,0I1,1W0,0W0,1W1,0W1\n", "s.csv")
    assert (in_flight_on_ranks(table), in_flight_on_stages(table)) == ([3], {0: 2, 1: 1})
