"""Each phrase, put into its file, makes the job that was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ratrain.ratrainc.bridge.jobs.formats import FORMATS
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Job, Loss, Sharding
from tests.ratrainc.bridge.hf_files import CASES, changed, job_of

VALUES: dict[str, tuple[Any, ...]] = {
    "checkpointing": (Checkpointing.NONE, Checkpointing.FULL, Checkpointing.OPS),
    "micro_batch_size": (3,),
    "gradient_accumulation": (5,),
    "seq_len": (640,),
    "optimizer": ("adamw", "adamw-8bit", "adafactor", "lion", "muon", "adamw-foreach-off"),
    "offload_parameters": (True, False),
    "offload_optimizer": (True, False),
    "offload_activations": (True, False),
    "sharding": (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP2, Sharding.DDP),
    "reshard_after_forward": (True, False),
    "reduces_each": (True, False),
    "loss": (Loss.FUSED, Loss.UPCAST, Loss.VOCAB_PARALLEL),
    "attention": (Attention.FLASH, Attention.SDPA, Attention.EAGER),
    "compute_dtype": ("bf16", "f16", "f32"),
    "weight_dtype": ("bf16", "f32"),
    "pp": (2,),
}
ALWAYS = {
    "axolotl": {
        "checkpointing",
        "micro_batch_size",
        "gradient_accumulation",
        "seq_len",
        "optimizer",
        "loss",
        "attention",
    },
    "llama-factory": {"checkpointing", "micro_batch_size", "gradient_accumulation", "seq_len", "optimizer", "loss"},
    "trl": {"checkpointing", "micro_batch_size", "gradient_accumulation", "seq_len", "optimizer", "loss", "attention"},
    "transformers": {"checkpointing", "micro_batch_size", "gradient_accumulation", "optimizer", "loss"},
    "accelerate": {"sharding"},
}
"""Fields that a format can always change to some of the values above."""


def said(job: Job, name: str, value: Any) -> str | None:
    (known,) = (each for each in FORMATS if each.name == job.framework)
    return known.phrase(job, name, value)


@pytest.mark.parametrize("case", CASES)
def test_a_phrase_does_what_it_says(case: str, tmp_path: Path) -> None:
    job = job_of(tmp_path, CASES[case], devices=8 if case in ("axolotl, one device", "TRL, small") else None)
    expressed = set()
    for name, values in VALUES.items():
        for value in values:
            words = said(job, name, value)
            if words is None:
                continue
            expressed.add(name)
            files = changed(CASES[case], words)
            again = job_of(tmp_path, files, devices=job.devices)
            assert getattr(again, name) == value, (name, value, words)
    assert expressed >= ALWAYS[job.framework]


def test_phrases_are_the_words_of_their_files(tmp_path: Path) -> None:
    plain = job_of(tmp_path, CASES["axolotl, one device"])
    assert said(plain, "checkpointing", Checkpointing.FULL) == "gradient_checkpointing: true"
    axolotl = job_of(tmp_path, CASES["axolotl, ZeRO 3"])
    moved = '"zero_optimization": {"offload_param": {"device": "none"}}  # in zero3.json'
    assert said(axolotl, "offload_parameters", False) == moved
    factory = job_of(tmp_path, CASES["LLaMA-Factory, pure"])
    assert said(factory, "checkpointing", Checkpointing.FULL) == "disable_gradient_checkpointing: false"
    assert said(factory, "attention", Attention.FLASH) == "flash_attn: fa2"
    trl = job_of(tmp_path, CASES["TRL, FSDP 1"])
    assert said(trl, "sharding", Sharding.ZERO3) == (
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}  # in fsdp1.yaml"
    )
    assert said(trl, "loss", Loss.FUSED) == "loss_type: chunked_nll\nuse_liger_kernel: false"
    arguments = job_of(tmp_path, CASES["arguments"])
    assert said(arguments, "micro_batch_size", 1) == '"per_device_train_batch_size": 1'
    assert said(arguments, "seq_len", 1) is None
