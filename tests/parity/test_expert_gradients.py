"""A model with experts against PyTorch's automatic differentiation of its formulas, with both losses of routers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.expert_keys import RouterLosses
from ratrain.ratrain_ir.model.blocks import block_chain
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.targets.runtime.checkpoint.state import training_state
from tests.end_to_end.test_experts import drawn, trained
from tests.end_to_end.tiny_runs import MODEL, OPTIMIZER, make_program
from tests.parity.test_families import sequences
from tests.targets.runtime.weights.parameter_views import named_parameters_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ratrain.ratrain_ir.config.model_config import ModelConfig

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch")

from tests.parity.torch_llama import Shape, attention, cross_entropy, mlp, rms_norm  # noqa: E402

MIXTRAL = evolve(MODEL, family="mixtral", experts=5, experts_per_token=2)
SIZES = {"experts": 5, "experts_per_token": 2, "expert_size": 20, "shared_expert_size": 28}
SOME = in_family(MODEL, "qwen2_moe", qkv_bias=True, **SIZES, mlp_kinds=("de" * MODEL.layers)[: MODEL.layers])
"""Layers of both kinds; where there are experts, one more that all tokens pass through."""
LOSSES = RouterLosses(balance_loss=0.4, z_loss=0.2)
LOSS, GRADIENT = 2e-6, 3e-5


def experts(x: Any, weights: Mapping[str, Any], prefix: str, model: ModelConfig) -> tuple[Any, Any]:
    """The sum over each token's experts of their gated MLPs, each weighted, and the losses of the router."""
    logits = x @ weights[f"{prefix}.gate.weight"].T
    best, chosen = logits.topk(model.experts_per_token, dim=-1)
    shares = best.softmax(dim=-1)
    of_expert = torch.zeros_like(logits).scatter(1, chosen, shares)
    names = ("w1", "w3", "w2") if model.family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    gate, up, down = (weights[f"{prefix}.experts.{name}.weight"] for name in names)
    inner = torch.nn.functional.silu(torch.einsum("th,eih->tei", x, gate)) * torch.einsum("th,eih->tei", x, up)
    out = torch.einsum("tei,ehi,te->th", inner, down, of_expert)
    if model.shared_expert_size is not None:
        share = (x @ weights[f"{prefix}.shared_expert_gate.weight"].T).sigmoid()
        out = out + share * mlp(x, weights, f"{prefix}.shared_expert")
    counts, spread = (of_expert != 0).sum(dim=0), logits.softmax(dim=-1).sum(dim=0)
    balance = len(logits.T) / (chosen.shape[1] * len(x) ** 2) * (counts * spread).sum()
    return out, LOSSES.balance_loss * balance + LOSSES.z_loss * logits.logsumexp(dim=-1).square().mean()


def loss_of(model: ModelConfig, weights: Mapping[str, Any], rows: Any) -> tuple[Any, Any]:
    """The loss of a micro-batch of sequences, and the losses of its routers."""
    shape = Shape.of({
        "model_type": "llama", "vocab_size": model.vocab_size, "hidden_size": model.hidden_size,
        "num_hidden_layers": model.layers, "num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim, "intermediate_size": model.ffn_size, "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
    })  # fmt: skip
    x, of_routers = weights["model.embed_tokens.weight"][rows[:, :-1]], 0.0
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], shape.eps)
        x = x + attention(normed, weights, f"{prefix}.self_attn", shape)
        normed = rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], shape.eps)
        if model.has_experts(layer):
            parent = f"{prefix}.{'block_sparse_moe' if model.family == 'mixtral' else 'mlp'}"
            out, more = experts(normed.flatten(0, 1), weights, parent, model)
            x, of_routers = x + out.reshape(x.shape), of_routers + more
        else:
            x = x + mlp(normed, weights, f"{prefix}.mlp")
    logits = rms_norm(x, weights["model.norm.weight"], shape.eps) @ weights["lm_head.weight"].T
    return cross_entropy(logits, rows[:, 1:]), of_routers


@pytest.mark.parametrize("model", [MIXTRAL, SOME], ids=["all-layers", "some-layers"])
@pytest.mark.parametrize("peers", [1, 2])
@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_gradients_are_those_of_the_formulas(model: ModelConfig, kernels: str, peers: int) -> None:
    keys: dict[str, Any] = {"pp": 2, "dp": 1, "tp": peers, "micro_batches": 2, "seq_len": 10, "view_dtype": "f32"}
    program = make_program(model, **keys, zero=0, router=LOSSES)
    values = {name: value * (4 if name.endswith(".gate.weight") else 1) for name, value in drawn(model).items()}
    run = trained(program, values, 1, kernels=kernels, order="sequential")
    weights = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True) for name, value in values.items()}
    rows = sequences(program, 0)
    parts = [loss_of(model, weights, each) for each in rows.chunk(program.plan.micro_batches)]
    loss = sum(part for part, _ in parts) / len(parts)
    (loss + sum(more for _, more in parts) / len(parts)).backward()
    assert run.done[0].report.loss == pytest.approx(float(loss.detach()), rel=LOSS)
    blocks = training_state(run.engine, 1).blocks
    for unit in block_chain(model):
        for name, moment in named_parameters_of(model, unit, blocks[unit].m1).items():
            exact = weights[name].grad.numpy()
            found = moment / (1 - OPTIMIZER.betas[0])
            assert np.abs(found - exact).max() <= GRADIENT * np.abs(exact).max(), name
