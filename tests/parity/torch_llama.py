"""Causal language models of the LLaMA kind in plain PyTorch: what training is compared with.

Eager float32 on whole batches, one function a formula, gradients by autograd. Nothing here comes from the project: a
model is described by the keys of a Hugging Face `config.json`, and weights go by their Hugging Face names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Shape:
    """The keys of a `config.json` that change the mathematics, with the defaults of the model classes."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    eps: float
    theta: float
    window: int | None
    """Tokens that a token sees, itself included."""
    alibi: bool
    qkv_bias: bool
    packed: bool
    """Query, key and value are one matrix `W_pack`."""
    tied: bool
    normalised_head: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """The shape a config describes."""
        family, heads = config["model_type"], config["num_attention_heads"]
        windowed = family == "mistral" or config.get("use_sliding_window", False)
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim", config["hidden_size"] // heads),
            ffn=config["intermediate_size"],
            eps=config["rms_norm_eps"],
            theta=config.get("rope_theta", 10000.0),
            window=config["sliding_window"] if windowed else None,
            alibi=config.get("position_embedding") == "alibi",
            qkv_bias=family == "qwen2",
            packed=family == "baichuan",
            tied=config.get("tie_word_embeddings", False),
            normalised_head=config.get("normalised_head", False),
        )

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters by Hugging Face name; a tied matrix stands once, as the embedding."""
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            found[f"{prefix}.input_layernorm.weight"] = (self.hidden,)
            if self.packed:
                found[f"{prefix}.self_attn.W_pack.weight"] = (q_size + 2 * kv_size, self.hidden)
            else:
                for name, size in (("q", q_size), ("k", kv_size), ("v", kv_size)):
                    found[f"{prefix}.self_attn.{name}_proj.weight"] = (size, self.hidden)
                    if self.qkv_bias:
                        found[f"{prefix}.self_attn.{name}_proj.bias"] = (size,)
            found[f"{prefix}.self_attn.o_proj.weight"] = (self.hidden, q_size)
            found[f"{prefix}.post_attention_layernorm.weight"] = (self.hidden,)
            found[f"{prefix}.mlp.gate_proj.weight"] = (self.ffn, self.hidden)
            found[f"{prefix}.mlp.up_proj.weight"] = (self.ffn, self.hidden)
            found[f"{prefix}.mlp.down_proj.weight"] = (self.hidden, self.ffn)
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, self.hidden)
        return found


@dataclass(frozen=True)
class AdamW:
    """Settings of the optimizer; the learning rate rises over `warmup_steps` and stays at `lr`."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    """Of matrices, the embedding and the head among them; norms and biases do not decay."""
    warmup_steps: int

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.lr * min(1.0, (step + 1) / max(1, self.warmup_steps))


def random_weights(config: Mapping[str, Any], seed: int) -> Weights:
    """Random float32 weights, large enough that every part of the model matters to the loss.

    Matrices keep the variance of what they multiply; norms are spread around 1, biases around 0.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in Shape.of(config).parameters().items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.2 * values
        elif name.endswith("bias"):
            weights[name] = 0.5 * values
        else:
            weights[name] = values / math.sqrt(shape[1])
    return weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of the last dimension (Zhang and Sennrich, 2019)."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, theta: float) -> Tensor:
    """Rotary embedding (Su et al., 2021) of x[..., tokens, head_dim]: element i is paired with i + head_dim / 2."""
    tokens, size = x.shape[-2:]
    frequency = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(tokens, dtype=torch.float32), frequency)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def alibi_slopes(heads: int) -> list[float]:
    """Slopes of the heads (Press et al., 2021): a geometric sequence.

    Where their number is no power of two, every second one of the next longer sequence completes the shorter one.
    """
    below = 2 ** int(math.log2(heads))

    def sequence(count: int) -> list[float]:
        return [2 ** (-8 * (i + 1) / count) for i in range(count)]

    return sequence(below) + sequence(2 * below)[0::2][: heads - below]


def score_bias(shape: Shape, tokens: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores [heads, queries, keys]: ALiBi, and minus infinity where a key is not seen."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    hidden = distance < 0
    if shape.window is not None:
        hidden |= distance >= shape.window
    slopes = torch.tensor(alibi_slopes(shape.heads) if shape.alibi else [0.0] * shape.heads, dtype=dtype)
    return (-slopes[:, None, None] * distance).masked_fill(hidden, -math.inf)


def qkv(x: Tensor, weights: Mapping[str, Tensor], prefix: str, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [batch, heads, tokens, head_dim] of x[batch, tokens, hidden]; keys of all query heads."""
    if shape.packed:
        parts = functional.linear(x, weights[f"{prefix}.W_pack.weight"]).chunk(3, dim=-1)
    else:
        parts = tuple(
            functional.linear(x, weights[f"{prefix}.{name}_proj.weight"], weights.get(f"{prefix}.{name}_proj.bias"))
            for name in "qkv"
        )
    query, key, value = (part.reshape(*part.shape[:-1], -1, shape.head_dim).transpose(1, 2) for part in parts)
    if not shape.alibi:
        query, key = rotated(query, shape.theta), rotated(key, shape.theta)
    group = shape.heads // shape.kv_heads
    return query, key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)


def attention(x: Tensor, weights: Mapping[str, Tensor], prefix: str, shape: Shape) -> Tensor:
    """Causal attention of x[batch, tokens, hidden], with its output projection."""
    query, key, value = qkv(x, weights, prefix, shape)
    scores = query @ key.transpose(-1, -2) / math.sqrt(shape.head_dim)
    mixed = (scores + score_bias(shape, x.shape[1], x.dtype)).softmax(dim=-1) @ value
    return functional.linear(mixed.transpose(1, 2).flatten(2), weights[f"{prefix}.o_proj.weight"])


def mlp(x: Tensor, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    """Gated MLP with SiLU (Shazeer, 2020)."""
    gate = functional.linear(x, weights[f"{prefix}.gate_proj.weight"])
    up = functional.linear(x, weights[f"{prefix}.up_proj.weight"])
    return functional.linear(functional.silu(gate) * up, weights[f"{prefix}.down_proj.weight"])


def logits(config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits [batch, tokens, vocab] of tokens[batch, tokens]."""
    shape = Shape.of(config)
    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], shape.eps)
        x = x + attention(normed, weights, f"{prefix}.self_attn", shape)
        normed = rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], shape.eps)
        x = x + mlp(normed, weights, f"{prefix}.mlp")
    x = rms_norm(x, weights["model.norm.weight"], shape.eps)
    table = weights["model.embed_tokens.weight" if shape.tied else "lm_head.weight"]
    return functional.linear(x, functional.normalize(table) if shape.normalised_head else table)


def mean_loss(config: Mapping[str, Any], weights: Mapping[str, Tensor], sequences: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of predicting each next token of sequences[batch, tokens + 1]."""
    return cross_entropy(logits(config, weights, sequences[:, :-1]), sequences[:, 1:])


def cross_entropy(predicted: Tensor, labels: Tensor) -> Tensor:
    """Its mean over labels[batch, tokens], in nats; of logits in 16 bits, in float32."""
    wide = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
    return functional.cross_entropy(wide.flatten(0, 1), labels.flatten())


def train(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokens: Sequence[int],
    *,
    seq_len: int,
    global_batch: int,
    steps: int,
    optimizer: AdamW,
    dtype: torch.dtype = torch.float32,
    views: torch.dtype | None = None,
    loss_of: Callable[[Mapping[str, Any], Mapping[str, Tensor], Tensor], Tensor] = mean_loss,
) -> tuple[list[float], Weights]:
    """Train in sequential order: the loss of each step before its update, and the gradients of the first step.

    Step k trains on the sequences k * global_batch and following; sequence i is tokens[i * seq_len :][:seq_len], its
    targets one later. Parameters and moments are of `dtype`; blocks compute with copies of them in `views`, where that is given.
    """
    parameters = {name: value.detach().clone().to(dtype).requires_grad_() for name, value in weights.items()}
    groups = [
        {"params": [p for p in parameters.values() if p.ndim == 2], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps)
    data = torch.tensor(tokens, dtype=torch.int64)
    losses, first = [], {}
    for step in range(steps):
        starts = [(step * global_batch + row) * seq_len for row in range(global_batch)]
        batch = torch.stack([data[start : start + seq_len + 1] for start in starts])
        for group in adamw.param_groups:
            group["lr"] = optimizer.learning_rate(step)
        adamw.zero_grad()
        read = parameters if views is None else {name: value.to(views) for name, value in parameters.items()}
        loss = loss_of(config, read, batch)
        torch.autograd.backward(loss)
        if step == 0:
            first = {name: value.grad.clone() for name, value in parameters.items() if value.grad is not None}
        adamw.step()
        losses.append(loss.item())
    return losses, first
