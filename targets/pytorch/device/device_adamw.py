"""AdamW on tensors: one update whose numbers are on the host, and one that a captured step can repeat, whose numbers are on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from attrs import frozen

from ratrain.targets.pytorch.device.device_common import F32, chunk_buffers, flat_chunks, shaped, size, wide
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels.shared import decay_segments

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F64, I64, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan


def adamw_plan(master: F32, **_: object) -> Plan:
    """Gradient, two new moments, a term; five numbers in float32 and two in float64; whether to skip; the count of updates."""
    numbers = [Buffer((1,))] * 5 + [Buffer((1,), np.float64)] * 2
    return [*chunk_buffers(4, size(master)), *numbers, Buffer((1,), np.bool_), Buffer((1,), np.int64)]


@frozen
class _Numbers:
    """What an update is made with: tensors of one float32."""

    multiplier: F32
    step_size: F32
    """lr / (1 - beta1^t)"""
    root: F32
    """sqrt(1 - beta2^t)"""
    keep: F32
    """1 - lr * weight_decay"""


class DeviceAdamW:
    """The optimizer of `TorchDevice`."""

    def adamw(
        self,
        master,
        m,
        v,
        grad,
        *,
        scratch,
        view=None,
        step,
        grad_multiplier,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decay,
    ):
        """`lr` is first rounded to float32, as `adamw_on_device` has it."""
        buffers = scratch.take_all(adamw_plan(master))
        rate, multiplier, count = buffers[7].fill_(lr), buffers[8].fill_(grad_multiplier), buffers[12].fill_(step)
        numbers = _numbers(buffers, count, multiplier, rate, beta1, beta2, weight_decay)
        _update(master, m, v, grad, view, numbers, None, buffers, beta1, beta2, eps, decay)

    def adamw_on_device(
        self,
        master: F32,
        m: F32,
        v: F32,
        grad: Array,
        *,
        scratch: Scratch,
        view: Array | None = None,
        t: I64,
        multiplier: F32,
        skip: Array,
        lr: F32,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decay: Sequence[tuple[int, int]],
    ) -> None:
        """`adamw` of a step that is captured once and then repeated: what differs from step to step is read on the device.

        `t` (int64) is `step`, `multiplier` (float32) `grad_multiplier`, `lr` (float32) the learning rate; with `skip` (any type, not 0)
        nothing changes but the view, which is the master's rounding in any case. Each has one element. The results are those of `adamw`
        to the bit, and so is the scratch.
        """
        buffers = scratch.take_all(adamw_plan(master))
        numbers = _numbers(buffers, t.view(1), multiplier.view(1), lr.view(1), beta1, beta2, weight_decay)
        skips = torch.ne(skip.view(1), 0, out=buffers[11])
        _update(master, m, v, grad, view, numbers, skips, buffers, beta1, beta2, eps, decay)


def _numbers(
    buffers: list[Array], t: I64, multiplier: F32, lr: F32, beta1: float, beta2: float, weight_decay: float
) -> _Numbers:
    """In float64, each rounded once."""
    step_size, root, keep, _, _, double, other = buffers[4:11]
    _one_minus_power(beta1, t, double)
    step_size.copy_(other.copy_(lr).div_(double))
    root.copy_(_one_minus_power(beta2, t, double).sqrt_())
    keep.copy_(double.copy_(lr).mul_(-weight_decay).add_(1))
    return _Numbers(multiplier, step_size, root, keep)


def _one_minus_power(beta: float, t: I64, out: F64) -> F64:
    """Out = 1 - beta^t. `torch.pow` of a number would make a tensor of it."""
    return out.copy_(t).mul_(math.log(beta) if beta else -math.inf).expm1_().neg_()


def _update(
    master: F32,
    m: F32,
    v: F32,
    grad: Array,
    view: Array | None,
    numbers: _Numbers,
    skip: Array | None,
    buffers: list[Array],
    beta1: float,
    beta2: float,
    eps: float,
    decay: Sequence[tuple[int, int]],
) -> None:
    """All elements, by chunks of those that are decayed and those that are not; where `skip` is there and true, state keeps its bits."""
    of_grad, of_m, of_v, term = buffers[:4]

    def store(out: F32, value: F32) -> None:
        if skip is None:
            out.copy_(value)
        else:
            torch.where(skip, out, value, out=out)

    views = [] if view is None else [view]
    for start, stop, decayed in decay_segments(len(master), decay):
        for p, old_m, old_v, g, *of_view in flat_chunks(*(x[start:stop] for x in (master, m, v, grad, *views))):
            gradient = wide(of_grad, g).mul_(numbers.multiplier)
            new_m, new_v, value = (shaped(each, p.shape) for each in (of_m, of_v, term))
            torch.sub(gradient, old_m, out=new_m).mul_(1 - beta1).add_(old_m)
            torch.mul(old_v, beta2, out=new_v).add_(gradient.square_().mul_(1 - beta2))
            torch.sqrt(new_v, out=gradient).div_(numbers.root).add_(eps)
            torch.div(new_m, gradient, out=value).mul_(numbers.step_size)
            store(old_m, new_m)
            store(old_v, new_v)
            kept = torch.mul(p, numbers.keep, out=gradient) if decayed else gradient.copy_(p)
            store(p, kept.sub_(value))
            for each in of_view:
                each.copy_(p)
