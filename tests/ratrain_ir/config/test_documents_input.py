"""Starts of documents as an input of every stage: their text, and exchanges of them that the verifier finds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratrain.passes.manager import PassManager
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.ops.base import Op, Part
from ratrain.ratrain_ir.ops.compute import Backward, BackwardInput, BlockOp, Forward, LoadInput, Recompute
from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.testing.fake_target import FakeTarget
from ratrain.ratrain_ir.text.parser import parse_module
from ratrain.ratrain_ir.text.printer import print_module
from ratrain.ratrain_ir.verifier import verify
from tests.end_to_end.toys import GPT2, TOY

if TYPE_CHECKING:
    import random

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.module import Module
    from ratrain.ratrain_ir.ops.tensor import Tensor

PLAN = Plan(2, 2, (1,), 1, 2, 4, attention_mask="document")
SLICED = attrs.evolve(PLAN, dp=1, zero=0, slices=(3, 1))
POSITIONS = attrs.evolve(GPT2, layers=2)
"""Its embedding asks where documents start too."""
WAYS = {
    "lowered": "",
    "split": "place-zb-h1",
    "recovered": "place-1f1b,recompute{policy=full}",
    "attention recovered": "recompute{policy=attention}",
}


def made(plan: Plan, passes: str = "", model: ModelConfig = POSITIONS) -> Module:
    return PassManager(FakeTarget()).run(lower(model, plan), passes)


def errors(module: Module) -> list[str]:
    found = Diagnostics()
    verify(module, found)
    return [f"{item.code}: {item.message}" for item in found.errors]


def test_the_text_of_a_lowered_module(golden):
    golden("documents.rtir", print_module(lower(TOY, PLAN)))


@pytest.mark.parametrize("passes", WAYS.values(), ids=WAYS)
def test_texts_are_read_back(passes: str) -> None:
    text = print_module(made(PLAN, passes))
    again = parse_module(text, file="again.rtir")
    assert print_module(again) == text
    assert again.plan == PLAN or again.plan.schedule is not None
    assert not errors(again)


def readers(module: Module) -> list[tuple[int, Op, Tensor]]:
    """What reads where documents start: stage, op, tensor."""
    return [
        (stage.index, op, tensor)
        for stage in module.stages
        for op in stage.ops
        for tensor in op.reads
        if tensor.kind is StateKind.INPUT and tensor.name.startswith("documents.")
    ]


@pytest.mark.parametrize("plan", [PLAN, SLICED], ids=["whole", "slices"])
def test_every_stage_loads_them_once_a_piece(plan: Plan) -> None:
    module = made(plan)
    pieces = plan.micro_batches * max(1, len(plan.slices))
    for stage in module.stages:
        loads = [op for op in stage.ops if isinstance(op, LoadInput) and op.part is Part.DOCUMENTS]
        assert len({(op.micro_batch, op.slice) for op in loads}) == len(loads) == pieces
        assert all(op.writes[0].type.shape == (plan.slices[op.slice or 0] if plan.slices else 4,) for op in loads)


def kinds_of_readers(module: Module) -> set[tuple[type[Op], str]]:
    """Kinds of ops, and of their blocks."""
    return {(type(op), op.block.kind) for _, op, _ in readers(module) if isinstance(op, BlockOp)}


def test_who_reads_them() -> None:
    assert kinds_of_readers(made(PLAN, WAYS["split"])) == {
        *((kind, "embed") for kind in (Forward, Backward)),
        *(
            (kind, "attention") for kind in (Forward, Backward, BackwardInput)
        ),  # of the first stage backwards stay whole
    }
    of_rotary = kinds_of_readers(made(PLAN, WAYS["recovered"], TOY))
    assert of_rotary == {(kind, "attention") for kind in (Forward, Backward, Recompute)}


@given(st.sampled_from([PLAN, SLICED]), st.sampled_from(sorted(WAYS)), st.randoms(use_true_random=False))
def test_starts_of_another_piece_are_refused(plan: Plan, way: str, chance: random.Random) -> None:
    """Whichever op it is that reads them."""
    module = made(plan, WAYS[way] if not plan.slices else "")
    index, op, own = chance.choice(readers(module))
    others = [
        tensor
        for tensor in module.stages[index].tensors.values()
        if tensor.kind is StateKind.INPUT and tensor.type == own.type and tensor is not own
    ]
    other = chance.choice(others)
    op.reads = tuple(other if tensor is own else tensor for tensor in op.reads)
    found = errors(module)
    assert any(f"in %{other.name}" in text or f"%{other.name} is used" in text for text in found), found


@given(st.sampled_from([PLAN, SLICED]), st.randoms(use_true_random=False))
def test_loads_that_are_dropped_or_exchanged_are_refused(plan: Plan, chance: random.Random) -> None:
    module = made(plan)
    stage = chance.choice(module.stages)
    loads = [op for op in stage.ops if isinstance(op, LoadInput) and op.part is Part.DOCUMENTS]
    if chance.random() < 0.5:
        dropped = chance.choice(loads)
        stage.ops = [op for op in stage.ops if op is not dropped]
    else:
        number = chance.choice(loads).slice
        first, second = chance.sample([op for op in loads if op.slice == number], 2)
        first.micro_batch, second.micro_batch = second.micro_batch, first.micro_batch
    assert errors(module)
