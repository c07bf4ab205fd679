"""The fields of a model: there and back as a header's text and as a `config.json`, and everything they can get wrong."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.families import FAMILIES, FAMILY
from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_fields import model_from_fields
from ratrain.ratrain_ir.model.blocks import block_chain, parameters
from ratrain.ratrain_ir.testing.strategies import family_choices
from tests.ratrain_ir.config.family_configs import (
    GEMMA2,
    GEMMA3,
    GPT2,
    GRANITE,
    INTERNLM2,
    LLAMA,
    NEOX,
    OLMO2,
    PHI3,
    SMOLLM3,
    parse,
    refusal,
    without,
)


@st.composite
def configs(draw) -> ModelConfig:
    family = draw(st.sampled_from(FAMILIES))
    whole = FAMILY[family].equal_widths
    kv_heads = draw(st.integers(1, 8))
    heads = kv_heads if whole else kv_heads * draw(st.integers(1, 8))
    head_dim = 2 * draw(st.integers(1, 64))
    fixed = whole or FAMILY[family].normed_widths
    hidden_size, layers = heads * head_dim if fixed else draw(st.integers(1, 9000)), draw(st.integers(1, 100))
    chosen = draw(family_choices(family, layers=layers, head_dim=head_dim, hidden_size=hidden_size))
    rotates = chosen.get("position", "rope") == "rope"
    sizes = {
        "name": draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)),
        "vocab_size": draw(st.integers(2, 200_000)),
        "ffn_size": draw(st.integers(1, 30_000)),
        "norm_eps": draw(st.floats(1e-12, 0.5)),
        "rope_theta": draw(st.floats(2, 1e9)) if rotates else 0.0,
        "tied_embeddings": not chosen.get("normalised_head") and draw(st.booleans()),
        "initializer_range": draw(st.floats(1e-4, 1.0)),
    }
    return ModelConfig(
        family=family,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        **sizes,
        **chosen,
    )


@settings(max_examples=150, deadline=None, derandomize=True)
@given(configs())
def test_fields_and_keys_round_trip(config):
    assert model_from_fields(config.to_fields()) == config
    assert evolve(parse(hugging_face_config(config)), name=config.name) == config
    named = {each.name: each.elements for unit in block_chain(config) for each in parameters(config, unit)}
    assert config.parameters == sum(named.values())


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"layers": 0}, "'layers' is 0"),
        ({"layers": "3"}, "'layers' is \"3\""),
        ({"family": "lama"}, "'family' is \"lama\""),
        ({"name": "a b"}, "'name' is \"a b\""),
        ({"name": None}, "'name' is null"),
        ({"kv_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "7 is odd"),
        ({"qkv_bias": True}, "all of attention has biases or none of it"),
        ({"packed_qkv": True}, "always in baichuan"),
        ({"sliding_window": 8}, "by choice in mistral, qwen2, qwen3"),
        ({"normalised_head": True}, "by choice in baichuan, else never"),
        ({"position": "alibi", "rope_theta": 0.0}, "always in gpt2, by choice in baichuan, else never"),
        ({"position": "alibi"}, "ALiBi rotates nothing"),
        ({"position": "learned", "rope_theta": 0.0, "learned_positions": 8}, "always in gpt2, by choice in baichuan"),
        ({"position": "sinusoidal"}, "'position' is \"sinusoidal\""),
        ({"learned_positions": 8}, "by choice in gpt2, else never"),
        ({"position": "learned"}, "'learned_positions' is missing"),
        ({"rope_theta": 0.0}, "'rope_theta' is 0.0"),
        ({"layer": 3}, '"layer" is not a known field'),
        ({"qk_norm": "head"}, "always in qwen3, gemma3_text, olmo2, qwen3_moe and olmoe, else never"),
        ({"parallel_residual": True}, "by choice in gpt_neox, else never"),
        ({"norm_placement": "post"}, "contradicts family 'llama'"),
        ({"norm": "batch"}, "'norm' is \"batch\""),
        ({"attention_softcap": 0.0}, "'attention_softcap' is 0.0"),
        ({"attention_softcap": 5.0}, "by choice in gemma2, else never"),
        ({"activation": "relu2"}, "an MLP with a gate and with the activation relu2"),
        ({"rotary_dim": 3}, "an even number below the head dimension 16"),
        ({"rotary_dim": 16}, "an even number below the head dimension 16"),
        ({"rope_scaling": "llama3 8 4 1 8192"}, "a scaling of a rotary embedding"),
        ({"rope_scaling": "linear 2.0"}, "a scaling of a rotary embedding"),
        ({"rope_scaling": 2}, "'rope_scaling' is 2"),
        ({"layer_kinds": "ff"}, "a letter for each layer"),
        ({"layer_kinds": "fxf"}, "a letter for each layer"),
        ({"layer_kinds": "fff"}, "all layers are alike"),
        ({"layer_kinds": "fwf"}, "no 'sliding_window' is given"),
    ],
)
def test_wrong_fields(change, phrase):
    errors = refusal(model_from_fields, {**parse(LLAMA).to_fields(), **change})
    assert {error.code for error in errors} == {"RT062"}
    assert phrase in "\n".join(error.message for error in errors)


@pytest.mark.parametrize(
    ("base", "change", "phrase"),
    [
        (GEMMA2, {"layer_kinds": "fwn"}, "has n, which layers of family 'gemma2' cannot be"),
        (SMOLLM3, {"layer_kinds": "ffwfn", "sliding_window": 4}, "has w, which layers of family 'smollm3' cannot be"),
        (GEMMA2, {"layer_kinds": "ffn", "sliding_window": 4}, "a window is given, but no layer has it"),
        (GEMMA2, {"attention_scale": None}, "'attention_scale' is missing"),
        (GRANITE, {"attention_scale": None}, "'attention_scale' is missing"),
        (GEMMA2, {"embedding_scale": 7.0}, "sqrt(hidden_size) = 8.0"),
        (GEMMA3, {"local_rope_theta": None}, "for layers with a window"),
        (GEMMA3, {"rope_scaling": "yarn 4 32 1 16 1 0"}, "does not truncate"),
        (GEMMA3, {"attention_softcap": 5.0}, "by choice in gemma2, else never"),
        (PHI3, {"rope_scaling": "linear 2"}, "contradicts family 'phi3'"),
        (INTERNLM2, {"rope_scaling": "llama3 8 1 4 8192"}, "is llama3, which family 'internlm2' has not"),
        (OLMO2, {"norm_placement": "pre"}, "contradicts family 'olmo2'"),
        (GPT2, {"rope_scaling": "linear 2"}, "is for rotated positions"),
        (NEOX, {"kv_heads": 2}, "packed QKV has three parts of the hidden size"),
        (NEOX, {"o_bias": False}, "all of attention has biases or none of it"),
        (NEOX, {"norm_placement": "both"}, "contradicts family 'gpt_neox'"),
        (NEOX, {"residual_scale": 0.5}, "contradicts family 'gpt_neox'"),
        (GPT2, {"activation": "silu"}, "an MLP without a gate and with the activation silu"),
    ],
)
def test_fields_that_no_file_of_the_family_says(base, change, phrase):
    errors = refusal(model_from_fields, {**parse(base).to_fields(), **change})
    assert {error.code for error in errors} == {"RT062"}
    assert phrase in "\n".join(error.message for error in errors)


@pytest.mark.parametrize(
    "name", ["name", "family", "vocab_size", "hidden_size", "layers", "heads", "ffn_size", "norm_eps"]
)
def test_missing_field(name):
    (error,) = refusal(model_from_fields, without(parse(LLAMA).to_fields(), name))
    assert f"'{name}' is missing" in error.message
