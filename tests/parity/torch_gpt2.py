"""GPT-2 in plain PyTorch, for comparison: names and shapes of `GPT2LMHeadModel`, whose `Conv1D` holds [inputs, outputs]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.parity.torch_llama import cross_entropy

Weights = dict[str, Tensor]


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """All parameters by name."""
    hidden, vocab = config["n_embd"], config["vocab_size"]
    inner = config.get("n_inner") or 4 * hidden
    found: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (vocab, hidden),
        "transformer.wpe.weight": (config["n_positions"], hidden),
    }
    linear = {
        "attn.c_attn": (hidden, 3 * hidden),
        "attn.c_proj": (hidden, hidden),
        "mlp.c_fc": (hidden, inner),
        "mlp.c_proj": (inner, hidden),
    }
    for layer in range(config["n_layer"]):
        for name, shape in linear.items():
            found[f"transformer.h.{layer}.{name}.weight"] = shape
            found[f"transformer.h.{layer}.{name}.bias"] = shape[1:]
    norms = [f"transformer.h.{layer}.{name}" for layer in range(config["n_layer"]) for name in ("ln_1", "ln_2")]
    for name in (*norms, "transformer.ln_f"):
        found |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    if not config.get("tie_word_embeddings", True):
        found["lm_head.weight"] = (vocab, hidden)
    return found


def random_weights(config: Mapping[str, Any], seed: int) -> Weights:
    """Random float32 weights with which there is something to learn: norms around 1, biases around 0, positions below the tokens."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes(config).items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            weights[name] = 0.05 * values
        elif len(shape) == 1:
            weights[name] = 1 + 0.2 * values
        else:
            inputs = shape[0] if ".h." in name else shape[1]
            weights[name] = values / math.sqrt(inputs) * (0.3 if ".wpe." in name else 1.0)
    return weights


def logits(config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [batch, tokens, vocab] of tokens[batch, tokens]."""
    eps, hidden = config["layer_norm_epsilon"], config["n_embd"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, (hidden,), weights[f"{name}.weight"], weights[f"{name}.bias"], eps)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (config["n_head"], -1)).transpose(1, 2)

    x = weights["transformer.wte.weight"][tokens] + weights["transformer.wpe.weight"][: tokens.shape[1]]
    for layer in range(config["n_layer"]):
        at = f"transformer.h.{layer}"
        query, key, value = (
            heads(part) for part in linear(norm(x, f"{at}.ln_1"), f"{at}.attn.c_attn").chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + linear(mixed.transpose(1, 2).flatten(2), f"{at}.attn.c_proj")
        up = linear(norm(x, f"{at}.ln_2"), f"{at}.mlp.c_fc")
        x = x + linear(functional.gelu(up, approximate="tanh"), f"{at}.mlp.c_proj")
    x = norm(x, "transformer.ln_f")
    tied = config.get("tie_word_embeddings", True)
    return functional.linear(x, weights["transformer.wte.weight" if tied else "lm_head.weight"])


def mean_loss(config: Mapping[str, Any], weights: Mapping[str, Tensor], sequences: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of predicting each next token of sequences[batch, tokens + 1]."""
    return cross_entropy(logits(config, weights, sequences[:, :-1]), sequences[:, 1:])
