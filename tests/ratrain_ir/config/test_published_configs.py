"""The configurations of published models: accepted or refused by name, with the known number of parameters, and written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.model_fields import model_from_fields
from ratrain.ratrain_ir.config.model_files import load_model, parse_config
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig

CONFIGS = Path(__file__).parents[2] / "data" / "configs"

TOTALS = {
    "baichuan2-13b": 13_896_668_160,
    "baichuan2-7b": 7_505_973_248,
    "gemma-2-2b": 2_614_341_888,
    "gemma-3-1b": 999_885_952,
    "gemma-3-270m": 268_098_176,
    "gpt-neox-20b": 20_554_567_680,
    "gpt2": 124_439_808,
    "granite-3.1-1b-a400m": 1_334_625_280,
    "granite-3.1-2b": 2_533_531_648,
    "internlm2-1.8b": 1_889_110_016,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-3-mini-4k": 3_821_079_552,
    "pythia-1.4b": 1_414_647_808,
    "pythia-160m": 162_322_944,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm3-3b": 3_075_098_624,
    "tinyllama-1.1b": 1_100_048_384,
}
"""Parameters as the models' pages give them, tied matrices counted once."""
LONGROPE = "phi-4-mini"


def load(name: str) -> ModelConfig:
    return load_model(str(CONFIGS / f"{name}.json"))


def test_every_file_is_looked_at() -> None:
    assert {path.stem for path in CONFIGS.glob("*.json")} == {*TOTALS, LONGROPE}


@pytest.mark.parametrize("name", TOTALS)
def test_parameters_are_the_published_ones(name: str) -> None:
    model = load(name)
    assert model.parameters == TOTALS[name]
    named = {each.name: each.elements for unit in block_chain(model) for each in parameters(model, unit)}
    assert sum(named.values()) == TOTALS[name]


@pytest.mark.parametrize("name", TOTALS)
def test_what_is_read_is_written_again(name: str) -> None:
    """By fields of a header and by keys of a file; keys of the published file have their values, or are those of storage."""
    model = load(name)
    again = model_from_fields(model.to_fields())
    assert (again, again.inert) == (model, model.inert)
    written = hugging_face_config(model)
    assert parse_config(written, name=name, file="config.json") == model
    given = json.loads((CONFIGS / f"{name}.json").read_text("utf-8"))
    differing = {key for key, value in given.items() if value is not None and written.get(key) != value}
    # said otherwise in what is written: scaling by its newer key, patterns by lists, names of one field by the first of them
    assert differing <= {"torch_dtype", "rope_scaling", "hidden_act", "n_ctx", "layer_types", *_BY_OTHERS.get(name, ())}


_BY_OTHERS = {
    "phi-3-mini-4k": ("attention_bias",),  # false, which its class does not know
    "gemma-3-1b": ("sliding_window_pattern",),
    "smollm3-3b": ("no_rope_layer_interval", "max_window_layers", "use_sliding_window"),
}


def test_longrope_is_refused_by_name() -> None:
    with pytest.raises(DiagnosticError) as caught:
        load(LONGROPE)
    (error,) = caught.value.diagnostics
    assert error.code == "RT061"
    assert "'rope_scaling' asks for \"longrope\" scaling" in error.message


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama-3.1-8b", {"rope_scaling": "llama3 8 1 4 8192", "rope_theta": 5e5, "layer_kinds": ""}),
        ("llama-3.2-1b", {"rope_scaling": "llama3 32 1 4 8192", "tied_embeddings": True}),
        ("mistral-nemo-12b", {"head_dim": 128, "hidden_size": 5120, "sliding_window": None}),
        ("qwen2.5-7b", {"qkv_bias": True, "o_bias": False, "sliding_window": None}),
        ("qwen3-0.6b", {"qk_norm": "head", "head_dim": 128, "qkv_bias": False}),
        (
            "gemma-2-2b",
            {
                "layer_kinds": "wf" * 13,
                "sliding_window": 4096,
                "attention_softcap": 50.0,
                "logit_softcap": 30.0,
                "embedding_scale": 48.0,
                "attention_scale": 1 / 16,
                "norm_placement": "both",
                "norm_unit_offset": True,
                "activation": "gelu-tanh",
                "tied_embeddings": True,
            },
        ),
        (
            "gemma-3-270m",
            {
                "layer_kinds": "wwwwwf" * 3,
                "sliding_window": 512,
                "local_rope_theta": 10000.0,
                "rope_theta": 1e6,
                "attention_softcap": None,
                "qk_norm": "head",
            },
        ),
        ("gemma-3-1b", {"layer_kinds": "wwwwwf" * 4 + "ww"}),
        ("phi-3-mini-4k", {"packed_qkv": True, "sliding_window": 2047, "rotary_dim": None}),
        ("olmo-2-1b", {"norm_placement": "post", "qk_norm": "whole", "norm_eps": 1e-6}),
        (
            "granite-3.1-2b",
            {"attention_scale": 1 / 64, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 1 / 8},
        ),
        ("internlm2-1.8b", {"packed_qkv": True, "rope_scaling": "dynamic 2 32768", "o_bias": False}),
        ("smollm2-135m", {"initializer_range": 1 / 24, "rope_theta": 1e5}),
        (
            "pythia-160m",
            {"parallel_residual": True, "rotary_dim": 16, "activation": "gelu", "o_bias": True, "qkv_bias": True},
        ),
        (
            "mixtral-8x7b",
            {"experts": 8, "experts_per_token": 2, "expert_size": None, "router_normalised": True, "norm_eps": 1e-5},
        ),
        (
            "qwen3-30b-a3b",
            {"experts": 128, "experts_per_token": 8, "expert_size": 768, "router_normalised": True, "head_dim": 128},
        ),
        (
            "qwen1.5-moe-a2.7b",
            {"experts": 60, "shared_expert_size": 5632, "router_normalised": False, "qkv_bias": True, "o_bias": False},
        ),
        ("olmoe-1b-7b", {"experts": 64, "qk_norm": "whole", "router_normalised": False, "norm_eps": 1e-5}),
        ("granite-3.1-1b-a400m", {"experts": 32, "experts_per_token": 8, "logit_scale": 1 / 6, "rope_theta": 1.5e6}),
        ("gpt-neox-20b", {"parallel_residual": True, "rotary_dim": 24, "activation": "gelu-tanh"}),
        ("smollm3-3b", {"layer_kinds": "fffn" * 9, "rope_theta": 5e6}),
    ],
)
def test_what_makes_a_model_of_its_own_kind(name: str, fields: dict[str, object]) -> None:
    model = load(name)
    assert {key: getattr(model, key) for key in fields} == fields
