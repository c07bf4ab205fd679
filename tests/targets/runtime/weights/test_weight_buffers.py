"""Buffers in weight files, which follow from the configuration, and the padding token's row of random weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from safetensors.numpy import save_file

from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.testing.families import in_family
from ratrain.targets.runtime.arena import tensor_file
from ratrain.targets.runtime.weights.weight_buffers import follows_from
from ratrain.targets.runtime.weights.weights import named_parameters, random_weights, read_weights, stored_layout

LLAMA = ModelConfig("tiny", "llama", 96, 32, 2, 4, 4, 8, 40, 1e-5)
BAICHUAN = evolve(LLAMA, family="baichuan", packed_qkv=True, position="alibi", rope_theta=0.0)
GPT2 = in_family(BAICHUAN, "gpt2", learned_positions=9, tied_embeddings=True)
MODELS = {
    "llama": LLAMA,
    "baichuan": BAICHUAN,
    "gpt2": GPT2,
    **{family: in_family(LLAMA, family) for family in ("gpt_neox", "gemma3_text", "internlm2", "phi3", "olmo2")},
}
ROTARY = ("model.layers.1.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.cos_cached")
BUFFERS = {
    "llama": (*ROTARY, "model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"),
    "phi3": ROTARY,
    "olmo2": ROTARY,
    "gpt_neox": (
        *("gpt_neox.layers.0.attention.rotary_emb.inv_freq", "gpt_neox.layers.1.attention.bias"),
        *("gpt_neox.layers.1.attention.masked_bias", "gpt_neox.rotary_emb.inv_freq"),
    ),
    "gemma3_text": (
        *("model.rotary_emb.sliding_attention_inv_freq", "model.rotary_emb_local.inv_freq"),
        "model.embed_tokens.embed_scale",
    ),
    "internlm2": ("model.layers.0.attention.rotary_emb.inv_freq",),
    "baichuan": ("model.future_mask", "model.alibi_mask"),
    "gpt2": ("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias"),
}
UNKNOWN = (
    *("model.layers.2.self_attn.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.weight"),
    *("model.layers.0.self_attn.inv_freq", "model.layers.0.self_attn.bias", "model.embed_tokens.bias"),
    *("transformer.h.2.attn.bias", "gpt_neox.layers.7.attention.bias", "gpt_neox.layers.0.attention.gate"),
)


def all_of(model: ModelConfig) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=held.shape).astype(np.float32) for name, held in stored_layout(model).items()}


@pytest.mark.parametrize("family", MODELS)
def test_buffers_of_a_family_are_passed_over_and_no_other_tensor_is(family: str, tmp_path: Path) -> None:
    model, path = MODELS[family], tmp_path / "w.safetensors"
    tensors, buffers = all_of(model), dict.fromkeys(BUFFERS[family], np.ones(4, np.float64))
    save_file(tensors | buffers, path)
    source = read_weights(str(path), model)
    assert {*named_parameters(model)} == {name for name in named_parameters(model) if source(name).size}
    for other in (*UNKNOWN, *(name for family in MODELS for name in BUFFERS[family] if not follows_from(model, name))):
        save_file(tensors | {other: np.ones(4, np.float32)}, path)
        with pytest.raises(DiagnosticError, match="which is no parameter of"):
            read_weights(str(path), model)


def test_what_one_family_has_is_unknown_in_another() -> None:
    """Masks are of two families, rotary tables of models that rotate, ALiBi's of those with ALiBi."""
    for buffer, families in {
        "transformer.h.0.attn.bias": {"gpt2"},
        "gpt_neox.layers.1.attention.bias": {"gpt_neox"},
        "model.alibi_mask": {"baichuan"},
        "model.embed_tokens.embed_scale": {"gemma3_text"},
        ROTARY[0]: {*MODELS} - {"gpt2", "baichuan"},
    }.items():
        assert {family for family, model in MODELS.items() if follows_from(model, buffer)} == families


@pytest.mark.parametrize("piece", [5, 31, 32, 1000])
@pytest.mark.parametrize("token", [0, 7, -1])
def test_the_padding_tokens_row_starts_as_zeros(token: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of the embedding is asked for, in pieces of any size; all else is as without it."""
    monkeypatch.setattr(tensor_file, "PIECE_ELEMENTS", piece)
    padded, plain = random_weights(evolve(LLAMA, padding_token=token), 3), random_weights(LLAMA, 3)
    table = "model.embed_tokens.weight"
    expected = plain(table).copy()
    assert expected[token].all()
    expected[token] = 0
    np.testing.assert_array_equal(padded(table), expected)
    flat = expected.reshape(-1)
    for start in (0, 100, 7 * 32 + 3, 95 * 32 - 1):
        found = np.concatenate([*padded.pieces(table, start, start + 33)])
        np.testing.assert_array_equal(found, flat[start : start + 33])
    for name in named_parameters(LLAMA):
        if name != table:
            np.testing.assert_array_equal(padded(name), plain(name))
