"""Bytes that stay from step to step: weights, master weights, moments; and gradients.

    none, ddp               all of it on each rank
    zero1                   weights and gradients whole; masters and moments shared out
    distributed-optimizer   the same (Megatron-LM: gradients are the main gradients)
    zero2                   weights whole; the rest shared out
    zero3, fsdp1, fsdp2     all of it shared out

Sharing out rounds up, as each mechanism pads to equal parts. With low-rank adapters frozen weights are apart, and only
adapters have gradients, masters and moments (adapters.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrainc.bridge.jobs.job import Sharding
from ratrain.ratrainc.fit.holdings.adapters import (
    ADAPTERS,
    FROZEN,
    frozen_bytes,
    largest_trained,
    layer_trained,
    outer_trained,
    trained,
)
from ratrain.ratrainc.fit.holdings.frozen_layers import trains_embedding
from ratrain.ratrainc.fit.holdings.part import itemsize, share
from ratrain.ratrainc.fit.holdings.styles import MEGATRON, TRANSFORMERS
from ratrain.ratrainc.fit.holdings.terms import Bytes, together

if TYPE_CHECKING:
    from ratrain.ratrainc.fit.holdings.part import Part

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer"
MASTERS = "master weights"
OF_EXPERTS = {
    FROZEN: "frozen weights of experts",
    WEIGHTS: "weights of experts",
    GRADIENTS: "gradients of experts",
    OPTIMIZER: "optimizer of experts",
    MASTERS: "master weights of experts",
}
"""Names of the experts' part of an owner's bytes, which is apart as most of a model is theirs."""
_F32 = 4
_BLOCK_8BIT = 256
"""Elements that share one f32 scale: bitsandbytes optim/optimizer.py blockwise states, torchao optim/adam.py."""
_BLOCK_4BIT = 128
"""As above, of 4-bit states, torchao optim/adam.py AdamW4bit."""

MOMENTS = {
    "adamw": 2,
    "adamw-fused": 2,
    "adamw-foreach-off": 2,
    "adamw-8bit": 2,
    "adamw-4bit": 2,
    "adamw-8bit-paged": 0,
    "adamw-paged": 0,
    "lion": 1,
    "lion-8bit": 1,
    "sgd": 0,
    "sgd-momentum": 1,
}
"""Moments an element. Paged ones are in managed memory, which PyTorch's allocator does not count and the driver moves
to the host (bitsandbytes optim/optimizer.py get_state_buffer)."""
FACTORED = "adafactor"


def state(part: Part) -> Bytes:
    """Return weights, master weights and moments of one rank."""
    job = part.job
    own = trained(part)
    held = share(own, part.shards)
    weights = itemsize(job.trained_dtype) * (held if part.sharded else own)
    masters = itemsize(job.master_dtype) * held if job.master_dtype else 0
    on_host = job.offload_optimizer or (job.offload_parameters and part.sharded)
    whole = {
        **({FROZEN: frozen_bytes(part)} if job.trains_part else {}),
        ADAPTERS if job.adapter else WEIGHTS: 0 if job.offload_parameters else weights,
        MASTERS: 0 if on_host else masters,
        OPTIMIZER: 0 if on_host else moments(part, held),
    }
    if part.model.experts is None:
        return whole
    if job.adapter:
        frozen = itemsize(job.weight_dtype) * part.expert_parameters if whole[FROZEN] else 0
        apart = split(FROZEN, whole.pop(FROZEN), share(frozen, part.shards) if part.sharded else frozen)
        return together([apart, whole])
    experts = share(part.expert_parameters, part.shards)
    of_experts = {
        WEIGHTS: itemsize(job.weight_dtype) * (experts if part.sharded else part.expert_parameters),
        MASTERS: itemsize(job.master_dtype) * experts if job.master_dtype else 0,
        OPTIMIZER: moments(part, experts, embeds=False),
    }
    return together(split(name, nbytes, min(nbytes, of_experts[name])) for name, nbytes in whole.items())


def split(name: str, nbytes: int, of_experts: int) -> Bytes:
    """Return an owner's bytes in two parts: of all but experts, and of experts."""
    return {name: nbytes - of_experts, OF_EXPERTS[name]: of_experts}


def moments(part: Part, elements: int, *, embeds: bool = True) -> int:
    """Return the bytes of the optimizer's moments of `elements` elements.

    An 8-bit AdamW keeps the embedding's moments in f32 under the Trainer (transformers trainer.py,
    register_module_override); `embeds` says if it is among the elements. Tensors under 4,096 elements stay in f32 too,
    which is left out: under 0.01 %.
    """
    name = part.job.optimizer
    if name == FACTORED:
        return _F32 * _factors(part)
    count = MOMENTS[name]
    if name in {"adamw-8bit", "lion-8bit"}:
        embeds = embeds and part.job.framework in TRANSFORMERS and part.job.adapter is None and trains_embedding(part)
        wide = share(part.embedding_parameters, part.shards) if embeds else 0
        narrow = elements - wide
        return count * (narrow + _F32 * share(narrow, _BLOCK_8BIT) + _F32 * wide)
    if name == "adamw-4bit":
        return count * (share(elements, 2) + _F32 * share(elements, _BLOCK_4BIT))
    return count * moment_item(part) * elements


def moment_item(part: Part) -> int:
    """Return the bytes of one moment's element: that of the weights that the optimizer updates, unless it is given."""
    job = part.job
    held = job.trained_dtype
    return itemsize(job.state_dtype or job.master_dtype or held)


def _factors(part: Part) -> int:
    """Return the elements of Adafactor's second moments: a row and a column of each matrix, all of each vector."""
    model = part.model
    hidden, query, key, ffn = model.hidden_size, part.query, part.key, part.ffn
    layer = 2 * (query + hidden) + 2 * (key + hidden) + len(model.mlp_matrices) * (ffn + hidden) + part.layer_vectors
    tables = [part.embedding_parameters] + ([] if part.tied_here else [part.head_matrix])
    return part.layers * layer + sum(each // hidden + hidden for each in tables if each) + model.norm_parameters


# Gradients

_MAIN_GRADIENTS = (Sharding.ZERO3, Sharding.DISTRIBUTED_OPTIMIZER)


def gradients_stay(part: Part) -> bool:
    """Return True if gradients of all parameters are allocated during the whole step.

    So it is if micro-batches accumulate; where they are one buffer, made once (Megatron-LM
    core/distributed/param_and_grad_buffer.py, DeepSpeed runtime/zero/stage3.py grad_partitions_flat_buffer, nanotron
    optim/gradient_accumulator.py build_grad_buffers); else they are made by the backward and dropped by zero_grad.
    """
    buffer = part.job.sharding in _MAIN_GRADIENTS or part.job.framework in MEGATRON or sums_apart(part)
    return (buffer or part.accumulates) and not part.job.optimizer_in_backward


def sums_apart(part: Part) -> bool:
    """Return True if nanotron adds each weight's gradient to an f32 buffer of all weights, whatever ZeRO's stage is."""
    job = part.job
    return job.framework == "nanotron" and itemsize(job.gradient_dtype) > itemsize(job.weight_dtype)


def gradients(part: Part, elements: int) -> int:
    """Return the bytes of the held gradients of `elements` parameters of one rank."""
    job = part.job
    if job.offload_optimizer and job.sharding in (Sharding.ZERO2, Sharding.ZERO3):
        return 0
    if job.offload_parameters and part.sharded:
        return 0
    shared = part.sharded or job.sharding is Sharding.ZERO2
    return itemsize(job.gradient_dtype) * (share(elements, part.shards) if shared else elements)


def all_gradients(part: Part) -> int:
    """Return the bytes of gradients after the backward.

    Where the optimizer's step is fused into the backward, the largest parameter's alone.
    """
    if part.job.sharding is Sharding.ZERO2 and has_partitions(part) and not part.job.offload_optimizer:
        return gradients_of_partition(part)
    return gradients(part, largest_trained(part) if part.job.optimizer_in_backward else trained(part))


def step_copies(part: Part) -> int:
    """Return the bytes of temporary tensors of the optimizer's step.

    adamw: foreach makes the roots of all second moments at once (torch optim/adam.py _multi_tensor_adam); without it
    the root and the quotient of one parameter. Megatron-LM, and ZeRO-3 by subgroup, update in one kernel (FusedAdam)
    after a copy of the shard's gradients in f32 (stage3.py).
    Adafactor: gradient, its square and the update in f32 (transformers optimization.py Adafactor).
    """
    job = part.job
    held = share(trained(part), part.shards)
    if job.offload_optimizer or (job.offload_parameters and part.sharded) or job.optimizer_in_backward:
        return 0
    if has_partitions(part):
        return max(_flattened(part), _updated(part)) - gradients_at_step(part)
    if job.sharding is Sharding.ZERO3:
        return _F32 * min(held, job.sizes.get("sub_group_size", SUB_GROUP))
    if job.framework in MEGATRON:
        return _F32 * held if job.gradient_dtype != "f32" and job.master_dtype == "f32" else 0
    if job.optimizer == "adamw":
        return moment_item(part) * held
    # of FSDP1 a parameter is all that one unit has
    flat = max([*(layer_trained(each) for each, _ in part.kinds), outer_trained(part)])
    largest = share(flat if job.sharding is Sharding.FSDP1 else largest_trained(part), part.shards)
    if job.optimizer == "adamw-foreach-off":
        return 2 * moment_item(part) * largest
    return 3 * _F32 * largest if job.optimizer == FACTORED else 0


def has_partitions(part: Part) -> bool:
    """Return True if DeepSpeed's stage 1 or 2 makes one flat gradient of its partition before it updates it."""
    others = part.job.framework in {*MEGATRON, "nanotron"}
    return part.job.sharding in (Sharding.ZERO1, Sharding.ZERO2) and not others


def gradients_at_step(part: Part) -> int:
    """Return the bytes of held gradients at the fullest moment of the optimizer's step.

    Of DeepSpeed's partitions those of other ranks are freed before (stage_1_and_2.py step, free_grad_in_param_list).
    """
    if part.job.optimizer_in_backward:
        return 0
    if not has_partitions(part) or part.job.offload_optimizer:
        return all_gradients(part)
    return gradients_of_partition(part) if _flattened(part) >= _updated(part) else 0


def gradients_of_partition(part: Part) -> int:
    """Return the bytes of gradients of a partition's parameters, each of which is whole (copy_grads_in_partition)."""
    largest = max(largest_trained(part), share(trained(part), part.shards))
    return itemsize(part.job.gradient_dtype) * largest


def _flattened(part: Part) -> int:
    """Return the bytes where a partition's gradients are made one flat tensor, and that is cast to f32.

    (stage_1_and_2.py step: averaged_gradients, flat_grad_partition, single_grad_partition)
    """
    held, item = share(trained(part), part.shards), itemsize(part.job.gradient_dtype)
    cast = itemsize(part.job.master_dtype or part.job.weight_dtype)
    return gradients_of_partition(part) + item * held + (cast * held if cast != item else 0)


def _updated(part: Part) -> int:
    """Return the bytes of a partition's gradient in its masters' type, and of what the optimizer makes of it.

    DeepSpeed's own optimizer is one kernel; torch's takes the partition as one tensor, of all its elements.
    """
    held, master = share(trained(part), part.shards), itemsize(part.job.master_dtype or part.job.weight_dtype)
    made = {"adamw": moment_item(part), "adamw-foreach-off": 2 * moment_item(part)}.get(part.job.optimizer, 0)
    return (master + made) * held


SUB_GROUP = 1_000_000_000
"""Default of sub_group_size, deepspeed runtime/zero/config.py."""
