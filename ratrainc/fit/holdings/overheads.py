"""Bytes of a device in addition to a step's tensors, each apart and named.

The workspace of cuBLAS is a tensor of PyTorch's allocator, so it counts as allocated; the others do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrainc.bridge.jobs.job import Sharding
from ratrain.ratrainc.fit.holdings.buffers import FSDP1_GATHERED, Phase, gather_pool
from ratrain.ratrainc.fit.holdings.logits import freed_logits
from ratrain.ratrainc.fit.holdings.state import GRADIENTS
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


def overhead(part: Part, moments: Sequence[Moment], fullest: Moment) -> tuple[Owner, ...]:
    """Return what the process takes of the device in addition to the tensors of its fullest moment.

    The allocator keeps a pool a stream, and a pool never shrinks by itself: gathers and reduced gradients of FSDP are
    made on streams of their own, so that their pools stay while the fullest moment is another's.
    """
    job = part.job
    pools = gather_pool(part)
    if job.sharding in (Sharding.FSDP1, Sharding.FSDP2):
        pools += _beyond(GRADIENTS, moments, fullest)
    if job.sharding is Sharding.FSDP1:
        pools += _beyond(FSDP1_GATHERED, moments, fullest)
    data = job.devices // job.model_ranks if job.devices else 1
    groups = [ranks for ranks in (data, job.tp, job.pp) if ranks > 1]
    return (
        Owner("allocator: rounding and fragmentation", int(fullest.bytes * FRAGMENTATION)),
        Owner("allocator: pools of other streams", pools),
        Owner("allocator: free blocks of logits", freed_logits(part) if fullest.name == Phase.LOSS_BACK.value else 0),
        Owner("communication: NCCL buffers", sum(COMMUNICATOR[ranks == 2] for ranks in groups)),
        Owner("CUDA context", CONTEXT),
    )


def _beyond(owner: str, moments: Sequence[Moment], fullest: Moment) -> int:
    """Return by how much an owner's most bytes exceed those at the fullest moment."""
    held = [sum(each.bytes for each in moment.owners if each.name == owner) for moment in (fullest, *moments)]
    return max(held) - held[0]
