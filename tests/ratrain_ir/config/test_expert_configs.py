"""Configurations of families with experts: keys, defaults of their classes, refusals, and the way back to a file."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.families import FAMILY, UNBUILT_EXPERTS
from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.hf_keys import keys_of
from ratrain.ratrain_ir.config.model_fields import check_model, model_from_fields
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from tests.ratrain_ir.config.family_configs import (
    GRANITEMOE,
    LLAMA,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN2_MOE,
    QWEN3_MOE,
    parse,
    refusal,
    without,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "granitemoe": GRANITEMOE,
}


def test_every_family_with_experts_is_tried() -> None:
    assert {*CONFIGS} == {name for name, family in FAMILY.items() if "experts" in family.free}
    assert not UNBUILT_EXPERTS & {*FAMILY}


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        (MIXTRAL, {"experts": 4, "experts_per_token": 2, "sliding_window": 32, "router_normalised": True}),
        (without(MIXTRAL, "num_local_experts", "num_experts_per_tok"), {"experts": 8, "experts_per_token": 2}),
        (without(MIXTRAL, "rope_theta", "sliding_window"), {"rope_theta": 1e6, "sliding_window": None}),
        (without(MIXTRAL, "rms_norm_eps"), {"norm_eps": 1e-5}),
        ({**MIXTRAL, "num_experts": 4}, {"experts": 4}),
        ({**without(MIXTRAL, "num_local_experts"), "num_experts": 3}, {"experts": 3}),
        (QWEN2_MOE, {"qkv_bias": True, "o_bias": False, "expert_size": 24, "shared_expert_size": 40}),
        (without(QWEN2_MOE, "qkv_bias"), {"qkv_bias": True, "o_bias": False}),
        ({**QWEN2_MOE, "qkv_bias": False}, {"qkv_bias": False, "o_bias": False}),
        ({**QWEN2_MOE, "num_local_experts": 4}, {"experts": 4}),
        (without(QWEN2_MOE, "num_experts", "num_experts_per_tok"), {"experts": 60, "experts_per_token": 4}),
        (
            without(QWEN2_MOE, "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob"),
            {"expert_size": 1408, "shared_expert_size": 5632, "router_normalised": False},
        ),
        (QWEN3_MOE, {"qk_norm": "head", "router_normalised": True, "sliding_window": None, "head_dim": 32}),
        ({**QWEN3_MOE, "attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        (without(QWEN3_MOE, "num_experts", "num_experts_per_tok"), {"experts": 128, "experts_per_token": 8}),
        (
            without(QWEN3_MOE, "moe_intermediate_size", "norm_topk_prob", "head_dim"),
            {"expert_size": 768, "router_normalised": False, "head_dim": 16},
        ),
        ({**without(QWEN3_MOE, "num_experts"), "num_local_experts": 3}, {"experts": 3}),
        (OLMOE, {"qk_norm": "whole", "router_normalised": False, "expert_size": None}),
        ({**OLMOE, "norm_topk_prob": True, "attention_bias": True}, {"router_normalised": True, "o_bias": True}),
        (without(OLMOE, "num_experts", "num_experts_per_tok"), {"experts": 64, "experts_per_token": 8}),
        (without(OLMOE, "rms_norm_eps", "norm_topk_prob"), {"norm_eps": 1e-5, "router_normalised": False}),
        (GRANITEMOE, {"attention_scale": 0.25, "logit_scale": 1 / 6, "residual_scale": 1.0, "norm_eps": 1e-5}),
        (without(GRANITEMOE, "num_local_experts", "num_experts_per_tok"), {"experts": 8, "experts_per_token": 2}),
        ({**GRANITEMOE, "attention_dropout": 0.1, "attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ({**GRANITEMOE, "embedding_multiplier": 12, "residual_multiplier": 0.22}, {"embedding_scale": 12.0}),
    ],
)
def test_meaning_of_keys(data: dict[str, Any], fields: dict[str, Any]) -> None:
    model = parse(data)
    assert {name: getattr(model, name) for name in fields} == fields
    again = model_from_fields(model.to_fields())
    assert (again, again.inert) == (model, model.inert)
    written = hugging_face_config(model)
    assert (parse(written), parse(written).inert) == (model, model.inert)


@pytest.mark.parametrize("family", CONFIGS)
def test_an_export_has_the_keys_of_the_file(family: str) -> None:
    given = CONFIGS[family]
    written = hugging_face_config(parse(given))
    absent = ("torch_dtype", "rope_scaling")
    assert {key: written[key] for key in without(given, *absent)} == without(given, *absent)
    assert sum(key in written for key in ("num_experts", "num_local_experts")) == 1


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({**MIXTRAL, "num_local_experts": None}, "RT062", "'num_local_experts' is missing"),
    ({**MIXTRAL, "num_local_experts": 0}, "RT060", "'num_local_experts' is 0"),
    ({**MIXTRAL, "num_experts_per_tok": 5}, "RT062", "a token cannot go to 5 of 4 experts"),
    ({**MIXTRAL, "num_experts_per_tok": None}, "RT062", "'num_experts_per_tok' is missing"),
    ({**MIXTRAL, "num_experts": 8}, "RT062", "'num_local_experts' is 4 and 'num_experts' is 8"),
    ({**QWEN2_MOE, "num_local_experts": 8}, "RT062", "'num_experts' is 4 and 'num_local_experts' is 8"),
    (
        {**without(QWEN2_MOE, "num_experts"), "num_local_experts": 4},
        "RT061",
        "'num_local_experts' is not read in a qwen2_moe model",
    ),
    (
        {**without(GRANITEMOE, "num_local_experts"), "num_experts": 4},
        "RT061",
        "'num_experts' is not read in a granitemoe model",
    ),
    ({**MIXTRAL, "moe_intermediate_size": 24}, "RT061", "another width of the experts"),
    ({**OLMOE, "shared_expert_intermediate_size": 24}, "RT061", "an expert that all tokens share"),
    ({**MIXTRAL, "n_shared_experts": 1}, "RT061", "an expert that all tokens share"),
    ({**MIXTRAL, "norm_topk_prob": False}, "RT061", "weights do not sum to 1"),
    ({**QWEN3_MOE, "norm_topk_prob": 1}, "RT060", "'norm_topk_prob' is 1"),
    ({**QWEN3_MOE, "moe_intermediate_size": None}, "RT062", "'moe_intermediate_size' is missing"),
    ({**QWEN2_MOE, "shared_expert_intermediate_size": 0}, "RT060", "'shared_expert_intermediate_size' is 0"),
    ({**QWEN2_MOE, "attention_bias": True}, "RT061", "whose class reads 'qkv_bias'"),
    ({**QWEN2_MOE, "qkv_bias": "no"}, "RT060", "'qkv_bias' is \"no\""),
    ({**QWEN2, "qkv_bias": True}, "RT061", '"qkv_bias" is not known'),
    ({**QWEN2_MOE, "use_sliding_window": True}, "RT061", "a sliding window is not supported"),
    ({**QWEN3_MOE, "use_sliding_window": True}, "RT061", "a sliding window is not supported"),
    ({**QWEN3_MOE, "layer_types": ["sliding_attention"] * 3}, "RT062", "no sliding window in use"),
    ({**MIXTRAL, "use_sliding_window": False}, "RT061", "'use_sliding_window' is not supported"),
    ({**OLMOE, "sliding_window": 8}, "RT061", "'sliding_window' 8"),
    ({**OLMOE, "clip_qkv": 8.0}, "RT061", "clipped queries, keys and values"),
    ({**OLMOE, "head_dim": 8}, "RT062", "the queries of family 'olmoe' are as wide as the model (64), not 32"),
    ({**MIXTRAL, "router_jitter_noise": 0.1}, "RT061", "noise at the input of the router"),
    ({**MIXTRAL, "output_router_logits": True}, "RT061", "one over all layers"),
    ({**OLMOE, "decoder_sparse_step": 2}, "RT061", "a dense MLP in some of the layers"),
    ({**MIXTRAL, "mlp_only_layers": [0]}, "RT061", "a dense MLP in some of the layers"),
    ({**QWEN3_MOE, "mlp_only_layers": [2, 1, 0]}, "RT061", "no layer of the model has experts"),
    ({**QWEN2_MOE, "decoder_sparse_step": 4}, "RT061", "'decoder_sparse_step' is 4: no layer"),
    ({**QWEN3_MOE, "decoder_sparse_step": 0}, "RT060", "'decoder_sparse_step' is 0"),
    ({**QWEN3_MOE, "decoder_sparse_step": True}, "RT060", "'decoder_sparse_step' is true"),
    ({**QWEN3_MOE, "mlp_only_layers": 1}, "RT060", "'mlp_only_layers' is 1"),
    ({**QWEN3_MOE, "mlp_only_layers": ["1"]}, "RT060", "'mlp_only_layers' is"),
    ({**MIXTRAL, "hidden_act": "gelu"}, "RT061", "experts with this activation are not supported"),
    ({**GRANITEMOE, "residual_multiplier": None}, "RT060", "'residual_multiplier' is null"),
    (without(MIXTRAL, "num_key_value_heads"), "RT060", "'num_key_value_heads' is missing"),
    ({**LLAMA, "num_experts_per_tok": 2}, "RT061", "a mixture of experts"),
    ({**LLAMA, "norm_topk_prob": True}, "RT061", '"norm_topk_prob" is not known'),
]


@pytest.mark.parametrize(("data", "code", "phrase"), REFUSED, ids=range(len(REFUSED)))
def test_refusal(data: dict[str, Any], code: str, phrase: str) -> None:
    (error,) = refusal(parse, data)
    assert (error.code, error.location.file) == (code, "config.json")
    assert phrase in error.message
    assert error.help or code == "RT060" or "num_experts_per_tok" in error.message or "cannot go" in error.message


@pytest.mark.parametrize(
    ("keys", "kinds"),
    [
        ({}, ""),
        ({"decoder_sparse_step": None, "mlp_only_layers": None}, ""),
        ({"mlp_only_layers": [7, -1]}, ""),
        ({"mlp_only_layers": [1]}, "ede"),
        ({"mlp_only_layers": [2, 0, 0]}, "ded"),
        ({"decoder_sparse_step": 2}, "ded"),
        ({"decoder_sparse_step": 3}, "dde"),
        ({"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, "dedd" + "de"),
    ],
)
@pytest.mark.parametrize("given", [QWEN2_MOE, QWEN3_MOE], ids=["qwen2_moe", "qwen3_moe"])
def test_layers_with_experts_are_those_of_the_rule(given: dict[str, Any], keys: dict[str, Any], kinds: str) -> None:
    """A layer has experts unless `mlp_only_layers` has its number, or it is not every n-th one."""
    model = parse({**given, **keys})
    assert model.mlp_kinds == kinds
    assert model.expert_layers == (kinds.count("e") if kinds else model.layers)
    dense = [layer for layer in range(model.layers) if not model.has_experts(layer)]
    assert dense == [layer for layer, kind in enumerate(kinds) if kind == "d"]
    written = hugging_face_config(model)
    if kinds:
        assert (written["decoder_sparse_step"], written["mlp_only_layers"]) == (1, dense)
    assert parse(written) == model
    assert model_from_fields(model.to_fields()) == model
    assert ("mlp_kinds" in model.to_fields()) is bool(kinds)


@pytest.mark.parametrize("family", CONFIGS)
def test_keys_that_must_be_switched_off_change_nothing_where_they_are(family: str) -> None:
    known = keys_of(family)
    for key, (allowed, _) in known.neutral.items():
        assert parse({**CONFIGS[family], key: allowed[-1]}) == parse(CONFIGS[family])
        (error,) = refusal(parse, {**CONFIGS[family], key: 17})
        assert key in error.message
    assert parse({**CONFIGS[family], **dict.fromkeys(known.harmless, 3)}) == parse(CONFIGS[family])


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "glm4_moe", "qwen3_next"])
def test_a_family_with_experts_of_another_kind_is_refused_with_those_that_are_built(family: str) -> None:
    (error,) = refusal(parse, {"model_type": family})
    assert error.message == f'the model family "{family}" is not supported: the experts of this family are not built'
    assert error.help == f"supported with experts are {', '.join(CONFIGS)}"


@pytest.mark.parametrize(
    ("family", "change", "phrase"),
    [
        ("mixtral", {"experts": None, "experts_per_token": None}, "'experts' is missing"),
        ("qwen3_moe", {"expert_size": None}, "'expert_size' is missing, which family 'qwen3_moe' always says"),
        ("qwen2_moe", {"shared_expert_size": None}, "'shared_expert_size' is missing"),
        ("mixtral", {"shared_expert_size": 8}, "contradicts family 'mixtral'"),
        ("olmoe", {"mlp_kinds": "ede"}, "contradicts family 'olmoe'"),
        ("qwen3_moe", {"mlp_kinds": "eee"}, "all layers are alike"),
        ("qwen3_moe", {"mlp_kinds": "ddd"}, "all layers are alike"),
        ("qwen3_moe", {"mlp_kinds": "ed"}, "a letter for each layer"),
        ("qwen3_moe", {"mlp_kinds": "ewd"}, "a letter for each layer"),
        ("mixtral", {"router_normalised": False}, "contradicts family 'mixtral'"),
        ("granitemoe", {"attention_scale": None}, "'attention_scale' is missing"),
        ("olmoe", {"heads": 2}, "the queries of family 'olmoe' are as wide as the model"),
    ],
)
def test_fields_that_contradict_the_family(family: str, change: dict[str, Any], phrase: str) -> None:
    model = evolve(parse(CONFIGS[family]), **change)
    with pytest.raises(DiagnosticError) as caught:
        check_model(model)
    (error,) = caught.value.diagnostics
    assert error.code == "RT062"
    assert phrase in error.message
