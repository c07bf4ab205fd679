"""Answers about models with experts: what grows with them, what a hot expert adds, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.jobs.job import Adapter, Checkpointing, Experts, Job, Sharding
from ratrain.ratrainc.cli import main
from ratrain.ratrainc.fit.holdings.activations import layer_kept
from ratrain.ratrainc.fit.holdings.experts import gradients_inside, hot_expert
from ratrain.ratrainc.fit.holdings.holdings import holdings
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.holdings.state import OF_EXPERTS
from tests.ratrainc.fit.jobs import expert_model, job_of, model_of

GIB = 1 << 30
PRESETS = ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "qwen3-30b-a3b", "olmoe-1b-7b", "granite-3.1-1b-a400m")
FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe")
FLASH = {"attn_implementation": "flash_attention_2"}
SMALL = {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 1000, "stage3_prefetch_bucket_size": 0}
MECHANISMS = [
    {},
    {"sharding": Sharding.DDP, "devices": 4},
    {"sharding": Sharding.FSDP1, "devices": 4},
    {"sharding": Sharding.FSDP2, "devices": 4},
    {"sharding": Sharding.ZERO1, "devices": 4, "master_dtype": "f32", "sizes": SMALL},
    {"sharding": Sharding.ZERO2, "devices": 4, "master_dtype": "f32", "sizes": SMALL},
    {"sharding": Sharding.ZERO3, "devices": 4, "master_dtype": "f32", "sizes": SMALL},
]


def peak(job: Job) -> int:
    return holdings(job)[0].peak_bytes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.sampled_from(MECHANISMS),
    st.sampled_from(list(Experts)),
    st.sampled_from([Checkpointing.NONE, Checkpointing.FULL]),
    st.integers(2, 12),
    st.integers(1, 2),
    st.integers(1, 64),
)
def test_bytes_grow_with_experts_with_their_choice_and_with_tokens(family, how, experts, policy, count, chosen, length):
    model = expert_model(family, experts=count, experts_per_token=chosen)
    job = job_of("trl", model, experts=experts, checkpointing=policy, seq_len=length, **how)
    more = peak(job)
    assert peak(evolve(job, model=evolve(model, experts=count + 1))) > more
    assert peak(evolve(job, model=evolve(model, experts_per_token=chosen + 1, experts=count + 1))) > more
    assert peak(evolve(job, seq_len=length + 1)) >= more
    wider = [evolve(job, model=evolve(model, experts_per_token=each)) for each in (chosen, chosen + 1)]
    kept = [sum(each.bytes for each in layer_kept(Part(one, 0))) for one in wider]
    assert kept[1] > kept[0]


@pytest.mark.parametrize("how", MECHANISMS, ids=lambda how: getattr(how.get("sharding"), "value", "none"))
def test_one_expert_is_a_dense_model_and_its_router(how):
    """The state of experts and the rest is that of the dense model, with a row of the router in each layer."""
    one = model_of("mixtral", experts=1, experts_per_token=1, ffn_size=176)
    dense = model_of("mistral", ffn_size=176)
    router = one.layers * one.hidden_size
    assert Part(job_of("trl", one, **how), 0).parameters == Part(job_of("trl", dense, **how), 0).parameters + router
    names = {name: {name, apart} for name, apart in OF_EXPERTS.items()}
    shares = how.get("devices", 1)
    for name, both in names.items():
        held = [
            max(sum(each.bytes for each in moment.owners if each.name in both) for moment in rank.moments)
            for model in (one, dense)
            for rank in holdings(job_of("trl", model, **how))
        ]
        assert 0 <= held[0] - held[1] <= 8 * (router + shares), name


@pytest.mark.parametrize("how", MECHANISMS, ids=lambda how: getattr(how.get("sharding"), "value", "none"))
def test_weights_of_experts_are_those_of_the_compilers_table(how):
    model = load_model("qwen3-30b-a3b")
    job = job_of("trl", model, **how)
    rank, shards = holdings(job)[0], how.get("devices", 1) if Part(job, 0).sharded else 1
    held = {each.name: each.bytes for each in rank.moments[0].owners}
    assert held["weights of experts"] == 2 * model.expert_parameters // shards
    assert held["weights"] + held["weights of experts"] == 2 * -(-model.parameters // shards)


def test_a_hot_expert_adds_what_a_loop_makes_of_its_rows():
    for experts in Experts:
        job = job_of("trl", load_model("mixtral-8x7b"), experts=experts, seq_len=4096, micro_batch_size=1)
        part = Part(job, 0)
        even, hot = gradients_inside(part), gradients_inside(part, part.tokens)
        assert hot_expert(part) == (0 if experts is Experts.GROUPED else hot - even)
        assert hot >= even or experts is Experts.GROUPED


def test_an_auxiliary_loss_keeps_logits_of_all_layers_recomputed_or_not():
    model = load_model("qwen3-30b-a3b")
    for policy in (Checkpointing.NONE, Checkpointing.FULL):
        job = job_of("trl", model, seq_len=4096, checkpointing=policy, micro_batch_size=1)
        loss = [holdings(evolve(job, router_logits=each))[0].moments[0].bytes for each in (False, True)]
        assert loss[1] - loss[0] == 2 * 2 * 4096 * model.experts * model.layers


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"framework": "torchtitan"}, "experts: code of torchtitan"),
        ({"ep": 2}, "ep: bytes of experts"),
        ({"compiled": True}, "experts: what torch.compile"),
        ({"optimizer": "adafactor"}, "optimizer: Adafactor's factors of stacks"),
        ({"experts": Experts.EAGER, "autocast": True, "weight_dtype": "f32"}, "experts: casts of weights by autocast"),
        ({"experts": Experts.MODULES, "router_logits": True}, "experts: the auxiliary loss of transformers 4"),
        (
            {"adapter": Adapter(8, 16.0, ("all-linear",)), "experts": Experts.MODULES},
            "adapter: all-linear means experts too",
        ),
        ({"adapter": Adapter(8, 16.0, ("q_proj", "up_proj"))}, "adapter: the target 'up_proj' names no linear"),
        ({"adapter": Adapter(8, 16.0, ("q_proj",), base_bits=4)}, "adapter: bitsandbytes quantises linears"),
        ({"adapter": Adapter(8, 16.0, (r".*_proj",))}, "adapter: the target '.*_proj' touches experts"),
        ({"adapter": Adapter(8, 16.0, ("wq",))}, "adapter: the target 'wq' names no linear"),
    ],
)
def test_what_is_not_known_of_experts_is_refused_by_name(fields, said):
    fields = fields | ({"method": "lora"} if "adapter" in fields else {})
    job = evolve(job_of("trl", load_model("mixtral-8x7b")), **fields)
    assert refusal(job).startswith(said)


def test_adapters_on_attention_leave_experts_frozen():
    adapter = Adapter(8, 16.0, ("q_proj", "k_proj", "v_proj", "o_proj"))
    model = load_model("olmoe-1b-7b")
    job = job_of("trl", model, adapter=adapter, method="lora", sharding=Sharding.FSDP2, devices=4)
    held = {each.name: each.bytes for each in holdings(job)[0].moments[0].owners}
    assert held["frozen weights of experts"] == 2 * model.expert_parameters // 4
    assert held["frozen weights"] + held["frozen weights of experts"] == 2 * model.parameters // 4
    assert not held.keys() & {"optimizer of experts", "gradients of experts"}


# From files


def settings_of(change: dict[str, Any]) -> str:
    usual = {"sequence_len": 2048, "micro_batch_size": 1, "gradient_accumulation_steps": 1, "learning_rate": 2e-5}
    return yaml.safe_dump({**usual, "optimizer": "adamw_torch_fused", "bf16": True, **FLASH, **change})


@pytest.mark.parametrize("preset", PRESETS)
def test_each_family_is_answered_for_through_the_command(preset, tmp_path: Path, capsys) -> None:
    file = tmp_path / "train.yaml"
    fsdp = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}
    file.write_text(settings_of({"base_model": "some/model", "gradient_checkpointing": True, **fsdp}))
    told = ["fit", str(file), "--model", preset, "--devices", "16", "--memory", "79GiB"]
    assert main(told) == 0
    said = " ".join(capsys.readouterr().out.split())
    model = load_model(preset)
    assert f"experts: {model.experts} a layer" in said
    assert "counted as transformers 5 runs them (grouped_mm)" in said
    assert "no choice changes a byte" in said
    assert "weights of experts" in said
    assert main([*told, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["experts"] == {"code": "grouped_mm", "rows": 2048 * model.experts_per_token, "hot_expert_bytes": 0}
    assert data["job"]["experts"]["default"] is True
    assert "get_correct_experts_implementation" in data["job"]["experts"]["place"]


def test_the_files_code_of_experts_counts_and_a_strange_one_is_not_understood(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    found = {}
    for name in ("grouped_mm", "eager", "scattermoe"):
        file.write_text(settings_of({"base_model": "some/model", "experts_implementation": name}))
        found[name] = api.fit(file, model="olmoe-1b-7b", devices=1, memory=200 * GIB)
    assert found["eager"].job.experts is Experts.EAGER
    assert "adds up to" in str(found["eager"])
    assert found["scattermoe"].peak == found["grouped_mm"].peak
    assert [note.key for note in found["scattermoe"].job.not_understood] == ["experts_implementation"]
    file.write_text(settings_of({"base_model": "some/model", "experts_implementation": "eager"}))
    dense = api.fit(file, model="llama-3-8b", devices=1, memory=200 * GIB)
    assert [note.why for note in dense.job.ignored if note.key == "experts_implementation"] == [
        "the model has no experts"
    ]


def test_a_coefficient_of_llama_factory_keeps_router_logits(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    usual = {"model_name_or_path": "some/model", "stage": "sft", "finetuning_type": "full", "cutoff_len": 2048}
    usual |= {"per_device_train_batch_size": 1, "bf16": True, "do_train": True, "template": "qwen"}
    kept = []
    for coefficient in (0.0, 0.001):
        file.write_text(yaml.safe_dump({**usual, "moe_aux_loss_coef": coefficient}))
        kept.append(api.fit(file, model="qwen3-30b-a3b", devices=1, memory=80 * GIB).job.router_logits)
    assert kept == [False, True]


def test_a_peak_that_a_hot_expert_lifts_over_the_capacity_is_too_close_to_call(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    change = {"base_model": "some/model", "experts_implementation": "eager", "micro_batch_size": 64}
    file.write_text(settings_of(change))
    found = api.fit(file, model="mixtral-8x7b", devices=1)
    just = int(found.peak * (1 + found.band.error)) + 1
    hot = int(hot_expert(Part(found.job, 0)) * (1 + found.band.error)) + 1
    assert hot > GIB
    assert api.fit(file, model="mixtral-8x7b", devices=1, memory=just).verdict.value == "too close to call"
    assert api.fit(file, model="mixtral-8x7b", devices=1, memory=just + hot).verdict.value == "fits"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"adapter": "lora", "lora_r": 8, "lora_target_modules": ["w1", "w2"]}, "adapter: w3 is missing"),
        ({"adapter": "lora", "lora_r": 8, "lora_target_parameters": ["wq"]}, "adapter: the parameter 'wq'"),
        ({"expert_parallel_size": 4}, "ep: bytes of experts on ranks of their own"),
        ({"optimizer": "adafactor"}, "optimizer: Adafactor's factors of stacks"),
    ],
)
def test_what_a_file_asks_of_experts_that_is_not_known_is_refused(change, said, tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(settings_of({"base_model": "some/model", **change}))
    with pytest.raises(DiagnosticError, match=said) as caught:
        api.fit(file, model="mixtral-8x7b", devices=8, memory=79 * GIB)
    assert caught.value.diagnostics[0].help
