"""Bytes that published runs held on a GPU under PyTorch frameworks, by formulas, in place of our own programs' bytes.

Our programs have no dropout, no f16 copy of f32 logits, no bucket that gradients are copied into, and no allocator. A
plan cannot say any of this, but these bytes decide a published peak, or a run that ran out of memory. From the
simulated program come only the bytes that follow from the schedule: boundaries, checkpoints and inputs.

The bytes of a stage are its state, the fuller of two moments (at the loss, or in the backward of a layer), buckets and
buffers, and a share that the allocator loses:

    state | checkpoints | max(loss, layer) | bucket | buffers of the step's end | 8 % of all these

Sources: Korthikanti et al. 2022 (arXiv 2205.05198), equations 1 and 2, for the activations of a layer with dropout
masks; and the frameworks' code of that time, named at each constant and read in public copies. runtime/zero/stage3.py
and the allocator of PyTorch are described from memory. One constant is fitted, `ALLOCATOR_LOSS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.passes.pipeline_text import parse_pipeline
from ratrain.passes.placed_by import placed_by
from ratrain.passes.recovery.recompute import RecomputePass
from ratrain.ratrain_ir.config.model_config import ModelConfig
from ratrain.ratrain_ir.config.plan import Plan
from ratrain.ratrain_ir.config.tensor_ranks import model_of_rank
from ratrain.ratrain_ir.schedules.named import default_schedule, most_held
from ratrain.ratrain_ir.topology import mesh_of
from ratrain.ratrainc.validation.framework_jobs import job_bytes, job_refusal

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.search.plan_evaluation import Task

_SCHEDULE = "1f1b"
_F16, _F32 = 2, 4
_BUCKET_ELEMENTS = 500_000_000
"""Defaults of reduce_bucket_size and allgather_bucket_size in DeepSpeed, runtime/zero/constants.py."""
_LIVE_PARAMETERS = 1_000_000_000
"""Default of stage3_max_live_parameters in the same file: gathered weights that are kept for their next use."""
ALLOCATOR_LOSS = 0.08
"""Share that the caching allocator and communicators take in addition to the counted bytes.

Fitted: the median of the six rows of benchmarks/published/dlperf-v100-memory.csv (0.05 to 0.16), and of no others.
"""


@frozen
class FrameworkBytes:
    """The rules by which a framework of published runs holds bytes, as far as its code shows them."""

    zero: int
    """ZeRO level of the plans that it applies to"""
    loss_logit_bytes: int
    """bytes a logit at the loss, the moment with most of them"""
    kept_logit_bytes: int = 0
    """bytes a logit that stay of the last stage's outputs while the backward is in its layers"""
    main_grad_bytes: int = 0
    """bytes a parameter of f32 gradients that stay from step to step"""
    backward_bucket_bytes: int = 0
    """bucket in which gradients are reduced during the backward"""
    job: str = ""
    """framework of a job, whose bytes `framework_jobs.py` takes from `ratrainc/fit/holdings`; the other fields say
    nothing then"""
    step_buffers: str = ""
    """flat buffers at the end of a step: `megatron-ddp`, `deepspeed-zero1`, or none if empty"""


FRAMEWORKS: Mapping[str, FrameworkBytes] = {
    # Megatron-LM of 2020 and 2021. Logits: model/gpt_model.py makes an f32 copy of the f16 logits. mpu/cross_entropy.py
    # computes exponentials and gradient in that copy, and converts the gradient to f16: 2 + 4 bytes. Gradients:
    # optimizer/optimizer.py keeps main_param.grad in f32 from step to step, because zero_grad clears the f16 parameters
    # only. model/distributed.py reduces a flat copy of all f16 gradients.
    "megatron-lm": FrameworkBytes(0, loss_logit_bytes=6, main_grad_bytes=_F32, step_buffers="megatron-ddp"),
    # Megatron-DeepSpeed of 2021 with pipelines (also of one stage). runtime/pipe/engine.py keeps a forward's output,
    # the f32 logits, in pipe_buffers until the next forward into the same buffer replaces it; the backward of the last
    # stage does not drop it. schedule.py has two buffers there. So a forward holds the f32 logits of two earlier
    # micro-batches, its own f16 logits and its own f32 logits: 2 x 4 + 2 + 4 bytes.
    "megatron-deepspeed": FrameworkBytes(1, loss_logit_bytes=14, kept_logit_bytes=8, step_buffers="deepspeed-zero1"),
    # DeepSpeed's ZeRO 3 under Megatron's model, without pipelines: runtime/zero/stage3.py reduces in a flat f16 bucket.
    "megatron-deepspeed-zero3": FrameworkBytes(3, loss_logit_bytes=6, backward_bucket_bytes=_BUCKET_ELEMENTS * _F16),
    # Of 2023 and of today, any family, with tensor-parallel ranks: formulas of ratrainc/fit/holdings, where the sources
    # stand.
    "megatron-lm-2023": FrameworkBytes(0, loss_logit_bytes=0, job="megatron-lm-ddp"),
    "megatron-core": FrameworkBytes(1, loss_logit_bytes=0, job="megatron-lm"),
    "torchtitan": FrameworkBytes(3, loss_logit_bytes=0, job="torchtitan"),
}
"""The frameworks that a table can name."""


def refusal(framework: FrameworkBytes, model: ModelConfig, plan: Plan, pipeline: str) -> str:
    """Return the condition of a framework's formulas that a plan does not meet; empty if it meets all."""
    if framework.job:
        return job_refusal(framework.job, model, plan, pipeline)
    passes = parse_pipeline(pipeline)
    recomputes = [each for each in passes if isinstance(each, RecomputePass)]
    policies = {each.policy for each in recomputes} or {"none"}
    placed = placed_by(pipeline) or plan.schedule or default_schedule(plan.shape)
    wrong = {
        "of the GPT-2 family, with a hidden size of an MLP four times the model's": model.family == "gpt2"
        and model.ffn_size == 4 * model.hidden_size,
        f"with zero = {framework.zero}": plan.zero == framework.zero,
        "with sequence_sharding = false, if tp is 2 or more": plan.tp == 1 or not plan.sequence_sharding,
        "with f16 views and logits = whole": plan.view_dtype == "f16" and plan.holds_logits,
        "with the schedule 1f1b": placed == _SCHEDULE,
        "with recompute{policy=full} of all layers or {policy=none}": policies in ({"full"}, {"none"})
        and all(each.every is None for each in recomputes),
    }
    return next((text for text, right in wrong.items() if not right), "")


def framework_bytes(framework: FrameworkBytes, task: Task, schedule_bytes: Sequence[int]) -> list[dict[str, int]]:
    """Return the bytes of a rank of each stage under a framework, by purpose.

    `schedule_bytes` are the simulated program's bytes that follow from its schedule, by stage.
    """
    if framework.job:
        return job_bytes(framework.job, task)
    policies = [each.policy for each in parse_pipeline(task.pipeline) if isinstance(each, RecomputePass)]
    recomputes = policies == ["full"]
    return [
        _Stage(framework, task.model, task.plan, index, recomputes).account(nbytes)
        for index, nbytes in enumerate(schedule_bytes)
    ]


@frozen
class _Stage:
    """One stage of a plan under a framework."""

    framework: FrameworkBytes
    model: ModelConfig
    plan: Plan
    index: int
    recomputes: bool

    def account(self, schedule_bytes: int) -> dict[str, int]:
        """Return bytes by purpose, at the fuller of two moments: at the loss, or in the backward of a layer."""
        framework = self.framework
        layers = self.in_flight * self.layers * self.layer_bytes
        at_loss = {
            "kept activations": 0 if self.recomputes else layers,
            "logits": framework.loss_logit_bytes * self.logits,
        }
        in_layer = {
            "kept activations": self.layer_bytes if self.recomputes else layers,
            "gradient of scores": self.score_bytes,
            "logits": framework.kept_logit_bytes * self.logits,
        }
        counted = {
            "state": self.state_bytes,
            "checkpoints, boundaries and inputs": schedule_bytes,
            **max(at_loss, in_layer, key=lambda each: sum(each.values())),
            "reduction bucket": framework.backward_bucket_bytes,
            "buffers of the step's end": self.new_segments(),
        }
        return counted | {"lost by the allocator": ceil(ALLOCATOR_LOSS * sum(counted.values()))}

    @property
    def of_rank(self) -> ModelConfig:
        """The part of the model that one tensor-parallel rank computes."""
        return model_of_rank(self.model, self.plan.tp)

    @property
    def last(self) -> bool:
        return self.index == mesh_of(self.plan).last_stage

    @property
    def layers(self) -> int:
        return len(self.plan.chunk_layers(self.index, self.model))

    @property
    def in_flight(self) -> int:
        """Micro-batches whose activations 1F1B keeps at once."""
        return most_held(_SCHEDULE, self.plan.shape, self.index)

    @property
    def parameters(self) -> int:
        """Elements of the rank's parameters; a tied matrix counts once in a stage."""
        model = self.of_rank
        count = sum(map(model.layer_parameters, self.plan.chunk_layers(self.index, self.model)))
        count += model.embedding_parameters if self.index == 0 else 0
        if not self.last:
            return count
        tied_here = model.tied_embeddings and self.plan.pp == 1
        return count + (model.norm_parameters if tied_here else model.head_parameters)

    @property
    def shards(self) -> int:
        return self.plan.dp if self.plan.zero else 1

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradients of all parameters, which stay until the step's end."""
        return self.parameters * (_F32 if self.plan.grad_dtype == "f32" else _F16)

    @property
    def state_bytes(self) -> int:
        """Bytes of f16 parameters, gradients, f32 parameters, two moments, and f32 gradients if they are kept.

        ZeRO 3 shards all of it, and adds gathered weights and the gradient of one matrix.
        """
        sharded = ceil(3 * _F32 * self.parameters / self.shards)
        if self.plan.zero == 3:
            largest = self.model.hidden_size * self.of_rank.ffn_size
            gathered = max(_LIVE_PARAMETERS, largest)
            return sharded + ceil(2 * _F16 * self.parameters / self.shards) + _F16 * (gathered + largest)
        return self.parameters * (_F16 + self.framework.main_grad_bytes) + self.grad_bytes + sharded

    @property
    def tokens(self) -> int:
        return self.plan.micro_batch_size * self.plan.seq_len

    @property
    def logits(self) -> int:
        return self.tokens * self.of_rank.vocab_size if self.last else 0

    @property
    def score_bytes(self) -> int:
        """Bytes of one f16 score matrix of the rank's heads, 2 a s^2 b / t; 0 if attention keeps no scores."""
        kept = self.plan.attention == "scores-kept"
        return _F16 * self.of_rank.heads * self.plan.seq_len * self.tokens if kept else 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's activations with dropout: s b h (10 + 24 / t + 5 a s / (h t)), equations 1 and 2.

        Each of t tensor-parallel ranks has the whole inputs and outputs of blocks. The last term is the scores:
        softmax, its dropout mask and its output.
        """
        return (
            10 * self.plan.tp + 24
        ) * self.tokens * self.model.hidden_size // self.plan.tp + 5 * self.score_bytes // _F16

    def new_segments(self) -> int:
        """Return the bytes that buffers of the step's end add to the segments that PyTorch's allocator has already.

        A buffer is cut from the smallest cached segment that is large enough, else a segment of its size is added.
        Segments never merge (c10/cuda/CUDACachingAllocator.cpp). The largest activation and the earlier buffers are
        cached.
        """
        cached = [max(_F32 * self.logits, self.score_bytes, _F16 * self.tokens * self.of_rank.ffn_size)]
        added = 0
        for sizes in self.buffers():
            free, new = list(cached), []
            for size in sizes:
                place = min((each for each in free if each >= size), default=None)
                if place is None:
                    new.append(size)
                else:
                    free.remove(place)
                    free.append(place - size)
            cached += new
            added += sum(new)
        return added

    def buffers(self) -> tuple[tuple[int, ...], ...]:
        """Return the flat buffers of the step's end in order; each tuple is held at once."""
        if self.framework.step_buffers == "megatron-ddp":
            return ((self.grad_bytes,),)  # _flatten_dense_tensors of all gradients
        if self.framework.step_buffers != "deepspeed-zero1":
            return ()
        # all_gather of a list of tensors uses a flat tensor (newLikeFlat in ProcessGroupNCCL.cpp). It is free again
        # only when its stream has passed it (recordStream), and step gathers one bucket after another without waiting.
        gathers = max(1, self.parameters // _BUCKET_ELEMENTS)
        return (
            (
                _BUCKET_ELEMENTS * _F16,
            ),  # ipg_buffer, in allreduce_gradients of runtime/zero/stage2.py; its size does not depend on the stage
            (ceil(_F32 * self.parameters / self.shards),),  # single_grad_partition, in step
            (ceil(_F16 * self.parameters / gathers),) * gathers,
        )
