"""Stated times of ops: textbook cases in closed form."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.ops.base import Engine
from ratrain.ratrain_ir.ops.kinds import OP_CLASSES
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.simulator.figures import StepFigures, step_figures
from ratrain.targets.simulator.given_times import KINDS, GivenTimes
from tests.end_to_end.tiny_runs import MODEL, make_plan

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

SHAPES = [(1, 4), (2, 1), (3, 3), (4, 3), (4, 8), (6, 9)]
TIMES = [(1.0, 1.0, 1.0), (2.0, 3.0, 1.5), (2.0, 1.0, 1.0), (18.522, 18.086, 9.337)]
"""T_F, T_B and T_W; ZB-H1 fills the whole cool-down where T_W is at most T_B."""


@cache
def pipeline(
    schedule: str, stages: int, micro_batches: int, layers_of_a_stage: int = 2, recompute: bool = False
) -> Program:
    layers = stages * layers_of_a_stage
    cuts = tuple(range(layers_of_a_stage, layers, layers_of_a_stage))
    model = evolve(MODEL, layers=layers)
    plan = make_plan(model, pp=stages, dp=1, cuts=cuts, micro_batches=micro_batches)
    recovery = "recompute{policy=full}," if recompute else ""
    return api.emit(api.compile(model, plan, passes=f"place-{schedule},{recovery}allocate-ddr"))


def figures(program: Program, times: GivenTimes) -> StepFigures:
    return step_figures(times.run(program))


def exactly(expected: float) -> object:
    """Equal, but for what adding up thousands of numbers in another order does to the last digits."""
    return pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.sampled(2)
def test_whole_backwards(
    schedule: str, stages: int, micro_batches: int, times: tuple[float, float, float], layers: int
) -> None:
    """(M + P - 1)(T_F + T_B + T_W), however many layers a stage has; bubble (P - 1) / (M + P - 1)."""
    found = figures(pipeline(schedule, stages, micro_batches, layers), GivenTimes.textbook(*times, 0.0))
    assert found.step_seconds == exactly((micro_batches + stages - 1) * sum(times))
    assert found.makespan_seconds == exactly(found.step_seconds)
    bubble = (stages - 1) / (micro_batches + stages - 1)
    assert found.bubble_fraction == pytest.approx(bubble, abs=1e-12)
    for stage in found.stages:
        assert stage.busy_seconds == exactly(micro_batches * sum(times))
        assert found.stage_bubble_fraction(stage) == pytest.approx(bubble, abs=1e-12)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
@pytest.mark.sampled(2)
def test_zb_h1(stages: int, micro_batches: int, times: tuple[float, float, float]) -> None:
    """The bubble of Qi et al. (2023), (P - 1)(T_F + T_B - T_W), where there are micro-batches enough to fill it: M >= P."""
    found = figures(pipeline("zb-h1", stages, micro_batches), GivenTimes.textbook(*times, 0.0))
    forward, backward_input, backward_weight = times
    idle = (stages - 1) * (forward + backward_input) - (min(stages, micro_batches) - 1) * backward_weight
    busy = micro_batches * sum(times)
    assert found.step_seconds == exactly(busy + idle)
    assert found.bubble_fraction == pytest.approx(idle / (busy + idle), abs=1e-12)


@pytest.mark.parametrize(("stages", "micro_batches"), SHAPES)
def test_messages_of_gpipe_cost_the_way_there_and_back(stages: int, micro_batches: int) -> None:
    """Under GPipe all but the first and the last message hide, as long as one takes less than a forward."""
    found = figures(pipeline("gpipe", stages, micro_batches), GivenTimes.textbook(2.0, 3.0, 1.5, 0.25))
    assert found.step_seconds == exactly((micro_batches + stages - 1) * 6.5 + 2 * (stages - 1) * 0.25)


def test_a_whole_backward_has_a_time_of_its_own_or_that_of_its_halves() -> None:
    program = pipeline("1f1b", 2, 4)
    whole = figures(program, GivenTimes({"forward": 1, "backward": 5}))
    halves = figures(program, GivenTimes({"forward": 1, "backward_input": 2, "backward_weight": 3}))
    assert whole.step_seconds == halves.step_seconds == 5 * 6


def test_split_backwards_need_the_times_of_their_halves() -> None:
    with pytest.raises(DiagnosticError) as raised:
        GivenTimes({"forward": 1, "backward": 5}).run(pipeline("zb-h1", 2, 4))
    assert raised.value.diagnostics[0].code == "RT005"


def test_recovery_takes_no_time_unless_it_is_given() -> None:
    program = pipeline("1f1b", 3, 4, recompute=True)
    times = {"forward": 1.0, "backward": 2.0}
    assert figures(program, GivenTimes(times)).step_seconds == 6 * 3
    found = figures(program, GivenTimes(times | {"recompute": 0.5}))
    assert [stage.busy_seconds for stage in found.stages] == [4 * 3.5] * 3


def test_other_ops_take_their_time_each() -> None:
    """The update of every block stands behind the step's last backward."""
    program = pipeline("1f1b", 1, 2)
    updates = sum(item.keyword == "update" for item in program.stages[0].streams[Engine.COMPUTE])
    assert updates == 6  # embedding, two layers of two blocks, head
    found = figures(program, GivenTimes({"forward": 1, "backward": 2, "update": 0.5}))
    assert found.step_seconds == exactly(2 * 3 + updates * 0.5)


def test_times_can_be_given_of_every_kind_that_takes_some() -> None:
    assert set(KINDS) == set(OP_CLASSES) - {"release"}
