"""Element-wise kernels on tensors, and checks that all elements are finite."""

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
    """Plan one chunk."""
    return chunk_buffers(1, size(out))


def add_plan(out: Array, **_: object) -> Plan:
    """Plan a chunk of each term."""
    return chunk_buffers(2, size(out))


def mean_plan(out: Array, **_: object) -> Plan:
    """Plan the sum, a term, the mark of finiteness and a part of it."""
    return [*chunk_buffers(2, size(out)), Buffer((1,)), Buffer((1,))]


def all_finite_plan(a: Array, **_: object) -> Plan:
    """Plan a chunk, the mark of finiteness and a part of it."""
    return [*chunk_buffers(1, size(a)), Buffer((1,)), Buffer((1,))]


def notice(values: F32, told: F32, part: F32) -> None:
    """Leave `told` at 0 if all values are finite, else make it NaN. Changes the values."""
    # 0 times an infinity or a NaN is NaN, 0 times any other number is 0: the sum tells, without a comparison on the
    # host
    torch.sum(values.mul_(0), dim=0, keepdim=True, out=part)
    told.add_(part)


class DeviceFlat:
    """The element-wise kernels of `TorchDevice`."""

    def zero(self, a, *, scratch):
        a.zero_()

    def cast(self, src, dst, *, scratch):
        dst.copy_(src)

    def group_columns(self, src, dst, *, scratch, groups, inverse):
        wide, tall = (dst, src) if inverse else (src, dst)
        of_wide, of_tall = wide.view(len(wide), groups, -1).transpose(0, 1), tall.view(groups, len(wide), -1)
        if inverse:
            of_wide.copy_(of_tall)
        else:
            of_tall.copy_(of_wide)

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
        """Average replicas' parts. Waits for the device once: the host needs the answer."""
        told = self.told_mean_of_replicas(parts, out, scratch=scratch, accumulate=accumulate, divisor=divisor)
        return bool(told.item() == 0)

    def all_finite(self, a, *, scratch):
        """Return whether all elements are finite. Waits for the device once: the host needs the answer."""
        return bool(self.told_all_finite(a, scratch=scratch).item() == 0)

    def told_mean_of_replicas(
        self, parts: Sequence[Array], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float
    ) -> F32:
        """Do `mean_of_replicas`; the answer stays on the device: in scratch, 0 if all is finite, else NaN."""
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
            # an infinity or NaN in a part makes the sum not finite, so that only the result is checked
            notice(wide(term, of_out), told, part)
        return told

    def told_all_finite(self, a: Array, *, scratch: Scratch) -> F32:
        """Do `all_finite`; its answer stays on the device, as that of `told_mean_of_replicas` does."""
        buffer, told, part = scratch.take_all(all_finite_plan(a))
        told.zero_()
        for (of_a,) in flat_chunks(a):
            notice(wide(buffer, of_a), told, part)
        return told
