"""Bytes of a framework's own buffers: gathered weights, reduction buckets, casts.

With U the parameters of a layer, R those outside layers, c and r the item sizes of compute and reduction:

    FSDP1   R c stays gathered. Backward: two layers gathered (prefetch), the gradients of one and of the one that is
            reduced, and a copy of it if r differs (torch distributed/fsdp/_runtime_utils.py _reduce_grad)
    FSDP2   R c stays gathered until its own gradients are reduced. Forward: the buffer of the last gather stays.
            Backward: a layer, and the buffer of the next one; its gradients, and the input of the reduce-scatter of the
            layer before, in r (fully_shard/_fsdp_param_group.py wait_for_unshard, post_backward; _fsdp_collectives.py
            foreach_reduce). torchtitan has groups of their own for embedding and head (distributed/fsdp.py)
    either  gradients that wait for the last micro-batch: whole_sums.py
    DDP     one copy of all gradients, in buckets (torch nn/parallel/distributed.py gradient_as_bucket_view=False)
    nanotron         DDP's buckets in the weights' type; with sums in f32, gradients in it until the backward's end
    Megatron-FSDP    counted as ZeRO of the same stage, with its sizes
    ZeRO-1, ZeRO-2   one bucket of reduce_bucket_size elements, two with overlap_comm, and the slices of one that go to
            several ranks, joined (runtime/zero/stage_1_and_2.py)
    ZeRO-3  gathered weights up to max_live_parameters, those prefetched, and one bucket (runtime/zero/stage3.py); more
            if a module alone has more, as experts may (partitioned_param_coordinator.py fetch_sub_module)
    Megatron-LM      placeholders of weight gradients, and one buffer for the gathered input of a sequence-parallel
            product (core/tensor_parallel/layers.py, get_global_memory_buffer)
    autocast         a copy of each weight in the compute type, until the forward's context ends
            (ATen/autocast_mode.cpp cached_cast)
"""

from __future__ import annotations

from enum import Enum
from itertools import pairwise

from ratrain.ratrainc.bridge.jobs.job import Checkpointing, Sharding
from ratrain.ratrainc.fit.holdings.activations import kept_by_policy, recomputed_layers
from ratrain.ratrainc.fit.holdings.adapters import (
    dequantised,
    gathered_layer,
    head_trained,
    layer_trained,
    outer_trained,
    trained,
)
from ratrain.ratrainc.fit.holdings.frozen_layers import layers_of
from ratrain.ratrainc.fit.holdings.part import Part, itemsize
from ratrain.ratrainc.fit.holdings.state import gradients, sums_apart
from ratrain.ratrainc.fit.holdings.styles import MEGATRON
from ratrain.ratrainc.fit.holdings.terms import Bytes, together

BUCKET = 500_000_000
"""Default of reduce_bucket_size in elements, deepspeed runtime/zero/config.py; so the next two."""
LIVE = 1_000_000_000
PREFETCH = 50_000_000
FSDP1_GATHERED = "buffers of FSDP1: gathered weights"
MADE_BY_FSDP1 = "buffers of FSDP1: whole gradients"
MADE_BY_FSDP2 = "buffers of FSDP2: whole gradients"


class Phase(Enum):
    """Moments of a step, in its order; the value is the name in an answer."""

    LOSS = "at the loss"
    LOSS_BACK = "in the backward of the loss"
    HEAD = "in the backward of the head"
    NORM = "in the backward of the final norm"
    LAST = "in the backward of the last layer"
    FIRST = "in the backward of the first layer"
    END = "at the end of the backward"
    STEP = "in the optimizer's step"


def buffers(part: Part, phase: Phase) -> Bytes:
    """Return the bytes of buffers in a phase, by the mechanism that holds them, without FSDP's whole gradients."""
    made = {
        Sharding.FSDP1: _fsdp1,
        Sharding.FSDP2: _fsdp2,
        Sharding.ZERO1: _zero12 if part.job.framework != "nanotron" else None,
        Sharding.ZERO2: _zero12,
        Sharding.ZERO3: _zero3,
    }.get(part.job.sharding)
    own = made(part, phase) if made else {}
    others = [_ddp(part), _half_gradients(part, phase), _gathered_rows(part), _placeholders(part, phase)]
    return together([own, *others, _casts(part, phase), _dequantised(part, phase)])


def gather_pool(part: Part) -> int:
    """Return the bytes of FSDP2's gather buffers: the largest group's, or two layers'.

    They are allocated on a stream of their own (fully_shard/_fsdp_collectives.py foreach_all_gather), whose pool no
    other stream uses.
    """
    if part.job.sharding is not Sharding.FSDP2:
        return 0
    letters = part.model.mlp_kinds
    pairs = set(pairwise(letters)) if letters else {("", "")}
    neighbours = [sum(gathered_layer(part.at(letters.find(letter))) for letter in pair) for pair in pairs]
    return max(*neighbours, part.item * part.head_matrix, part.item * part.embedding_parameters)


def _gathered(part: Part) -> tuple[int, int, int]:
    """Return the bytes of gathered weights: of all layers, of the one in use, and of that and the next in the backward.

    In the backward of the first layer none is next, where layers are alike.
    """
    layers = sum(count * gathered_layer(each) for each, count in part.kinds)
    here, before = gathered_layer(part.here), part.before
    return layers, here, here + (0 if before is None else gathered_layer(before))


def _fsdp1(part: Part, phase: Phase) -> Bytes:
    layers, gather, both = _gathered(part)
    whole = not part.job.reshard_after_forward
    if whole and part.sums_whole and phase in (Phase.FIRST, Phase.END):
        # weights that stay for the backward then stay for the next micro-batch too (_should_free_in_backward)
        return {FSDP1_GATHERED: layers + part.item * part.outer_parameters}
    gathered = {
        Phase.LOSS: layers if whole else 0,
        Phase.LOSS_BACK: layers if whole else 0,
        Phase.HEAD: layers if whole else gather,
        Phase.NORM: layers if whole else gather,
        Phase.LAST: layers if whole else both,
        Phase.FIRST: both if part.number else gather,
    }.get(phase, 0) + (0 if phase is Phase.STEP else part.item * part.outer_parameters)
    return {FSDP1_GATHERED: gathered}


def _reduced_by_fsdp1(part: Part, phase: Phase) -> int:
    unit, in_flight, item = layer_trained(part.here), _unit_after(part), part.item
    reduced = itemsize(part.job.reduce_dtype)
    copy = reduced if reduced != item else 0
    head, outer = item * head_trained(part), outer_trained(part)
    return {
        Phase.HEAD: head,
        Phase.NORM: head,
        Phase.LAST: item * unit + of_the_layer_before(part, item + copy) + head,
        Phase.FIRST: item * unit + (item + copy) * in_flight + head,
        # the root's parts and the tensor that joins them, before its shard is made; or its copy, when the gathered root
        # is gone (_post_backward_hook reshards first)
        Phase.END: max(2 * item * outer - gradients(part, outer), copy * outer, 0),
    }.get(phase, 0)


def of_the_layer_before(part: Part, item: int) -> int:
    """Return the bytes of gradients in reduction that the second backward has more than the first keeps.

    The last layer's backward has no layer before it, but everything is still kept; the next one's has, and one layer
    less is kept. The fuller of the two is meant. A layer of another kind than the one behind it is a moment of its own.
    """
    if part.number is not None and part.after is not None:
        return item * layer_trained(part.after)
    here = part.here
    if part.before is None or part.before.model is not here.model:
        return 0
    return max(0, item * layer_trained(here) - sum(each.bytes for each in kept_by_policy(here)))


def _unit_after(part: Part) -> int:
    """Return the elements that train of the layer whose gradients are in reduction during the backward of another."""
    return 0 if part.after is None else layer_trained(part.after)


def _groups_apart(part: Part) -> bool:
    """Return True if embedding and head are groups of FSDP2 of their own."""
    return part.job.framework == "torchtitan" and not part.tied_here


def _root(part: Part) -> int:
    """Return the elements of FSDP2's group of the root."""
    return part.head_matrix + part.model.norm_parameters * part.last if _groups_apart(part) else part.outer_parameters


def _fsdp2(part: Part, phase: Phase) -> Bytes:
    layers, gather, both = _gathered(part)
    whole = not part.job.reshard_after_forward
    gathered = {
        Phase.LOSS: layers if whole else gather,
        Phase.LOSS_BACK: layers if whole else gather,
        Phase.HEAD: layers if whole else gather,
        Phase.NORM: layers if whole else gather,
        Phase.LAST: layers if whole else both,
        Phase.FIRST: both if part.number else gather,
    }.get(phase, 0)
    if phase not in (Phase.END, Phase.STEP) and not (_groups_apart(part) and phase is Phase.FIRST):
        gathered += part.item * _root(part)
    return {"buffers of FSDP2: gathered weights": gathered}


def _reduced_by_fsdp2(part: Part, phase: Phase) -> int:
    unit, item, apart = layer_trained(part.here), part.item, _groups_apart(part)
    reduced = itemsize(part.job.reduce_dtype)
    head = item * head_trained(part)
    last_group = outer_trained(part) if part.job.trains_part else part.embedding_parameters if apart else _root(part)
    waiting = 0 if apart else head
    return {
        Phase.HEAD: head,
        Phase.NORM: head,
        Phase.LAST: item * unit
        + max(of_the_layer_before(part, reduced), reduced * head_trained(part) if apart else 0)
        + waiting,
        Phase.FIRST: item * unit + reduced * _unit_after(part) + waiting,
        Phase.END: (item + reduced) * last_group + reduced * layer_trained(part.at(0)),
    }.get(phase, 0)


def in_reduction(part: Part, phase: Phase) -> Bytes:
    """Return the bytes of whole gradients that FSDP makes and reduces, if it reduces those of each micro-batch."""
    if part.job.sharding is Sharding.FSDP1:
        return {MADE_BY_FSDP1: _reduced_by_fsdp1(part, phase)}
    return {MADE_BY_FSDP2: _reduced_by_fsdp2(part, phase)} if part.job.sharding is Sharding.FSDP2 else {}


def _ddp(part: Part) -> Bytes:
    if part.job.framework == "nanotron":
        return _ddp_of_nanotron(part)
    if part.job.sharding is not Sharding.DDP or part.job.framework in MEGATRON:
        return {}  # Megatron-LM's gradients are the buckets
    return {"buffers of DDP: buckets": itemsize(part.job.gradient_dtype) * trained(part)}


def _ddp_of_nanotron(part: Part) -> Bytes:
    """Return DDP's buckets, which have the weights' type: sums in f32 have a buffer of their own.

    With ZeRO and sums in f32 nothing is wrapped in DDP (nanotron trainer.py, _init_model: make_ddp).
    """
    alone = part.job.sharding is Sharding.NONE or (part.job.sharding is Sharding.ZERO1 and sums_apart(part))
    return {} if alone else {"buffers of DDP: buckets": itemsize(part.job.weight_dtype) * part.parameters}


def _half_gradients(part: Part, phase: Phase) -> Bytes:
    """Return gradients in the weights' type that wait for the backward's end, where all are added to f32 sums.

    (nanotron optim/gradient_accumulator.py, FP32GradientAccumulator.backward)
    """
    if not sums_apart(part) or phase in (Phase.LOSS, Phase.LOSS_BACK, Phase.STEP):
        return {}
    elements = part.parameters if phase in (Phase.FIRST, Phase.END) else part.head_matrix
    return {"buffers of nanotron: gradients before their sum": itemsize(part.job.weight_dtype) * elements}


def _owner(part: Part) -> str:
    """Return who holds ZeRO's buffers: DeepSpeed, or Megatron-LM with an FSDP of its own, which is counted alike."""
    return "buffers of Megatron-LM" if part.job.framework in MEGATRON else "buffers of DeepSpeed"


def _zero12(part: Part, phase: Phase) -> Bytes:
    if phase in (Phase.LOSS, Phase.LOSS_BACK, Phase.STEP):
        return {}  # made by backward, dropped after it
    sizes = part.job.sizes
    count = 2 if sizes.get("overlap_comm") else 1
    elements = sizes.get("reduce_bucket_size", BUCKET)
    # slices of a bucket that go to several ranks are joined in one more tensor (allreduce_bucket, flatten)
    joined = min(elements, trained(part)) if part.shards > 1 and part.job.framework not in MEGATRON else 0
    return {f"{_owner(part)}: buckets": itemsize(part.job.reduce_dtype) * (count * elements + joined)}


def _zero3(part: Part, phase: Phase) -> Bytes:
    sizes = part.job.sizes
    bucket = itemsize(part.job.reduce_dtype) * sizes.get("reduce_bucket_size", BUCKET)
    if phase is Phase.STEP:
        return {f"{_owner(part)}: buckets": bucket}
    live = sizes.get("stage3_max_live_parameters", LIVE) + sizes.get("stage3_prefetch_bucket_size", PREFETCH)
    gathered = part.item * min(part.parameters, max(live, part.largest_module))
    return {f"{_owner(part)}: gathered weights": gathered, f"{_owner(part)}: buckets": bucket}


def _gathered_rows(part: Part) -> Bytes:
    if part.job.framework not in MEGATRON or not part.job.sequence_sharding or part.job.tp == 1:
        return {}
    return {"buffers of Megatron-LM: gathered rows": part.item * part.tokens * part.model.hidden_size}


def _placeholders(part: Part, phase: Phase) -> Bytes:
    """Return what products that add to main gradients themselves give autograd in place of a gradient.

    TransformerEngine keeps an empty tensor of each weight's shape (pytorch/module/base.py get_dummy_wgrad); the head's
    product makes one anew (megatron/core/tensor_parallel/layers.py grad_weight = torch.empty). Only with f32 main
    gradients, which the fused product needs.
    """
    if part.job.framework not in MEGATRON or part.job.gradient_dtype != "f32":
        return {}
    hidden, matrices = part.model.hidden_size, len(part.model.mlp_matrices)
    layer = hidden * (2 * part.query + 2 * part.key + matrices * part.ffn)
    head = part.head_matrix if phase is Phase.HEAD else 0
    return {"buffers of Megatron-LM: placeholders of weight gradients": part.item * (layer + head)}


def _dequantised(part: Part, phase: Phase) -> Bytes:
    """Return the matrix that the product of a quantised weight makes while it runs."""
    runs = phase in (Phase.LAST, Phase.FIRST)
    return {"buffers: dequantised matrix": dequantised(part)} if runs and part.job.adapter else {}


def _casts(part: Part, phase: Phase) -> Bytes:
    if not part.casts or phase in (Phase.END, Phase.STEP):
        return {}
    trained = layers_of(part).trained
    head = head_trained(part) if part.job.thawed is not None else part.head_matrix
    # the cache is cleared where the forward's context ends; recomputed products cast again, others saved their copies
    saved = trained - recomputed_layers(part) * (part.job.checkpointing is Checkpointing.FULL)
    again = min(part.job.checkpoint_every, trained - saved)
    # autocast keeps casts of weights that train; of frozen ones autograd keeps those that a backward reads
    layers = {
        Phase.LOSS: _cast_layers(part, saved if part.job.adapter else trained),
        Phase.LAST: _cast_layers(part, saved) + again * _cast_layer(part.here),
        Phase.FIRST: _cast_layer(part.here),
    }.get(phase, _cast_layers(part, saved))
    has_head = phase in (Phase.LOSS, Phase.LOSS_BACK, Phase.HEAD)
    return {"buffers of autocast: cast weights": part.item * (layers + (head if has_head else 0))}


def _cast_layer(part: Part) -> int:
    """Return the elements of a layer's weights that autocast casts; it does not know grouped products of experts."""
    if part.job.adapter is not None and part.job.adapter.base_bits is not None:
        return 0
    return part.layer_parameters - part.layer_vectors - part.layer_experts


def _cast_layers(part: Part, number: int) -> int:
    """Return the elements of the weights that autocast casts of a number of layers, of each kind its share of them."""
    return sum(number * count * _cast_layer(each) // part.layers for each, count in part.kinds)
