"""Bytes of the loss: logits, their copies and their gradients.

In bytes a logit, c the item size of the compute type:

                     forward       backward
    upcast           c + 4 + 4     4 + 4 + 4   logits, f32 copy, log_softmax; log_softmax, gradients of its result and
                                               of its input (transformers loss/loss_utils.py ForCausalLMLoss, torchtitan
                                               components/loss.py; derivatives.yaml _log_softmax, nll_loss_forward)
    Megatron-LM      c + 4         4 + c       exponentials and gradient in place of the f32 copy
                                               (core/tensor_parallel/cross_entropy.py)
    nanotron         c + 4 + 4     4 + c       the maximum is subtracted out of place (parallel/tensor_parallel/
                                               functional.py _ShardedCrossEntropy)
    compiled         c             c + c       softmax is computed again in the backward kernel (assumed)
    whole            2 c           3 c
    chunked          c + 4 + 4/n   c + 4 + 8/n log_softmax of all n chunks is saved, one chunk is upcast
    chunked, litgpt  2 c           3 c         utils.py chunked_cross_entropy keeps logits, and gathers the gradients
    fused            never whole: gradients of the head's input and matrix, made in the forward, and one chunk of logits
                     (linkedin/Liger-Kernel src/liger_kernel/ops/fused_linear_cross_entropy.py)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratrain.ratrainc.bridge.jobs.job import Loss
from ratrain.ratrainc.fit.holdings.frozen_layers import trains_head
from ratrain.ratrainc.fit.holdings.part import Part, share
from ratrain.ratrainc.fit.holdings.styles import MEGATRON

if TYPE_CHECKING:
    from ratrain.ratrainc.fit.holdings.terms import Bytes

LOGITS = "logits"
_F32 = 4
_DEFAULT_CHUNKS = 8
"""torchtune modules/loss/ce_chunked_output_loss.py CEWithChunkedOutputLoss, num_output_chunks."""


def _logits(part: Part) -> int:
    """Return the logits of one micro-batch on one rank.

    Megatron-LM and nanotron always share out the vocabulary; elsewhere each tensor-parallel rank has whole rows unless
    the loss is vocabulary-parallel.
    """
    shared = part.job.loss is Loss.VOCAB_PARALLEL or part.job.framework in {*MEGATRON, "nanotron"}
    return part.tokens * (part.vocabulary if shared else part.model.vocab_size)


def loss_bytes(part: Part, *, backward: bool) -> Bytes:
    """Return the bytes of the loss at the end of its forward or in its backward; nothing on stages without the head."""
    if not part.last:
        return {}
    if part.job.loss is Loss.FUSED:
        return {LOGITS: _fused(part)}
    count = _logits(part)
    capped = part.item * count if part.model.logit_softcap is not None else 0  # tanh keeps its result
    return {LOGITS: _of_logits(part, count)[backward] + capped}


def _of_logits(part: Part, count: int) -> tuple[int, int]:
    """Return the bytes of `count` logits and of what is made of them: forward, backward."""
    item, loss, framework = part.item, part.job.loss, part.job.framework
    if framework in MEGATRON:
        return (item + _F32) * count, (item + _F32) * count
    if framework == "nanotron":
        return (item + 2 * _F32) * count, (item + _F32) * count
    if compiled_loss(part) and loss is Loss.CHUNKED and part.job.adapter is not None:
        # the backward of each chunk's loss frees its logits, and makes their gradient, before the frozen head's begins
        return item * count, item * count + share(item * count, part.job.loss_chunks or _DEFAULT_CHUNKS)
    if compiled_loss(part):
        return item * count, 2 * item * count
    if loss is Loss.WHOLE or framework == "litgpt":
        return 2 * item * count, 3 * item * count
    if loss is Loss.CHUNKED:
        chunks = part.job.loss_chunks or _DEFAULT_CHUNKS
        saved, chunk = (item + _F32) * count, share(_F32 * count, chunks)
        return saved + chunk, saved + 2 * chunk
    return (item + 2 * _F32) * count, 3 * _F32 * count


def compiled_loss(part: Part) -> bool:
    """Return True if torch.compile covers the loss.

    So it does in torchtune, and in torchtitan since 2025 (components/loss.py build_cross_entropy_loss);
    `compile_loss` = 0 among the job's sizes says that it does not.
    """
    job = part.job
    return job.compiled and job.framework in {"torchtitan", "torchtune"} and bool(job.sizes.get("compile_loss", 1))


def freed_logits(part: Part) -> int:
    """Return the bytes of logits that are free at the loss's fullest moment, in a block too small for what follows.

    Only where a caching allocator holds logits, then their f32 copies, which are twice as large (eager upcast).
    """
    in_place = part.job.framework in {*MEGATRON, "nanotron", "litgpt"}
    upcast = part.job.loss in (Loss.UPCAST, Loss.VOCAB_PARALLEL) and not compiled_loss(part) and not in_place
    return part.item * _logits(part) if part.last and upcast and part.item < _F32 else 0


def _fused(part: Part) -> int:
    """Return the bytes of a fused linear cross-entropy.

    A chunk has as many rows as make its logits about as large as the head's input: the next power of two of
    tokens / ceil(vocabulary / hidden).
    """
    hidden = part.model.hidden_size
    rows = share(part.tokens, share(part.vocabulary, hidden))
    chunk = 1 << max(rows - 1, 0).bit_length()
    trains = part.job.adapter is None and trains_head(part)
    matrix = part.vocabulary * hidden if trains else 0  # a frozen one has no gradient
    return part.item * (part.tokens * hidden + matrix + chunk * part.vocabulary)


def logit_gradient(part: Part) -> Bytes:
    """Return the bytes of the gradient of logits while the head's own backward runs."""
    if not part.last or part.job.loss is Loss.FUSED:
        return {}
    return {LOGITS: part.item * _logits(part)}
