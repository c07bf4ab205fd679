"""Sample runs with the reading that their frameworks' sources give: values, and which of them are defaults.

The samples lie outside the repository; without them nothing is tested here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrainc.bridge.jobs.formats import FORMATS, read_job
from ratrain.ratrainc.bridge.jobs.job import Checkpointing, Job, Sharding
from ratrain.ratrainc.bridge.jobs.job_reader import Asked

SAMPLES = next(
    (each / "shared" / "settings" for each in Path(__file__).parents if (each / "shared" / "settings").is_dir()),
    Path("none"),
)
OURS = {
    "01-axolotl-full-zero3": ("train.yaml", "axolotl"),
    "04-llamafactory-lora-sft": ("train.yaml", "llama-factory"),
    "06-trl-sft-lora-accelerate-fsdp2": ("sft.yaml", "trl"),
    "19-deepspeed-hjson-auto": ("args.json", "transformers"),
}
OPTIMIZERS = {
    "adamw_torch_fused": "adamw-fused",
    "AdamW (DeepSpeedCPUAdam because optimizer is offloaded)": "adamw-fused",
}
KINDS = {"none_or_ddp": (Sharding.NONE, Sharding.DDP), "fsdp": (Sharding.FSDP1, Sharding.FSDP2)}
DEFAULTS = {
    "optimizer.name": "optimizer",
    "optimizer.betas": "betas",
    "optimizer.eps": "eps",
    "optimizer.weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "lr_scheduler": "scheduler",
    "checkpointing.enabled": "checkpointing",
}
"""Fields of the samples' tables of defaults that a job has, with their names there."""

pytestmark = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples are not there")


def read(name: str, **asked: Any) -> tuple[Job, dict[str, Any]]:
    folder = SAMPLES / name
    expected = json.loads((folder / "expected.json").read_text())
    first = OURS[name][0]
    beside = tuple(folder / each for each in expected["files"] if each != first)
    return read_job(folder / first, Asked(beside=beside, **asked)), expected


def found(job: Job) -> dict[str, Any]:
    """List what a job says in the words of the samples."""
    training = job.training
    return {
        "model": job.model_name,
        "lr_scheduler": training.scheduler,
        "max_grad_norm": training.max_grad_norm,
        "micro_batch_per_rank": job.micro_batch_size,
        "grad_accum": job.gradient_accumulation,
        "seq_len": job.seq_len,
        "activation_offload": job.offload_activations,
        "ranks": job.devices,
    }


@pytest.mark.parametrize("name", OURS)
def test_a_sample_is_read_as_its_framework_reads_it(name: str) -> None:
    job, expected = read(name)
    expect = expected["expect"]
    assert job.framework == OURS[name][1]
    ours = found(job)
    if name.startswith("19"):
        del ours["lr_scheduler"]  # the ds_config has a schedule of DeepSpeed's own
    assert ours == {key: expect[key] for key in ours}
    optimizer, training = expect["optimizer"], job.training
    assert job.optimizer == OPTIMIZERS[optimizer["name"]]
    assert training.betas == tuple(optimizer["betas"])
    for key in ("lr", "eps", "weight_decay"):
        assert getattr(training, key) == optimizer[key], key
    assert training.warmup_ratio == expect["warmup"].get("ratio")
    assert training.warmup_steps == expect["warmup"].get("steps")
    assert job.compute_dtype == expect["precision"]["compute"]
    assert job.checkpointing is (Checkpointing.FULL if expect["checkpointing"]["enabled"] else Checkpointing.NONE)
    assert job.offload_parameters == expect["offload"]["params"]
    assert job.offload_optimizer == expect["offload"]["optimizer"]
    if expect["method"] is not None:
        assert job.method == expect["method"]
    if expect["packing"] is not None:
        assert training.packing == expect["packing"]["enabled"]
    sharding = expect["sharding"]
    stage = sharding.get("zero_stage")
    assert job.sharding in ((Sharding(f"zero{stage}"),) if stage else KINDS[sharding["kind"]])
    lora = expect.get("lora")
    assert (lora is None) == (job.adapter is None)
    if lora is not None and job.adapter is not None:
        targets = (lora["targets"],) if isinstance(lora["targets"], str) else tuple(lora["targets"])
        adapter = job.adapter
        assert (adapter.rank, adapter.alpha, adapter.dropout, adapter.targets) == (
            lora["r"],
            lora["alpha"],
            lora["dropout"],
            targets,
        )


@pytest.mark.parametrize("name", OURS)
def test_defaults_are_named_with_their_source(name: str) -> None:
    job, expected = read(name)
    for each in expected["defaults"]:
        field = DEFAULTS.get(each["field"])
        if field is None or not each["source"]:
            continue
        origin = job.origins[field]
        path = each["source"].partition(":")[2].partition(",")[0]
        assert origin.default, field
        assert Path(path).name in origin.place, field


def test_sizes_of_samples() -> None:
    job, _ = read("01-axolotl-full-zero3")
    width = load_model("qwen3-8b").hidden_size
    assert job.model == load_model("qwen3-8b")
    assert job.sizes["reduce_bucket_size"] == width**2
    assert job.sizes["stage3_prefetch_bucket_size"] == int(0.9 * width**2)
    assert job.sizes["stage3_param_persistence_threshold"] == 10 * width
    assert (job.master_dtype, job.weight_dtype) == ("f32", "bf16")
    assert not job.not_understood
    job, _ = read("06-trl-sft-lora-accelerate-fsdp2")
    assert (job.sharding, job.reshard_after_forward, job.devices) == (Sharding.FSDP2, True, 16)
    assert (job.weight_dtype, job.gradient_dtype, job.reduce_dtype) == ("bf16", "f32", "bf16")
    assert job.training.min_lr == 2e-5
    job, _ = read("19-deepspeed-hjson-auto", model=load_model("gpt2"))
    assert job.sizes["reduce_bucket_size"] == 768**2
    assert (job.sizes["allgather_bucket_size"], job.sizes["overlap_comm"]) == (200_000_000, 0)
    job, _ = read("04-llamafactory-lora-sft")
    assert (job.weight_dtype, job.gradient_dtype, job.seq_len) == ("bf16", "f32", 4096)


def test_a_sample_is_of_one_format_at_most() -> None:
    for path in SAMPLES.glob("*/*"):
        if path.name != "expected.json" and path.is_file():
            names = [each.name for each in FORMATS if each.recognises(path, path.read_text())]
            wanted = OURS.get(path.parent.name)
            assert len(names) <= 1, (path, names)
            if wanted is not None and path.name == wanted[0]:
                assert names == [wanted[1]]
            elif wanted is None:
                assert not {each for _, each in OURS.values()} & {*names}, path
