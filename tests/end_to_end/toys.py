"""Toy models that tests share: the smallest there is, and one for runs."""

from __future__ import annotations

from attrs import evolve

from ratrain.ratrain_ir.frontend.model_config import ModelConfig

TOY = ModelConfig(
    name="toy",
    family="llama",
    vocab_size=64,
    hidden_size=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ffn_size=8,
    norm_eps=1e-5,
)
UNEVEN = evolve(TOY, vocab_size=61, hidden_size=24, layers=3, heads=4, kv_heads=2, head_dim=6, ffn_size=40)
"""No width is a multiple of 64, so that padding is everywhere."""
GPT2 = evolve(
    UNEVEN,
    family="gpt2",
    kv_heads=4,
    position="learned",
    rope_theta=0.0,
    learned_positions=21,
    qkv_bias=True,
    packed_qkv=True,
    tied_embeddings=True,
)
"""The same in GPT-2's form: its embedding, with a row for each position, is longer than its head."""
