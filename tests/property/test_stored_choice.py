"""How much is stored: within a hundredth of the best number of layers of micro-batches, by the stage's own step from trying them all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.passes.pass_base import PassContext
from ratrain.passes.recovery.layer_choice import EVERYTHING
from ratrain.passes.recovery.recompute_choice import StageShape, as_chosen, choose, kept_in_ddr
from ratrain.passes.recovery.rewriting import Rewriting
from ratrain.passes.trial.trial import Trials
from ratrain.ratrain_ir.config.types import Home
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.targets.target import target_of
from tests.end_to_end.tiny_runs import MODEL, make_plan
from tests.mutation.subjects import WITH_STORES

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

DEEP = evolve(MODEL, layers=5)


@pytest.mark.full
@settings(max_examples=40)
@given(st.floats(6, 11), st.floats(6, 11), st.floats(0, 1), st.integers(2, 4), st.sampled_from(("1f1b", "gpipe")))
def test_no_other_number_is_a_hundredth_better(
    store: float, fetch: float, room: float, micro_batches: int, schedule: str
) -> None:
    check_number(10**store, 10**fetch, room, micro_batches, schedule)


def test_the_number_is_good_in_one_case() -> None:
    check_number(2e8, 3e8, 0.4, 3, "gpipe", MODEL)


def check_number(
    store: float, fetch: float, room: float, micro_batches: int, schedule: str, model: ModelConfig = DEEP
) -> None:
    constants = WITH_STORES.constants
    rates = {"host_store": store, "host_fetch": fetch, "host_capacity": 1e9}
    changed = {name: evolve(constants[name], value=value) for name, value in rates.items()}
    machine = evolve(WITH_STORES, constants=constants | changed)
    plan = make_plan(model, pp=1, dp=1, zero=0, micro_batches=micro_batches, schedule=schedule)
    module = api.compile(model, plan, passes=f"place-{schedule}", machine=machine)
    trials = Trials(module, PassContext(target_of(machine), Diagnostics()))
    (stage,) = module.stages
    least, most = (
        api.compile(model, plan, passes=f"recompute{{policy={policy}}},allocate-ddr", machine=machine)
        .stages[0]
        .arena_bytes
        for policy in ("full", "none")
    )
    capacity = int(least + room * max(0, most - least))
    seconds = trials.period(as_chosen(Rewriting(stage), trials, choose(Rewriting(stage), trials, capacity, Home.HOST)))
    shape = StageShape.of(stage, trials)
    stored = evolve(EVERYTHING, home=Home.HOST)
    every = (
        kept_in_ddr(Rewriting(stage), trials, capacity, shape, shape.stored(count, stored))
        for count in range(shape.items + 1)
    )
    assert seconds <= 1.01 * min(trials.period(as_chosen(Rewriting(stage), trials, each)) for each in every)
