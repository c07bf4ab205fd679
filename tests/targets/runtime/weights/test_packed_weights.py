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
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
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


EXPERTS, WIDTH = 3, 20
FEW = {"experts": EXPERTS, "experts_per_token": 2}
SIZED = {**FEW, "expert_size": WIDTH}
CHOSEN: dict[str, dict[str, object]] = {
    "phi3": {},
    "internlm2": {},
    "mixtral": FEW,
    "qwen2_moe": {**SIZED, "shared_expert_size": 12},
    "qwen3_moe": SIZED,
    "olmoe": {**FEW, "head_dim": 8},
    "granitemoe": {**FEW, "attention_scale": 0.25},
}


@pytest.mark.parametrize(
    ("family", "router", "names"),
    [
        ("mixtral", "block_sparse_moe.gate", {part: f"w{n}" for part, n in (("gate", 1), ("up", 3), ("down", 2))}),
        *(
            (family, "mlp.gate", {part: f"{part}_proj" for part in ("gate", "up", "down")})
            for family in CHOSEN
            if family in ("qwen2_moe", "qwen3_moe", "olmoe")
        ),
    ],
)
def test_files_have_the_matrices_of_each_expert(
    tmp_path: Path, family: str, router: str, names: dict[str, str]
) -> None:
    model = of(family, **CHOSEN[family])
    tensors, source = written(model, tmp_path), random_weights(model, 3)
    width, block = model.expert_size or FFN, router.partition(".")[0]
    for layer in range(model.layers):
        at = f"model.layers.{layer}"
        assert tensors[f"{at}.{router}.weight"].shape == (EXPERTS, HIDDEN)
        for part, name in names.items():
            stack = source(f"{at}.{block}.experts.{name}.weight")
            assert stack.shape == ((EXPERTS, HIDDEN, width) if part == "down" else (EXPERTS, width, HIDDEN))
            for expert in range(EXPERTS):
                assert np.array_equal(tensors[f"{at}.{block}.experts.{expert}.{name}.weight"], stack[expert])
    assert sum(".experts." in name for name in tensors) == model.layers * EXPERTS * 3
    assert any("shared_expert" in name for name in tensors) == (family == "qwen2_moe")


def test_granitemoe_stacks_gate_and_up_of_each_expert(tmp_path: Path) -> None:
    model = of("granitemoe", **CHOSEN["granitemoe"])
    tensors, source = written(model, tmp_path), random_weights(model, 3)
    for layer in range(model.layers):
        at = f"model.layers.{layer}.block_sparse_moe"
        gate, up = np.split(tensors[f"{at}.input_linear.weight"], 2, axis=1)
        assert gate.shape == (EXPERTS, FFN, HIDDEN)
        assert np.array_equal(gate, source(f"{at}.experts.gate_proj.weight"))
        assert np.array_equal(up, source(f"{at}.experts.up_proj.weight"))
        assert np.array_equal(tensors[f"{at}.output_linear.weight"], source(f"{at}.output_linear.weight"))
        assert tensors[f"{at}.output_linear.weight"].shape == (EXPERTS, HIDDEN, FFN)
        assert tensors[f"{at}.router.layer.weight"].shape == (EXPERTS, HIDDEN)


@pytest.mark.parametrize("family", CHOSEN)
def test_packed_files_round_trip(tmp_path: Path, family: str) -> None:
    model = of(family, **CHOSEN[family])
    written(model, tmp_path)
    source, drawn = read_weights(str(tmp_path), model), random_weights(model, 3)
    for name, parameter in named_parameters(model).items():
        values = drawn(name)
        assert np.array_equal(source(name), values), name
        for start, stop in ((0, 1), (parameter.elements // 3 - 7, parameter.elements // 2 + 5), (5, 5)):
            first, last = max(0, start), min(stop, parameter.elements)
            some = np.concatenate([np.empty(0, np.float32), *source.pieces(name, first, last)])
            assert np.array_equal(some, values.reshape(-1)[first:last]), name


@pytest.mark.parametrize("family", ["mixtral", "granitemoe"])
def test_a_stack_is_asked_for_once(tmp_path: Path, family: str) -> None:
    model = of(family, **CHOSEN[family])
    source, asked = random_weights(model, 3), []

    def asking(name: str) -> Float32:
        asked.append(name)
        return source(name)

    write_weights(str(tmp_path / "model.safetensors"), model, asking)
    assert sorted(asked) == sorted(named_parameters(model))


def test_experts_that_are_missing_or_too_many_are_refused_by_name(tmp_path: Path) -> None:
    model = of("qwen3_moe", **CHOSEN["qwen3_moe"])
    tensors = written(model, tmp_path)
    more = tensors | {
        "model.layers.0.mlp.experts.3.up_proj.weight": tensors["model.layers.0.mlp.experts.2.up_proj.weight"]
    }
    del more["model.layers.1.mlp.experts.0.down_proj.weight"]
    save_file(more, tmp_path / "model.safetensors")
    with pytest.raises(DiagnosticError) as caught:
        read_weights(str(tmp_path), model)
    missing, unexpected = (item.message for item in caught.value.diagnostics)
    assert 'lacks "model.layers.1.mlp.experts.0.down_proj.weight", shape [32, 20]' in missing
    assert 'has "model.layers.0.mlp.experts.3.up_proj.weight", shape [20, 32], which is no parameter' in unexpected
