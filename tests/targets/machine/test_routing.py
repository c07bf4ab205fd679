"""Price routers that do not send every expert as many rows: products by rows, copies of experts that travel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from ratrain.targets.machine.cost import experts_and_rows, is_of_experts, routine_work
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.routing import (
    BALANCED,
    HOT_RANK,
    ONE_HOT,
    ROUTINGS,
    Routing,
    expert_loads,
    named_routing,
    rank_loads,
)
from ratrain.targets.simulator.figures import Figures, simulated
from tests.end_to_end.tiny_runs import make_program
from tests.end_to_end.toys import SIX_EXPERTS

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

SHAPE: dict[str, Any] = {"pp": 1, "cuts": (), "dp": 2, "micro_batches": 2}
SHARED_OUT = {**SHAPE, "ep": 2, "zero": 3}


def figures(program: Program, routing: Routing | None, machine: Machine | None = None) -> Figures:
    return simulated(program, machine or load_machine(None), routing=routing)[0]


def named(program: Program, name: str) -> Routing:
    model = program.model
    assert model.experts is not None
    assert model.experts_per_token is not None
    return named_routing(name, model.experts, model.experts_per_token, program.plan.ep)


@st.composite
def histograms(draw: st.DrawFn) -> tuple[tuple[float, ...], int, int]:
    """Shares of experts, ranks that share them out, and the rows that each rank routes."""
    ranks, own, rows = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 300))
    weights = draw(st.lists(st.integers(0, 9), min_size=ranks * own, max_size=ranks * own).filter(any))
    return tuple(weight / sum(weights) for weight in weights), ranks, rows


@given(histograms())
def test_every_rank_computes_as_many_rows_and_all_that_is_sent_arrives(
    case: tuple[tuple[float, ...], int, int],
) -> None:
    shares, ranks, rows = case
    loads = rank_loads(shares, ranks, rows)
    of_experts = np.zeros(len(shares))
    for rank, load in enumerate(loads):
        assert sum(load.own) + sum(load.copied) == rows
        of_experts[rank * len(load.own) : (rank + 1) * len(load.own)] += load.own
        assert load.copies_received == np.count_nonzero(load.copied) <= len(load.own)
    assert sum(load.rows_sent for load in loads) == sum(load.rows_received for load in loads)
    assert sum(load.copies_sent for load in loads) == sum(load.copies_received for load in loads)
    given_away = ranks * rows * np.array(shares) - of_experts
    assert (given_away > -ranks).all(), "no more than its share, rounded to whole rows on each rank"
    assert sum(sum(load.copied) for load in loads) == pytest.approx(given_away.sum())


def test_balanced_ranks_copy_nothing_and_a_hot_expert_goes_to_all_others() -> None:
    balanced, hot = (rank_loads(named_routing(name, 8, 3, 4).layers[0], 4, 96) for name in (BALANCED, ONE_HOT))
    assert {(load.rows_sent, load.copies_sent) for load in balanced} == {(72, 0)}
    # of experts 0 and 1 rank 0 has 256 rows and gives two runs of 96, the later one of expert 1 alone; it then has room
    assert [load.copies_sent for load in hot] == [3, 1, 0, 0]
    assert [load.copies_received for load in hot] == [1, 0, 1, 2]


@pytest.mark.parametrize("keys", [SHAPE, SHARED_OUT], ids=["whole", "shared-out"])
def test_the_balanced_routing_takes_the_usual_time_to_the_last_bit(keys: dict[str, Any]) -> None:
    """Also as a list for each layer, and where equal shares are not written as exact ones."""
    program = make_program(SIX_EXPERTS, **keys)
    usual = figures(program, None)
    lists = ((1 / 6,) * 6,) * program.model.layers
    for routing in (named(program, BALANCED), Routing("file", lists), Routing("file", ((0.1666667,) * 6,))):
        assert figures(program, routing) == usual


@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != BALANCED])
def test_routers_that_are_not_balanced_take_no_less_where_experts_travel(name: str) -> None:
    """Only times differ: bytes are those of any router."""
    program = make_program(SIX_EXPERTS, **SHARED_OUT)
    usual, found = figures(program, None), figures(program, named(program, name))
    assert found.step_seconds >= usual.step_seconds
    assert [stage.peak_bytes for stage in found.stages] == [stage.peak_bytes for stage in usual.stages]


def test_hot_layers_alone_take_more() -> None:
    """The layers of a routing are those of the program, and one more hot layer is no faster."""
    program = make_program(SIX_EXPERTS, **SHARED_OUT)
    hot, even = named(program, HOT_RANK).layers[0], (1 / 6,) * 6
    layers = program.model.layers
    steps = [
        figures(program, Routing("file", (hot,) * count + (even,) * (layers - count))).step_seconds
        for count in range(layers + 1)
    ]
    assert steps[0] == figures(program, None).step_seconds
    assert steps[-1] == figures(program, named(program, HOT_RANK)).step_seconds
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


@pytest.mark.parametrize("cost", ["roofline", "tiles"])
def test_products_cost_by_the_rows_of_each_expert(cost: str) -> None:
    """Equal rows cost as much as untold ones; idle experts move fewer bytes, as their weights are not read."""
    machine = evolve(load_machine("mt3000"), cost=cost)
    program = make_program(SIX_EXPERTS, **SHAPE, seq_len=16)
    routines = [each for each in program.routines if any(map(is_of_experts, each.steps))]
    assert len(routines) > 1
    for routine in routines:
        _, rows = experts_and_rows(routine, next(filter(is_of_experts, routine.steps)))
        assert rows % 6 == 0
        usual = routine_work(routine, machine)
        equal, idle = (
            routine_work(routine, machine, expert_loads(shares, 1, rows))
            for shares in ((1 / 6,) * 6, (1 / 3,) * 3 + (0.0,) * 3)
        )
        assert equal.seconds == pytest.approx(usual.seconds, rel=1e-12)
        assert equal.ddr_bytes == pytest.approx(usual.ddr_bytes, rel=1e-12)
        assert idle.ddr_bytes < usual.ddr_bytes
