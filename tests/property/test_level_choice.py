"""Which blocks keep their views: near the best of all choices, from trying them all on the whole step."""

from __future__ import annotations

from itertools import chain, combinations
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.zero_levels import ZeroLevels
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.choices.level_choice import choose_levels
from ratrain.ratrainc.choices.timed_plan import RefusedPlan, TimedPlan, time_plan
from tests.end_to_end.tiny_runs import MODEL, make_plan
from tests.mutation.subjects import MACHINE

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.targets.machine.machine import Machine

SHALLOW = evolve(MODEL, layers=2)
PASSES = "place-1f1b,insert-prefetch,recompute{policy=auto},allocate-ddr"
ROUND = 64
"""Bytes that addresses are multiples of."""
DISTANCE = 1.05
"""How much longer a step than the best of all choices may be."""


def machine_of(capacity: float, link: float) -> Machine:
    values = {"ddr_capacity": capacity // ROUND * ROUND, "link_bandwidth": link}
    constants = MACHINE.constants
    changed = {name: evolve(constants[name], value=value) for name, value in values.items()}
    return evolve(MACHINE, constants=constants | changed)


def seconds_of(plan: Plan, machine: Machine) -> float:
    """Simulated seconds of a step; infinite where it does not fit."""
    timed = time_plan(SHALLOW, plan, PASSES, machine)
    return timed.figures.step_seconds if isinstance(timed, TimedPlan) else float("inf")


def arena_of(plan: Plan) -> int:
    timed = time_plan(SHALLOW, plan, PASSES, MACHINE)
    assert isinstance(timed, TimedPlan)
    return max(stage.arena_bytes for stage in timed.module.stages)


def check_choice(room: float, link: float, micro_batches: int, pp: int) -> None:
    plan = make_plan(SHALLOW, pp=pp, cuts=(1,) * (pp - 1), dp=2, zero=3, micro_batches=micro_batches)
    least, most = arena_of(plan), arena_of(evolve(plan, zero=2))
    machine = machine_of(least + room * max(0, most - least), link)
    names = [f"{each} 2" for each in block_chain(SHALLOW)]
    subsets = chain.from_iterable(combinations(names, count) for count in range(1, len(names) + 1))
    every = [seconds_of(evolve(plan, zero_blocks=ZeroLevels.parse(", ".join(each))), machine) for each in subsets]
    if isinstance(time_plan(SHALLOW, plan, PASSES, machine), RefusedPlan):
        return
    choice = choose_levels(SHALLOW, plan, PASSES, machine)
    chosen = evolve(plan, zero_blocks=choice.levels)
    assert seconds_of(chosen, machine) == choice.step_seconds <= choice.gathered_seconds
    assert choice.step_seconds <= DISTANCE * min(every)


@pytest.mark.full
@settings(max_examples=10, deadline=None)
@given(st.floats(0, 1), st.floats(5, 10), st.integers(1, 3), st.integers(1, 2))
def test_no_other_choice_is_much_better(room: float, link: float, micro_batches: int, pp: int) -> None:
    check_choice(room, 10**link, micro_batches, pp)


@pytest.mark.full
def test_the_choice_is_good_in_one_case() -> None:
    check_choice(0.5, 1e8, 1, 1)


def test_with_room_for_all_and_slow_links_all_views_are_kept() -> None:
    plan = make_plan(SHALLOW, pp=1, cuts=(), dp=2, zero=3, micro_batches=2)
    choice = choose_levels(SHALLOW, plan, PASSES, machine_of(1e8, 1e6))
    assert set(choice.kept) == set(block_chain(SHALLOW))
    assert str(choice.levels) == "embed 2, head 2, attention.* 2, mlp.* 2"
    assert choice.step_seconds < choice.gathered_seconds
    assert choice.exposed_seconds > 0
    assert str(choice.levels) in choice.words


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"zero": 2}, "zero = 2"), ({"dp": 1}, "dp = 1"), ({"zero_blocks": ZeroLevels.parse("embed 2")}, "zero_blocks")],
)
def test_a_plan_in_which_nothing_is_to_be_chosen_is_refused(changes: dict[str, object], words: str) -> None:
    plan = make_plan(SHALLOW, **{"pp": 1, "cuts": (), "dp": 2, "zero": 3, **changes})
    with pytest.raises(DiagnosticError, match=words):
        choose_levels(SHALLOW, plan, PASSES, MACHINE)
