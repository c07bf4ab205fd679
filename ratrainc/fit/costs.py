"""Seconds of a job's step on one device, roughly: enough to order ways out by what they cost.

    products     operations of the model, and of what is recomputed, at the machine's efficiency
    links        bytes of weights and gradients that data-parallel ranks exchange, and of keys and values that context
                 ranks do; they overlap with products
    host         bytes over the link to the host, and the host's update; nothing overlaps with them here

    seconds = max(products, links) + host

A way out costs the ratio of two such steps. Kernels' launches, pipeline bubbles and tensor-parallel exchanges are the
same in both and are left out: the ratio is an estimate, and is called one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from ratrain.ratrain_ir.config.model_flops import model_flops_per_token
from ratrain.ratrain_ir.config.types import Dtype
from ratrain.ratrainc.bridge.jobs.context_ranks import source_of_one_run
from ratrain.ratrainc.bridge.jobs.job import UNSHARDED, Checkpointing, Context, Sharding
from ratrain.ratrainc.fit.holdings.adapted_experts import share_differentiated
from ratrain.ratrainc.fit.holdings.adapters import trained
from ratrain.ratrainc.fit.holdings.frozen_layers import layers_of, recomputes_frozen
from ratrain.ratrainc.fit.holdings.part import Part

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job
    from ratrain.targets.machine.machine import Machine

HOST_LINK = 25e9
"""Bytes a second between device and host if the machine does not say: PCIe 4.0 x16, assumed at 80 % of 31.5 GB/s."""
HOST_UPDATE = 20e9
"""Bytes of masters and moments that a device's share of the host's cores updates a second (assumed)."""
_OF_FROZEN = 2 / 3
"""Operations of a step on frozen weights against one that trains them: a frozen weight's backward is one product of two
(of the input's gradient). Those of adapters, about 1 %, are left out."""
_GATHERS_WEIGHTS = (Sharding.ZERO3, Sharding.FSDP1, Sharding.FSDP2)


@frozen
class StepCost:
    """Estimated seconds of a step by what takes them."""

    products: float
    links: float
    host: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return max(self.products, self.links) + self.host


def step_cost(job: Job, machine: Machine) -> StepCost:
    """Estimate a step of a job whose model, sequence and micro-batch are known."""
    return StepCost(_products(job, machine), _links(job, machine), _host(job, machine))


def slower(before: Job, after: Job, machine: Machine) -> float:
    """Return by which share of a step a trained token takes longer; negative if less.

    Context ranks share the tokens of a sequence, so that as many devices have fewer sequences at a time.
    """
    one, other = (step_cost(job, machine).seconds * job.cp / _tokens(job) for job in (before, after))
    return other / one - 1


def _tokens(job: Job) -> int:
    """Return the tokens that a device's replica trains in a step."""
    return _of(job.micro_batch_size) * _of(job.seq_len) * _of(job.gradient_accumulation)


def _of(value: int | None) -> int:
    return value or 1


def _products(job: Job, machine: Machine) -> float:
    assert job.model is not None
    operations = model_flops_per_token(job.model, _of(job.seq_len)) * _tokens(job) / job.model_ranks
    own = 1.0
    if job.thawed is not None:
        own = _passes_of_frozen(job)
    elif job.adapter is not None:  # the gradient of an adapted stack is a product too
        own = _OF_FROZEN + (1 - _OF_FROZEN) * share_differentiated(Part(job, 0))
    passes = (own + _recomputed(job)) * (1 + _imbalance(job))
    seconds = operations * passes / (machine["fp16_peak"] * machine["gemm_efficiency"])
    return seconds + _dequantisation(job, machine)


def _passes_of_frozen(job: Job) -> float:
    """Return the operations of a step beside frozen layers against one that trains all.

    Each third is a forward of all, gradients of inputs down to the lowest layer that trains, gradients of weights.
    """
    part = Part(job, 0)
    there = layers_of(part)
    return (1 + (there.trained + there.above + there.trained) / part.layers) / 3


def _imbalance(job: Job) -> float:
    """Return the share of a step that the last context rank works longer than the mean.

    With one run of each sequence a rank, the last of c has 2 - 1 / c times the mean of the scores below the diagonal.
    """
    assert job.model is not None
    if job.cp == 1 or job.context is Context.HEADS or source_of_one_run(job) is None:
        return 0.0
    return (1 - 1 / job.cp) * _score_share(job)


def _score_share(job: Job) -> float:
    """Return the share of a step's operations that products of queries with keys, and of scores with values, have."""
    assert job.model is not None
    model = job.model
    whole = model_flops_per_token(model, _of(job.seq_len))
    head = 6.0 * model.vocab_size * model.hidden_size
    return (whole - head - 6.0 * model.matrix_elements) / whole


def _dequantisation(job: Job, machine: Machine) -> float:
    """Return the seconds in which quantised weights are read, written in the compute type, and read by the product.

    Once in a forward, once in a backward, and once more where a layer is recomputed (bitsandbytes
    autograd/_functions.py MatMul4Bit).
    """
    assert job.model is not None
    if job.adapter is None or job.adapter.base_bits is None:
        return 0.0
    weights = job.model.matrix_elements
    passes = _of(job.gradient_accumulation) * (3 if job.checkpointing is Checkpointing.FULL else 2)
    each = job.adapter.base_bits / 8 + 2 * _bytes(job.compute_dtype)
    return passes * weights * each / machine["ddr_bandwidth"]


def _recomputed(job: Job) -> float:
    """Return the share of a step's operations that backward repeats; forward is a third of a step."""
    assert job.model is not None
    model, length = job.model, _of(job.seq_len)
    whole = model_flops_per_token(model, length)
    head = 6.0 * model.vocab_size * model.hidden_size
    of_layers = (whole - head) / whole / 3
    if job.checkpointing is Checkpointing.FULL:
        layers = model.layers
        if job.thawed is not None:
            there = layers_of(Part(job, 0))
            layers = there.trained + (there.above if recomputes_frozen(job) else 0)
        layers = layers if job.checkpoint_layers is None else min(job.checkpoint_layers, layers)
        return of_layers * layers / model.layers
    if job.checkpointing is Checkpointing.ATTENTION:
        return _score_share(job) / 3
    return of_layers / 2 if job.checkpointing is Checkpointing.OPS else 0.0  # every second product


def _local_parameters(job: Job) -> float:
    """Return the parameters that a device computes with."""
    assert job.model is not None
    return job.model.parameters / (job.tp * job.pp)


def _trained_parameters(job: Job) -> float:
    """Return the parameters of a device that have gradients and moments."""
    return _local_parameters(job) if not job.trains_part else float(trained(Part(job, 0)))


def _shards(job: Job) -> int:
    return job.shard_size or job.replicas or 1


def _bytes(dtype: str) -> int:
    return Dtype(dtype).itemsize


def _links(job: Job, machine: Machine) -> float:
    """Return the seconds of exchanges over data-parallel and context ranks.

    A ring moves nearly all bytes once each way.
    """
    between = _exchanged(job) / _link_bandwidth(job, machine)
    if _shards(job) == 1:
        return between
    parameters, micro_batches = _local_parameters(job), _of(job.gradient_accumulation)
    reduced = _trained_parameters(job)
    if job.sharding in _GATHERS_WEIGHTS:
        gathers = 2 if job.reshard_after_forward else 1
        gathered = gathers * _bytes(job.compute_dtype) * parameters * _quantised_share(job)
        reductions = 1 if job.sums_whole else micro_batches
        moved = micro_batches * gathered + reductions * _bytes(job.reduce_dtype) * reduced
    else:  # a reduction and a gather of the updated weights, or an all-reduce: as many bytes
        moved = (_bytes(job.reduce_dtype) + _bytes(job.weight_dtype)) * reduced
    return between + moved / _link_bandwidth(job, machine)


def _exchanged(job: Job) -> float:
    """Return the bytes that a context rank receives in a step: of keys and values, or of heads and their results.

    Once in a forward and once more where it is recomputed; a backward has them again, and their gradients.
    """
    if job.cp == 1:
        return 0.0
    part = Part(job, 0)
    rows = part.tokens * (job.cp - 1)
    if job.context is Context.HEADS:
        each = 2 * part.item * (part.query + part.exchanged_key) * rows / job.cp
        passes = 2 + (job.checkpointing is Checkpointing.FULL)
    else:
        each = 2 * part.item * part.exchanged_key * rows
        passes = 3 + (job.checkpointing is Checkpointing.FULL)
    return passes * each * part.layers * part.micro_batches


def _quantised_share(job: Job) -> float:
    """Return the bytes of a frozen weight as stored, divided by its bytes in the compute type."""
    bits = None if job.adapter is None else job.adapter.base_bits
    return 1.0 if bits is None else bits / (8 * _bytes(job.compute_dtype))


def _link_bandwidth(job: Job, machine: Machine) -> float:
    """Return the bandwidth of the innermost group of the machine that holds all devices of the job."""
    groups = machine.link_groups
    holding = [group for group in groups if group.clusters is None or group.clusters >= (job.devices or 1)]
    return (holding[0] if holding else groups[-1]).link.bandwidth


def _host(job: Job, machine: Machine) -> float:
    """Return the seconds that offloaded parameters, state and activations take."""
    assert job.model is not None
    link = machine["host_fetch"] if "host_fetch" in machine.constants else HOST_LINK
    sharded = job.sharding in _GATHERS_WEIGHTS
    own = _local_parameters(job) / (_shards(job) if job.sharding not in UNSHARDED else 1)
    micro_batches, seconds = _of(job.gradient_accumulation), 0.0
    kept = _bytes(job.weight_dtype) * _quantised_share(job)
    if job.offload_optimizer:
        updated = own * _trained_parameters(job) / _local_parameters(job)
        seconds += updated * (_bytes(job.gradient_dtype) + _bytes(job.weight_dtype)) / link
        seconds += updated * 3 * _bytes("f32") / HOST_UPDATE
    if job.offload_parameters:
        seconds += 2 * micro_batches * (own if sharded else _local_parameters(job)) * kept / link
    if job.offload_activations:
        inputs = job.model.layers / job.pp * Part(job, 0).tokens * job.model.hidden_size
        seconds += 2 * micro_batches * inputs * _bytes(job.compute_dtype) / link
    return seconds
