"""A training step of a LLaMA in PyTorch, as its users write it: fused attention, norm and AdamW, eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Optimizer


class Layer(nn.Module):
    """One transformer layer."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = model
        kv_size = model.kv_heads * model.head_dim
        self.norm1 = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.q = nn.Linear(model.hidden_size, model.heads * model.head_dim, bias=False)
        self.k = nn.Linear(model.hidden_size, kv_size, bias=False)
        self.v = nn.Linear(model.hidden_size, kv_size, bias=False)
        self.o = nn.Linear(model.heads * model.head_dim, model.hidden_size, bias=False)
        self.norm2 = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.gate = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            part.unflatten(-1, (-1, self.model.head_dim)).transpose(1, 2)
            for part in (self.q(normed), self.k(normed), self.v(normed))
        )
        mixed = functional.scaled_dot_product_attention(
            _rotated(q, cos, sin), _rotated(k, cos, sin), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        normed = self.norm2(x)
        added: Tensor = self.down(functional.silu(self.gate(normed)) * self.up(normed))
        return x + added


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Llama(nn.Module):
    """The whole model; `forward` gives the mean loss of predicting each next token."""

    def __init__(self, model: ModelConfig, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        frequency = 1.0 / model.rope_theta ** (torch.arange(0, model.head_dim, 2) / model.head_dim)
        angle = torch.outer(torch.arange(seq_len), frequency)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def names(model: ModelConfig) -> dict[str, str]:
    """Each parameter's Hugging Face name."""
    renamed = {
        "embed.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    parts = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    parts |= {part: f"self_attn.{part}_proj" for part in "qkvo"}
    parts |= {part: f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    for layer in range(model.layers):
        for ours, theirs in parts.items():
            renamed[f"layers.{layer}.{ours}.weight"] = f"model.layers.{layer}.{theirs}.weight"
    return renamed


def make_step(
    model: ModelConfig,
    optimizer: Optimizer,
    seq_len: int,
    dtype: torch.dtype,
    weights: dict[str, Any],
    batches: Callable[[int], tuple[Any, Any]],
    *,
    device: str = "cpu",
    products: torch.dtype | None = None,
    compiled: bool = False,
) -> Callable[[], float]:
    """A function that makes one step and returns its loss; parameters, gradients and moments are of `dtype`.

    `weights` are numpy arrays by Hugging Face name, `batches` gives tokens and labels [sequences, seq_len] of a step. With `products`
    autocast multiplies in that type; with `compiled` the model goes through torch.compile.
    """
    llama = Llama(model, seq_len)
    with torch.no_grad():
        for ours, theirs in names(model).items():
            llama.get_parameter(ours).copy_(torch.from_numpy(weights[theirs]))
    return step_of(llama, optimizer, dtype, batches, device=device, products=products, compiled=compiled)


def step_of(
    network: nn.Module,
    optimizer: Optimizer,
    dtype: torch.dtype,
    batches: Callable[[int], tuple[Any, Any]],
    *,
    device: str = "cpu",
    products: torch.dtype | None = None,
    compiled: bool = False,
) -> Callable[[], float]:
    """Return the step of a network whose `forward` takes tokens and labels, and gives the loss."""
    network.to(dtype).to(device)
    decayed = [p for p in network.parameters() if p.ndim >= 2]
    others = [p for p in network.parameters() if p.ndim == 1]
    adamw = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": optimizer.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=optimizer.lr,
        betas=optimizer.betas,
        eps=optimizer.eps,
        fused=True,
    )
    done = 0
    forward = torch.compile(network) if compiled else network

    def step() -> float:
        nonlocal done
        tokens, labels = (torch.from_numpy(part).long().to(device) for part in batches(done))
        for group in adamw.param_groups:
            group["lr"] = optimizer.learning_rate(done)
        adamw.zero_grad()
        with torch.autocast(torch.device(device).type, products, enabled=products is not None):
            loss = forward(tokens, labels)
        loss.backward()
        adamw.step()
        done += 1
        return float(loss.item())

    return step
