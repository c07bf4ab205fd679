"""ZB-H1 in closed form: what is run, in which order, how much is in flight and pending, and how long it takes."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.analysis.unit_run import Computation, unit_run
from ratrain.ratrain_ir.config.plan import Optimizer, Plan
from ratrain.ratrain_ir.config.plan_text import check_plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.compute import Backward, BackwardInput, BackwardWeight, Forward
from ratrain.ratrain_ir.ops.messages import Recv, Send
from ratrain.ratrain_ir.schedules import named
from ratrain.ratrain_ir.schedules.action import Action, ActionKind
from ratrain.ratrain_ir.schedules.one_chunk import schedule_1f1b, schedule_zb_h1
from ratrain.ratrain_ir.schedules.shape import PipelineShape
from ratrain.ratrain_ir.testing import invariants
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.testing.strategies import cases
from tests.end_to_end.toys import TOY
from tests.ratrain_ir.analysis.graph import finish_times, module_graph, op_at

F, B = ActionKind.FORWARD, ActionKind.BACKWARD
HALF_I, HALF_W = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT
SHAPES = st.integers(1, 12).flatmap(
    lambda stages: st.tuples(st.just(stages), st.integers(1, 24), st.integers(0, stages - 1))
)
DELAYS = st.none() | st.integers(0, 12)
MODEL = evolve(TOY, layers=4)


def order_1f1b(stages: int, micro_batches: int, stage: int) -> list[Action]:
    return schedule_1f1b(PipelineShape(stages, micro_batches), stage)


def order_zb_h1(stages: int, micro_batches: int, stage: int, delay: int | None = None) -> list[Action]:
    return schedule_zb_h1(PipelineShape(stages, micro_batches), stage, delay)


def word(actions: list[Action]) -> str:
    return " ".join(f"{action.kind.value}{action.micro_batch}" for action in actions)


@pytest.mark.parametrize(
    ("shape", "delay", "expected"),
    [
        ((1, 2, 0), None, "F0 B0 F1 B1"),
        ((2, 3, 0), None, "F0 F1 B0 F2 B1 B2"),
        ((2, 3, 1), None, "F0 I0 F1 I1 W0 F2 I2 W1 W2"),
        ((2, 3, 1), 0, "F0 I0 W0 F1 I1 W1 F2 I2 W2"),
        ((3, 4, 1), None, "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3"),
        ((3, 4, 2), None, "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"),
        ((3, 4, 2), 1, "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3"),
        ((4, 1, 3), None, "F0 I0 W0"),
    ],
)
def test_by_hand(shape, delay, expected):
    assert word(order_zb_h1(*shape, delay)) == expected


@given(SHAPES, DELAYS)
def test_without_weight_halves_it_is_1f1b(shape, delay):
    """All kinds ascend, weight halves too, each after its input half."""
    actions = order_zb_h1(*shape, delay)
    kept = [Action(B if a.kind is HALF_I else a.kind, a.micro_batch, a.chunk) for a in actions if a.kind is not HALF_W]
    assert kept == order_1f1b(*shape)
    weights = [a.micro_batch for a in actions if a.kind is HALF_W]
    assert weights == (list(range(shape[1])) if shape[2] else [])
    for m in weights:
        assert actions.index(Action(HALF_I, m, shape[2])) < actions.index(Action(HALF_W, m, shape[2]))


@given(SHAPES, DELAYS)
def test_what_is_in_flight_and_what_is_pending_is_bounded(shape, delay):
    """Begun forward, gradient of the input not made: at most min(P - s, M). Until the weight half: as many as `delay` more."""
    stages, micro_batches, stage = shape
    later = stage if delay is None else min(delay, stage)
    flying, held, most_flying, most_held = 0, 0, 0, 0
    for action in order_zb_h1(*shape, delay):
        flying += {F: 1, HALF_W: 0}.get(action.kind, -1)
        held += {F: 1, HALF_I: 0}.get(action.kind, -1)
        most_flying, most_held = max(most_flying, flying), max(most_held, held)
    assert (flying, held) == (0, 0)
    assert (
        most_flying == named.most_held("zb-h1", PipelineShape(*shape[:2]), stage) == min(shape[0] - shape[2], shape[1])
    )
    assert most_held <= min(stages - stage + later, micro_batches)


def unit_makespan(orders: list[list[Action]]) -> int:
    """When the last event of the run of an order a stage ends, and nothing waits for what is not made."""
    end = [0] * len(orders)
    time = {F: 1, HALF_I: 1, HALF_W: 1, B: 2}
    made: dict[tuple[bool, int, int], int] = {}
    for event in unit_run(orders, range(len(orders))):
        if isinstance(event, Computation):
            kind, m, stage = event.action.kind, event.action.micro_batch, event.stage
            needed = made[kind is F, m, stage - 1 if kind is F else stage + 1] if has_input(kind, stage, orders) else 0
            end[stage] = max(end[stage], needed) + time[kind]
            if kind is not HALF_W:
                made[kind is F, m, stage] = end[stage]
    return max(end)


def has_input(kind: ActionKind, stage: int, orders: list[list[Action]]) -> bool:
    return stage > 0 if kind is F else kind is not HALF_W and stage < len(orders) - 1


@given(st.integers(1, 10), st.integers(1, 20))
def test_the_bubble_is_the_one_of_the_paper(stages, micro_batches):
    """With T_F = T_B = T_W = 1 a step loses (P - 1)(T_F + T_B - T_W), under 1F1B (P - 1)(T_F + T_B + T_W).

    That is for M >= P. With fewer there are not weight halves enough to fill the idle time: the critical path is then all forwards and
    input halves of the first and the last micro-batch. Without delay it is (P - 1)(T_F + T_B) for any M.
    """
    shapes = [(stages, micro_batches, stage) for stage in range(stages)]
    busy = 3 * micro_batches
    assert unit_makespan([order_1f1b(*shape) for shape in shapes]) - busy == 3 * (stages - 1)
    assert unit_makespan([order_zb_h1(*shape, 0) for shape in shapes]) - busy == 2 * (stages - 1)
    bubble = unit_makespan([order_zb_h1(*shape) for shape in shapes]) - busy
    assert bubble == (stages - 1 if micro_batches >= stages else 2 * stages - 1 - micro_batches)


def test_orders_that_wait_for_each_other_are_refused():
    first = [Action(B, 0, 0), Action(F, 0, 0)]
    with pytest.raises(ValueError, match="in a circle"):
        unit_run([first, [Action(F, 0, 1), Action(B, 0, 1)]], range(2))


STATES = (
    {"zero": 0},
    {"zero": 1},
    {"zero": 2, "reduce": "last"},
    {"zero": 2, "reduce": "each-micro-batch"},
    {"zero": 3, "reduce": "last"},
    {"zero": 3, "reduce": "each-micro-batch"},
)


@settings(max_examples=10)
@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.sampled_from(STATES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4),
    DELAYS,
)
def test_every_shape_and_state_is_sound_at_every_level(stages, micro_batches, state, tied, clipped, recovery, delay):
    """Verified after each pass (both send modes, byte reuse included): the same mathematics, reductions after the weight halves."""
    model = evolve(MODEL, tied_embeddings=tied)
    optimizer = Optimizer(clip="global" if clipped else "none")
    plan = Plan(stages, 2, tuple(range(1, stages)), 1, micro_batches, 4, optimizer=optimizer, **state)
    check_plan(plan, model)
    option = "" if delay is None else f"{{delay={delay}}}"
    policy = ("none", "full", "attention", "mlp", "auto")[recovery]
    passes = (
        f"place-zb-h1{option},insert-prefetch,bucket-grad-sync{{bytes=600B}},recompute{{policy={policy}}},allocate-ddr"
    )
    module = PassManager(FakeTarget(), verify_each=True).run(lower(model, plan), passes)
    invariants.check_everything(module, FakeTarget().capacity_bytes)
    assert invariants.mathematics(module) == invariants.mathematics(lower(model, plan))
    assert module.plan == evolve(plan, schedule="zb-h1")


@settings(max_examples=25)
@given(
    cases(max_layers=4, max_stages=4, max_chunks=1, max_slices=1, max_micro_batches=6),
    st.sampled_from(("place-1f1b", "place-gpipe")),
)
def test_another_placement_keeps_halves_together(case, other):
    """A split module can be placed anew: every weight half then follows its input half's group."""
    module = PassManager(FakeTarget(), verify_each=True).run(case.module(), f"place-zb-h1,{other}")
    for stage in module.stages:
        work = [op for op in stage.ops if isinstance(op, Backward | BackwardInput | BackwardWeight)]
        assert [op.micro_batch for op in work] == sorted(op.micro_batch for op in work)


@settings(max_examples=30)
@given(cases(max_layers=4, min_stages=1, max_stages=4, max_chunks=1, max_slices=1, max_micro_batches=6))
def test_one_step_takes_the_closed_form(case):
    """Placed ops over their own dependences, engines and messages, not the order they were made from.

    A forward, an input half and a weight half of a stage take one second each, a whole backward two, all else none.
    """
    module = PassManager(FakeTarget()).run(case.module(), "place-zb-h1")
    stages, micro_batches = case.plan.pp, case.plan.micro_batches
    kinds = (Forward, Backward, BackwardInput, BackwardWeight)
    counts = [
        {kind: sum(type(op) is kind and op.micro_batch == 0 for op in stage.ops) for kind in kinds}
        for stage in module.stages
    ]

    def seconds(node) -> float:
        op, count = op_at(module, node), counts[node[0]]
        if type(op) is Backward:  # of a split stage only the head's, which is whole
            return 0.0 if count[BackwardInput] else 2 / count[Backward]
        return 1 / count[type(op)] if type(op) in kinds else 0.0

    finish = finish_times(module_graph(module, rendezvous=False), seconds)
    first_step = max(time for (_, step, _), time in finish.items() if step == 0)
    bubble = stages - 1 if micro_batches >= stages else 2 * stages - 1 - micro_batches
    assert first_step == pytest.approx(3 * micro_batches + bubble, rel=1e-9)


@settings(max_examples=20)
@given(cases(max_layers=4, max_stages=4, max_chunks=1, max_slices=1, max_micro_batches=6))
def test_a_stage_that_has_no_room_keeps_its_backwards_whole(case):
    """With less capacity the delay shrinks, at last to none at all; 1F1B's forwards and backwards stay where they are."""
    passes = "place-zb-h1,insert-release"
    roomy = PassManager(FakeTarget()).run(case.module(), passes)
    tight = PassManager(FakeTarget(capacity_bytes=64)).run(case.module(), passes)
    assert not any(isinstance(op, BackwardInput | BackwardWeight) for stage in tight.stages for op in stage.ops)
    for stage, other in zip(tight.stages, roomy.stages, strict=True):
        assert [repr(op) for op in stage.ops if isinstance(op, Forward)] == [
            repr(op) for op in other.ops if isinstance(op, Forward)
        ]
        assert sum(isinstance(op, Send | Recv) for op in stage.ops) == sum(
            isinstance(op, Send | Recv) for op in other.ops
        )
    assert all(any(isinstance(op, BackwardInput) for op in stage.ops) for stage in roomy.stages[1:])


def test_the_delay_is_what_fits():
    """All of it where everything kept fits; none where only recovering makes room; whole backwards where nothing does."""
    plan = Plan(3, 1, (1, 2), 4, 6, 16, zero=0)

    def delays(capacity: int) -> list[str]:
        manager = PassManager(FakeTarget(capacity_bytes=capacity))
        manager.run(lower(MODEL, plan), "place-zb-h1")
        return [str(manager.runs[0].statistics[f"stage {stage}"]) for stage in (1, 2)]

    def arenas(pipeline: str) -> list[int]:
        module = PassManager(FakeTarget()).run(lower(MODEL, plan), pipeline)
        return [stage.arena_bytes for stage in module.stages]

    kept, recovered = (
        arenas(f"place-zb-h1{{delay=0}},recompute{{policy={policy}}},allocate-ddr") for policy in ("none", "full")
    )
    assert delays(1 << 30) == ["weight halves 1 micro-batch later", "weight halves 2 micro-batches later"]
    assert recovered[2] < kept[2]
    between = (recovered[2] + kept[2]) // 2
    assert delays(between)[1] == "weight halves 0 micro-batches later"
    assert delays(64) == ["backwards whole: two halves do not fit"] * 2
