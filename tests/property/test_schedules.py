"""1F1B in closed form: what is run, in which order, how much is in flight, and how long it takes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.ops.compute import Backward, Forward
from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.named import most_held
from ratrain.ratrain_ir.schedules.one_chunk import schedule_1f1b
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases
from tests.ratrain_ir.analysis.graph import finish_times, module_graph, op_at

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
SHAPES = st.integers(1, 12).flatmap(
    lambda stages: st.tuples(st.just(stages), st.integers(1, 24), st.integers(0, stages - 1))
)


def order_1f1b(stages: int, micro_batches: int, stage: int) -> list[Action]:
    return schedule_1f1b(PipelineShape(stages, micro_batches), stage)


def word(actions: list[Action]) -> str:
    return " ".join(f"{action.kind.value}{action.micro_batch}" for action in actions)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 1, 0), "F0 B0"),
        ((1, 3, 0), "F0 B0 F1 B1 F2 B2"),
        ((2, 3, 0), "F0 F1 B0 F2 B1 B2"),
        ((2, 3, 1), "F0 B0 F1 B1 F2 B2"),
        ((4, 2, 0), "F0 F1 B0 B1"),
        ((4, 2, 1), "F0 F1 B0 B1"),
        ((4, 2, 2), "F0 F1 B0 B1"),
        ((4, 5, 1), "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4"),
    ],
)
def test_by_hand(shape, expected):
    assert word(order_1f1b(*shape)) == expected


@given(SHAPES)
def test_every_micro_batch_goes_forward_then_backward_in_ascending_order(shape):
    actions = order_1f1b(*shape)
    _, micro_batches, _ = shape
    for kind in (F, B):
        assert [a.micro_batch for a in actions if a.kind is kind] == list(range(micro_batches))
    for m in range(micro_batches):
        assert actions.index(Action(F, m, shape[2])) < actions.index(Action(B, m, shape[2]))


@given(SHAPES)
def test_warm_up_alternation_and_drain(shape):
    """min(P - s - 1, M) forwards, then forward and backward in turn, then as many backwards."""
    stages, micro_batches, stage = shape
    actions = order_1f1b(*shape)
    warm_up = min(stages - stage - 1, micro_batches)
    middle = actions[warm_up : len(actions) - warm_up]
    assert all(action.kind is F for action in actions[:warm_up])
    assert [action.kind for action in middle] == [F, B] * (micro_batches - warm_up)
    assert all(action.kind is B for action in actions[len(actions) - warm_up :])


@given(SHAPES)
def test_what_is_in_flight_reaches_the_bound_and_never_exceeds_it(shape):
    stages, micro_batches, stage = shape
    flying, most = 0, 0
    for action in order_1f1b(*shape):
        flying += 1 if action.kind is F else -1
        most = max(most, flying)
    assert flying == 0
    assert most == most_held("1f1b", PipelineShape(stages, micro_batches), stage) == min(stages - stage, micro_batches)


@settings(max_examples=30)
@given(cases(max_stages=4, max_chunks=1, max_slices=1))
def test_the_pass_places_the_schedule(case):
    """The forwards and backwards of each stage, a group of blocks a micro-batch, stand in the schedule's order."""
    module = PassManager(FakeTarget()).run(case.module(), "place-1f1b")
    for stage in module.stages:
        groups = []
        for op in stage.ops:
            if isinstance(op, Forward | Backward):
                action = Action(F if type(op) is Forward else B, op.micro_batch, stage.index)
                if not groups or groups[-1] != action:
                    groups.append(action)
        assert groups == schedule_1f1b(case.plan.shape, stage.index)


@settings(max_examples=30)
@given(cases(max_layers=4, max_stages=4, max_chunks=1, max_slices=1, max_micro_batches=5))
def test_one_step_takes_the_closed_form(case):
    """With forwards of one second a stage, backwards of two, and all else free: (M + P - 1) * 3 seconds, each step."""
    module = PassManager(FakeTarget()).run(case.module(), "place-1f1b")
    counts = [sum(type(op) is Forward and op.micro_batch == 0 for op in stage.ops) for stage in module.stages]

    def seconds(node) -> float:
        op = op_at(module, node)
        if isinstance(op, Forward):
            return 1 / counts[node[0]]
        return 2 / counts[node[0]] if isinstance(op, Backward) else 0.0

    expected = (case.plan.micro_batches + case.plan.pp - 1) * 3
    finish = finish_times(module_graph(module, rendezvous=False), seconds)
    first_step = max(time for (_, step, _), time in finish.items() if step == 0)
    assert first_step == pytest.approx(expected, rel=1e-9)
