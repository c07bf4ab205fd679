"""Bounds of the counts of a job: those of a plan, so that `fit` answers for no run that `import-plan` refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.diagnostics import Diagnostics
from ratrain.ratrain_ir.support.limits import (
    MAX_CHUNKS,
    MAX_DEVICES,
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_MICRO_BATCH,
    MAX_MICRO_BATCHES,
    MAX_PARALLEL,
    MAX_SEQ_LEN,
)
from ratrain.ratrainc.bridge.jobs.job import location_of

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job

_MOST = {
    "seq_len": ("tokens of a sequence", MAX_SEQ_LEN),
    "micro_batch_size": ("sequences of a micro-batch", MAX_MICRO_BATCH),
    "gradient_accumulation": ("micro-batches of a step and device", MAX_MICRO_BATCHES),
    "devices": ("devices", MAX_DEVICES),
    "tp": ("tensor-parallel ranks", MAX_PARALLEL),
    "pp": ("pipeline ranks", MAX_PARALLEL),
    "cp": ("context-parallel ranks", MAX_PARALLEL),
    "ep": ("expert-parallel ranks", MAX_PARALLEL),
    "virtual_stages": ("chunks of layers a pipeline rank", MAX_CHUNKS),
    "shard_size": ("ranks of a sharding group", MAX_DEVICES),
    "checkpoint_every": ("layers a kept input", MAX_LAYERS),
    "loss_chunks": ("chunks of the loss", MAX_SEQ_LEN),
}
"""Fields that count from 1: what they count, and the most of it."""


def check_counts(job: Job) -> None:
    """Raise `DiagnosticError` RT063 with all counts of a job that are out of range, at the places that say them."""
    report = Diagnostics()
    counts = {name: (getattr(job, name), *bound) for name, bound in _MOST.items()}
    if job.adapter is not None:
        counts["adapter"] = (job.adapter.rank, "ranks of an adapter", MAX_HIDDEN)
    for name, (count, what, most) in counts.items():
        if count is None or 1 <= count <= most:
            continue
        origin = job.origins.get(name)
        key = name if origin is None or not origin.key else origin.key
        location = None if origin is None else location_of(origin.place)
        report.error("RT063", f"{key}: {count} {what}", location, help=f"a whole number from 1 to {most} is expected")
    report.check()
