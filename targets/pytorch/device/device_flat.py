"""Kernels on tensors that work element by element, and tell whether all are finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ratrain.targets.pytorch.device.device_common import add_wide, chunk_buffers, flat_chunks, shaped, size, wide
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan


def scale_plan(out: Array, **_: object) -> Plan:
    """One chunk."""
    return chunk_buffers(1, size(out))


def add_plan(out: Array, **_: object) -> Plan:
    """A chunk of each term."""
    return chunk_buffers(2, size(out))


def mean_plan(out: Array, **_: object) -> Plan:
    """The sum, a term, what tells whether all are finite and a part of it."""
    return [*chunk_buffers(2, size(out)), Buffer((1,)), Buffer((1,))]


def all_finite_plan(a: Array, **_: object) -> Plan:
    """A chunk, what tells whether all are finite and a part of it."""
    return [*chunk_buffers(1, size(a)), Buffer((1,)), Buffer((1,))]


def notice(values: F32, told: F32, part: F32) -> None:
    """Leave `told` at 0 where all values are finite, else NaN: 0 times an infinity or a NaN is one. Changes the values."""
    torch.sum(values.mul_(0), dim=0, keepdim=True, out=part)
    told.add_(part)


class DeviceFlat:
    """The kernels of `TorchDevice` that know no rows."""

    def zero(self, a, *, scratch):
        a.zero_()

    def cast(self, src, dst, *, scratch):
        dst.copy_(src)

    def add(self, a, b, out, *, scratch, scale=1.0):
        left, right = scratch.take_all(add_plan(out))
        for of_a, of_b, of_out in flat_chunks(a, b, out):
            term = wide(right, of_b)
            if scale != 1:
                term.mul_(scale)
            of_out.copy_(wide(left, of_a).add_(term))

    def scale(self, a, out, *, scratch, scale):
        (buffer,) = scratch.take_all(scale_plan(out))
        for of_a, of_out in flat_chunks(a, out):
            of_out.copy_(wide(buffer, of_a).mul_(scale))

    def mean_of_replicas(self, parts, out, *, scratch, accumulate, divisor):
        """Waits for the device, once: the answer is needed on the host."""
        told = self.told_mean_of_replicas(parts, out, scratch=scratch, accumulate=accumulate, divisor=divisor)
        return bool(told.item() == 0)

    def all_finite(self, a, *, scratch):
        """Waits for the device, once: the answer is needed on the host."""
        return bool(self.told_all_finite(a, scratch=scratch).item() == 0)

    def told_mean_of_replicas(
        self, parts: Sequence[Array], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float
    ) -> F32:
        """`mean_of_replicas`, whose answer stays on the device: one element in scratch, 0 where all is finite, else NaN."""
        acc, term, told, part = scratch.take_all(mean_plan(out))
        told.zero_()
        for of_out, *of_parts in flat_chunks(out, *parts):
            total = shaped(acc, of_out.shape).zero_()
            for each in of_parts:
                add_wide(total, term, each)
            total.mul_(1 / divisor)
            if accumulate:
                add_wide(total, term, of_out)
            of_out.copy_(total)
            # a sum with an infinity or a NaN in it is not finite: the result tells about the parts too
            notice(wide(term, of_out), told, part)
        return told

    def told_all_finite(self, a: Array, *, scratch: Scratch) -> F32:
        """`all_finite`, whose answer stays on the device, as that of `told_mean_of_replicas` does."""
        buffer, told, part = scratch.take_all(all_finite_plan(a))
        told.zero_()
        for (of_a,) in flat_chunks(a):
            notice(wide(buffer, of_a), told, part)
        return told
