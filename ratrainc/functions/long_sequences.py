"""Plans of ours for the long sequences of a job: cut among context ranks, and cut into slices, on the same devices.

job     8 devices, cp 4, pp 1         sequences of 131,072
ranks   cp 4, two replicas            each rank has its part of a sequence; as many sequences a step
slices  4 stages, two replicas        stages in the place of context ranks; slice after slice goes through them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.ratrain_ir.config.cuts import even_work_lengths
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.plan_keys import CONTIGUOUS, ZIGZAG
from ratrain.ratrain_ir.config.training import WHOLE
from ratrain.ratrain_ir.model.layer_cuts import balance_cuts
from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.bridge.job_plans.plan_of_job import zero_level
from ratrain.ratrainc.choices.strategies import DEFAULT_STRATEGY
from ratrain.ratrainc.console.progress import counting
from ratrain.ratrainc.fit.answer import OurPlan
from ratrain.ratrainc.planner.answer.strategy_comparison import compare_on_plan

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.training import Training
    from ratrain.ratrainc.bridge.jobs.job import Job
    from ratrain.targets.machine.machine import Machine

LONG = 1 << 15
"""Tokens from which on context ranks and slices are compared where a job has one context rank."""
_MLP_CHUNK = 2048
"""Rows of an MLP at a time, in both plans: next to no time (docs/long-sequences.md)."""


def long_sequence_plans(job: Job, machine: Machine, training: Training = WHOLE) -> tuple[OurPlan, ...]:
    """Compile, place and simulate both plans of a job; neither if its sequences are short and it has no context ranks.

    `training` says what trains. A plan that cannot be is returned with its reason.
    """
    assert job.model is not None
    assert job.seq_len is not None
    if job.cp == 1 and job.seq_len < LONG:
        return ()
    both = (_with_ranks(job, training), _with_slices(job, training))
    return tuple(_placed(job.model, *made, machine) for made in both)


def _base(job: Job, training: Training, *, dp: int, micro_batches: int, pp: int, cp: int) -> Plan:
    """Return a plan of the job's batch and types with other degrees; its stages are cut where their work is even."""
    assert job.model is not None
    assert job.micro_batch_size is not None
    assert job.seq_len is not None
    zero = zero_level(job) if dp * cp > 1 else 0
    return Plan(
        pp=pp,
        dp=dp,
        cp=cp,
        tp=job.tp,
        cuts=balance_cuts(job.model, pp, job.seq_len, training),
        micro_batch_size=job.micro_batch_size,
        micro_batches=micro_batches,
        seq_len=job.seq_len,
        context_layout=CONTIGUOUS if cp > 1 and job.seq_len % (2 * cp) else ZIGZAG,
        zero=zero,
        reduce="each-micro-batch" if zero > 1 else "last",
        view_dtype=job.compute_dtype,
        mlp_chunk=_MLP_CHUNK,
        training=training,
    )


def _several(job: Job) -> int:
    """Return the context ranks of the job, or as many as a power of two of its replicas makes."""
    dp = job.dp or 1
    return job.cp if job.cp > 1 else dp & -dp


def _with_ranks(job: Job, training: Training) -> tuple[str, Plan | None]:
    cp = _several(job)
    times = cp // job.cp
    plan = _base(
        *(job, training),
        dp=(job.dp or 1) // times,
        micro_batches=(job.gradient_accumulation or 1) * times,
        pp=job.pp,
        cp=cp,
    )
    return f"cp {cp}", plan if cp > 1 else None


def _with_slices(job: Job, training: Training) -> tuple[str, Plan | None]:
    """Return a plan whose stages are in the place of context ranks, and twice as many slices as stages."""
    assert job.model is not None
    assert job.seq_len is not None
    cp = _several(job)
    stages, times = job.pp * cp, cp // job.cp
    slices = max(4, 2 * stages)
    name = f"{number_of(slices, 'slice')} through {number_of(stages, 'stage')}"
    if stages > job.model.layers or job.seq_len < slices:
        return name, None
    plan = _base(
        *(job, training),
        dp=(job.dp or 1) // times,
        micro_batches=(job.gradient_accumulation or 1) * times,
        pp=stages,
        cp=1,
    )
    return name, evolve(plan, slices=even_work_lengths(job.model, job.seq_len, slices))


def _placed(model: ModelConfig, name: str, plan: Plan | None, machine: Machine) -> OurPlan:
    if plan is None:
        return OurPlan("", 0, 0.0, name, "there are too few devices, or layers")
    try:
        (row,) = compare_on_plan(model, plan, [DEFAULT_STRATEGY], machine, counting(None)).rows
    except DiagnosticError as error:
        return OurPlan("", 0, 0.0, name, error.diagnostics[0].message)
    if not row["fits"]:
        return OurPlan("", row["peak_bytes"], 0.0, name, "it does not fit")
    return OurPlan(name, row["peak_bytes"], row["step_seconds"], name)
