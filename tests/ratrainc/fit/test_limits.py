"""Limits that `fit` names, followed: the file's reader accepts them, they fit, and nothing beyond them does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrainc.bridge.jobs.formats import format_named
from ratrain.ratrainc.bridge.jobs.job import Checkpointing, Job, Loss, Sharding
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.limits import limits
from ratrain.ratrainc.fit.verdicts import may_fit, most_bytes, surely_fits
from tests.ratrainc.bridge import test_other_job_phrases as other

if TYPE_CHECKING:
    from collections.abc import Callable

    from ratrain.ratrainc.fit.answer import Fit

GIB = 1 << 30
MEGATRON = """WORLD_SIZE={devices}
ARGUMENTS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --kv-channels 128
    --group-query-attention --num-query-groups 8 --normalization RMSNorm --swiglu --disable-bias-linear
    --max-position-embeddings 8192 --position-embedding-type rope --vocab-size 128256
    --untie-embeddings-and-output-weights --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
    --micro-batch-size {micro} --global-batch-size 128 --seq-length 2048 --bf16 --attention-backend flash {sharding}
)
"""
OWN_FSDP = "--use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
SHARDED = {"distributed optimizer": "--use-distributed-optimizer", "Megatron-FSDP": OWN_FSDP}


@pytest.mark.parametrize("sharding", SHARDED)
@pytest.mark.parametrize("gibibytes", [40, 66, 72, 79])
def test_fewer_devices_of_a_fixed_batch_are_a_number_that_divides_it(
    sharding: str, gibibytes: int, tmp_path: Path
) -> None:
    """With 128 sequences a step in micro-batches of 8, 11 devices are no advice: Megatron-LM refuses them."""
    file = tmp_path / "x.megatron"

    def fit(devices: int, micro: int = 8) -> Fit:
        file.write_text(MEGATRON.format(devices=devices, micro=micro, sharding=SHARDED[sharding]))
        return api.fit(file, memory=gibibytes * GIB, model="llama-3-8b")

    start = fit(16)
    for most, enough in ((start.limits, surely_fits), (start.perhaps, may_fit)):
        assert most is not None
        accepted: dict[int, bool] = {}
        for count in range(1, 17):
            try:
                found = fit(count)
            except DiagnosticError:
                continue
            accepted[count] = enough(found.job, found.peak, gibibytes * GIB)
        assert list(accepted) == [1, 2, 4, 8, 16]
        assert most.fewest_devices == next((count for count, fits in accepted.items() if fits), None)
        sizes = {size: enough((one := fit(16, size)).job, one.peak, gibibytes * GIB) for size in (1, 2, 4, 8)}
        assert most.largest_micro_batch == max((size for size, fits in sizes.items() if fits), default=None)
    said = " ".join(repr(start).split())
    if start.perhaps is not None and start.perhaps.fewest_devices is not None:
        assert "numbers that share out the 128 sequences of a step in micro-batches of 8" in said


@pytest.mark.parametrize("name", other.PHRASES)
def test_limits_of_every_sample_file_are_accepted_by_its_reader(name: str, tmp_path: Path) -> None:
    known, job = other.original(name)
    if refusal(job):
        pytest.skip(refusal(job))
    path, devices = other.FOLDER / name, other.DEVICES.get(name)
    room = most_bytes(job) * 21 // 20

    def enough(changed: Job) -> bool:
        return most_bytes(changed) <= room

    most = limits(job, enough, format_named(job.framework).phrase)
    for field, value in (("seq_len", most.longest_sequence), ("micro_batch_size", most.largest_micro_batch)):
        assert value is not None
        if (phrase := known.phrase(job, field, value)) is not None:
            text, beside = other.applied(path, phrase, tmp_path)
            assert enough(other.read(path, text, beside, devices)), phrase
    if devices is not None and most.fewest_devices is not None and not most.sharding:
        beside_it = path.with_suffix(".args.json")
        others = (beside_it,) if beside_it.is_file() else ()
        fewest = most.fewest_devices
        assert enough(other.read(path, path.read_text(), others, fewest))
        for fewer in range(job.model_ranks, fewest):
            try:
                found = other.read(path, path.read_text(), others, fewer)
            except DiagnosticError:
                continue
            assert refusal(found) or not enough(found), fewer


BATCHES: dict[str, tuple[dict[str, int], Callable[[int], bool]]] = {
    "whole and micro-batch": (
        {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 4},
        lambda count: 24 % count == 0,
    ),
    "whole and accumulation": (
        {"train_batch_size": 96, "gradient_accumulation_steps": 2},
        lambda count: 48 % count == 0,
    ),
    "all three": (
        {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        lambda count: count == 12,
    ),
    "without the whole": ({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}, lambda _count: True),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("gibibytes", [20, 27, 40, 79])
def test_of_three_sizes_the_two_that_the_file_says_stay(batch: str, gibibytes: int, tmp_path: Path) -> None:
    sizes, accepts = BATCHES[batch]
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, **sizes}))
    options = {"format": "deepspeed", "model": "tinyllama-1.1b", "seq_len": 2048, "memory": gibibytes * GIB}
    start = api.fit(file, devices=12, **options)
    fitting = []
    for count in range(1, 13):
        try:
            found = api.fit(file, devices=count, **options)
        except DiagnosticError:
            assert not accepts(count)
            continue
        assert accepts(count)
        if surely_fits(found.job, found.peak, gibibytes * GIB):
            fitting.append(count)
    assert start.limits is not None
    fewest = start.limits.fewest_devices
    assert fewest == (fitting[0] if fitting else None) or (not fitting and fewest is not None and fewest > 12)


JOBS = st.builds(
    Job,
    framework=st.sampled_from(["torchtitan", "axolotl", "llm-foundry"]),
    model_name=st.just("tinyllama-1.1b"),
    model=st.just(load_model("tinyllama-1.1b")),
    seq_len=st.sampled_from([128, 640, 2048]),
    micro_batch_size=st.sampled_from([1, 2, 3]),
    gradient_accumulation=st.sampled_from([1, 2]),
    devices=st.sampled_from([2, 4, 8]),
    sharding=st.sampled_from([Sharding.FSDP1, Sharding.FSDP2]),
    compute_dtype=st.sampled_from(["f32", "bf16"]),
    checkpointing=st.sampled_from([Checkpointing.NONE, Checkpointing.FULL]),
    loss=st.sampled_from([Loss.UPCAST, Loss.FUSED]),
)


@settings(max_examples=25)
@given(JOBS, st.integers(4, 40), st.sampled_from([1, 2, 3]))
def test_a_fixed_batch_is_shared_out_by_divisors_alone(job: Job, gigabytes: int, times: int) -> None:
    assert job.micro_batch_size is not None
    assert job.devices is not None
    whole = job.micro_batch_size * job.devices * times
    fixed = evolve(job, gradient_accumulation=times, whole_batch=whole)
    most = limits(fixed, lambda changed: most_bytes(changed) <= gigabytes << 30, lambda *_: None)
    counts = [count for count in range(1, whole + 1) if whole % (job.micro_batch_size * count) == 0]
    fitting = [count for count in counts if most_bytes(evolve(job, devices=count)) <= gigabytes << 30]
    assert most.fewest_devices == (fitting[0] if fitting else None)
    sizes = [size for size in range(1, whole + 1) if whole % (size * job.devices) == 0]
    fitting = [size for size in sizes if most_bytes(evolve(job, micro_batch_size=size)) <= gigabytes << 30]
    assert most.largest_micro_batch == (fitting[-1] if fitting else None)
