"""AdamW in one pass over its state, which also rounds the view.

Its numbers (learning rate, step) come from the host, or from the device in a captured step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl

from ratrain.targets.program.kernel_options import AdamWOptions
from ratrain.targets.pytorch.triton.triton_common import (
    BLOCK,
    jit,
    launch,
    load_wide,
    own_elements,
    programs,
    store_rounded,
)
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels.shared import decay_segments

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, I64, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan


def adamw_plan(**_: object) -> Plan:
    """Plan the four factors of an update; and for numbers of the host: learning rate, multiplier, count of updates."""
    return [Buffer((4,)), Buffer((1,)), Buffer((1,)), Buffer((1,), np.int64)]


@jit
def prepare_numbers(
    numbers: tl.tensor,
    t: tl.tensor,
    multiplier: tl.tensor,
    lr: tl.tensor,
    log_beta1: tl.constexpr,
    log_beta2: tl.constexpr,
    weight_decay: tl.constexpr,
) -> None:
    """Set multiplier, lr / (1 - beta1^t), sqrt(1 - beta2^t), 1 - lr * weight_decay: in float64, each rounded once."""
    # constants are made float64 tensors: a Python float could become a float32 constant
    count, rate = tl.load(t).to(tl.float64), tl.load(lr).to(tl.float64)
    first, second = tl.full((), log_beta1, tl.float64), tl.full((), log_beta2, tl.float64)
    tl.store(numbers, tl.load(multiplier))
    tl.store(numbers + 1, (rate / (1 - tl.exp(count * first))).to(tl.float32))
    tl.store(numbers + 2, tl.sqrt(1 - tl.exp(count * second)).to(tl.float32))
    tl.store(numbers + 3, (1 - rate * tl.full((), weight_decay, tl.float64)).to(tl.float32))


@jit
def update(
    master: tl.tensor,
    m: tl.tensor,
    v: tl.tensor,
    grad: tl.tensor,
    view: tl.tensor,
    numbers: tl.tensor,
    skip: tl.tensor,
    count: tl.tensor,
    beta1: tl.constexpr,
    beta2: tl.constexpr,
    eps: tl.constexpr,
    decayed: tl.constexpr,
    skips: tl.constexpr,
    views: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Update some elements; if it `skips` and `skip` is not 0, state keeps its bits. The view is the rounded master."""
    at = own_elements(block)
    there = at < count
    inside = there
    if skips:
        # a skipped update is one that stores to no element: no branch, so a captured step can repeat it
        inside = at < tl.where(tl.load(skip).to(tl.float32) == 0, count, 0)
    gradient = load_wide(grad + at, inside) * tl.load(numbers)
    first, second = tl.load(m + at, mask=inside, other=0.0), tl.load(v + at, mask=inside, other=0.0)
    # same order of operations as `DeviceAdamW`; divisions and roots as IEEE 754 rounds them
    first = (gradient - first) * (1 - beta1) + first
    second = second * beta2 + gradient * gradient * (1 - beta2)
    value = tl.div_rn(first, tl.div_rn(tl.sqrt_rn(second), tl.load(numbers + 2)) + eps) * tl.load(numbers + 1)
    # the master is loaded for all elements: a skipped update still stores the view
    held = tl.load(master + at, mask=there, other=0.0)
    kept = held * tl.load(numbers + 3) if decayed else held
    kept -= value
    tl.store(m + at, first, mask=inside)
    tl.store(v + at, second, mask=inside)
    tl.store(master + at, kept, mask=inside)
    if views:
        store_rounded(view + at, tl.where(inside, kept, held), there)


def _log(beta: float) -> float:
    """Return log(beta); for 0 a number whose multiples have the exponential 0, as all powers of 0."""
    return math.log(beta) if beta else -1e9


class TritonAdamW:
    """The optimizer of `TorchTriton`."""

    def adamw(self, master, m, v, grad, *, scratch, view=None, step, grad_multiplier, lr, **options):
        """Update a shard; `lr` is first rounded to float32, as in `adamw_on_device`."""
        numbers, rate, multiplier, count = scratch.take_all(adamw_plan())
        given = AdamWOptions(**options)
        _prepare(numbers, count.fill_(step), multiplier.fill_(grad_multiplier), rate.fill_(lr), given)
        _update(master, m, v, grad, view, numbers, None, given)

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
        """Do what `adamw` does with numbers that are on the device; see `DeviceAdamW.adamw_on_device`."""
        numbers, *_ = scratch.take_all(adamw_plan())
        given = AdamWOptions(**options)
        _prepare(numbers, t, multiplier, lr, given)
        _update(master, m, v, grad, view, numbers, skip, given)


def _prepare(numbers: F32, t: I64, multiplier: F32, lr: F32, given: AdamWOptions) -> None:
    logs = {"log_beta1": _log(given.beta1), "log_beta2": _log(given.beta2)}
    constants: dict[str, Any] = {**logs, "weight_decay": given.weight_decay}
    launch(prepare_numbers, (1,), numbers, t, multiplier, lr, **constants, warps=1)


def _update(
    master: F32,
    m: F32,
    v: F32,
    grad: Array,
    view: Array | None,
    numbers: F32,
    skip: Array | None,
    given: AdamWOptions,
) -> None:
    """Update all elements, by runs of decayed and of other ones."""
    constants: dict[str, Any] = {
        "beta1": given.beta1,
        "beta2": given.beta2,
        "eps": given.eps,
        "skips": skip is not None,
        "views": view is not None,
    }
    tensors = (master, m, v, grad, master if view is None else view)
    # any tensor will do where `skips` is False: it is not read
    flag = numbers if skip is None else skip
    for start, stop, decayed in decay_segments(len(master), given.decay):
        parts = (each[start:stop] for each in tensors)
        grid = (programs(stop - start, BLOCK),)
        launch(update, grid, *parts, numbers, flag, stop - start, decayed=decayed, **constants, block=BLOCK)
