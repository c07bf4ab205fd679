"""Where compute waits for collectives, training is the same bit for bit, in every order the waits allow."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from ratrain import api
from ratrain.passes.idle_options import without_idle_options
from tests.end_to_end.tiny_runs import MODEL, losses, make_plan, same_bits, train

STEPS = 3
OVERLAPPING = "place-1f1b,bucket-grad-sync{unit=layer},insert-prefetch,recompute{policy=mlp},allocate-ddr"
BLOCKING = OVERLAPPING.replace("unit=layer", "unit=layer blocking=true").replace("prefetch", "prefetch{blocking=true}")
PLANS: dict[str, dict[str, Any]] = {
    "zero1": {},
    "zero0": {"zero": 0},
    "zero2-each": {"zero": 2, "reduce": "each-micro-batch"},
    "zero3": {"zero": 3},
    "3-stages-tied": {"pp": 3, "dp": 1, "zero": 0, "tied": True},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in ("zero1", "3-stages-tied"))) for name in PLANS]
)
def test_the_same_bits_in_every_order(name: str) -> None:
    keys = dict(PLANS[name])
    model = evolve(MODEL, tied_embeddings=keys.pop("tied", False))
    plan = make_plan(model, **keys)
    overlapping, blocking = (
        api.emit(api.compile(model, plan, passes=without_idle_options(text, plan, model)))
        for text in (OVERLAPPING, BLOCKING)
    )
    assert any(item.blocking for stage in blocking.stages for stream in stage.streams.values() for item in stream)
    expected = train(overlapping, STEPS)
    for order in ({}, {"threads": 2, "poison": True}, {"interleave_seed": 1}, {"interleave_seed": 2, "poison": True}):
        found = train(blocking, STEPS, **order)
        assert losses(found) == losses(expected), order
        same_bits(found, expected)
