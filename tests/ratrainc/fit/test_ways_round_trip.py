"""Every way out of every sample file, put into the file and read again, has the peak that it was said to have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ratrain.ratrainc.bridge.jobs.formats import format_named
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.verdicts import most_bytes
from ratrain.ratrainc.fit.ways_out import WayOut, ways_out
from ratrain.targets.machine.machine import load_machine
from tests.ratrainc.bridge import hf_files
from tests.ratrainc.bridge import test_other_job_phrases as other

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job

DDP_AXOLOTL = hf_files.AXOLOTL_PLAIN.replace("fp16: true", "fp16: false").replace("bf16: false", "bf16: true")
DDP_FACTORY = hf_files.FACTORY_PLAIN.replace("pure_bf16", "bf16")
ZERO0 = hf_files.ACCELERATE_ZERO3.replace("stage: 3", "stage: 0").replace("device: cpu", "device: none")
MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
FAMILY: dict[str, hf_files.Files] = {
    **hf_files.CASES,
    "axolotl, DDP in bf16": {"train.yml": DDP_AXOLOTL},
    "axolotl, DDP by accelerate": {"train.yml": DDP_AXOLOTL, "ddp.yaml": hf_files.ACCELERATE_DDP},
    "LLaMA-Factory, DDP": {"train.yaml": DDP_FACTORY},
    "TRL, ZeRO 0": {"sft.yaml": hf_files.TRL_FULL, "zero0.yaml": ZERO0},
    "axolotl, experts": {"train.yml": DDP_AXOLOTL.replace("mistralai/Mistral-7B-v0.3", MIXTRAL)},
    "LLaMA-Factory, experts": {"train.yaml": DDP_FACTORY.replace("Qwen/Qwen2.5-1.5B", MIXTRAL)},
    "TRL, experts": {"sft.yaml": hf_files.TRL_FULL.replace("Qwen/Qwen3-8B", MIXTRAL), "zero0.yaml": ZERO0},
}


def ways(job: Job) -> tuple[WayOut, ...]:
    """Return the ways out of a job on devices of half its peak, so that combinations are tried as well."""
    return ways_out(job, most_bytes(job) // 2, load_machine("a100-node"), format_named(job.framework).phrase)


@pytest.mark.parametrize("case", FAMILY)
def test_of_the_trainer_family(case: str, tmp_path: Path) -> None:
    devices = None if "num_processes" in "".join(FAMILY[case].values()) or "hybrid" in case else 8
    job = hf_files.job_of(tmp_path, FAMILY[case], devices=devices)
    if refusal(job):
        pytest.skip(refusal(job))
    for way in ways(job):
        files = FAMILY[case]
        for change in way.changes:
            files = hf_files.changed(files, change)
        again = hf_files.job_of(tmp_path, files, devices=devices)
        assert most_bytes(again) == way.peak_bytes, way.text


@pytest.mark.parametrize("name", other.PHRASES)
def test_of_other_formats(name: str, tmp_path: Path) -> None:
    known, job = other.original(name)
    if refusal(job):
        pytest.skip(refusal(job))
    path, devices = other.FOLDER / name, other.DEVICES.get(name)
    for way in ways(job):
        text, beside = path.read_text(), tuple[Path, ...]()
        for number, change in enumerate(way.changes):
            file = tmp_path / str(number) / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
            arguments = beside[0] if beside else path.with_suffix(".args.json")
            if arguments.is_file():
                file.with_suffix(".args.json").write_text(arguments.read_text())
            text, beside = other.applied(file, change, tmp_path)
        again = other.read(path, text, beside, devices)
        assert most_bytes(again) == way.peak_bytes, way.text
    assert known.name == job.framework
