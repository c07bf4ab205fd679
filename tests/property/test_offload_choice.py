"""Of how many blocks state is offloaded: within a hundredth of the best number, from trying them all on the whole step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.types import Home, StateKind
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.simulator.figures import simulated
from tests.end_to_end.tiny_runs import MODEL, losses, make_plan, same_state_of_blocks, train
from tests.mutation.subjects import WITH_STORES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine

DEEP = evolve(MODEL, layers=3)
ROUND = 64
"""Bytes that addresses are multiples of."""


def machine_of(**values: float) -> Machine:
    constants = WITH_STORES.constants
    return evolve(
        WITH_STORES,
        constants=constants | {name: evolve(constants[name], value=value) for name, value in values.items()},
    )


def seconds_of(plan: Plan, passes: str, machine: Machine) -> float:
    """Simulated seconds of a step; infinite where it does not fit."""
    try:
        program = api.emit(api.compile(DEEP, plan, passes=f"{passes},allocate-ddr", machine=machine), machine=machine)
    except DiagnosticError as error:
        if {each.code for each in error.diagnostics} <= {"RT043", "RT052", "RT053"}:
            return float("inf")
        raise
    return simulated(program, machine)[0].step_seconds


def check_number(rate: float, room: float, store: str) -> None:
    plan = make_plan(DEEP, pp=1, dp=1, zero=0, micro_batches=2)
    usual = machine_of(host_store=rate, host_fetch=rate, host_capacity=1e9)
    ends = (f"offload-state{{home=host}},joint-order{{policy={policy}}}" for policy in ("full", "none"))
    least = min(
        api.compile(DEEP, plan, passes=f"{passes},allocate-ddr", machine=usual).stages[0].arena_bytes for passes in ends
    )
    most = api.compile(DEEP, plan, passes="joint-order{policy=none},allocate-ddr", machine=usual).stages[0].arena_bytes
    capacity = least + room * (most - least) * 1.05
    machine = machine_of(host_store=rate, host_fetch=rate, host_capacity=1e9, ddr_capacity=capacity // ROUND * ROUND)
    chosen = seconds_of(plan, f"joint-order{{store={store} offload=host}}", machine)
    blocks = 2 * DEEP.layers + 2
    every = [
        seconds_of(plan, f"place-1f1b,{moved}joint-order{{store={store}}}", machine)
        for moved in ("", *(f"offload-state{{home=host blocks={count}}}," for count in range(1, blocks + 1)))
    ]
    assert chosen <= 1.01 * min(every)


@pytest.mark.full
@settings(max_examples=30, deadline=None)
@given(st.floats(6, 11), st.floats(0, 1), st.sampled_from(("nowhere", "host")))
def test_no_other_number_is_a_hundredth_better(rate: float, room: float, store: str) -> None:
    check_number(10**rate, room, store)


def test_the_number_is_good_in_one_case() -> None:
    check_number(1e9, 0.5, "nowhere")


@pytest.mark.parametrize("store", ["nowhere", "host"])
def test_what_is_chosen_trains_the_same_bits(store: str) -> None:
    plan = make_plan(DEEP, zero=1)
    machine = machine_of(host_store=1e10, host_fetch=1e10, host_capacity=1e9, ddr_capacity=400_000)
    passes = f"joint-order{{store={store} offload=host}},allocate-ddr"
    module = api.compile(DEEP, plan, passes=passes, machine=machine)
    assert any(
        t.home is Home.HOST and t.kind is StateKind.MASTER for stage in module.stages for t in stage.tensors.values()
    )
    found = train(api.emit(module, machine=machine), 3, check_memory=True, poison=True)
    expected = train(api.emit(api.compile(DEEP, plan)), 3)
    assert losses(found) == losses(expected)
    same_state_of_blocks(found, expected)


@given(st.integers(1, 5))
@settings(max_examples=5)
def test_so_many_blocks_of_a_stage_are_moved(count: int) -> None:
    plan = make_plan(DEEP)
    module = api.compile(DEEP, plan, passes=f"offload-state{{home=host blocks={count}}}", machine=WITH_STORES)
    for stage in module.stages:
        owners = module.topology.stage_blocks[stage.index]
        moved = {block for block in owners if stage.tensors[f"p.{block}"].home is Home.HOST}
        assert moved == set(owners[max(0, len(owners) - count) :])


def test_state_is_chosen_once() -> None:
    with pytest.raises(DiagnosticError, match="state is in another memory already"):
        api.compile(DEEP, make_plan(DEEP), passes="offload-state,joint-order{offload=host}", machine=WITH_STORES)


def test_a_machine_without_the_memory_is_refused() -> None:
    with pytest.raises(DiagnosticError, match="the machine has no memory 'host'"):
        api.compile(DEEP, make_plan(DEEP), passes="joint-order{offload=host}")
