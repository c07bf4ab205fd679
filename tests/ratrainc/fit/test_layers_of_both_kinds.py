"""Answers about models with experts in some layers and a dense MLP in the others: each kind by its own formulas."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.hf_export import hugging_face_config
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.config.types import StateKind
from ratrain.ratrain_ir.model.blocks import block, flat_elements, trained_parameters
from ratrain.ratrainc.bridge.jobs.job import Adapter, Checkpointing, Experts, Sharding
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.fit.holdings.activations import kept_activations, layer_kept
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.holdings.state import OF_EXPERTS
from tests.end_to_end.tiny_runs import make_plan
from tests.ratrainc.fit.jobs import expert_model, job_of
from tests.ratrainc.fit.test_experts import MECHANISMS, settings_of

if TYPE_CHECKING:
    from pathlib import Path

    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrainc.fit.holdings.terms import RankBytes

FAMILIES = ("qwen2_moe", "qwen3_moe")
KINDS = ("de", "ed", "eed", "deee", "eeed", "dede", "eedd", "ddee", "deed")
ATTENTION = Adapter(8, 16.0, ("q_proj", "v_proj"))
POLICIES = st.sampled_from([Checkpointing.NONE, Checkpointing.FULL])
WAYS = st.sampled_from([*MECHANISMS, {"sharding": Sharding.FSDP2, "devices": 4, "reshard_after_forward": False}])


def mixed(family: str, kinds: str, **sizes: int) -> ModelConfig:
    """A model whose dense layers are wider than an expert."""
    return expert_model(family, layers=len(kinds), mlp_kinds=kinds, **{"expert_size": 48, "ffn_size": 112} | sizes)


def dense(model: ModelConfig) -> ModelConfig:
    return evolve(model, mlp_kinds="", experts=None, experts_per_token=None, shared_expert_size=None)


def totals(rank: RankBytes) -> list[int]:
    return [moment.bytes for moment in rank.moments]


def held(rank: RankBytes) -> dict[str, int]:
    """Bytes of state by owner, with those of experts apart from the others."""
    return {each.name: each.bytes for each in rank.moments[0].owners}


# State


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_state_is_that_of_the_compiled_module(family: str, kinds: str) -> None:
    """Weights of 2 bytes, masters and both moments of 4, and gradients: as many elements as tensors without padding."""
    model = mixed(family, kinds)
    plan = make_plan(model, pp=1, cuts=(), dp=1, micro_batches=2, zero=0)
    (stage,) = api.compile(model, plan).stages
    blocks = [block("embed"), block("head"), *(block(k, n) for k in ("attention", "mlp") for n in range(len(kinds)))]
    own = {each: sum(one.elements for one in trained_parameters(model, each)) for each in blocks}
    padding = sum(flat_elements(model, plan, each) - own[each] for each in blocks)
    elements = dict.fromkeys(StateKind, 0)
    for tensor in stage.tensors.values():
        elements[tensor.kind] += tensor.type.elements
    for kind, tensors in {StateKind.VIEW: 1, StateKind.MASTER: 1, StateKind.MOMENT: 2, StateKind.GRAD: 1}.items():
        elements[kind] -= tensors * padding
    rank = holdings(job_of("deepspeed", model, master_dtype="f32", gradient_accumulation=2))[0]
    owners = held(rank)
    found = {name: owners[name] + owners[apart] for name, apart in OF_EXPERTS.items() if name in owners}
    assert found["weights"] == 2 * elements[StateKind.VIEW]
    assert found["master weights"] == 4 * elements[StateKind.MASTER]
    assert found["optimizer"] == 4 * elements[StateKind.MOMENT]
    assert found["gradients"] == 2 * elements[StateKind.GRAD]
    assert owners["weights of experts"] == 2 * model.expert_parameters
    assert Part(job_of("trl", model), 0).parameters == model.parameters


@pytest.mark.parametrize("how", MECHANISMS, ids=lambda how: getattr(how.get("sharding"), "value", "none"))
@pytest.mark.parametrize("kinds", KINDS)
def test_ranks_share_out_the_state_of_all_layers(kinds: str, how: dict[str, object]) -> None:
    model = mixed("qwen3_moe", kinds)
    job = job_of("trl", model, **how)
    owners, shards = held(holdings(job)[0]), 4 if Part(job, 0).sharded else 1
    assert owners["weights"] + owners["weights of experts"] == 2 * -(-model.parameters // shards)
    assert owners["weights of experts"] == 2 * -(-model.expert_parameters // shards)


# Moments


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    WAYS,
    st.sampled_from(list(Experts)),
    POLICIES,
    st.integers(2, 6),
    st.integers(1, 64),
    st.integers(1, 3),
)
def test_letters_that_are_all_alike_say_nothing(family, how, experts, policy, layers, length, micro_batches) -> None:
    """The way through both kinds gives every moment of a model whose layers are alike, to the byte."""
    usual = expert_model(family, layers=layers, ffn_size=112)
    fields = {"experts": experts, "checkpointing": policy, "seq_len": length, "gradient_accumulation": micro_batches}
    for letter, model in (("e", usual), ("d", dense(usual))):
        one, other = (
            holdings(job_of("trl", each, **how, **fields))[0]
            for each in (model, evolve(usual, mlp_kinds=letter * layers))
        )
        assert totals(one) == totals(other)


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    WAYS,
    st.sampled_from(KINDS),
    POLICIES,
    st.integers(1, 64),
    st.integers(1, 3),
    st.sampled_from([16, 112, 900]),
    st.booleans(),
)
def test_both_kinds_hold_no_less_than_the_smaller_and_no_more_than_the_larger(
    family, how, kinds, policy, length, micro_batches, width, autocast
) -> None:
    model = mixed(family, kinds, ffn_size=width)
    fields = {"checkpointing": policy, "seq_len": length, "gradient_accumulation": micro_batches}
    if autocast and not how:
        fields |= {"autocast": True, "weight_dtype": "f32", "gradient_dtype": "f32"}
    peaks = [
        holdings(job_of("trl", each, **how, **fields))[0].peak_bytes
        for each in (evolve(model, mlp_kinds=""), dense(model), model)
    ]
    assert min(peaks[:2]) <= peaks[2] <= max(peaks[:2])


def test_a_layer_is_asked_for_by_its_kind() -> None:
    part = Part(job_of("trl", mixed("qwen3_moe", "de")), 0)
    with pytest.raises(AssertionError, match="one kind of layer"):
        layer_kept(part)
    with pytest.raises(AssertionError, match="one kind of layer"):
        _ = part.layer_parameters
    assert part.at(0).layer_experts == 0 < part.at(1).layer_experts


def test_what_a_model_keeps_is_what_its_layers_keep() -> None:
    for kinds in KINDS:
        part = Part(job_of("trl", mixed("qwen2_moe", kinds)), 0)
        layers = [sum(each.bytes for each in layer_kept(part.at(number))) for number in range(len(kinds))]
        for count in range(len(kinds) + 1):
            assert sum(kept_activations(part, count).values()) == sum(layers[:count])


def test_an_auxiliary_loss_keeps_logits_of_layers_with_routers() -> None:
    model = mixed("qwen3_moe", "eded")
    loss = [totals(holdings(job_of("trl", model, router_logits=each))[0])[0] for each in (False, True)]
    assert loss[1] - loss[0] == 2 * (2 * 2 * 32 * 2) * model.experts


# Adapters, and answers


@pytest.mark.parametrize("how", MECHANISMS, ids=lambda how: getattr(how.get("sharding"), "value", "none"))
def test_adapters_of_attention_leave_both_kinds_frozen(how: dict[str, object]) -> None:
    model = mixed("qwen3_moe", "deed")
    job = job_of("trl", model, adapter=ATTENTION, method="lora", **how)
    assert refusal(job) == ""
    owners, shards = held(holdings(job)[0]), 4 if Part(job, 0).sharded else 1
    assert owners["frozen weights of experts"] == 2 * model.expert_parameters // shards
    assert owners["frozen weights"] + owners["frozen weights of experts"] == 2 * -(-model.parameters // shards)
    trains = 4 * 8 * ((64 + 64) + (64 + 32))
    usual = evolve(job, model=evolve(model, mlp_kinds=""))
    for each in (job, usual):
        assert held(holdings(each)[0])["adapters"] == 2 * -(-trains // shards)


@pytest.mark.parametrize(
    "adapter",
    [
        Adapter(8, 16.0, ("q_proj", "up_proj")),
        Adapter(8, 16.0, ("all-linear",)),
        Adapter(8, 16.0, ("gate",)),
        Adapter(8, 16.0, ("q_proj",), target_parameters=("mlp.experts",)),
    ],
)
def test_adapters_of_mlps_of_both_kinds_are_refused_by_name(adapter: Adapter) -> None:
    job = job_of("trl", mixed("qwen3_moe", "de"), adapter=adapter, method="lora")
    assert "touches MLPs, and experts are in 1 of 2 layers: name linears of attention" in refusal(job)


def test_a_configuration_with_dense_layers_is_answered_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every second layer of a Qwen3-30B-A3B dense: 16.9 billion parameters, of which 24 layers have experts."""
    config = {**hugging_face_config(load_model("qwen3-30b-a3b")), "decoder_sparse_step": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    file = tmp_path / "train.yaml"
    file.write_text(settings_of({"base_model": "some/model", "gradient_checkpointing": True}))
    told = ["fit", str(file), "--model", str(tmp_path), "--devices", "8", "--memory", "79GiB"]
    assert main(told) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "experts: 128 in 24 of 48 layers" in said
    assert "weights of experts" in said
