"""Every sample of a settings file that `fit` reads: its plan has the sizes of the job, or it is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ratrain import api
from ratrain.ratrain_ir.config.model_files import load_model
from ratrain.ratrain_ir.support.diagnostics import MISUSE, DiagnosticError
from ratrain.ratrain_ir.text.plan_file import load_plan
from ratrain.ratrainc.bridge.job_plans.importing_jobs import BY_JOBS
from ratrain.ratrainc.bridge.jobs.formats import read_job
from ratrain.ratrainc.bridge.jobs.job import Checkpointing, Job, Sharding
from ratrain.ratrainc.bridge.jobs.job_reader import Asked
from tests.ratrainc.bridge.hf_files import CASES, Files, written
from tests.ratrainc.bridge.test_job_plans import JOBS, SHARED

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.importing import Imported

ANSWERS: dict[str, Any] = {
    "--clusters": ("clusters", 16),
    "--seq-len": ("seq_len", 64),
    "--micro-batch-size": ("micro_batch_size", 2),
    "--global-batch": ("global_batch", 64),
    "--steps": ("steps", 1000),
    "--f32-state": ("f32_state", True),
}
"""Options that a way out may ask for, and what a person would say."""


def samples() -> dict[str, tuple[Files | Path, tuple[Path, ...]]]:
    """Every sample run by its name: texts to be written, or a file with those beside it."""
    found: dict[str, tuple[Files | Path, tuple[Path, ...]]] = {name: (files, ()) for name, files in CASES.items()}
    for path in sorted(JOBS.iterdir()):
        if path.name not in ("expected.json", "ds_zero3.args.json"):
            found[path.name] = (path, ())
    for folder in sorted(SHARED.iterdir()) if SHARED else []:
        if folder.is_dir():
            files = json.loads((folder / "expected.json").read_text())["files"]
            found[folder.name] = (folder / files[0], tuple(folder / each for each in files[1:]))
    return found


SAMPLES = samples()


def asked(first: Path, beside: tuple[Path, ...]) -> tuple[Imported | DiagnosticError, dict[str, Any]]:
    """Import a file, giving each option that a way out asks for; return what comes of it, and the options."""
    options: dict[str, Any] = {"beside": beside}
    for _ in range(len(ANSWERS) + 1):
        try:
            return api.import_plan(None, first, **options), options
        except DiagnosticError as error:
            helps = " ".join(each.help or "" for each in error.diagnostics)
            wanted = {key: value for key, value in ANSWERS.items() if re.search(rf"{key}\b", helps)}
            new = {name: value for name, value in wanted.values() if name not in options}
            if not new:
                return error, options
            options |= new
    raise AssertionError("options go on being asked for")


def level(job: Job) -> int:
    """Return the ZeRO level that a job's sharding is."""
    if job.shard_size == 1:
        return 0
    if job.sharding in (Sharding.FSDP1, Sharding.FSDP2):
        return 3 if job.reshard_after_forward else 2
    return {Sharding.ZERO1: 1, Sharding.DISTRIBUTED_OPTIMIZER: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}.get(
        job.sharding, 0
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_a_plan_has_the_sizes_of_the_job_or_the_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    files, beside = SAMPLES[name]
    first, beside = (files, beside) if isinstance(files, Path) else written(tmp_path, files)
    made, options = asked(first, beside)
    if isinstance(made, DiagnosticError):
        for each in made.diagnostics:
            assert each.code in ("RT063", "RT064", MISUSE)
            assert each.help or each.code == MISUSE
            assert each.location is not None or each.code == MISUSE
            assert not re.match(r"(adapter|method|dropout|optimizer|weight_dtype):", each.message) or name.startswith(
                ("axolotl", "01")
            )  # the file's own words
        return
    names = {"devices": "clusters", "seq_len": "seq_len", "micro_batch_size": "micro_batch_size"}
    given = {ours: options[theirs] for ours, theirs in names.items() if theirs in options}
    job, plan = read_job(first, Asked(beside=beside, **given)), made.plan
    assert (plan.pp, plan.tp, plan.cp, plan.dp) == (job.pp, job.tp, job.cp, job.dp)
    assert (plan.seq_len, plan.micro_batch_size) == (job.seq_len, job.micro_batch_size)
    assert plan.micro_batches == job.gradient_accumulation or plan.global_batch == options["global_batch"]
    assert plan.view_dtype == job.compute_dtype
    assert (plan.attention == "fused") or job.attention.value == "eager"
    if job.framework in BY_JOBS:
        assert plan.zero == level(job)
        grouped = job.shard_size not in (None, 1, plan.replicas) and plan.zero
        assert plan.shard_group == (job.shard_size if grouped else None)
        assert any("recompute{policy=full" in each for each in made.passes) == (job.checkpointing is Checkpointing.FULL)
        assert any("offload-state" in each for each in made.passes) == job.offload_optimizer
    (tmp_path / "p.toml").write_text(made.text())
    read = load_plan(tmp_path / "p.toml", load_model("llama-2-7b"))
    assert (read.pp, read.tp, read.dp, read.zero, read.view_dtype) == (
        plan.pp,
        plan.tp,
        plan.dp,
        plan.zero,
        plan.view_dtype,
    )
