"""Everything a config.json can get wrong: its keys, its file, the name of a preset, and damage at random."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.families import FAMILIES
from ratrain.ratrain_ir.config.hf_keys import keys_of
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
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
    PHI3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    YARN,
    parse,
    refusal,
    without,
)

# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_another_family_is_refused_with_the_families():
    (error,) = refusal(parse, {"model_type": "mpt"})
    assert error.code == "RT061"
    assert all(family in error.help for family in FAMILIES)


REFUSED = [
    # RT060: missing, mistyped, out of range
    (without(LLAMA, "hidden_size"), "RT060", "'hidden_size' is missing"),
    (without(LLAMA, "num_hidden_layers"), "RT060", "'num_hidden_layers' is missing"),
    (without(LLAMA, "model_type", "architectures"), "RT060", "'model_type' is missing"),
    (without(MISTRAL, "num_key_value_heads"), "RT060", "'num_key_value_heads' is missing"),
    ({**LLAMA, "hidden_size": "64"}, "RT060", "'hidden_size' is \"64\""),
    ({**LLAMA, "hidden_size": 64.0}, "RT060", "'hidden_size' is 64.0"),
    ({**LLAMA, "hidden_size": True}, "RT060", "'hidden_size' is true"),
    ({**LLAMA, "num_hidden_layers": 0}, "RT060", "'num_hidden_layers' is 0"),
    ({**LLAMA, "vocab_size": -256}, "RT060", "'vocab_size' is -256"),
    ({**LLAMA, "vocab_size": 10**30}, "RT060", "'vocab_size' is 1000000000000000000000000000000"),
    ({**LLAMA, "vocab_size": 1 << 20000}, "RT060", "a number of 20001 bits"),
    ({**LLAMA, "vocab_size": []}, "RT060", "'vocab_size' is []"),
    ({**LLAMA, "vocab_size": None}, "RT060", "'vocab_size' is null"),
    ({**LLAMA, "intermediate_size": {"a": 1}}, "RT060", "'intermediate_size' is {'a': 1}"),
    ({**LLAMA, "rms_norm_eps": 0}, "RT060", "'rms_norm_eps' is 0"),
    ({**LLAMA, "rms_norm_eps": float("inf")}, "RT060", "'rms_norm_eps' is inf"),
    ({**LLAMA, "rms_norm_eps": 10**400}, "RT060", "'rms_norm_eps' is a number of"),
    ({**LLAMA, "rope_theta": "1e4"}, "RT060", "'rope_theta' is \"1e4\""),
    ({**LLAMA, "rope_theta": -1.0}, "RT060", "'rope_theta' is -1.0"),
    ({**LLAMA, "tie_word_embeddings": "no"}, "RT060", "'tie_word_embeddings' is \"no\""),
    ({**LLAMA, "model_type": 7}, "RT060", "'model_type' is 7"),
    ({**LLAMA, "architectures": "LlamaForCausalLM"}, "RT060", "a list of names"),
    ({**LLAMA, "rope_scaling": "linear"}, "RT060", "'rope_scaling' is \"linear\""),
    ({**LLAMA, "layer_types": "full_attention"}, "RT060", "'layer_types' is"),
    ({**MISTRAL, "sliding_window": 0}, "RT060", "'sliding_window' is 0"),
    ({**QWEN2, "use_sliding_window": "yes"}, "RT060", "'use_sliding_window' is \"yes\""),
    ({**QWEN2, "use_sliding_window": True, "max_window_layers": -1}, "RT060", "'max_window_layers' is -1"),
    ({**BAICHUAN, "num_hidden_layers": 33}, "RT060", "position embedding is not known"),
    ({**BAICHUAN, "vocab_size": 300}, "RT060", "kind of head is not known"),
    ({**BAICHUAN, "vocab_size": [125696]}, "RT060", "'vocab_size' is [125696]"),
    ({**BAICHUAN, "normalised_head": 1}, "RT060", "'normalised_head' is 1"),
    # RT061: another mathematics
    ({**LLAMA, "model_type": "mpt"}, "RT061", 'family "mpt" is not supported'),
    ({**LLAMA, "model_type": "deepseek_v3"}, "RT061", 'family "deepseek_v3" is not supported: the experts'),
    ({**LLAMA, "model_type": "qwen3"}, "RT061", "LlamaForCausalLM"),
    ({**LLAMA, "architectures": ["LlamaForSequenceClassification"]}, "RT061", "LlamaForSequenceClassification"),
    ({**LLAMA, "architectures": ["MistralForCausalLM"]}, "RT061", "MistralForCausalLM"),
    ({**MISTRAL, "attention_bias": True}, "RT061", "whose class has none"),
    ({**PHI3, "attention_bias": True}, "RT061", "whose class has none"),
    ({**QWEN2, "attention_bias": False}, "RT061", "always has biases"),
    ({**LLAMA, "attention_bias_qkv": True}, "RT061", "'attention_bias_qkv' is true"),
    ({**QWEN2, "attention_bias_qkv": False}, "RT061", "'attention_bias_qkv' is false"),
    ({**LLAMA, "attention_bias_out": True}, "RT061", "output projection"),
    ({**LLAMA, "norm_type": "layernorm"}, "RT061", "the kind of norm"),
    ({**LLAMA, "attention_dropout": 0.1}, "RT061", "dropout is not supported"),
    ({**LLAMA, "rope_scaling": {"rope_type": ["yarn"]}}, "RT061", "['yarn']"),
    ({**LLAMA, "rope_scaling": {"type": "default", "factor": 2.0}}, "RT061", '"factor"'),
    ({**LLAMA, "rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "RT061", '"full_attention"'),
    ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "RT061", "asks to rotate 0.5 of each head"),
    ({**LLAMA, "partial_rotary_factor": 0.5}, "RT061", "asks to rotate 0.5 of each head"),
    ({**LLAMA, "logit_softcapping": 30.0}, "RT061", "soft-capped logits"),
    ({**LLAMA, "qk_norm": True}, "RT061", "norms of queries and keys"),
    ({**LLAMA, "num_local_experts": 8}, "RT061", "mixture of experts"),
    ({**LLAMA, "quantization_config": {"bits": 4}}, "RT061", "quantised"),
    ({**LLAMA, "z_loss_weight": 1e-4}, "RT061", "z-loss"),
    ({**LLAMA, "position_embedding": "learned"}, "RT061", '"learned"'),
    ({**LLAMA, "position_embedding": "alibi"}, "RT061", '"alibi"'),
    ({**BAICHUAN, "position_embedding": ["rope"]}, "RT061", "['rope']"),
    ({**LLAMA, "normalised_head": True}, "RT061", "'normalised_head' is true"),
    ({**LLAMA, "sliding_window": 32}, "RT061", "'sliding_window' 32"),
    ({**LLAMA, "use_sliding_window": True}, "RT061", "only qwen2 and qwen3"),
    ({**LLAMA, "max_window_layers": 3}, "RT061", "only qwen2 and qwen3"),
    ({**MISTRAL, "use_sliding_window": False}, "RT061", "only qwen2 and qwen3"),
    ({**LLAMA, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}, "RT062", "no sliding window"),
    (
        {**MISTRAL, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "RT062",
        "full_attention and sliding_attention",
    ),
    ({**LLAMA, "layer_types": [["full_attention"]] * 3}, "RT061", "layers of type"),
    ({**LLAMA, "layer_types": ["linear_attention"] * 3}, "RT061", '"linear_attention"'),
    ({**LLAMA, "residual_scale": 0.5}, "RT061", '"residual_scale" is not known'),
    ({**LLAMA, "\ud800": 1}, "RT061", '"\\ud800" is not known'),
    ({**GPT2, "activation_function": "relu"}, "RT061", "'activation_function' is \"relu\""),
    ({**GPT2, "scale_attn_weights": False}, "RT061", "scores are not scaled"),
    ({**GPT2, "scale_attn_by_inverse_layer_idx": True}, "RT061", "the number of their layer"),
    ({**GPT2, "add_cross_attention": True}, "RT061", "cross attention"),
    ({**GPT2, "attention_bias": False}, "RT061", "biases in all of attention"),
    ({**GPT2, "attention_bias_qkv": False}, "RT061", "'attention_bias_qkv' is false"),
    ({**GPT2, "attention_bias_out": False}, "RT061", "an output projection without a bias"),
    ({**GPT2, "mlp_bias": False}, "RT061", "an MLP without biases"),
    ({**GPT2, "mlp_type": "swiglu"}, "RT061", "the kind of MLP"),
    ({**GPT2, "norm_type": "rmsnorm"}, "RT061", "the kind of norm"),
    ({**GPT2, "position_embedding": "rope"}, "RT061", '"rope"'),
    ({**GPT2, "sliding_window": 8}, "RT061", "'sliding_window' 8"),
    ({**GPT2, "rms_norm_eps": 1e-5}, "RT061", '"rms_norm_eps" is not known'),
    ({**GPT2, "architectures": ["GPT2Model"]}, "RT061", "GPT2Model"),
    ({**LLAMA, "n_positions": 64}, "RT061", '"n_positions" is not known'),
    ({**NEOX, "mlp_bias": False}, "RT061", "an MLP without biases"),
    ({**NEOX, "rms_norm_eps": 1e-5}, "RT061", '"rms_norm_eps" is not known'),
    ({**NEOX, "hidden_dropout": 0.1}, "RT061", "dropout is not supported"),
    ({**NEOX, "hidden_dropout_prob": 0.1}, "RT061", "dropout is not supported"),
    ({**NEOX, "position_embedding": "learned"}, "RT061", '"learned"'),
    ({**without(NEOX, "rotary_emb_base"), "rope_theta": 1e4}, "RT061", "'rope_theta' is not read"),
    ({**without(NEOX, "rotary_pct"), "partial_rotary_factor": 0.25}, "RT061", "'partial_rotary_factor' is not read"),
    ({**LLAMA, "use_parallel_residual": True}, "RT061", '"use_parallel_residual" is not known'),
    ({**LLAMA, "rotary_pct": 0.5}, "RT061", "rotating a part of each head only"),
    ({**NEOX, "use_parallel_residual": 1}, "RT060", "'use_parallel_residual' is 1"),
    ({**NEOX, "use_parallel_residual": None}, "RT060", "'use_parallel_residual' is null"),
    ({**NEOX, "attention_bias": 1}, "RT060", "'attention_bias' is 1"),
    (without(GPT2, "n_embd"), "RT060", "'n_embd' is missing"),
    (without(GPT2, "n_positions", "n_ctx"), "RT060", "'n_positions' is missing"),
    ({**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "RT060", "no usable llama3 scaling"),
    ({**LLAMA, "rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "RT060", "no usable llama3 scaling"),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 0.5}}, "RT060", "no usable linear scaling"),
    ({**LLAMA, "rope_scaling": {"type": "linear", "factor": "2"}}, "RT060", "no usable linear scaling"),
    (
        {**without(LLAMA, "max_position_embeddings"), "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "RT060",
        "no usable dynamic scaling",
    ),
    ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 9.0}}, "RT061", '"alpha"'),
    ({**LLAMA, "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}}, "RT061", '"longrope"'),
    ({**PHI3, "rope_scaling": YARN}, "RT061", '"yarn" scaling, not supported in a phi3 model'),
    ({**INTERNLM2, "rope_scaling": LLAMA3}, "RT061", '"llama3" scaling, not supported in a internlm2 model'),
    ({**PHI3, "partial_rotary_factor": 1.5}, "RT061", "asks to rotate 1.5 of each head"),
    ({**GEMMA3, "rope_parameters": {"rope_type": "default"}}, "RT061", "for each type of layers"),
    ({**GEMMA3, "rope_parameters": {"full_attention": 3}}, "RT060", "full_attention = 3"),
    ({**GEMMA3, "rope_parameters": {"sliding_attention": 3}}, "RT060", "sliding_attention = 3"),
    ({**GEMMA3, "rope_parameters": {"sliding_attention": {"type": "linear", "factor": 2}}}, "RT061", "with a window"),
    ({**GEMMA3, "rope_parameters": {"sliding_attention": {"factor": 2}}}, "RT061", '"factor"'),
    ({**GEMMA3, "rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}}, "RT061", "a part of each"),
    ({**GEMMA3, "rope_scaling": {"full_attention": {"rope_theta": 1e4}}}, "RT061", '"full_attention"'),
    ({**GEMMA3, "attn_logit_softcapping": 50.0}, "RT061", "soft-capped attention scores"),
    ({**GEMMA3, "sliding_window_pattern": 0}, "RT060", "'sliding_window_pattern' is 0"),
    ({**GEMMA2, "use_bidirectional_attention": True}, "RT061", "attention to later tokens"),
    ({**GEMMA2, "query_pre_attn_scalar": 0}, "RT060", "'query_pre_attn_scalar' is 0"),
    ({**GEMMA2, "attn_logit_softcapping": -1.0}, "RT060", "'attn_logit_softcapping' is -1.0"),
    ({**GRANITE, "residual_multiplier": None}, "RT060", "'residual_multiplier' is null"),
    ({**GRANITE, "logits_scaling": "8"}, "RT060", "'logits_scaling' is \"8\""),
    ({**LLAMA, "residual_multiplier": 0.5}, "RT061", "scaled residuals"),
    ({**LLAMA, "attention_bias": "yes"}, "RT060", "'attention_bias' is \"yes\""),
    ({**LLAMA, "hidden_act": "relu"}, "RT061", "'hidden_act' is \"relu\""),
    ({**LLAMA, "lm_head_bias": True}, "RT061", "a bias of the head"),
    ({**SMOLLM3, "no_rope_layers": [1, 0]}, "RT060", "'no_rope_layers' is [1, 0]"),
    ({**SMOLLM3, "no_rope_layer_interval": 0}, "RT060", "'no_rope_layer_interval' is 0"),
    ({**SMOLLM3, "use_sliding_window": True, "sliding_window": 8}, "RT061", "a sliding window in the layers"),
    ({**LLAMA, "no_rope_layers": [1, 1, 0]}, "RT061", "layers without rotary embedding"),
    # RT062: contradictions
    ({**LLAMA, "rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "RT062", "has two types"),
    ({**LLAMA, "rope_scaling": YARN, "rope_parameters": {"rope_type": "default"}}, "RT062", "differ"),
    ({**LLAMA, "rope_scaling": YARN, "rope_parameters": LLAMA3}, "RT062", "differ"),
    (
        {**PHI3, "partial_rotary_factor": 0.5, "rope_parameters": {"partial_rotary_factor": 0.75}},
        "RT062",
        "'partial_rotary_factor' says 0.5 and 'rope_parameters' says 0.75",
    ),
    ({**PHI3, "partial_rotary_factor": 0.6}, "RT062", "9 rotated elements of a head"),
    ({**LLAMA, "hidden_act": "relu2"}, "RT062", "activation relu2 is not supported"),
    ({**LLAMA, "hidden_activation": "gelu"}, "RT062", "they mean the same"),
    ({**GEMMA2, "sliding_window": None}, "RT062", "some layers use sliding attention"),
    ({**GEMMA3, "rope_scaling": {**YARN, "truncate": False}}, "RT062", "does not truncate"),
    ({**QWEN3, "layer_types": ["sliding_attention"] * 3}, "RT062", "no sliding window"),
    ({**SMOLLM3, "layer_types": ["sliding_attention"] * 5}, "RT062", "no sliding window"),
    ({**GPT2, "rope_scaling": YARN}, "RT062", "for rotated positions"),
    ({**GPT2, "n_ctx": 512}, "RT062", "'n_positions' is 1024 and 'n_ctx' is 512"),
    ({**GPT2, "hidden_size": 64}, "RT062", "'n_embd' is 768 and 'hidden_size' is 64"),
    ({**GPT2, "rope_theta": 1e4}, "RT062", "uses learned positions"),
    ({**GPT2, "num_key_value_heads": 4}, "RT062", "packed QKV"),
    ({**GPT2, "head_dim": 32}, "RT062", "packed QKV"),
    ({**NEOX, "num_key_value_heads": 2}, "RT062", "packed QKV"),
    ({**NEOX, "head_dim": 32}, "RT062", "packed QKV"),
    ({**NEOX, "rotary_pct": 0.3, "partial_rotary_factor": 0.25}, "RT062", "the share of a head that is rotated"),
    ({**NEOX, "rope_theta": 500}, "RT062", "'rotary_emb_base' says 10000 and 'rope_theta' says 500"),
    ({**NEOX, "rotary_pct": 0.2}, "RT062", "3 rotated elements of a head"),
    ({**LLAMA, "bos_token_id": float("inf")}, "RT062", "'bos_token_id' has a number that cannot be held"),
    ({**LLAMA, "sep_token_id": [{"a": -float("inf")}]}, "RT062", "'sep_token_id' has a number that cannot be held"),
    ({**LLAMA, "num_attention_heads": 12}, "RT062", "'hidden_size' 64 is not a multiple of 'num_attention_heads' 12"),
    ({**LLAMA, "num_key_value_heads": 3}, "RT062", "is not a multiple of 'num_key_value_heads' 3"),
    ({**LLAMA, "num_key_value_heads": 8}, "RT062", "is not a multiple of 'num_key_value_heads' 8"),
    ({**LLAMA, "head_dim": 15}, "RT062", "15 is odd"),
    ({**LLAMA, "norm_eps": 1e-6}, "RT062", "they mean the same"),
    ({**LLAMA, "rope_parameters": {"rope_theta": 5e5}}, "RT062", "given twice"),
    ({**LLAMA, "layer_types": ["full_attention"] * 2}, "RT062", "2 entries"),
    ({**LLAMA, "layer_types": ["sliding_attention"] * 3}, "RT062", "no sliding window"),
    ({**MISTRAL, "layer_types": ["full_attention"] * 3}, "RT062", "'layer_types' says full_attention"),
    ({**QWEN2, "layer_types": ["sliding_attention"] * 3}, "RT062", "no sliding window"),
    ({**LLAMA, "parameters_expected": 1}, "RT062", "'parameters_expected' is 1"),
    ({**BAICHUAN, "position_embedding": "alibi", "rope_theta": 1e4}, "RT062", "uses ALiBi"),
    ({**BAICHUAN, "num_key_value_heads": 8}, "RT062", "packed QKV"),
    ({**BAICHUAN, "head_dim": 64}, "RT062", "packed QKV"),
    ({**BAICHUAN, "tie_word_embeddings": True}, "RT062", "do not go with a normalised head"),
]


@pytest.mark.parametrize(("data", "code", "phrase"), REFUSED, ids=range(len(REFUSED)))
def test_refusal(data, code, phrase):
    (error,) = refusal(parse, data)
    assert error.code == code
    assert phrase in error.message
    assert error.location.file == "config.json"
    error.render().encode()


def test_suggestion_for_a_misspelt_key():
    (error,) = refusal(parse, {**LLAMA, "rope_thetta": 5e5})
    assert "did you mean 'rope_theta'?" in error.help
    (error,) = refusal(parse, {**LLAMA, "hidden_size": "64"})
    assert error.help == "write 64, without quotes"


def test_all_errors_at_once():
    data = {**LLAMA, "hidden_size": -1, "vocab_size": "x", "qk_norm": True, "num_key_value_heads": 3, "novelty": 1}
    errors = refusal(parse, data)
    assert [error.code for error in errors] == ["RT061", "RT061", "RT060", "RT060", "RT062"]


# -- files -------------------------------------------------------------------------------------------------------------


def test_place_of_an_error(tmp_path):
    path = tmp_path / "m.json"
    path.write_text(json.dumps({**LLAMA, "rope_scaling": {"hidden_size": 3}, "hidden_size": -4}, indent=2))
    errors = {error.code: error for error in refusal(load_model, str(path))}
    text = path.read_text().split("\n")
    for code, key in (("RT060", '"hidden_size": -4'), ("RT061", '"rope_scaling": {')):
        place = errors[code].location
        assert text[place.line - 1] == errors[code].source
        assert errors[code].source[place.column - 1 :][: place.length] == key
    assert f"{path}:{errors['RT060'].location.line}:3: error[RT060]" in errors["RT060"].render()


GOOD = json.dumps(LLAMA, indent=1)
BROKEN = [
    (b"", "RT060", "empty", 1),
    (b" \n\n", "RT060", "empty", 1),
    (b"[1, 2]", "RT060", "not a list", 1),
    (b"3", "RT060", "not 3", 1),
    (GOOD[:100].encode(), "RT060", "not valid JSON", 7),
    (GOOD.encode()[:-1], "RT060", "not valid JSON", GOOD.count("\n") + 1),
    (b'{\n "hidden_size": 4\n "a": 2}', "RT060", "not valid JSON", 3),
    (b'{"hidden_size": NaN}', "RT060", "NaN is not a JSON number", 1),
    (b'{"hidden_size": ' + b"9" * 5000 + b"}", "RT060", "not usable JSON", 1),
    (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "RT060", "nested too deeply", 1),
    (b'{"vocab_size": 3,\n "vocab_size": 4}', "RT060", '"vocab_size" appears twice', 2),
    (b'{"rope_scaling": {"type": 1, "type": 2}}', "RT060", '"type" appears twice inside', 1),
    (b'{\n"name": "\xff"}', "RT060", "byte 0xff is not UTF-8", 2),
    (bytes(range(1, 256)) * 10, "RT060", "is not UTF-8", 2),
    (b"{}" + b" " * (1 << 20), "RT060", "larger than", 1),
]


@pytest.mark.parametrize(("content", "code", "phrase", "line"), BROKEN, ids=range(len(BROKEN)))
def test_broken_file(tmp_path, content, code, phrase, line):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    (error,) = refusal(load_model, str(path))
    assert error.code == code
    assert phrase in error.message
    assert (error.location.file, error.location.line) == (str(path), line)


def test_unreadable_path(tmp_path):
    (error,) = refusal(load_model, str(tmp_path / "llama-2-7.json"))
    assert error.code == "RT002"
    (tmp_path / "config.json").mkdir()
    (error,) = refusal(load_model, str(tmp_path))
    assert error.code == "RT002"
    assert os.strerror(21) in error.message


@pytest.mark.parametrize("name", ["llama2-7b", "Llama-2-7B", "somebody/Llama-2-7b"])
def test_misspelt_preset(name):
    (error,) = refusal(load_model, name)
    assert error.code == ("RT002" if "/" in name else "RT004")
    assert "did you mean 'llama-2-7b'?" in error.help
    assert "qwen2.5-32b" in error.help


@pytest.mark.parametrize("name", ["", "\0", "x" * 5000, "💥"])
def test_strange_name(name):
    (error,) = refusal(load_model, name)
    assert error.code == "RT004"
    assert len(error.message) < 200


# -- anything at all -----------------------------------------------------------------------------------------------------


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(
        [LLAMA, MISTRAL, QWEN2, BAICHUAN, GPT2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, GRANITE, INTERNLM2, SMOLLM3, NEOX]
    ),
    st.dictionaries(
        st.sampled_from(sorted({key for of in FAMILIES for key in (*keys_of(of).read, *keys_of(of).neutral)}))
        | st.text(max_size=8),
        JSON_VALUES,
        min_size=1,
        max_size=4,
    ),
)
def test_any_value_reads_or_is_diagnosed(base, change):
    try:
        config = parse({**base, **change})
    except DiagnosticError as error:
        diagnostics = error.diagnostics
    else:
        diagnostics = []
        check_model(config)
    assert {diagnostic.code for diagnostic in diagnostics} <= {"RT060", "RT061", "RT062"}
    "".join(diagnostic.render() for diagnostic in diagnostics).encode()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, len(GOOD) - 1), st.binary(max_size=4), st.integers(0, 6))
def test_damaged_file_reads_or_is_diagnosed(tmp_path_factory, at, inserted, removed):
    path = tmp_path_factory.getbasetemp() / "damaged.json"
    data = GOOD.encode()
    path.write_bytes(data[:at] + inserted + data[at + removed :])
    try:
        check_model(load_model(str(path)))
    except DiagnosticError as error:
        codes = {diagnostic.code for diagnostic in error.diagnostics}
    else:
        codes = set()
    assert codes <= {"RT060", "RT061", "RT062"}
