"""Keys of context ranks gathered in groups of heads: the very bits of keys of all heads, with fewer of them at a time.

Heads are independent, and the query heads of a key head are in one group, so no sum is in another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from attrs import evolve

from ratrain import api
from ratrain.ratrain_ir.config.training import Training as TrainingKeys
from ratrain.ratrain_ir.model.blocks import block, parameters
from ratrain.ratrain_ir.model.slots import WHOLE_KEYS
from ratrain.ratrain_ir.ops.compute import Release
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.targets.codegen.context_routines import Heads
from ratrain.targets.program.instruction import Access
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.runtime.engine.evaluation import held_out
from ratrain.targets.verifier.program_verifier import check_program
from ratrain.targets.verifier.routine_verifier import routine_problem
from tests.end_to_end.test_context_ranks import MODELS, SCHEDULES, Training
from tests.end_to_end.test_slices import POLICIES
from tests.end_to_end.tiny_runs import instructions, make_plan, make_stream, same_bits, start, train

if TYPE_CHECKING:
    from ratrain.ratrain_ir.ops.tensor import Tensor

STEPS = 3
SIDE_BY_SIDE = MODELS["side-by-side"]

COVERING = [
    (Training(), (2, "zigzag"), 2, "joint"),
    (Training("four-layers", "zero-1", micro_batch_size=3), (3, "zigzag"), 2, "full"),
    (Training("window-below-a-slice", "zero-2-each"), (3, "contiguous"), 2, "full"),
    (Training("window-below-a-slice", "zero-1"), (6, "zigzag"), 2, "none"),
    (Training("window-above-a-slice", "zero-3", pp=2), (2, "contiguous"), 2, "attention"),
    (Training("learned-positions", "zero-3-each"), (6, "zigzag"), 4, "auto"),
    (Training("tied", "clipped", pp=2), (2, "zigzag"), 2, "mlp"),
    (Training("grouped-queries", "zero-1", pp=3, micro_batch_size=1), (4, "contiguous"), 2, "forward-side"),
    (Training("side-by-side", "zero-2"), (3, "zigzag"), 4, "full"),
    (Training("side-by-side", "zero-2"), (4, "contiguous"), 2, "mlp"),
    (Training("post-norms", "zero-1"), (3, "zigzag"), 2, "auto"),
    (Training("two-kinds", "zero-2", pp=2), (2, "zigzag"), 2, "full"),
    (Training("scaled", "zero-0"), (2, "contiguous"), 2, "attention"),
    (Training("router", "zero-1"), (2, "zigzag"), 2, "full"),
    (Training("experts", "zero-2"), (3, "contiguous"), 2, "none"),
    (Training("side-by-side", "zero-1", pp=2, more=(("tp", 2),)), (2, "zigzag"), 2, "full"),
    (Training("learned-positions", "zero-2", more=(("tp", 2), ("sequence_sharding", False))), (3, "zigzag"), 2, "mlp"),
    (Training("side-by-side", "zero-3", more=(("tp", 2),)), (2, "contiguous"), 2, "joint"),
    (Training("tied", "zero-1", more=(("attention_mask", "document"),)), (3, "zigzag"), 2, "full"),
    (Training("learned-positions", "zero-1", more=(("attention_mask", "document"),)), (2, "zigzag"), 4, "none"),
]


@pytest.mark.parametrize(("training", "layout", "groups", "policy"), COVERING, ids=str)
@pytest.mark.sampled(8)
def test_groups_of_heads_train_the_bits_of_all_heads(
    training: Training, layout: tuple[int, str], groups: int, policy: str
) -> None:
    cp, name = layout
    keys = {"cp": cp, "context_layout": name}
    expected = train(training.program(POLICIES[policy], **keys), STEPS)
    program = training.program(POLICIES[policy], **keys, context_groups=groups)
    same_bits(expected, train(program, STEPS, poison=True))


@pytest.mark.parametrize("model", ["grouped-queries", "window-above-a-slice", "learned-positions", "two-kinds"])
def test_so_do_the_reference_kernels(model: str) -> None:
    training = Training(model)
    runs = [
        train(training.program(POLICIES["full"], cp=2, context_groups=groups), STEPS, kernels="reference")
        for groups in (1, 2)
    ]
    same_bits(*runs)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "zb-v"])
def test_any_schedule_trains_the_same_bits(schedule: str) -> None:
    training, passes = Training("four-layers", "zero-1"), "place-schedule,recompute{policy=attention},allocate-ddr"
    keys = {"cp": 2, "schedule": schedule, **SCHEDULES[schedule]}
    expected = train(training.program(passes, **keys), STEPS)
    same_bits(expected, train(training.program(passes, **keys, context_groups=2), STEPS, poison=True))


def test_passes_and_interleavings_change_no_bit() -> None:
    training, keys = Training("window-above-a-slice", "zero-2"), {"cp": 3, "context_groups": 2}
    expected = train(training.program(POLICIES["joint"], **keys), STEPS)
    for policy in ("full", "attention", "auto"):
        same_bits(expected, train(training.program(POLICIES[policy], **keys), STEPS))
    program = training.program(POLICIES["attention"], **keys)
    for seed in (1, 2, 3):
        same_bits(expected, train(program, STEPS, interleave_seed=seed, poison=True))
    same_bits(expected, train(program, STEPS, poison=True, check_memory=True))


TRAININGS = {
    "adapters": TrainingKeys(method="lora", rank=3, alpha=6.0),
    "adapters-of-values": TrainingKeys(method="lora", rank=2, alpha=4.0, targets="v_proj, o_proj"),
    "adapters-above-an-attention": TrainingKeys(method="lora", rank=2, alpha=4.0, targets="down_proj"),
    "packed-base": TrainingKeys(method="lora", rank=3, alpha=6.0, base="int8-block"),
    "upper-layers": TrainingKeys(freeze="model.embed_tokens.*, model.layers.0.*, model.layers.1.self_attn.*"),
}


@pytest.mark.parametrize("policy", ["full", "attention"])
@pytest.mark.parametrize("of", TRAININGS)
def test_parts_of_a_model_train_the_same_bits(of: str, policy: str) -> None:
    training = Training("grouped-queries", "zero-2", more=(("training", TRAININGS[of]),))
    expected = train(training.program(POLICIES[policy], cp=2), STEPS)
    same_bits(expected, train(training.program(POLICIES[policy], cp=2, context_groups=2), STEPS, poison=True))


def test_a_program_is_the_same_from_its_file() -> None:
    program = Training(state="zero-3").program(POLICIES["full"], cp=2, context_groups=2)
    data = program_bytes(program)
    again = parse_program(data, "groups.rtx")
    check_program(again)
    assert program_bytes(again) == data
    same_bits(train(program, 2), train(again, 2))


def test_an_evaluation_has_the_loss_of_all_heads_and_changes_no_bit() -> None:
    training, found = Training("window-above-a-slice", "zero-2"), []
    for groups in (2, 1):
        program = training.program(POLICIES["full"], cp=2, context_groups=groups)
        run = start(program, STEPS, poison=True)
        held = held_out(make_stream(program.model, 900), program.plan)
        found.append([held.loss(run.engine) for _ in run.steps()])
        same_bits(run, train(program, STEPS))
    assert found[0] == found[1]


@pytest.mark.parametrize("passes", ["recompute{policy=none store=peer}", "recompute{policy=mlp store=peer}"])
def test_what_another_stage_keeps_changes_no_bit(passes: str) -> None:
    training, keys = Training("four-layers", "zero-1", pp=2), {"cp": 2, "micro_batches": 3}
    expected = train(training.program(POLICIES["none"], **keys), STEPS)
    program = training.program(f"place-1f1b,{passes},allocate-ddr", **keys, context_groups=2)
    assert any(True for _ in instructions(program, "peer_offload"))
    same_bits(expected, train(program, STEPS, poison=True))


def test_a_call_of_the_routine_of_another_group_is_refused() -> None:
    """Routines of the groups between the first and the last have the same operands, which are accessed alike."""
    program = Training("side-by-side").program(POLICIES["none"], cp=2, context_groups=4)
    for keyword in ("attend", "attend_backward"):
        calls = {
            call.head_group: (stage, engine, at, call) for stage, engine, at, call in instructions(program, keyword)
        }
        stage, engine, at, call = calls[2]
        program.stages[stage].streams[engine][at] = evolve(call, routine=calls[1][-1].routine)
        with pytest.raises(DiagnosticError, match="RT080"):
            check_program(program)
        program.stages[stage].streams[engine][at] = call
    check_program(program)


@pytest.mark.parametrize("keyword", ["attend", "attend_backward"])
@pytest.mark.parametrize("group", [0, 1, 3])
def test_a_routine_writes_the_rows_of_its_group_alone(keyword: str, group: int) -> None:
    """Whatever its derivation says: rows of another group, and rows that are left out, are found in its steps."""
    program = Training("side-by-side").program(POLICIES["none"], cp=2, context_groups=4)
    call = next(each for *_, each in instructions(program, keyword) if each.head_group == group)
    assert call.routine is not None
    routine = program.routines[call.routine]
    accesses = {each.role: each.access for each in call.operands if each.access is not Access.SCRATCH}
    own = parameters(program.model, block("attention", 0))
    for other in range(4):
        problem = routine_problem(routine, accesses, own, Heads(other, 4))
        assert (problem is None) is (other == group), problem
    made = "o" if keyword == "attend" else "dq_out"
    fewer = [step for step in routine.steps if not any(each.startswith(made) for each in step.operands.values())]
    problem = routine_problem(evolve(routine, steps=tuple(fewer)), accesses, own, Heads(group, 4))
    assert problem is not None
    assert "never writes" in problem


@pytest.mark.parametrize("policy", ["none", "attention"])
@pytest.mark.parametrize("cp", [2, 3])
def test_keys_and_parts_of_their_gradients_take_the_bytes_of_one_group(policy: str, cp: int) -> None:
    held = {}
    for groups in (1, 2, 4):
        plan = make_plan(SIDE_BY_SIDE, pp=1, dp=1, cp=cp, seq_len=12, context_groups=groups)
        module = api.compile(SIDE_BY_SIDE, plan, passes=POLICIES[policy])
        (stage,) = module.stages
        lives: dict[Tensor, list[int]] = {}
        for position, op in enumerate(stage.ops):
            for tensor in () if isinstance(op, Release) else op.operands:
                if tensor.slot in WHOLE_KEYS or tensor.name.startswith("dkeys"):
                    lives.setdefault(tensor, []).append(position)
        at = [
            sum(tensor.type.nbytes for tensor, uses in lives.items() if uses[0] <= position <= uses[-1])
            for position in range(len(stage.ops))
        ]
        held[groups] = max(at)
    assert held[1] == 2 * held[2] == 4 * held[4] > 0
