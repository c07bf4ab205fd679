"""Properties of the bytes that a rank holds: sums, monotony, shares, and what is refused."""

from __future__ import annotations

import time

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Loss, Sharding
from ratrain.ratrainc.fit.holdings.holdings import holdings, stage_holdings
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.holdings.state import moments
from ratrain.ratrainc.fit.holdings.styles import STYLES
from tests.ratrainc.fit.jobs import gpt, job_of, megatron, model_of

SHARED = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP1, Sharding.FSDP2)
LLAMA = model_of("llama", layers=8, hidden_size=256, heads=8, kv_heads=4, head_dim=32, ffn_size=704, vocab_size=4096)
SMALL = {"reduce_bucket_size": 1000, "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}


def peak(job) -> int:
    return max(each.peak_bytes for each in holdings(job))


JOBS = st.builds(
    lambda framework, sharding, devices, accumulation, checkpointing, attention, loss, optimizer, dropout: job_of(
        framework,
        LLAMA,
        sharding=sharding,
        devices=devices if sharding is not Sharding.NONE else 1,
        gradient_accumulation=accumulation,
        checkpointing=checkpointing,
        attention=attention,
        loss=loss,
        optimizer=optimizer,
        dropout=dropout,
        sizes=SMALL,
    ),
    st.sampled_from(sorted(STYLES)),
    st.sampled_from([Sharding.NONE, Sharding.DDP, *SHARED]),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([Checkpointing.NONE, Checkpointing.FULL, Checkpointing.ATTENTION]),
    st.sampled_from(Attention),
    st.sampled_from(Loss),
    st.sampled_from(["adamw", "adamw-fused", "adamw-8bit", "sgd", "lion"]),
    st.sampled_from([0.0, 0.1]),
)


@settings(max_examples=150, deadline=None)
@given(JOBS)
def test_owners_sum_to_the_fullest_of_the_moments(job):
    for rank in holdings(job):
        assert sum(each.bytes for each in rank.owners) == rank.peak_bytes
        assert rank.peak_bytes == max(each.bytes for each in rank.moments)
        assert rank.moment in {each.name for each in rank.moments}
        assert rank.reserved_bytes == rank.peak_bytes + sum(each.bytes for each in rank.overhead)
        assert all(type(each.bytes) is int and each.bytes > 0 for moment in rank.moments for each in moment.owners)
        assert all(type(each.bytes) is int and each.bytes >= 0 for each in rank.overhead)


@settings(max_examples=150, deadline=None)
@given(JOBS)
def test_more_tokens_hold_more(job):
    assert peak(job) <= peak(evolve(job, micro_batch_size=4)) <= peak(evolve(job, micro_batch_size=8))
    assert peak(job) <= peak(evolve(job, seq_len=64)) <= peak(evolve(job, seq_len=2048))


@settings(max_examples=150, deadline=None)
@given(JOBS)
def test_more_devices_that_share_state_hold_no_more(job):
    if job.sharding in SHARED:
        assert peak(evolve(job, devices=2)) >= peak(evolve(job, devices=8)) >= peak(evolve(job, devices=64))


@settings(max_examples=150, deadline=None)
@given(JOBS)
def test_recomputation_keeps_no_more_between_forward_and_backward(job):
    full = evolve(job, checkpointing=Checkpointing.FULL)
    none = evolve(job, checkpointing=Checkpointing.NONE)
    at_loss = [
        next(each.bytes for each in holdings(one)[-1].moments if each.name == "at the loss") for one in (full, none)
    ]
    assert at_loss[0] <= at_loss[1]


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.DISTRIBUTED_OPTIMIZER])
def test_stages_and_tensor_ranks_hold_all_parameters_once(sharding):
    model = gpt(heads=8, layers=8, vocab=1024)
    whole = megatron(model, tp=1, sharding=sharding)
    for tp, pp in ((1, 2), (2, 1), (4, 2), (8, 4)):
        job = megatron(model, tp=tp, pp=pp, gradient_accumulation=8, sharding=sharding, sequence_sharding=tp > 1)
        parts = [Part(job, stage) for stage in range(pp)]
        vectors = sum(part.layers * part.layer_vectors + part.outer_parameters for part in parts)
        assert sum(part.layers for part in parts) == 8
        matrices = sum(part.layers * (part.layer_parameters - part.layer_vectors) for part in parts)
        first = Part(whole, 0)
        assert matrices * tp == 8 * (first.layer_parameters - first.layer_vectors)
        assert vectors >= (8 * first.layer_vectors) // tp
        assert peak(job) < peak(evolve(whole, gradient_accumulation=8))


def test_the_first_stage_keeps_most_activations_and_the_last_has_the_logits():
    model = gpt(layers=8, vocab=1024)
    kinds = holdings(megatron(model, pp=4, gradient_accumulation=8))
    assert [(each.name, each.ranks) for each in kinds] == [("first stage", 1), ("middle stages", 2), ("last stage", 1)]
    kept = [sum(owner.bytes for owner in each.owners if owner.name.startswith("activations")) for each in kinds]
    assert kept[0] > kept[1] > kept[2]
    assert [any(owner.name == "logits" for m in each.moments for owner in m.owners) for each in kinds] == [
        False,
        False,
        True,
    ]
    assert [each.peak_bytes for each in stage_holdings(megatron(model, pp=4, gradient_accumulation=8))][:2] == [
        each.peak_bytes for each in kinds[:2]
    ]


def test_uneven_stages_by_megatrons_flags():
    job = megatron(gpt(layers=6), pp=4, gradient_accumulation=4)
    assert refusal(job).startswith("pp: 6 layers")
    counted = {"account_for_embedding_in_pipeline_split": 1, "account_for_loss_in_pipeline_split": 1}
    for sizes in (counted, {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1}):
        assert [Part(evolve(job, sizes=sizes), stage).layers for stage in range(4)] == [1, 2, 2, 1]
        assert not refusal(evolve(job, sizes=sizes))
    only = evolve(job, sizes={"decoder_first_pipeline_num_layers": 3})
    assert [Part(only, stage).layers for stage in range(4)] == [3, 1, 1, 1]


def test_bytes_a_parameter_of_known_recipes():
    """16 bytes: f32 weights, gradients and AdamW; 18 under Megatron-LM; 8 in pure bf16; 12 / n shared by the optimizer."""
    count = LLAMA.parameters

    def a_parameter(job) -> float:
        step = holdings(job)[0].moments[-1]
        named = {"weights", "gradients", "optimizer", "master weights"}
        return sum(each.bytes for each in step.owners if each.name in named) / count

    f32 = {"weight_dtype": "f32", "gradient_dtype": "f32"}
    assert a_parameter(job_of("transformers", LLAMA, **f32)) == 16
    assert a_parameter(job_of("torchtune", LLAMA)) == 8
    assert a_parameter(megatron(LLAMA)) == 18
    shared = megatron(LLAMA, sharding=Sharding.DISTRIBUTED_OPTIMIZER, devices=4)
    assert a_parameter(shared) == pytest.approx(6 + 12 / 4, abs=1e-4)
    assert a_parameter(job_of("torchtitan", LLAMA, sharding=Sharding.FSDP2, devices=8, **f32)) == pytest.approx(
        2, abs=1e-4
    )
    assert a_parameter(job_of("torchtune", LLAMA, optimizer="adamw-4bit")) == pytest.approx(
        4 + 1 + 2 * 4 / 128, abs=1e-4
    )
    assert a_parameter(job_of("torchtune", LLAMA, optimizer="adamw-8bit")) == pytest.approx(
        4 + 2 + 2 * 4 / 256, abs=1e-4
    )
    assert a_parameter(job_of("torchtune", LLAMA, optimizer="adamw-paged")) == 4


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.DDP, Sharding.ZERO1])
def test_nanotron_sums_gradients_in_a_buffer_of_their_own(sharding: Sharding) -> None:
    """4 bytes a parameter at each moment, and DDP's buckets in bf16 where it wraps the model; none is DeepSpeed's."""
    devices = 1 if sharding is Sharding.NONE else 4
    fields = {"gradient_dtype": "f32", "reduce_dtype": "f32", "master_dtype": "f32"}
    job = job_of("nanotron", model_of("llama"), sharding=sharding, devices=devices, **fields)
    parameters = Part(job, 0).parameters
    (rank,) = holdings(job)
    for moment in rank.moments:
        held = {each.name: each.bytes for each in moment.owners}
        assert held["gradients"] == 4 * parameters, moment.name
        assert held.get("buffers of DDP: buckets", 0) == (2 * parameters if sharding is Sharding.DDP else 0)
        assert not any("DeepSpeed" in name for name in held)
        waiting = held.get("buffers of nanotron: gradients before their sum", 0)
        assert waiting == 2 * parameters or moment.name != "at the end of the backward"


def test_the_trainers_8_bit_adamw_keeps_moments_of_the_embedding_in_f32():
    narrow, wide = (Part(job_of(name, LLAMA, optimizer="adamw-8bit"), 0) for name in ("torchtune", "trl"))
    embedding = LLAMA.embedding_parameters
    assert moments(wide, LLAMA.parameters) - moments(narrow, LLAMA.parameters) == 2 * (
        4 * embedding - embedding - 4 * embedding // 256
    )


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix():
    h, f, v, k = LLAMA.hidden_size, LLAMA.ffn_size, LLAMA.vocab_size, LLAMA.kv_size
    layer = 2 * (h + h) + 2 * (k + h) + 3 * (f + h) + 2 * h
    job = job_of("transformers", LLAMA, optimizer="adafactor")
    assert moments(Part(job, 0), LLAMA.parameters) == 4 * (8 * layer + 2 * (v + h) + h)


def test_paged_moments_and_offloaded_state_are_not_on_the_device():
    whole = job_of("transformers", LLAMA, sharding=Sharding.ZERO3, devices=4, master_dtype="f32", sizes=SMALL)
    names = {each.name for each in holdings(evolve(whole, offload_optimizer=True))[0].owners}
    assert not names & {"optimizer", "master weights"}
    assert "weights" not in {each.name for each in holdings(evolve(whole, offload_parameters=True))[0].owners}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": None}, "model: the sizes"),
        ({"micro_batch_size": None}, "micro_batch_size: neither"),
        ({"seq_len": None}, "seq_len: neither"),
        ({"gradient_accumulation": None}, "gradient_accumulation: neither"),
        ({"micro_batch_size": 0}, "micro_batch_size: must be at least 1"),
        ({"devices": None, "sharding": Sharding.FSDP2}, "devices: the number"),
        ({"framework": "colossal"}, "framework: the model code of colossal"),
        ({"method": "lora"}, "adapter: the settings do not say"),
        ({"method": "frozen"}, "method: frozen"),
        ({"ep": 2}, "ep: bytes of experts"),
        ({"model": load_model("mixtral-8x7b"), "framework": "torchtune"}, "experts: code of torchtune"),
        ({"cp": 2, "devices": 2, "framework": "litgpt"}, "cp: litgpt has no context ranks"),
        ({"fp8": True}, "fp8:"),
        ({"optimizer": "muon"}, "optimizer: the moments of muon"),
        ({"schedule": "zb-v"}, "schedule: micro-batches"),
        ({"compute_dtype": "f8"}, "types: the size of f8"),
        ({"tp": 2, "devices": 2}, "tp, pp: tensor and pipeline parallelism of transformers"),
        ({"devices": 3, "framework": "megatron-lm", "tp": 2}, "devices: 3 are not a multiple"),
        ({"shard_size": 3, "devices": 4, "sharding": Sharding.FSDP2}, "shard_size: 3"),
        ({"checkpointing": Checkpointing.OPS}, "checkpointing: the list"),
        ({"sharding": Sharding.DISTRIBUTED_OPTIMIZER}, "sharding: the distributed optimizer"),
        ({"optimizer": "adafactor", "sharding": Sharding.FSDP2, "devices": 2}, "optimizer: Adafactor"),
        ({"offload_activations": True}, "offload_activations:"),
        ({"checkpoint_every": 0, "checkpointing": Checkpointing.FULL}, "checkpoint_every"),
    ],
)
def test_no_formula_no_answer(fields, said):
    job = evolve(job_of("transformers", LLAMA), **fields)
    assert refusal(job).startswith(said)
    with pytest.raises(DiagnosticError, match="RT061"):
        holdings(job)


def test_a_70b_on_64_devices_takes_milliseconds():
    job = megatron(
        load_model("llama-2-70b"), tp=8, pp=4, devices=64, gradient_accumulation=16, attention=Attention.FLASH
    )
    holdings(job)
    start = time.process_time()
    holdings(job)
    assert time.process_time() - start < 0.05
