"""Conditions under which no formula is known; a job that fails one gets a reason and no bytes."""

from __future__ import annotations

from ratrain.ratrainc.bridge.jobs.job import UNSHARDED, Checkpointing, Job, Sharding
from ratrain.ratrainc.fit.holdings.adapters import adapter_refusal, adapter_unread
from ratrain.ratrainc.fit.holdings.context import context_refusal
from ratrain.ratrainc.fit.holdings.experts import experts_refusal
from ratrain.ratrainc.fit.holdings.frozen_layers import frozen_refusal
from ratrain.ratrainc.fit.holdings.part import Part, stage_layers
from ratrain.ratrainc.fit.holdings.state import FACTORED, MOMENTS
from ratrain.ratrainc.fit.holdings.styles import MEGATRON, STYLES

_SCHEDULES = ("1f1b", "gpipe", "interleaved")
_PARALLEL = frozenset({*MEGATRON, "torchtitan", "nanotron"})
"""Frameworks whose tensor and pipeline parallelism was read."""
EXPERTS = "experts"
"""Opening of the refusal of a model with experts."""
_PER_DEVICE = ("seq_len", "micro_batch_size", "gradient_accumulation")


def refusal(job: Job) -> str:
    """Return why the bytes of a job are not known; empty if they are.

    The reason names the field of the job that decides, so that a reader of settings can name its key.
    """
    return _not_built(job) or _incomplete(job) or _shapes(job) or _combinations(job) or adapter_refusal(Part(job, 0))


def _incomplete(job: Job) -> str:
    if job.model is None:
        return f"model: the sizes of {job.model_name or 'the model'} are not known"
    missing = next((name for name in _PER_DEVICE if getattr(job, name) is None), "")
    if missing:
        return f"{missing}: neither the settings nor the framework's defaults decide it"
    if job.devices is None and (job.sharding not in UNSHARDED or job.model_ranks > 1):
        return "devices: the number of devices decides how the state is shared out"
    wrong = next((name for name in (*_PER_DEVICE, "tp", "pp", "virtual_stages") if getattr(job, name) < 1), "")
    return f"{wrong}: must be at least 1" if wrong else ""


def _not_built(job: Job) -> str:
    if job.framework not in STYLES:
        return f"framework: the model code of {job.framework} was not read (known: {', '.join(STYLES)})"
    if unread := experts_refusal(job):
        return unread
    if unread := adapter_unread(job):
        return unread
    if unread := frozen_refusal(job):
        return unread
    if job.ep > 1:
        return "ep: bytes of experts on ranks of their own are not known here"
    if job.fp8:
        return "fp8: the bytes of float8 copies and scales are not known here"
    if job.optimizer not in {*MOMENTS, FACTORED}:
        return f"optimizer: the moments of {job.optimizer} are not known (known: {', '.join((*MOMENTS, FACTORED))})"
    if job.schedule not in _SCHEDULES:
        return f"schedule: micro-batches in flight of {job.schedule} are not known (known: {', '.join(_SCHEDULES)})"
    if job.offload_activations and job.checkpointing is not Checkpointing.FULL:
        return "offload_activations: known with full recomputation only, where layer inputs alone are moved"
    types = {job.weight_dtype, job.compute_dtype, job.gradient_dtype, job.reduce_dtype}
    types |= {each for each in (job.master_dtype, job.state_dtype) if each}
    odd = sorted(types - {"f32", "bf16", "f16"})
    return f"types: the size of {odd[0]} is not known (known: f32, bf16, f16)" if odd else ""


def _shapes(job: Job) -> str:
    assert job.model is not None
    assert job.seq_len is not None
    model = job.model
    if job.devices is not None and (job.devices < 1 or job.devices % job.model_ranks):
        return f"devices: {job.devices} are not a multiple of tp x pp x cp = {job.model_ranks}"
    if not stage_layers(job, 0) or not stage_layers(job, job.last_stage):
        return f"pp: {model.layers} layers do not share out evenly over {job.pp * job.virtual_stages} stages"
    if model.heads % job.tp:
        return f"tp: {model.heads} heads do not share out evenly over {job.tp} ranks"
    if model.learned_positions is not None and job.seq_len > model.learned_positions:
        return f"seq_len: {job.seq_len} is above the model's {model.learned_positions} positions"
    shards, ranks = job.shard_size, job.replicas
    if shards is not None and ranks is not None and (shards < 1 or ranks % shards):
        return f"shard_size: {shards} does not divide {ranks} data-parallel and context ranks"
    if unread := context_refusal(job):
        return unread
    if job.checkpoint_layers is not None and job.checkpoint_layers < 0:
        return "checkpoint_layers: must not be negative"
    return "checkpoint_every: must be at least 1" if job.checkpoint_every < 1 else ""


def _combinations(job: Job) -> str:
    assert job.model is not None
    if job.tp * job.pp > 1 and job.framework not in _PARALLEL:
        return f"tp, pp: tensor and pipeline parallelism of {job.framework} was not read"
    if job.virtual_stages > 1 and job.pp == 1:
        return "virtual_stages: needs pp above 1"
    if job.schedule == "interleaved" and job.virtual_stages == 1 and job.pp > 1:
        return "schedule: interleaved needs virtual_stages above 1"
    if job.checkpointing is Checkpointing.OPS and job.framework != "torchtitan":
        return "checkpointing: the list of kept ops is torchtitan's"
    if job.optimizer == FACTORED and job.sharding not in UNSHARDED:
        return "optimizer: Adafactor's factors of flat shards are not known"
    if job.sharding is Sharding.DISTRIBUTED_OPTIMIZER and job.framework not in MEGATRON:
        return "sharding: the distributed optimizer is Megatron-LM's"
    return "model: a normalised head makes a copy that is not known here" if job.model.normalised_head else ""
