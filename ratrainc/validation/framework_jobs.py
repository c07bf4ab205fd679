"""Plans of measured rows as jobs of a framework, whose bytes the formulas of `ratrainc/fit/holdings` give.

They serve what the formulas of 2021 (`frameworks.py`) do not: families other than GPT-2, tensor-parallel ranks,
interleaved pipelines, FSDP2. A plan says nothing of dropout, so none is counted where the framework's default has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.placed_by import placed_by
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.ratrain_ir.schedules.named import default_schedule
from ratrain.ratrain_ir.topology import mesh_of
from ratrain.ratrainc.bridge.jobs.job import Attention, Checkpointing, Job, Loss, Sharding
from ratrain.ratrainc.fit.holdings.holdings import stage_holdings
from ratrain.ratrainc.fit.holdings.refusals import refusal

if TYPE_CHECKING:
    from ratrain.ratrain_ir.config.model_config import ModelConfig
    from ratrain.ratrain_ir.config.plan import Plan
    from ratrain.ratrainc.planner.search.plan_evaluation import Task

# megatron/core, with the distributed optimizer: bf16 weights, f32 masters
_MEGATRON = Job(
    "megatron-lm",
    None,
    None,
    None,
    None,
    None,
    sharding=Sharding.DISTRIBUTED_OPTIMIZER,
    master_dtype="f32",
    loss=Loss.VOCAB_PARALLEL,
)
JOBS = {
    "megatron-lm": _MEGATRON,
    # Megatron-LM of 2023 without the distributed optimizer, with its default dropout of 0.1 (arguments.py). One buffer
    # has all gradients. The step makes their f32 copies, and zero_grad drops them (optimizer.py).
    "megatron-lm-ddp": evolve(_MEGATRON, sharding=Sharding.DDP, dropout=0.1),
    # torchtitan, torchtitan/distributed/fsdp.py: f32 weights, gathered in the compute type, reduced in f32
    "torchtitan": Job("torchtitan", None, None, None, None, None, sharding=Sharding.FSDP2, loss=Loss.UPCAST),
}
"""Settings that a row's plan does not have, by the framework of the job."""
_LEVELS = {Sharding.DDP: 0, Sharding.DISTRIBUTED_OPTIMIZER: 1, Sharding.FSDP2: 3}
"""ZeRO level of the plans that a job's sharding stands for."""
_POLICIES = {
    "none": Checkpointing.NONE,
    "full": Checkpointing.FULL,
    "attention": Checkpointing.ATTENTION,
    "ops": Checkpointing.OPS,
}


def job_refusal(framework: str, model: ModelConfig, plan: Plan, pipeline: str) -> str:
    """Return the condition that a plan does not meet, or why its job's bytes are not known; empty if they are."""
    policies = {each.policy for each in _recomputes(pipeline)}
    level = _LEVELS[JOBS[framework].sharding]
    wrong = {
        f"with zero = {level}": plan.zero == level,
        "with f16 or bf16 views and logits = whole": plan.view_dtype in ("f16", "bf16") and plan.holds_logits,
        "with one of recompute{policy=full}, {policy=none}, {policy=attention}, {policy=ops}": len(policies) == 1
        and policies <= _POLICIES.keys(),
        "with as many layers on each stage but the first and the last": _middle_layers(model, plan) is not None,
        "without slices": not plan.slices,
        "with the chunks of a stage in a loop": plan.layout == "loop",
    }
    reason = next((text for text, right in wrong.items() if not right), "")
    return reason or _unknown(refusal(job_of(framework, model, plan, pipeline)))


def _recomputes(pipeline: str) -> list[RecomputePass]:
    """Return the passes of a pipeline that recompute; one that recomputes nothing if there are none."""
    found = [each for each in parse_pipeline(pipeline) if isinstance(each, RecomputePass)]
    return found or [RecomputePass("none")]


def _unknown(reason: str) -> str:
    return f"whose bytes are known ({reason})" if reason else ""


def job_of(framework: str, model: ModelConfig, plan: Plan, pipeline: str) -> Job:
    """Return the job that a plan is under a framework."""
    recompute = _recomputes(pipeline)[0]
    base = JOBS[framework]
    shards_weights = base.sharding is Sharding.FSDP2
    return evolve(
        base,
        model_name=model.name,
        model=model,
        seq_len=plan.seq_len,
        micro_batch_size=plan.micro_batch_size,
        gradient_accumulation=plan.micro_batches,
        devices=plan.clusters,
        cp=plan.cp,
        tp=plan.tp,
        pp=plan.pp,
        virtual_stages=plan.chunks,
        schedule=placed_by(pipeline) or plan.schedule or default_schedule(plan.shape),
        sequence_sharding=plan.sequence_sharding and plan.tp > 1,
        shard_size=plan.shard_group,
        weight_dtype="f32" if shards_weights else plan.view_dtype,
        compute_dtype=plan.view_dtype,
        gradient_dtype=plan.grad_dtype,
        reduce_dtype=plan.grad_dtype,
        optimizer="adamw-fused",
        checkpointing=_POLICIES.get(recompute.policy, Checkpointing.NONE),
        checkpoint_layers=None if recompute.every is None else model.layers // recompute.every,
        attention=Attention.EAGER if plan.attention == "scores-kept" else Attention.FLASH,
        sizes=_split(model, plan),
    )


def _middle_layers(model: ModelConfig, plan: Plan) -> int | None:
    """Return the layers of each stage between the first and the last (0 if there is none); None if they differ."""
    middle = range(1, mesh_of(plan).last_stage)
    counts = {len(plan.chunk_layers(stage, model)) for stage in middle} if plan.chunks == 1 else {0}
    return max(counts, default=0) if len(counts) <= 1 else None


def _split(model: ModelConfig, plan: Plan) -> dict[str, int]:
    """Return the layers of the first and the last stage, by Megatron-LM's names."""
    if plan.pp == 1 or plan.chunks > 1:
        return {}
    return {
        "decoder_first_pipeline_num_layers": len(plan.chunk_layers(0, model)),
        "decoder_last_pipeline_num_layers": len(plan.chunk_layers(mesh_of(plan).last_stage, model)),
    }


def job_bytes(framework: str, task: Task) -> list[dict[str, int]]:
    """Return the bytes of a rank of each stage at its fullest moment, by owner.

    Allocated by tensors alone: what an allocator loses is the machine's, as for our own programs.
    """
    job = job_of(framework, task.model, task.plan, task.pipeline)
    return [{each.name: each.bytes for each in rank.owners} for rank in stage_holdings(job)]
