"""Toy models that tests share: the smallest there is, and one for runs."""

from __future__ import annotations

from attrs import evolve

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.testing.families import in_family

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
GPT2 = in_family(UNEVEN, "gpt2", kv_heads=4, rope_theta=0.0, learned_positions=21, tied_embeddings=True)
"""The same in GPT-2's form: its embedding, with a row for each position, is longer than its head."""
GEMMA3 = in_family(
    UNEVEN,
    "gemma3_text",
    sliding_window=4,
    layer_kinds="wfw",
    local_rope_theta=100.0,
    attention_scale=0.3,
    logit_softcap=3.0,
    embedding_scale=24**0.5,
    rope_scaling="linear 2",
)
"""Norms before and after what a block computes, normed heads, capped logits, layers of two kinds."""
OLMO2 = in_family(UNEVEN, "olmo2", qkv_bias=True, o_bias=True)
"""Norms after what a block computes only, and of whole projections."""
GRANITE = in_family(
    UNEVEN,
    "granite",
    activation="gelu",
    mlp_bias=True,
    embedding_scale=3.0,
    residual_scale=0.5,
    logit_scale=0.25,
    attention_scale=0.2,
)
"""Scaled embeddings, branches, scores and logits."""
NEOX = in_family(UNEVEN, "gpt_neox", kv_heads=4, rotary_dim=4)
"""Attention and MLP side by side, so that what stands between them is a pair; layer norms, biases, a part of each head rotated."""
EXPERTS = in_family(UNEVEN, "olmoe", experts=4, experts_per_token=2, router_normalised=False)
"""A mixture of experts whose weights do not sum to 1; queries and keys normed."""
SHARED_EXPERT = in_family(
    UNEVEN, "qwen2_moe", qkv_bias=True, experts=5, experts_per_token=3, expert_size=20, shared_expert_size=28
)
"""A mixture with an expert that all tokens pass through, by a gate of its own."""
SIX_EXPERTS = evolve(SHARED_EXPERT, experts=6)
"""Has experts that two or three ranks share out evenly, and is the same otherwise."""
SOME_EXPERTS = evolve(SIX_EXPERTS, mlp_kinds="dee")
"""Has a dense MLP in its first layer, and is the same otherwise."""
