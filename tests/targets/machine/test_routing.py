"""Price routers that do not send every expert as many rows: products by rows, copies that travel, rows that do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.expert_keys import ExpertDispatch
from ratrain.ratrain_ir.model.expert_blocks import expert_rows
from ratrain.ratrain_ir.model.expert_ranks import capacity_of
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.targets.machine.cost import experts_and_rows, is_of_experts, routine_work
from ratrain.targets.machine.machine import Machine, load_machine
from ratrain.targets.machine.routing import (
    BALANCED,
    HOT_RANK,
    ONE_HOT,
    ROUTINGS,
    Routing,
    dropped_share,
    expert_loads,
    named_routing,
    rank_loads,
    sent_rows,
)
from ratrain.targets.machine.timing import under_routing
from ratrain.targets.simulator.figures import Figures, simulated
from ratrain.targets.simulator.op_works import timed_instruction
from tests.end_to_end.tiny_runs import make_program
from tests.end_to_end.toys import SIX_EXPERTS

if TYPE_CHECKING:
    from collections.abc import Sequence

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


# Ranks that drop rows


@frozen
class Counted:
    """Rows of an exchange, counted one by one."""

    computed: list[list[int]]
    """by rank, of each of its experts"""
    sent: list[int]
    """by rank, to other ranks"""
    received: list[int]
    kept: int
    """rows of one rank that it does not drop"""


def counted(counts: Sequence[int], ranks: int, capacity: int) -> Counted:
    """Send the rows of all ranks, each with the same choices, and drop those above an expert's capacity."""
    own = len(counts) // ranks
    found = Counted([[0] * own for _ in range(ranks)], [0] * ranks, [0] * ranks, 0)
    kept = 0
    for origin in range(ranks):
        taken = [0] * len(counts)
        for expert in (expert for expert, rows in enumerate(counts) for _ in range(rows)):
            if taken[expert] == capacity:
                continue
            taken[expert] += 1
            owner = expert // own
            found.computed[owner][expert % own] += 1
            found.sent[origin] += owner != origin
            found.received[owner] += owner != origin
        kept = sum(taken)
    return evolve(found, kept=kept)


@st.composite
def dropping(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Rows of a rank for each expert, ranks that share out the experts, and the capacity of an expert."""
    ranks, own = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    counts = draw(st.lists(st.integers(0, 40), min_size=ranks * own, max_size=ranks * own).filter(any))
    return counts, ranks, draw(st.integers(1, 45))


@given(dropping())
def test_ranks_send_and_compute_what_a_count_of_all_rows_says(case: tuple[list[int], int, int]) -> None:
    counts, ranks, capacity = case
    rows, expected = sum(counts), counted(*case)
    shares = tuple(count / rows for count in counts)
    loads = rank_loads(shares, ranks, rows, capacity)
    assert [list(load.own) for load in loads] == expected.computed
    assert [load.rows_sent for load in loads] == expected.sent
    assert [load.rows_received for load in loads] == expected.received
    assert not any(sum(load.copied) + load.copies_sent + load.copies_received for load in loads)
    assert sent_rows(shares, rows, capacity) == expected.kept
    assert sum(load.rows for load in loads) == ranks * expected.kept


def with_capacity(factor: float, **keys: Any) -> Program:
    return make_program(SIX_EXPERTS, **{**SHARED_OUT, **keys}, experts=ExpertDispatch("capacity", factor))


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("name", [ONE_HOT, HOT_RANK])
def test_exchanges_carry_the_rows_of_the_busiest_rank(name: str, factor: float) -> None:
    """Count no dropped row, neither there nor back; a rank with more rows has more to move in its DDR."""
    program = with_capacity(factor)
    model, plan, routing = program.model, program.plan, named(program, name)
    rows, capacity = expert_rows(model, plan), capacity_of(model, plan)
    assert capacity is not None
    found = counted([round(share * rows) for share in routing.layers[0]], plan.ep, capacity)
    busiest, most = max(found.sent + found.received), max(map(sum, found.computed))
    stream = program.stages[0].streams[Engine.TENSOR]
    exchanges = [each for each in stream if each.keyword in ("dispatch", "combine")]
    assert {each.keyword for each in exchanges} == {"dispatch", "combine"}
    for each in exchanges:
        usual = timed_instruction(program, 0, Engine.TENSOR, each)
        tensors = [program.stages[0].tensors[operand.tensor] for operand in each.operands]
        routed = under_routing(usual, routing, 0, model, plan, tensors)
        balanced = min(rows, 6 * capacity)
        a_row = usual.payload_bytes / balanced
        more = most - balanced + (found.kept - balanced) * (each.keyword == "combine")
        assert routed.payload_bytes == round(busiest * a_row * plan.ep / (plan.ep - 1))
        assert routed.own_bytes == usual.own_bytes + round(more * a_row)


@pytest.mark.parametrize("cost", ["roofline", "tiles"])
@pytest.mark.parametrize("name", [ONE_HOT, HOT_RANK])
def test_more_room_takes_longer_until_nothing_is_dropped(name: str, cost: str) -> None:
    """One rank computes what all ranks send it, up to all rows of all ranks; its bytes are those of any router."""
    machine = evolve(load_machine("mt3000"), cost=cost)
    steps, shares = [], []
    for factor in (0.5, 1.0, 2.0, 3.0):
        program = with_capacity(factor, seq_len=32)
        usual, found = figures(program, None, machine), figures(program, named(program, name), machine)
        assert [stage.peak_bytes for stage in found.stages] == [stage.peak_bytes for stage in usual.stages]
        assert found.step_seconds > usual.step_seconds or factor <= 1
        steps.append(found.step_seconds)
        shares.append(dropped_share(named(program, name), program.model, program.plan))
    assert steps[:3] == sorted(set(steps[:3]))
    assert steps[2] == steps[3], "from experts / experts_per_token on nothing is dropped"
    assert shares == [0.75, 0.5, 0.0, 0.0]


def test_the_dropped_part_is_of_all_layers_and_slices() -> None:
    whole, sliced = with_capacity(1.0), with_capacity(1.0, seq_len=12, slices=(8, 4))
    layers = whole.model.layers
    hot, even = named(whole, ONE_HOT).layers[0], (1 / 6,) * 6
    for program in (whole, sliced):
        for count in range(layers + 1):
            routing = Routing("file", (hot,) * count + (even,) * (layers - count))
            assert dropped_share(routing, program.model, program.plan) == pytest.approx(0.5 * count / layers)
        assert dropped_share(None, program.model, program.plan) == 0
    half = with_capacity(0.5)
    assert dropped_share(None, half.model, half.plan) == 0.5
    balanced = make_program(SIX_EXPERTS, **SHARED_OUT)
    assert dropped_share(named(balanced, ONE_HOT), balanced.model, balanced.plan) is None


def test_room_above_the_mean_takes_no_time_in_slices_either() -> None:
    """Balanced routers send as many rows of a slice, whatever the capacity leaves room for."""
    keys = {"seq_len": 12, "slices": (8, 4)}
    steps = [figures(with_capacity(factor, **keys), None).step_seconds for factor in (1.0, 2.0)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-12)
