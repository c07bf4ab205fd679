"""Bytes of context ranks: each has a part of every sequence, and attention alone looks beyond it.

With c ranks and micro-batches of T tokens a rank has t = T / c of them in all of the model; weights are whole on each,
and mechanisms that share out state do so over data-parallel and context ranks together. Per layer, in elements, with
queries of width q, keys of width k, and `x32` for f32:

    form, code                  kept in addition      forward, at its fullest     backward, at its fullest
    gather, ring-flash-attn     nothing               2 T w                       4 T w + 2 t w
    ring, ring-flash-attn       nothing               4 t k + 4 t q x32           4 t k + t (q + 6 k) x32
    gather, PyTorch             output t q            2 T k + 4 t q x32           2 T k + 4 t k + t (1.5 q + 6 k) x32
    ring, PyTorch               output t q            4 t k + 4 t q x32           6 t k + t (1.5 q + 6 k) x32
    ring, TransformerEngine     nothing               2 T k + T q                 8 t k + t q
    gather, TransformerEngine   nothing               3 T k                       6 T k
    heads, either               output t q            2 t (q + 2 k')              2 t (q + k')

w is the width of the heads that are gathered at a time (`heads_k_stride`, one head by default), k' that of keys with
each head on as many ranks as there are too few heads for. Read in

- zhuzilin/ring-flash-attention ring_flash_attn/llama3_flash_attn_varlen.py (kv_buffer, dkv_buffer,
  kv_contiguous_buffer) and ring_flash_attn.py (next_k, block_dk_buffer, update_out_and_lse): axolotl; nanotron's copies
- torch/distributed/tensor/experimental/_context_parallel/_attention.py _templated_ring_attention, its _backward,
  _AllGatherRotater and _SDPAMerger: torchtitan, torchtune, and accelerate's cp_size. What merges halves lays the result
  out by head (_partial_update), so the projection's input is a copy: on all ranks but the last
- NVIDIA/TransformerEngine transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py
  AttnFuncWithCPAndKVP2P (p2p_comm_buffers and out_per_step stay to the forward's end), AttnFuncWithCPAndKVAllGather
  (k_ag twice while it is reordered; dk, dv and those of a step) and AttnFuncWithCPAndQKVOA2A: Megatron-LM
- deepspeedai/DeepSpeed deepspeed/runtime/sequence_parallel/ulysses_sp.py UlyssesSPAttentionHF, _DimZeroAllToAll: heads
  elsewhere; keys and values are repeated where there are fewer heads than ranks

tests/ratrainc/fit/test_context_ranks.py counts what PyTorch's own code makes as one of several ranks, and the steps of
the others as they are written there a second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.bridge.jobs.context_ranks import Code, code_of, length_divisor
from ratrain.ratrainc.bridge.jobs.job import Attention, Context, Job, Sharding
from ratrain.ratrainc.bridge.jobs.job_common import STRIDE
from ratrain.ratrainc.fit.holdings.styles import MEGATRON, TRANSFORMERS

if TYPE_CHECKING:
    from ratrain.ratrainc.fit.holdings.part import Part

EXCHANGE = "buffers of context ranks: keys and values"
_F32 = 4


def exchange_forward(part: Part) -> int:
    """Return the bytes that context ranks hold in an attention's forward, in addition to what it keeps."""
    job, item, tokens, query, key = part.job, part.item, part.tokens, part.query, part.exchanged_key
    whole = tokens * job.cp
    if job.cp == 1:
        return 0
    merged = 4 * _F32 * tokens * query  # a result, another one, what is subtracted and the sum, all in f32
    if job.context is Context.HEADS:
        return 2 * item * tokens * (query + 2 * key)
    match code_of(job), job.context:
        case Code.RING_FLASH, Context.GATHER:
            return 2 * item * whole * _gathered_width(part)
        case Code.ENGINE, Context.GATHER:
            return 3 * item * whole * key
        case Code.ENGINE, _:
            return item * whole * (2 * key + query)
        case _, Context.GATHER:
            return 2 * item * whole * key + merged
    return 2 * item * tokens * key * min(job.cp - 1, 2) + merged  # two ranks receive once


def exchange_backward(part: Part) -> int:
    """Return the bytes that context ranks hold in an attention's backward, in addition to its gradients."""
    job, item, tokens, query, key = part.job, part.item, part.tokens, part.query, part.exchanged_key
    whole = tokens * job.cp
    if job.cp == 1:
        return 0
    if job.context is Context.HEADS:
        return 2 * item * tokens * (query + key)
    match code_of(job), job.context:
        case Code.RING_FLASH, Context.GATHER:
            return item * (4 * whole + 2 * tokens) * _gathered_width(part)
        case Code.RING_FLASH, _:
            return 2 * item * tokens * key * min(job.cp - 1, 2) + _F32 * tokens * (query + 6 * key)
        case Code.ENGINE, Context.GATHER:
            return 6 * item * whole * key
        case Code.ENGINE, _:
            return item * tokens * (8 * key + query)
    sums = _F32 * tokens * (3 * query + 12 * key) // 2
    # two ranks receive once
    return sums + 2 * item * key * (whole + 2 * tokens if job.context is Context.GATHER else min(job.cp, 3) * tokens)


def _gathered_width(part: Part) -> int:
    return min(part.key, part.job.sizes.get(STRIDE, 1) * part.model.head_dim)


def context_refusal(job: Job) -> str:
    """Return why the bytes of a job's context ranks are not known; empty if they are, or it has none."""
    if job.cp == 1:
        return ""
    assert job.model is not None
    assert job.seq_len is not None
    if job.cp < 1:
        return "cp: must be at least 1"
    if job.framework in ("pytorch", "litgpt", "llm-foundry"):
        return f"cp: {job.framework} has no context ranks that were read"
    by = length_divisor(job)
    if job.seq_len % by:
        runs = f"{number_of(by // job.cp, 'equal run')} for each of {job.cp} context ranks"
        return f"seq_len: {job.seq_len} tokens are not a multiple of {by}: {job.framework} needs {runs}"
    return _kernels(job) or (_heads(job) if job.context is Context.HEADS else "")


def _kernels(job: Job) -> str:
    """Return which other setting a framework's context ranks do not go with."""
    if job.attention is Attention.EAGER:
        return "attention: context ranks go with fused attention kernels alone"
    if job.framework == "axolotl":
        if job.sharding is Sharding.FSDP1:
            return "cp: accelerate's context ranks need FSDP 2, DDP or DeepSpeed (parallelism_config.py)"
        if job.attention is not Attention.FLASH:
            return "attention: axolotl's context ranks need flash attention (attn_implementation: flash_attention_2)"
        if job.training.packing and (job.micro_batch_size or 1) > 1:
            return "micro_batch_size: axolotl's context ranks need 1 with sample_packing"
        if (job.model is not None) and job.model.kv_heads % job.sizes.get(STRIDE, 1):
            return f"{STRIDE}: {job.sizes[STRIDE]} does not divide {job.model.kv_heads} heads of keys"
        return ""
    if job.framework not in TRANSFORMERS:
        return ""
    if job.context is Context.HEADS:
        known = (Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
        return "" if job.sharding in known else "cp: heads are exchanged by DeepSpeed alone (accelerate's sp_size)"
    if job.sharding is not Sharding.FSDP2:
        return "cp: accelerate's context ranks need FSDP 2 (accelerate src/accelerate/accelerator.py, prepare)"
    if job.attention is not Attention.SDPA:
        return "attention: accelerate's context ranks need PyTorch's fused attention (sdpa)"
    return ""


def _heads(job: Job) -> str:
    """Return why heads cannot be split over context ranks. Megatron-LM splits the heads of one tensor-parallel rank."""
    model, cp, tp = job.model, job.cp, job.tp
    assert model is not None
    heads, keys = model.heads // tp, max(1, model.kv_heads // tp)
    if heads % cp:
        return f"cp: {heads} heads do not share out evenly over {cp} context ranks"
    if keys % cp and (job.framework in MEGATRON or cp % keys):
        return f"cp: {keys} heads of keys do not share out evenly over {cp} context ranks"
    return ""
