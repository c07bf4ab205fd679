"""AdamW on tensors, with numbers (learning rate, step) given by the host, or read on the device by a captured step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from ratrain.targets.program.kernel_options import AdamWOptions
from ratrain.targets.pytorch.device.device_common import F32, chunk_buffers, flat_chunks, shaped, size, wide
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels.shared import decay_segments

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F64, I64, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan


def adamw_plan(master: F32, **_: object) -> Plan:
    """Plan the scratch of an update, in order.

    Four float32 chunks of the master's elements (`chunk_buffers`): gradient, two new moments, a term. Then single
    numbers: five float32, two float64, the skip flag (bool), the count of updates (int64).
    """
    numbers = [Buffer((1,))] * 5 + [Buffer((1,), np.float64)] * 2
    return [*chunk_buffers(4, size(master)), *numbers, Buffer((1,), np.bool_), Buffer((1,), np.int64)]


@frozen
class _Numbers:
    """Factors of an update, each a tensor of one float32."""

    multiplier: F32
    step_size: F32
    """lr / (1 - beta1^t)"""
    root: F32
    """sqrt(1 - beta2^t)"""
    keep: F32
    """1 - lr * weight_decay"""


class DeviceAdamW:
    """The optimizer of `TorchDevice`."""

    def adamw(self, master, m, v, grad, *, scratch, view=None, step, grad_multiplier, lr, **options):
        """Update a shard; `lr` is first rounded to float32, as in `adamw_on_device`."""
        buffers = scratch.take_all(adamw_plan(master))
        rate, multiplier, count = buffers[7].fill_(lr), buffers[8].fill_(grad_multiplier), buffers[12].fill_(step)
        given = AdamWOptions(**options)
        _update(master, m, v, grad, view, _numbers(buffers, count, multiplier, rate, given), None, buffers, given)

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
        **options: Any,
    ) -> None:
        """Do what `adamw` does with numbers that are on the device, for a step that is captured once and then repeated.

        `t` (int64) is `step`, `multiplier` (float32) `grad_multiplier`, `lr` (float32) the learning rate, each of one
        element. If `skip` (one element of any type) is not 0, only the view changes: it is the rounded master in any
        case. Results have the bits of `adamw`; the scratch is the same.
        """
        buffers = scratch.take_all(adamw_plan(master))
        given = AdamWOptions(**options)
        numbers = _numbers(buffers, t.view(1), multiplier.view(1), lr.view(1), given)
        # views of one element: no operation here reads a number on the host
        skips = torch.ne(skip.view(1), 0, out=buffers[11])
        _update(master, m, v, grad, view, numbers, skips, buffers, given)


def _numbers(buffers: list[Array], t: I64, multiplier: F32, lr: F32, given: AdamWOptions) -> _Numbers:
    """Compute the factors of an update in float64, each rounded once."""
    step_size, root, keep, _, _, double, other = buffers[4:11]
    _one_minus_power(given.beta1, t, double)
    step_size.copy_(other.copy_(lr).div_(double))
    root.copy_(_one_minus_power(given.beta2, t, double).sqrt_())
    # `double` and `other` are reused: each number is rounded to float32 before the next is made
    keep.copy_(double.copy_(lr).mul_(-given.weight_decay).add_(1))
    return _Numbers(multiplier, step_size, root, keep)


def _one_minus_power(beta: float, t: I64, out: F64) -> F64:
    """Set out = 1 - beta^t, as -expm1(t * log(beta)). `torch.pow` of a number would allocate a tensor for it."""
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
    given: AdamWOptions,
) -> None:
    """Update all elements, by chunks of decayed and other ones; if `skip` is given and true, state keeps its bits."""
    of_grad, of_m, of_v, term = buffers[:4]

    def store(out: F32, value: F32) -> None:
        if skip is None:
            out.copy_(value)
        else:
            torch.where(skip, out, value, out=out)

    views = [] if view is None else [view]
    for start, stop, decayed in decay_segments(len(master), given.decay):
        for p, old_m, old_v, g, *of_view in flat_chunks(*(x[start:stop] for x in (master, m, v, grad, *views))):
            gradient = wide(of_grad, g).mul_(numbers.multiplier)
            new_m, new_v, value = (shaped(each, p.shape) for each in (of_m, of_v, term))
            # same order of operations as the reference: m + (g - m) * (1 - beta1)
            torch.sub(gradient, old_m, out=new_m).mul_(1 - given.beta1).add_(old_m)
            torch.mul(old_v, given.beta2, out=new_v).add_(gradient.square_().mul_(1 - given.beta2))
            torch.sqrt(new_v, out=gradient).div_(numbers.root).add_(given.eps)
            torch.div(new_m, gradient, out=value).mul_(numbers.step_size)
            # all new values are computed before any is stored, and kept out of state by selection, not by a branch
            store(old_m, new_m)
            store(old_v, new_v)
            kept = torch.mul(p, numbers.keep, out=gradient) if decayed else gradient.copy_(p)
            store(p, kept.sub_(value))
            for each in of_view:
                each.copy_(p)
