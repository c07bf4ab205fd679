"""Tiny models of several families, their tensors as Hugging Face names and shapes them, and what a refusal says."""

from __future__ import annotations

import numpy as np
import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family

LLAMA = ModelConfig("tiny", "llama", 96, 32, 2, 4, 2, 8, 40, 1e-5)
QWEN2 = evolve(LLAMA, family="qwen2", qkv_bias=True, tied_embeddings=True)
BAICHUAN = evolve(LLAMA, family="baichuan", kv_heads=4, packed_qkv=True, position="alibi", rope_theta=0.0)
MISTRAL = evolve(LLAMA, family="mistral", sliding_window=16, head_dim=6)
GPT2 = in_family(BAICHUAN, "gpt2", learned_positions=9, tied_embeddings=True)
MODELS = {model.family: model for model in (LLAMA, QWEN2, BAICHUAN, MISTRAL, GPT2)}


def refusal(action, *arguments, **options) -> list:
    with pytest.raises(DiagnosticError) as caught:
        action(*arguments, **options)
    return caught.value.diagnostics


def hugging_face(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """The tensors as model classes of Hugging Face name and shape them, written down apart from the product's tables."""
    if model.family == "gpt2":
        return hugging_face_gpt2(model, seed)
    rng = np.random.default_rng(seed)
    q, kv, hidden, ffn = model.heads * model.head_dim, model.kv_heads * model.head_dim, 32, 40

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    tensors = {"model.embed_tokens.weight": draw(96, hidden), "model.norm.weight": draw(hidden)}
    if not model.tied_embeddings:
        tensors["lm_head.weight"] = draw(96, hidden)
    for layer in range(2):
        at = f"model.layers.{layer}."
        tensors[f"{at}input_layernorm.weight"] = draw(hidden)
        tensors[f"{at}post_attention_layernorm.weight"] = draw(hidden)
        if model.family == "baichuan":
            tensors[f"{at}self_attn.W_pack.weight"] = draw(3 * hidden, hidden)
        else:
            for part, width in (("q", q), ("k", kv), ("v", kv)):
                tensors[f"{at}self_attn.{part}_proj.weight"] = draw(width, hidden)
                if model.family == "qwen2":
                    tensors[f"{at}self_attn.{part}_proj.bias"] = draw(width)
        tensors[f"{at}self_attn.o_proj.weight"] = draw(hidden, q)
        tensors[f"{at}mlp.gate_proj.weight"] = draw(ffn, hidden)
        tensors[f"{at}mlp.up_proj.weight"] = draw(ffn, hidden)
        tensors[f"{at}mlp.down_proj.weight"] = draw(hidden, ffn)
    return tensors


def hugging_face_gpt2(model: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Those of `GPT2LMHeadModel`; its `Conv1D` has weights of [inputs, outputs]."""
    rng = np.random.default_rng(seed)
    shapes = {"transformer.wte.weight": (96, 32), "transformer.wpe.weight": (9, 32)}
    for layer in range(2):
        at = f"transformer.h.{layer}."
        for name, inputs, outputs in (
            ("attn.c_attn", 32, 96),
            ("attn.c_proj", 32, 32),
            ("mlp.c_fc", 32, 40),
            ("mlp.c_proj", 40, 32),
        ):
            shapes |= {f"{at}{name}.weight": (inputs, outputs), f"{at}{name}.bias": (outputs,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{at}{name}.weight": (32,), f"{at}{name}.bias": (32,)}
    shapes |= {"transformer.ln_f.weight": (32,), "transformer.ln_f.bias": (32,)}
    if not model.tied_embeddings:
        shapes["lm_head.weight"] = (96, 32)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
