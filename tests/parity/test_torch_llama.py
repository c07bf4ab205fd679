"""The PyTorch models that trainings are compared with are those of Hugging Face `transformers`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.parity.harness import show

pytestmark = pytest.mark.parity

RECORDED = json.loads((Path(__file__).parent / "transformers_logits.json").read_text("utf-8"))
MODELS = {model["name"]: model for model in RECORDED["models"]}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    import torch

    from tests.parity import torch_llama

    model: dict[str, Any] = MODELS[name]
    weights = {}
    for index, (key, shape) in enumerate(torch_llama.Shape.of(model["config"]).parameters().items()):
        # the formula that the recorded weights were made with: no random generator has to stay the same
        values = torch.sin(torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).square() * (index + 1) * 0.37)
        shift, scale = (1.0, 0.3) if key.endswith("norm.weight") else (0.0, 0.5)
        weights[key] = (shift + scale * values).reshape(shape).float()
    got = torch_llama.logits(model["config"], weights, torch.tensor([RECORDED["tokens"]]))[0]
    expected = torch.tensor(model["logits"])
    worst = float((got - expected).abs().max())
    show(f"{name}: worst deviation {worst:.1e} of logits up to {float(expected.abs().max()):.1f}")
    assert worst <= 1e-5


def test_alibi_slopes_are_those_of_the_paper() -> None:
    from tests.parity import torch_llama

    assert torch_llama.alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    # the paper's code for a number of heads that is no power of two: those of 4 heads, then two of 8 heads
    assert torch_llama.alibi_slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]


def test_the_gradients_are_those_of_the_first_step_and_the_weights_are_left_alone() -> None:
    import torch

    from tests.parity import torch_llama

    config = MODELS["llama"]["config"]
    weights = torch_llama.random_weights(config, seed=1)
    before = {name: value.clone() for name, value in weights.items()}
    optimizer = torch_llama.AdamW(lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5, warmup_steps=2)
    tokens = [(3 * i + i // 5) % config["vocab_size"] for i in range(25)]
    losses, gradients = torch_llama.train(
        config, weights, tokens, seq_len=6, global_batch=2, steps=2, optimizer=optimizer, dtype=torch.float64
    )
    assert all(torch.equal(weights[name], before[name]) for name in before)

    # The first update in closed form: both moments are the gradient's, so that each element moves by the learning rate.
    moved = {}
    for name, value in weights.items():
        decay = 0.5 if value.ndim == 2 else 0.0
        gradient = gradients[name]
        moved[name] = value.double() * (1 - 0.05 * decay) - 0.05 * gradient / (gradient.abs() + 1e-8)
    rows = [torch.tensor(tokens[start : start + 7]) for start in (12, 18)]
    assert losses[1] == pytest.approx(float(torch_llama.mean_loss(config, moved, torch.stack(rows))), rel=1e-9)
