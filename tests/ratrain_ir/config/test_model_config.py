"""The model front end: parameter counts against the facts, what each key means, and where a config.json is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratrain.ratrain_ir.config.families import FAMILIES
from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.hf_keys import DENSE_LAYERS, DROPOUT, keys_of
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.model_files import load_model, preset_names
from tests.ratrain_ir.config.family_configs import (
    BAICHUAN,
    GEMMA2,
    GEMMA3,
    GPT2,
    GRANITE,
    INTERNLM2,
    LLAMA,
    LLAMA3,
    MISTRAL,
    NEOX,
    OLMO2,
    ORIGINAL,
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    YARN,
    parse,
    refusal,
    without,
)

FACTS = Path(__file__).parents[2] / "data" / "models"
MODELS = sorted(path.stem for path in FACTS.glob("*.json"))


def test_presets_are_the_facts():
    assert preset_names() == MODELS
    assert len(MODELS) == 37


@pytest.mark.parametrize("name", MODELS)
def test_parameter_count(name):
    facts = json.loads((FACTS / f"{name}.json").read_text())
    preset = load_model(name)
    assert preset.parameters == facts["parameters_expected"]
    parts = facts["parameters_breakdown"]
    assert preset.layer_parameters(0) == parts["per_layer"]
    assert preset.embedding_parameters == parts["embedding"] + parts["position_embedding"]
    assert preset.head_parameters == parts["final_norm"] + preset.vocab_size * preset.hidden_size
    assert load_model(str(FACTS / f"{name}.json")) == preset
    check_model(preset)


def test_family_traps():
    assert load_model("qwen2.5-32b").norm_eps == 1e-5
    assert load_model("qwen2.5-32b").qkv_bias
    assert load_model("qwen2.5-32b").sliding_window is None
    assert load_model("qwen2.5-0.5b").tied_embeddings
    assert load_model("mistral-7b-v0.1").sliding_window == 4096
    assert load_model("baichuan2-7b").position == "rope"
    big = load_model("baichuan2-13b")
    assert (big.position, big.rope_theta, big.normalised_head, big.packed_qkv) == ("alibi", 0.0, True, True)
    assert not parse({**BAICHUAN, "vocab_size": 64000}).normalised_head


def test_the_published_gpt2_reads():
    model = parse(GPT2)
    assert model == ModelConfig(
        name="test",
        family="gpt2",
        vocab_size=50257,
        hidden_size=768,
        layers=3,
        heads=12,
        kv_heads=12,
        head_dim=64,
        ffn_size=3072,
        norm_eps=1e-5,
        position="learned",
        rope_theta=0.0,
        qkv_bias=True,
        packed_qkv=True,
        tied_embeddings=True,
        learned_positions=1024,
        norm="layer",
        o_bias=True,
        mlp_bias=True,
        activation="gelu-tanh",
        gated_mlp=False,
    )
    assert parse({**GPT2, "n_layer": 12}).parameters == 124_439_808
    assert {key: model.inert[key] for key in DROPOUT["gpt2"]} == dict.fromkeys(DROPOUT["gpt2"], 0.1)
    written = hugging_face_config(model)
    assert parse(written) == model
    assert {key: written[key] for key in GPT2 if key != "n_ctx"} == without(GPT2, "n_ctx")


def test_a_real_file_reads():
    config = parse(LLAMA)
    assert config == ModelConfig("test", "llama", 256, 64, 3, 4, 2, 16, 176, 1e-5)
    assert (config.q_size, config.kv_size) == (64, 32)


@pytest.mark.parametrize(
    ("data", "field", "value"),
    [
        (without(LLAMA, "num_key_value_heads"), "kv_heads", 4),
        ({**LLAMA, "num_key_value_heads": None}, "kv_heads", 4),
        ({**LLAMA, "head_dim": None}, "head_dim", 16),
        ({**LLAMA, "head_dim": 32}, "head_dim", 32),
        (without(LLAMA, "rms_norm_eps"), "norm_eps", 1e-6),
        (without(LLAMA, "rope_theta"), "rope_theta", 10000.0),
        (without(LLAMA, "model_type"), "family", "llama"),
        (without(LLAMA, "tie_word_embeddings"), "tied_embeddings", False),
        ({**LLAMA, "rope_theta": 500000}, "rope_theta", 500000.0),
        (
            {**without(LLAMA, "rope_theta"), "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            "rope_theta",
            5e5,
        ),
        ({**LLAMA, "rope_scaling": {"type": "default"}}, "rope_theta", 10000.0),
        ({**LLAMA, "layer_types": ["full_attention"] * 3}, "sliding_window", None),
        (without(MISTRAL, "sliding_window"), "sliding_window", 4096),
        ({**MISTRAL, "sliding_window": None}, "sliding_window", None),
        (MISTRAL, "sliding_window", 32),
        (QWEN2, "sliding_window", None),
        (QWEN2, "qkv_bias", True),
        # biases and activations
        ({**LLAMA, "attention_bias": True}, "qkv_bias", True),
        ({**LLAMA, "attention_bias": True}, "o_bias", True),
        ({**LLAMA, "mlp_bias": True}, "mlp_bias", True),
        ({**GRANITE, "mlp_bias": True}, "mlp_bias", True),
        ({**INTERNLM2, "bias": True}, "o_bias", True),
        (QWEN2, "o_bias", False),
        ({**LLAMA, "hidden_act": "gelu"}, "activation", "gelu"),
        ({**LLAMA, "hidden_act": "gelu_new"}, "activation", "gelu-tanh"),
        ({**LLAMA, "hidden_act": "swish"}, "activation", "silu"),
        ({**LLAMA, "hidden_act": None}, "activation", "silu"),
        (GEMMA2, "activation", "gelu-tanh"),  # its class does not read hidden_act
        ({**GEMMA2, "hidden_activation": "gelu"}, "activation", "gelu"),
        ({**GPT2, "activation_function": "gelu"}, "activation", "gelu"),
        ({**GPT2, "activation_function": "relu2"}, "activation", "relu2"),
        (NEOX, "activation", "gelu"),
        ({**NEOX, "hidden_act": "gelu_fast"}, "activation", "gelu-tanh"),
        (NEOX, "qkv_bias", True),
        (NEOX, "o_bias", True),
        ({**NEOX, "attention_bias": False}, "o_bias", False),
        ({**NEOX, "attention_bias": False}, "qkv_bias", False),
        # scales and caps
        (GEMMA2, "attention_softcap", 50.0),
        ({**GEMMA2, "attn_logit_softcapping": None}, "attention_softcap", None),
        ({**GEMMA2, "final_logit_softcapping": None}, "logit_softcap", None),
        ({**GEMMA2, "final_logit_softcapping": 20}, "logit_softcap", 20.0),
        (GEMMA3, "logit_softcap", None),
        ({**GEMMA2, "query_pre_attn_scalar": 16}, "attention_scale", 0.25),
        (GEMMA2, "attention_scale", 1 / 16),
        (GEMMA2, "embedding_scale", 8.0),
        (GRANITE, "attention_scale", 0.25),
        ({**GRANITE, "embedding_multiplier": 12}, "embedding_scale", 12.0),
        ({**GRANITE, "residual_multiplier": 0.22}, "residual_scale", 0.22),
        ({**GRANITE, "logits_scaling": 8}, "logit_scale", 0.125),
        ({**GRANITE, "attention_dropout": 0.1}, "family", "granite"),
        # layers
        (GEMMA2, "layer_kinds", "wfw"),
        ({**GEMMA2, "layer_types": ["full_attention"] * 3}, "sliding_window", None),
        ({**GEMMA2, "layer_types": ["sliding_attention"] * 3}, "layer_kinds", ""),
        (GEMMA3, "layer_kinds", ""),
        (GEMMA3, "sliding_window", 32),
        ({**GEMMA3, "sliding_window_pattern": 2}, "layer_kinds", "wfw"),
        ({**GEMMA3, "sliding_window_pattern": 1, "sliding_window": None}, "local_rope_theta", None),
        (SMOLLM3, "layer_kinds", "fffnf"),
        ({**SMOLLM3, "no_rope_layers": [0, 1, 1, 1, 1], "no_rope_layer_interval": 2}, "layer_kinds", "nffff"),
        ({**SMOLLM3, "no_rope_layers": [1] * 5}, "layer_kinds", ""),
        ({**SMOLLM3, "no_rope_layer_interval": 2}, "layer_kinds", "fnfnf"),
        ({**SMOLLM3, "sliding_window": 8, "use_sliding_window": False}, "sliding_window", None),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, "layer_kinds", "fww"),
        ({**QWEN3, "use_sliding_window": True, "sliding_window": None}, "sliding_window", None),
        ({**PHI3, "sliding_window": 16}, "sliding_window", 16),
        # positions
        ({**LLAMA, "rope_scaling": LLAMA3}, "rope_scaling", "llama3 8 1 4 8192"),
        ({**LLAMA, "rope_scaling": without(LLAMA3, ORIGINAL)}, "rope_scaling", "llama3 8 1 4 2048"),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling", "linear 2"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling", "dynamic 2 2048"),
        ({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 1.0}}, "rope_scaling", "yarn 1 32 1 2048 1 1"),
        (
            {**LLAMA, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
            "rope_scaling",
            "yarn 4 32 1 64 1 1",
        ),
        ({**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.5}}, "rope_scaling", "yarn 4 32 1 64 1.5 1"),
        (
            {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1, "beta_fast": 8, "truncate": False}},
            "rope_scaling",
            "yarn 4 8 1 64 1 0",
        ),
        ({**without(LLAMA, "rope_theta"), "rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, "rope_theta", 5e5),
        ({**LLAMA, "rope_parameters": LLAMA3}, "rope_scaling", "llama3 8 1 4 8192"),
        ({**PHI3, "partial_rotary_factor": 0.5}, "rotary_dim", 8),
        ({**PHI3, "partial_rotary_factor": 1.0}, "rotary_dim", None),
        ({**PHI3, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}, "rotary_dim", 12),
        (GEMMA3, "rope_theta", 1e6),
        (GEMMA3, "local_rope_theta", 10000.0),
        ({**GEMMA3, "rope_local_base_freq": 500}, "local_rope_theta", 500.0),
        ({**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_theta": 500.0}}}, "local_rope_theta", 500.0),
        ({**GEMMA3, "rope_parameters": {"full_attention": {"rope_theta": 500.0}}}, "rope_theta", 500.0),
        (without(SMOLLM3, "rope_theta"), "rope_theta", 2e6),
        (NEOX, "rotary_dim", 4),
        ({**NEOX, "rotary_pct": 1.0}, "rotary_dim", None),
        ({**NEOX, "rotary_pct": 0.5, "partial_rotary_factor": 0.5}, "rotary_dim", 8),
        ({**without(NEOX, "rotary_pct"), "rope_parameters": {"partial_rotary_factor": 0.5}}, "rotary_dim", 8),
        ({**NEOX, "rotary_emb_base": 500}, "rope_theta", 500.0),
        ({**NEOX, "rope_scaling": YARN}, "rope_scaling", "yarn 4 32 1 64 1.138629436111989 1"),
        # what classes assume
        (NEOX, "parallel_residual", True),
        (without(NEOX, "use_parallel_residual"), "parallel_residual", True),
        ({**NEOX, "use_parallel_residual": False}, "parallel_residual", False),
        (without(NEOX, "rotary_pct"), "rotary_dim", 4),
        (without(NEOX, "rotary_emb_base"), "rope_theta", 10000.0),
        (without(NEOX, "layer_norm_eps"), "norm_eps", 1e-5),
        (without(QWEN3, "head_dim"), "head_dim", 128),
        (without(GEMMA2, "head_dim"), "head_dim", 256),
        (without(GEMMA2, "tie_word_embeddings"), "tied_embeddings", True),
        (without(SMOLLM3, "tie_word_embeddings"), "tied_embeddings", True),
        (without(OLMO2, "rms_norm_eps"), "norm_eps", 1e-5),
        (without(PHI3, "rms_norm_eps"), "norm_eps", 1e-5),
        ({**LLAMA, "initializer_range": 0.5}, "initializer_range", 0.5),
        ({**QWEN2, "use_sliding_window": True}, "sliding_window", None),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 0}, "sliding_window", 32),
        ({**QWEN2, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3}, "sliding_window", 32),
        ({**QWEN2, "use_sliding_window": True, "layer_types": ["full_attention"] * 3}, "sliding_window", None),
        ({**BAICHUAN, "vocab_size": 300, "normalised_head": False}, "normalised_head", False),
        ({**BAICHUAN, "position_embedding": "alibi"}, "position", "alibi"),
        ({**BAICHUAN, "position_embedding": "alibi"}, "rope_theta", 0.0),
        ({**GPT2, "n_inner": None}, "ffn_size", 3072),
        ({**GPT2, "n_inner": 1000}, "ffn_size", 1000),
        ({**GPT2, "tie_word_embeddings": False}, "tied_embeddings", False),
        (without(GPT2, "layer_norm_epsilon"), "norm_eps", 1e-5),
        ({**GPT2, "activation_function": "gelu_pytorch_tanh"}, "family", "gpt2"),
        (without(GPT2, "activation_function", "model_type", "n_ctx"), "learned_positions", 1024),
        ({**without(GPT2, "n_embd", "n_head"), "hidden_size": 64, "num_attention_heads": 2}, "head_dim", 32),
    ],
)
def test_meaning_of_a_key(data, field, value):
    got = getattr(parse(data), field)
    assert got == value
    assert type(got) is type(value)


def test_key_tables_do_not_overlap():
    for family in FAMILIES:
        known = keys_of(family)
        assert not known.read & known.harmless
        assert known.read & known.neutral.keys() <= {*DENSE_LAYERS}  # without effect where they name no layer
        assert not known.harmless & known.neutral.keys()


def test_file_and_directory(tmp_path):
    (tmp_path / "My model!").mkdir()
    path = tmp_path / "My model!" / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert load_model(str(path)).name == "My-model"
    assert load_model(str(path.parent)) == load_model(str(path))
    other = path.rename(path.with_name("small.json"))
    assert load_model(str(other)).name == "small"
    (error,) = refusal(load_model, str(path.parent))
    assert error.code == "RT002"
    assert "holds no config.json" in error.message
