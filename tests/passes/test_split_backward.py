"""A backward in two halves: the same steps, the same bits, and what the verifier says where a half is missing or misplaced."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.model.slots import SPLIT_KINDS, pending_slots, saved_slots
from ratrain.ratrain_ir.ops.compute import Backward, BackwardInput, BackwardWeight, Forward
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import verify
from ratrain.targets.codegen.routines import routine_of
from ratrain.targets.program.rtx import parse_program, program_bytes
from ratrain.targets.verifier.program_verifier import check_program
from tests.end_to_end.tiny_runs import MODEL, losses, make_plan, same_bits, train
from tests.end_to_end.toys import GPT2, NEOX

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.targets.program.routine import Routine
    from ratrain.targets.runtime.training.training import TrainingRun

BIASED = evolve(MODEL, family="qwen2", qkv_bias=True)
ALIBI = evolve(MODEL, family="baichuan", heads=4, kv_heads=4, position="alibi", rope_theta=0.0, packed_qkv=True)
SPLIT = "place-zb-h1,bucket-grad-sync,allocate-ddr"
WHOLE = "place-1f1b,recompute{policy=full},allocate-ddr"


def routines(model: ModelConfig, keyword: str, kind: str, *, first: bool) -> Routine:
    """The routine of a backward op, or of a half, of a block of a kind; of micro-batch 0, which writes, or 1, which adds."""
    plan = make_plan(model, dp=1)
    passes = "place-zb-h1" if keyword != "backward" else "place-1f1b"
    module = PassManager(FakeTarget()).run(lower(model, plan), passes)
    op = next(
        op
        for op in module.stages[1].ops
        if isinstance(op, Backward | BackwardInput | BackwardWeight)
        and (op.keyword, op.block.kind, op.micro_batch) == (keyword, kind, 0 if first else 1)
    )
    return routine_of(op, model, plan)


def calls(routine: Routine) -> list[tuple[str, str, str]]:
    """Kernel, operands and options of each step but the norm's, which is checked alone."""
    return [
        (step.kernel, str(sorted(step.operands.items())), str(sorted(step.options.items())))
        for step in routine.steps
        if step.kernel not in ("rmsnorm_backward", "layernorm_backward", "add", "cast")
    ]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("kind", SPLIT_KINDS)
@pytest.mark.parametrize("model", [MODEL, BIASED, ALIBI, GPT2, NEOX], ids=["llama", "qwen2", "alibi", "gpt2", "neox"])
def test_the_halves_are_the_steps_of_the_whole(model: ModelConfig, kind: str, first: bool) -> None:
    whole, made, weight = (
        routines(model, keyword, kind, first=first) for keyword in ("backward", "backward_input", "backward_weight")
    )
    assert Counter(calls(whole)) == Counter(calls(made)) + Counter(calls(weight))
    for half in (made, weight):
        kept = [step for step in calls(whole) if step in calls(half)]
        assert kept == calls(half), "each half keeps the order of the whole"
    sums = ("dgamma", "dbeta") if model.has_layer_norm else ("dgamma",)
    norm, apart = (next(step for step in half.steps if "norm_backward" in step.kernel) for half in (whole, made))
    assert apart.operands == norm.operands | {name: name for name in sums}
    assert (norm.options["accumulate"], apart.options["accumulate"]) == (not first, False)
    assert [step.kernel for step in weight.steps if step.kernel in ("add", "cast")] == len(sums) * [
        "cast" if first else "add"
    ]
    assert all(made.operand(name)[0] is Dtype.F32 for name in sums)


@pytest.mark.parametrize("kind", SPLIT_KINDS)
def test_pending_slots_have_names_of_their_own(kind: str) -> None:
    module = lower(MODEL, make_plan())
    unit = next(op.block for op in module.stages[0].ops if isinstance(op, Forward) and op.block.kind == kind)
    saved, pending = (
        {slot.name for slot in slots(module.model, module.plan, unit)} for slots in (saved_slots, pending_slots)
    )
    assert pending
    assert saved.isdisjoint(pending)


# training


def run(model: ModelConfig, passes: str, keys: dict[str, Any], **settings: Any) -> TrainingRun:
    return train(api.emit(api.compile(model, make_plan(model, **keys), passes=passes)), 3, **settings)


@pytest.mark.parametrize("kernels", ["fast", "reference"])
@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (MODEL, {"pp": 3, "dp": 1}),
        (BIASED, {"pp": 2, "view_dtype": "f32"}),
        (ALIBI, {"pp": 2, "zero": 2, "reduce": "each-micro-batch", "grad_dtype": "f32"}),
        (NEOX, {"pp": 2, "mlp_chunk": 7}),
    ],
    ids=["llama", "qwen2-f32", "alibi-each", "neox"],
)
@pytest.mark.sampled(2)
def test_training_is_the_same_bit_for_bit(kernels: str, model: ModelConfig, keys: dict[str, Any]) -> None:
    whole, split = (run(model, passes, keys, kernels=kernels) for passes in (WHOLE, SPLIT))
    assert losses(split) == losses(whole)
    same_bits(split, whole)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_the_waits_allow_gives_the_same_bits_in_poisoned_memory(seed: int) -> None:
    keys = {"pp": 3, "dp": 1, "micro_batches": 5}
    ordered = run(MODEL, SPLIT, keys, poison=True)
    shuffled = run(MODEL, SPLIT, keys, interleave_seed=seed, poison=True)
    same_bits(shuffled, ordered)


def test_a_program_with_halves_is_written_read_and_judged() -> None:
    program = api.emit(api.compile(MODEL, make_plan(pp=3), passes=SPLIT))
    again = parse_program(program_bytes(program), "split.rtx")
    check_program(again)
    assert program_bytes(again) == program_bytes(program)
    keywords = {i.keyword for stage in again.stages for stream in stage.streams.values() for i in stream}
    assert {"backward", "backward_input", "backward_weight"} <= keywords


# the verifier


def text() -> list[str]:
    """The lines of a sound module whose second stage splits its backwards, weight halves a micro-batch later."""
    plan = make_plan(evolve(MODEL, layers=2), dp=1, micro_batches=2)
    module = PassManager(FakeTarget()).run(lower(evolve(MODEL, layers=2), plan), "place-zb-h1")
    return print_module(module).splitlines()


def line_of(lines: list[str], words: str) -> int:
    (found,) = [number for number, line in enumerate(lines) if re.search(rf"{words}\b", line)]
    return found


def problems(lines: list[str]) -> list[tuple[str, str]]:
    found = Diagnostics()
    verify(parse_module("\n".join(lines), file="edited.rtir"), found)
    return [(error.code, error.message) for error in found.errors]


def test_the_text_is_sound() -> None:
    assert problems(text()) == []


def test_a_weight_half_that_is_missing_is_missed() -> None:
    lines = text()
    del lines[line_of(lines, "backward_weight mlp.1 m1")]
    assert ("RT030", "stage @1 never does 'backward_weight mlp.1 m1'") in problems(lines)
    assert {code for code, _ in problems(lines)} == {"RT030", "RT031"}


def test_a_weight_half_happens_once() -> None:
    lines = text()
    lines.append("")
    at = line_of(lines, "backward_weight mlp.1 m1")
    lines.insert(at, lines[at])
    assert ("RT030", "'backward_weight mlp.1 m1' happens twice") in problems(lines)


def test_a_weight_half_comes_after_its_input_half() -> None:
    lines = text()
    weight = lines.pop(line_of(lines, "backward_weight mlp.1 m0"))
    lines.insert(line_of(lines, "backward_input mlp.1 m0"), weight)
    found = problems(lines)
    assert found[0][0] == "RT020"
    assert "is used before it is defined" in found[0][1]


def test_weight_halves_ascend() -> None:
    """With the order of two of them turned round, the first contribution comes from m1."""
    lines = text()
    first, second = (line_of(lines, f"backward_weight mlp.1 m{m}") for m in (0, 1))
    turned = lines[second].replace("+=", "="), lines[first].replace(" = ", " += ")
    lines[first : first + 1] = []
    lines[second - 1] = turned[0]
    lines.insert(second, turned[1])
    assert {code for code, _ in problems(lines)} == {"RT031"}
    assert any(
        "the first contribution to the gradient of mlp.1 must be m0" in message for _, message in problems(lines)
    )


def test_a_weight_half_takes_what_its_own_input_half_left() -> None:
    lines = text()
    at = line_of(lines, "backward_weight mlp.1 m1")
    lines[at] = lines[at].replace("%d.mlp.1.m1.", "%d.mlp.1.m0.")
    found = problems(lines)
    assert {code for code, _ in found} == {"RT030"}
    assert "needs pending mlp.1 m1 dgate in %d.mlp.1.m0.dgate, which holds pending mlp.1 m0 dgate" in found[0][1]


def test_only_attention_and_mlp_are_split() -> None:
    lines = text()
    at = line_of(lines, "backward head m0")
    lines[at] = lines[at].replace("backward head", "backward_input head")
    assert problems(lines) == [("RT025", "the backward of head is not split: only attention and mlp blocks' are")]
