"""The dataflow that a model and a plan are lowered to, for people to read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import pytest

from ratrain.ratrain_ir import lowering
from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.ratrain_ir.text.printer import print_module
from tests.end_to_end.toys import TOY
from tests.mutation.subjects import SUBJECTS
from tests.passes.differences import header_changes, stage_changes

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

PLAN = Plan(2, 2, (1,), 1, 2, 4)


def test_the_text_of_a_lowered_module(golden):
    golden("dataflow.rtir", print_module(lower(TOY, PLAN)))


def test_what_another_model_and_plan_change(golden):
    """ZeRO 2, reduced each micro-batch, tied embeddings, biases, a fixed loss scale, whole gradients in f32."""
    model = attrs.evolve(TOY, tied_embeddings=True, family="qwen2", qkv_bias=True)
    plan = attrs.evolve(PLAN, zero=2, reduce="each-micro-batch", grad_dtype="f32", loss_scale=1024.0)
    golden("dataflow-zero2-tied.txt", changes_of(model, plan))


def test_what_experts_change(golden):
    """A router, a shared expert, and both losses of routers."""
    model = in_family(
        TOY, "qwen2_moe", qkv_bias=True, experts=4, experts_per_token=2, expert_size=6, shared_expert_size=5
    )
    golden("dataflow-experts.txt", changes_of(model, attrs.evolve(PLAN, router=RouterLosses(0.1, 0.01))))


def changes_of(model: ModelConfig, plan: Plan) -> str:
    """Return how the lowered module of another model and plan differs from that of the toy."""
    plain, other = lower(TOY, PLAN), lower(model, plan)
    changes = [*header_changes(plain, other)]
    for before, after in zip(plain.stages, other.stages, strict=True):
        changes += stage_changes(before, after)
    return "\n".join(changes) + "\n"


@pytest.mark.parametrize("name", SUBJECTS)
def test_passes_that_are_repeated_are_those_that_would_be_made_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plan = SUBJECTS[name].module().model, SUBJECTS[name].module().plan
    plan = attrs.evolve(plan, micro_batches=max(5, plan.micro_batches), schedule=None)
    repeated = print_module(lower(model, plan))
    monkeypatch.setattr(lowering, "PATTERN", plan.micro_batches)
    assert print_module(lower(model, plan)) == repeated
