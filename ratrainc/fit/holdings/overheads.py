"""Bytes of a device in addition to a step's tensors, each apart and named.

The workspace of cuBLAS is a tensor of PyTorch's allocator, so it counts as allocated; the others do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ratrain.ratrainc.bridge.jobs.job import Sharding
from ratrain.ratrainc.fit.holdings.buffers import FSDP1_GATHERED, Phase, gather_pool
from ratrain.ratrainc.fit.holdings.logits import freed_logits
from ratrain.ratrainc.fit.holdings.state import GRADIENTS, OF_EXPERTS
from ratrain.ratrainc.fit.holdings.terms import Owner

if TYPE_CHECKING:
    from ratrain.ratrainc.fit.holdings.part import Part
    from ratrain.ratrainc.fit.holdings.terms import Moment

_MIB = 2**20
WORKSPACE = 2 * 32 * _MIB
"""cuBLAS's workspaces: one a handle, and the thread of the forward and that of the backward have one each
(pytorch aten/src/ATen/cuda/CublasHandlePool.cpp parseChosenWorkspaceSize: 32 MiB from Hopper on, 8.1 MiB before; a job
does not name the chip, so the larger)."""
CONTEXT = 1113 * _MIB
"""CUDA context and kernels: measured on a V100, bigscience-workshop/bigscience experiments/tr3m-1B3.md. Newer drivers
load kernels on demand and take less: assumed as the upper end."""
COMMUNICATOR = {True: 544 * _MIB, False: 688 * _MIB}
"""Buffers of one NCCL communicator, of two ranks (True) or more: measured on A100s, NVIDIA/nccl issue 964."""
FRAGMENTATION = 0.02
"""Share of the tensors' bytes that the caching allocator reserves and does not use.

22.27 GiB allocated and 22.76 reserved, when GPT-2 XL ran out of memory on 24 GB: huggingface.co/blog/pytorch-fsdp.
"""
_STREAMS: Mapping[Sharding, tuple[str, ...]] = {
    Sharding.FSDP1: (GRADIENTS, OF_EXPERTS[GRADIENTS], FSDP1_GATHERED),
    Sharding.FSDP2: (GRADIENTS, OF_EXPERTS[GRADIENTS]),
}
"""Owners whose tensors are made on a stream apart (fully_shard/_fsdp_collectives.py foreach_reduce; FSDP1's
_runtime_utils.py _unshard, _post_backward_hook)."""


def overhead(part: Part, moments: Sequence[Moment], fullest: Moment) -> tuple[Owner, ...]:
    """Return what the process takes of the device in addition to the tensors of its fullest moment."""
    job = part.job
    data = job.replicas or 1
    groups = [ranks for ranks in (data, job.tp, job.pp, job.cp) if ranks > 1]
    return (
        Owner("allocator: rounding and fragmentation", int(fullest.bytes * FRAGMENTATION)),
        Owner("allocator: pools of other streams", _pools(part, moments, fullest)),
        Owner("allocator: free blocks of logits", freed_logits(part) if fullest.name == Phase.LOSS_BACK.value else 0),
        Owner("communication: NCCL buffers", sum(COMMUNICATOR[ranks == 2] for ranks in groups)),
        Owner("CUDA context", CONTEXT),
    )


def _pools(part: Part, moments: Sequence[Moment], fullest: Moment) -> int:
    """Return the bytes that the pools of all streams have in addition to the tensors of the fullest moment.

    The allocator keeps a pool a stream, and none shrinks by itself (c10/cuda/CUDACachingAllocator.cpp). FSDP makes
    reduced gradients, and gathers, on streams of their own, so that what they once took is not there for activations.
    """
    if part.job.sharding not in _STREAMS:
        return 0
    apart = _STREAMS[part.job.sharding]
    pooled = [[sum(each.bytes for each in moment.owners if each.name == name) for name in apart] for moment in moments]
    rest: int = max(moment.bytes - sum(own) for moment, own in zip(moments, pooled, strict=True))
    most = sum(max(own[index] for own in pooled) for index in range(len(apart)))
    return rest + most - fullest.bytes + gather_pool(part)
