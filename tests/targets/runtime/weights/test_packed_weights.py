"""Weights that families store packed: the rows of what is in a file, against rows computed apart as the families' own code cuts them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from attrs import evolve
from safetensors.numpy import load_file, save_file

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.targets.runtime.weights.weight_files import write_weights
from ratrain.targets.runtime.weights.weights import named_parameters, random_weights, read_weights, stored_layout

if TYPE_CHECKING:
    from ratrain.targets.runtime.arena.tensor_file import Float32

LLAMA = ModelConfig("tiny", "llama", 96, 32, 2, 4, 2, 6, 40, 1e-5)
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 6, 32, 40
GROUP = HEADS // KV_HEADS


def of(family: str, **changes: object) -> ModelConfig:
    model = evolve(LLAMA, family=family, **{**FAMILY[family].implied, **changes})
    check_model(model)
    return model


def written(model: ModelConfig, folder: Path) -> dict[str, Float32]:
    path = folder / "model.safetensors"
    write_weights(str(path), model, random_weights(model, 3))
    tensors: dict[str, Float32] = load_file(path)
    return tensors


def test_phi3_stacks_queries_keys_values_and_gate_up(tmp_path: Path) -> None:
    model = of("phi3")
    tensors, source = written(model, tmp_path), random_weights(model, 3)
    for layer in range(model.layers):
        at = f"model.layers.{layer}."
        packed = tensors[f"{at}self_attn.qkv_proj.weight"]
        assert packed.shape == ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
        query, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM  # as Phi3Attention.forward cuts its products
        assert np.array_equal(packed[:query], source(f"{at}self_attn.q_proj.weight"))
        assert np.array_equal(packed[query : query + keys], source(f"{at}self_attn.k_proj.weight"))
        assert np.array_equal(packed[query + keys :], source(f"{at}self_attn.v_proj.weight"))
        gate, up = np.split(tensors[f"{at}mlp.gate_up_proj.weight"], 2)
        assert np.array_equal(gate, source(f"{at}mlp.gate_proj.weight"))
        assert np.array_equal(up, source(f"{at}mlp.up_proj.weight"))


@pytest.mark.parametrize("bias", [False, True])
def test_internlm2_has_the_queries_of_a_key_beside_it(tmp_path: Path, *, bias: bool) -> None:
    """Its code takes wqkv as [key-value heads, queries of each + 2, head_dim] rows: the last two are key and value."""
    model = of("internlm2", qkv_bias=bias, o_bias=bias)
    tensors, source = written(model, tmp_path), random_weights(model, 3)
    kinds = ("weight", "bias") if bias else ("weight",)
    if bias:
        drawn = np.random.default_rng(0)
        biased = {name: drawn.standard_normal(held.shape, np.float32) for name, held in stored_layout(model).items()}
        save_file(biased, tmp_path / "biased.safetensors")
        tensors, source = biased, read_weights(str(tmp_path / "biased.safetensors"), model)
    for layer in range(model.layers):
        at = f"model.layers.{layer}.attention."
        for kind in kinds:
            packed = tensors[f"{at}wqkv.{kind}"]
            grouped = packed.reshape(KV_HEADS, GROUP + 2, HEAD_DIM, *packed.shape[1:])
            parts = {"q": grouped[:, :GROUP], "k": grouped[:, GROUP], "v": grouped[:, GROUP + 1]}
            for part, rows in parts.items():
                values = source(f"{at}w{part}.{kind}")
                assert np.array_equal(rows.reshape(values.shape), values), (part, kind)
        assert tensors[f"{at}wo.weight"].shape == (HIDDEN, HEADS * HEAD_DIM)


@pytest.mark.parametrize("family", ["phi3", "internlm2"])
def test_packed_files_round_trip(tmp_path: Path, family: str) -> None:
    model = of(family)
    written(model, tmp_path)
    source, drawn = read_weights(str(tmp_path), model), random_weights(model, 3)
    for name in named_parameters(model):
        assert np.array_equal(source(name), drawn(name)), name
