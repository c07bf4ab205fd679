"""The gradient's norm in the log: the same with and without clipping, under every way of keeping state."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.targets.runtime.checkpoint.state import training_state
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, make_program, same_bits, train
from tests.end_to_end.toys import GPT2
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

KEYS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero": 0},
    "ZeRO 1": {"zero": 1},
    "ZeRO 2": {"zero": 2, "reduce": "each-micro-batch"},
    "ZeRO 3": {"zero": 3},
    "one rank": {"pp": 1, "dp": 1},
    "f32": {"view_dtype": "f32", "loss_scale": 1.0},
    "gpt2": {"model": GPT2, "zero": 2},
}


def norms(**keys: Any) -> list[float | None]:
    return [step.report.gradient_norm for step in train(make_program(**keys), 4).done]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("name", KEYS)
@pytest.mark.sampled(4)
def test_the_norm_does_not_depend_on_clipping(name: str, *, tied: bool) -> None:
    model = evolve(KEYS[name].get("model", MODEL), tied_embeddings=tied)
    keys = {"loss_scale": 256.0, **KEYS[name], "model": model}
    unclipped = norms(**keys)
    clipped = norms(**keys, optimizer=evolve(OPTIMIZER, clip="global", max_norm=1e9))
    assert unclipped == pytest.approx(clipped, rel=1e-12)
    assert all(norm > 0 for norm in unclipped if norm is not None)
    assert len(set(unclipped)) == 4


@pytest.mark.parametrize("model", [MODEL, GPT2], ids=["llama", "gpt2"])
def test_the_norm_is_that_of_the_gradient(model: ModelConfig) -> None:
    """After one step Adam's first moment is (1 - beta1) times the gradient; a tied table counts once."""
    run = train(make_program(model, view_dtype="f32", zero=2), 1)
    state = training_state(run.engine, 1)
    total, seen = 0.0, set()
    for unit in block_chain(model):
        named = named_parameters_of(model, unit, state.blocks[unit].m1)
        for values in (named[name] for name in named.keys() - seen):
            total += float(np.square(values.astype(np.float64)).sum())
        seen |= named.keys()
    assert run.done[0].report.gradient_norm == pytest.approx(math.sqrt(total) / (1 - OPTIMIZER.betas[0]), rel=1e-6)


def test_an_overflow_is_no_number() -> None:
    run = train(make_program(loss_scale=2.0**32), 1)
    assert run.done[0].report.gradient_norm == math.inf
    assert run.done[0].to_json()["gradient_norm"] is None


def test_two_runs_log_the_same() -> None:
    one, other = (train(make_program(zero=2), 3, **keys) for keys in ({}, {"interleave_seed": 5}))
    same_bits(one, other)
    assert [step.report for step in one.done] == [step.report for step in other.done]
