"""Code by which the context ranks of a job exchange keys and values, and how it cuts sequences."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from ratrain.ratrainc.bridge.deepspeed_rules import ULYSSES
from ratrain.ratrainc.bridge.jobs.job import Context

if TYPE_CHECKING:
    from ratrain.ratrainc.bridge.jobs.job import Job


class Code(Enum):
    """Code that exchanges keys and values."""

    RING_FLASH = "ring-flash-attn"
    TORCH = "PyTorch"
    ENGINE = "TransformerEngine"
    DEEPSPEED = "DeepSpeed"


_CUTS_ONCE = {
    "axolotl": "axolotl-ai-cloud/axolotl: src/axolotl/utils/ctx_managers/sequence_parallel.py, "
    "apply_sequence_parallelism",
    "nanotron": "huggingface/nanotron: src/nanotron/data/clm_collator.py, DataCollatorForCLMWithPositionIds",
}


def code_of(job: Job) -> Code:
    """Return the code by which a job's context ranks exchange keys and values."""
    if job.framework in ("megatron-lm", "megatron-bridge"):
        return Code.ENGINE
    if job.context is Context.HEADS:
        return Code.DEEPSPEED
    return Code.RING_FLASH if job.framework in _CUTS_ONCE else Code.TORCH


def source_of_one_run(job: Job) -> str | None:
    """Return the place in the framework's source that gives a context rank one run of each sequence.

    None if a rank has an early and a late run.
    """
    code = code_of(job)
    return ULYSSES if code is Code.DEEPSPEED else _CUTS_ONCE[job.framework] if code is Code.RING_FLASH else None


def length_divisor(job: Job) -> int:
    """Return the number that a sequence's length must be a multiple of for its context ranks.

    axolotl pads sequences. One run a rank: nanotron's rings and DeepSpeed; two: nanotron's models/qwen.py for
    llama3_ring_attention, PyTorch's _HeadTailLoadBalancer, Megatron-LM's get_batch_on_this_cp_rank.
    """
    if job.cp == 1 or job.framework == "axolotl":
        return 1
    gathers = job.framework == "nanotron" and job.context is Context.GATHER
    return job.cp if source_of_one_run(job) and not gathers else 2 * job.cp


def copies_result(job: Job) -> bool:
    """Return True if context ranks keep the attention's result once more, in another layout, for its projection."""
    return job.cp > 1 and (job.context is Context.HEADS or code_of(job) is Code.TORCH)
