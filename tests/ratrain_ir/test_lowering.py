"""The dataflow that a model and a plan are lowered to, for people to read."""

from __future__ import annotations

import attrs

from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.lowering import lower
from ratrain.ratrain_ir.text.printer import print_module
from tests.end_to_end.toys import TOY
from tests.passes.differences import header_changes, stage_changes

PLAN = Plan(2, 2, (1,), 1, 2, 4)


def test_the_text_of_a_lowered_module(golden):
    golden("dataflow.rtir", print_module(lower(TOY, PLAN)))


def test_what_another_model_and_plan_change(golden):
    """ZeRO 2, reduced each micro-batch, tied embeddings, biases, a fixed loss scale, whole gradients in f32."""
    model = attrs.evolve(TOY, tied_embeddings=True, family="qwen2", qkv_bias=True)
    plan = attrs.evolve(PLAN, zero=2, reduce="each-micro-batch", grad_dtype="f32", loss_scale=1024.0)
    plain, other = lower(TOY, PLAN), lower(model, plan)
    changes = [*header_changes(plain, other)]
    for before, after in zip(plain.stages, other.stages, strict=True):
        changes += stage_changes(before, after)
    golden("dataflow-zero2-tied.txt", "\n".join(changes) + "\n")
