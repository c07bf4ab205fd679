"""Bytes that each rank of a job holds under its framework: the answer to "will it fit, and what holds the bytes".

    ranks    Part (part.py), one a kind of pipeline stage
    layer    tensors that autograd saves (activations.py), by the framework's model code (styles.py)
    loss     logits.py;  state: state.py;  buffers of the mechanism that shares out state: buffers.py
    peak     the fullest of the step's moments (moments.py);  in addition: overheads.py

All of it is closed-form arithmetic on integers, whatever the size of the job. One number is rounded: the share that
the allocator loses (overheads.FRAGMENTATION). Formulas come from the frameworks' code, named where they stand; what
was not read says "assumed".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.fit.holdings.moments import moments_of
from ratrain.ratrainc.fit.holdings.overheads import overhead
from ratrain.ratrainc.fit.holdings.part import Part
from ratrain.ratrainc.fit.holdings.refusals import refusal
from ratrain.ratrainc.fit.holdings.terms import RankBytes

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job


def holdings(job: Job) -> tuple[RankBytes, ...]:
    """Return the bytes of each kind of rank: first, middle and last pipeline stages, or one kind without a pipeline.

    Of the middle stages the first is meant, which keeps most micro-batches in flight.

    Raises RT061 if no formula is known for the job, with `refusal`'s reason.
    """
    _check(job)
    replicas = _ranks_of_a_stage(job)
    kinds = {
        1: [("each rank", 0, 1)],
        2: [("first stage", 0, 1), ("last stage", 1, 1)],
    }.get(job.pp, [("first stage", 0, 1), ("middle stages", 1, job.pp - 2), ("last stage", job.last_stage, 1)])
    return tuple(_rank(Part(job, stage), name, replicas * stages) for name, stage, stages in kinds)


def stage_holdings(job: Job) -> tuple[RankBytes, ...]:
    """Return the bytes of a rank of each pipeline stage; raises as `holdings` does."""
    _check(job)
    return tuple(_rank(Part(job, stage), f"stage {stage}", _ranks_of_a_stage(job)) for stage in range(job.pp))


def _check(job: Job) -> None:
    reason = refusal(job)
    if reason:
        way = "change that setting, or give what it leaves open"
        fail("RT061", f"bytes of this job under {job.framework} are not known: {reason}", help=way)


def _ranks_of_a_stage(job: Job) -> int:
    return (job.devices or job.model_ranks) // job.pp


def _rank(part: Part, name: str, ranks: int) -> RankBytes:
    """Return the bytes of one kind of rank at its fullest moment."""
    moments = moments_of(part)
    fullest = max(moments, key=lambda each: each.bytes)
    return RankBytes(
        name=name,
        ranks=ranks,
        peak_bytes=fullest.bytes,
        moment=fullest.name,
        owners=fullest.owners,
        moments=moments,
        overhead=overhead(part, moments, fullest),
    )
