"""What families call the parameters of a layer and of both ends, written down apart from the product's tables."""

from __future__ import annotations

import pytest
from attrs import evolve

from ratrain.ratrain_ir.config.families import FAMILY
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.model_fields import check_model
from ratrain.ratrain_ir.config.training import Training
from ratrain.ratrain_ir.model.blocks import block, parameters, trained_parameters

LLAMA = ModelConfig("tiny", "llama", 96, 32, 2, 4, 2, 8, 40, 1e-5)
SCALED = {"attention_scale": 0.25, "embedding_scale": 32**0.5}
ATTENTION = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
MLP = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
INPUT, AFTER = "input_layernorm.weight", "post_attention_layernorm.weight"
BEFORE_MLP, AFTER_MLP = "pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"
EXPERTS = {"experts": 3, "experts_per_token": 2}
QK = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]


def of(family: str, **changes: object) -> ModelConfig:
    model = evolve(LLAMA, family=family, **{**FAMILY[family].implied, **changes})
    check_model(model)
    return model


@pytest.mark.parametrize(
    ("model", "attention", "mlp"),
    [
        (of("llama"), [INPUT, *ATTENTION], [AFTER, *MLP]),
        (of("qwen3"), [INPUT, *ATTENTION, *QK], [AFTER, *MLP]),
        (of("gemma2", **SCALED), [INPUT, *ATTENTION, AFTER], [BEFORE_MLP, *MLP, AFTER_MLP]),
        (of("gemma3_text", **SCALED), [INPUT, *ATTENTION, *QK, AFTER], [BEFORE_MLP, *MLP, AFTER_MLP]),
        (of("olmo2"), [*ATTENTION, *QK, AFTER], [*MLP, AFTER_MLP]),
        (
            of("granite", attention_scale=1.0, mlp_bias=True),
            [INPUT, *ATTENTION],
            [AFTER, *(name for weight in MLP for name in (weight, weight.replace("weight", "bias")))],
        ),
        (
            of("internlm2"),
            ["attention_norm.weight", *(f"attention.w{part}.weight" for part in "qkvo")],
            ["ffn_norm.weight", *(f"feed_forward.w{number}.weight" for number in (1, 3, 2))],
        ),
        (
            of("mixtral", **EXPERTS),
            [INPUT, *ATTENTION],
            [AFTER, *(f"block_sparse_moe.{name}.weight" for name in ("gate", *(f"experts.w{n}" for n in (1, 3, 2))))],
        ),
        (
            of("qwen2_moe", **EXPERTS, expert_size=8, shared_expert_size=8),
            [INPUT, *ATTENTION],
            [
                *(AFTER, "mlp.gate.weight"),
                *(name.replace("mlp.", f"mlp.{kind}.") for kind in ("experts", "shared_expert") for name in MLP),
                "mlp.shared_expert_gate.weight",
            ],
        ),
        (
            of("granitemoe", **EXPERTS, attention_scale=1.0),
            [INPUT, *ATTENTION],
            [
                AFTER,
                *(
                    f"block_sparse_moe.{name}.weight"
                    for name in ("router.layer", "experts.gate_proj", "experts.up_proj", "output_linear")
                ),
            ],
        ),
    ],
    ids=lambda value: value.family if isinstance(value, ModelConfig) else "",
)
def test_names_of_a_layer(model: ModelConfig, attention: list[str], mlp: list[str]) -> None:
    for kind, names in (("attention", attention), ("mlp", mlp)):
        held = [each.name for each in parameters(model, block(kind, 1))]
        assert held == [f"model.layers.1.{name}" for name in names]


def test_names_of_a_layer_of_gpt_neox() -> None:
    model = of("gpt_neox", kv_heads=4)
    attention, mlp = ([each.name for each in parameters(model, block(kind, 1))] for kind in ("attention", "mlp"))
    layer = "gpt_neox.layers.1"
    names = ["input_layernorm", *(f"attention.{part}_proj" for part in "qkv"), "attention.dense"]
    assert attention == [f"{layer}.{name}.{kind}" for name in names for kind in ("weight", "bias")]
    names = ["post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
    assert mlp == [f"{layer}.{name}.{kind}" for name in names for kind in ("weight", "bias")]
    ends = ["embed_out.weight", "gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias"]
    assert [each.name for each in parameters(model, block("head"))] == ends
    assert [each.name for each in parameters(model, block("embed"))] == ["gpt_neox.embed_in.weight"]


@pytest.mark.parametrize(
    ("family", "embedding", "head"),
    [
        ("llama", "model.embed_tokens.weight", "lm_head.weight"),
        ("olmo2", "model.embed_tokens.weight", "lm_head.weight"),
        ("internlm2", "model.tok_embeddings.weight", "output.weight"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_names_of_both_ends(family: str, embedding: str, head: str, *, tied: bool) -> None:
    model = of(family, tied_embeddings=tied)
    assert [each.name for each in parameters(model, block("embed"))] == [embedding]
    names = [each.name for each in parameters(model, block("head"))]
    assert names == [embedding if tied else head, "model.norm.weight"]


A, B = "lora_A.weight", "lora_B.weight"


@pytest.mark.parametrize(
    ("model", "targets", "kind", "named"),
    [
        (of("qwen3"), "v_proj", "attention", [f"self_attn.v_proj.{A}", f"self_attn.v_proj.{B}"]),
        (
            of("phi3"),
            "qkv_proj",
            "attention",
            [f"self_attn.qkv_proj.{A}", *(f"self_attn.{part}_proj.{B}" for part in "qkv")],
        ),
        (of("internlm2"), "wqkv", "attention", [f"attention.wqkv.{A}", *(f"attention.w{part}.{B}" for part in "qkv")]),
        (of("phi3"), "gate_up_proj", "mlp", [f"mlp.gate_up_proj.{A}", f"mlp.gate_proj.{B}", f"mlp.up_proj.{B}"]),
        (
            of("mixtral", **EXPERTS),
            "experts.gate_up_proj",
            "mlp",
            [f"mlp.experts.gate_up_proj.{A}", f"mlp.experts.gate_proj.{B}", f"mlp.experts.up_proj.{B}"],
        ),
        (
            of("granitemoe", **EXPERTS, attention_scale=0.25),
            "down_proj",
            "mlp",
            [f"block_sparse_moe.experts.down_proj.{A}", f"block_sparse_moe.experts.down_proj.{B}"],
        ),
    ],
)
def test_adapters_are_named_below_their_layer(model: ModelConfig, targets: str, kind: str, named: list[str]) -> None:
    training = Training(method="lora", rank=2, targets=targets)
    trained = trained_parameters(evolve(model, training=training), block(kind, 1))
    assert [each.name for each in trained] == [f"model.layers.1.{name}" for name in named]
