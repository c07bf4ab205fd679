"""The order of an attention's saved slots, which recovery needs without a model."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.plan_keys import CONTEXT_EXCHANGES, OF_KEYS
from ratrain.ratrain_ir.config.tensor_ranks import shares_heads
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.model.blocks import block
from ratrain.ratrain_ir.model.slots import forward_slots, made_by_project, place_in_attention
from ratrain.ratrain_ir.testing.strategies import models
from tests.end_to_end.tiny_runs import make_plan
from tests.end_to_end.toys import GEMMA3, OLMO2, UNEVEN


@given(models(), st.sampled_from([*((exchange, False) for exchange in CONTEXT_EXCHANGES), (OF_KEYS, True)]))
def test_slots_stand_in_the_order_of_their_places(model, form) -> None:
    exchange, in_groups = form
    assume(exchange == OF_KEYS or shares_heads(model, 2))
    assume(not in_groups or model.position != "alibi")
    groups = model.kv_heads if in_groups else 1
    keys = {"cp": 2, "context_exchange": exchange, "context_groups": groups}
    plan = make_plan(model, pp=1, cuts=(), dp=1, seq_len=4, head_chunk=4, **keys)
    slots = [slot.name for slot in forward_slots(model, plan, block("attention", 0))]
    places = [place_in_attention(name) for name in slots]
    assert places == sorted(places)
    assert len({*places}) == len(places)


def test_products_of_adapters_stand_together() -> None:
    training = Training(method="lora", rank=2, alpha=4.0)
    for model in (UNEVEN, OLMO2, GEMMA3):
        plan = make_plan(model, pp=1, dp=1, seq_len=12, cp=2, training=training)
        slots = [slot.name for slot in forward_slots(model, plan, block("attention", 0))]
        places = [place_in_attention(name) for name in slots]
        assert places == sorted(places)
        assert {*(slot.name for slot in made_by_project(model, plan, block("attention", 0)))} < {*slots}
