"""Matrices in nf4 on tensors, with the bits of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ratrain.ratrain_ir.config.quantised import NESTED_BLOCK, NF4_BLOCK, nf4_sizes
from ratrain.targets.pytorch.device.device_common import chunk_rows, row_chunks, size
from ratrain.targets.runtime.arena.scratch import Buffer
from ratrain.targets.runtime.kernels.reference.reference_nf4 import NESTED_LEVELS, NF4_LEVELS

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, Array
    from ratrain.targets.runtime.arena.scratch import Plan

_GROUP = NF4_BLOCK * NESTED_BLOCK
"""Elements whose maxima share a scale."""


def dequantise_nf4_plan(out: Array, **_: object) -> Plan:
    """Plan a chunk of values, their levels' indices, their bytes, and their maxima."""
    groups = chunk_rows(nf4_sizes(size(out)).scales, _GROUP)
    elements = groups * _GROUP
    return [
        Buffer((elements,)),
        Buffer((elements,), np.int32),
        Buffer((elements // 2,), np.uint8),
        Buffer((groups, NESTED_BLOCK)),
    ]


def nf4_levels(device: torch.device) -> tuple[F32, F32]:
    """Make the tables of levels on a device."""
    return torch.tensor(NF4_LEVELS, device=device), torch.tensor(NESTED_LEVELS, device=device)


class DeviceNf4:
    """The kernel of `TorchDevice` on matrices in nf4."""

    nf4_levels: tuple[F32, F32]
    """levels of elements and of maxima, on the device: made with the set, because a step allocates nothing"""

    def dequantise_nf4(self, packed, out, *, scratch):
        values, indices, spare, grouped = scratch.take_all(dequantise_nf4_plan(out))
        levels, nested_levels = self.nf4_levels
        target, count = out.view(-1), nf4_sizes(size(out))
        head, middle, end = count.ends
        numbers, nested, pairs = packed[:head].view(torch.float32), packed[head:middle], packed[middle:end]
        for groups in row_chunks(count.scales, _GROUP):
            blocks = slice(groups.start * NESTED_BLOCK, min(groups.stop * NESTED_BLOCK, count.maxima))
            at = slice(blocks.start * NF4_BLOCK, min(blocks.stop * NF4_BLOCK, len(target)))
            rows, whole = blocks.stop - blocks.start, grouped[: groups.stop - groups.start]
            maxima = whole.view(-1)
            torch.index_select(nested_levels, 0, indices[:rows].copy_(nested[blocks]), out=maxima[:rows])
            maxima[rows:].zero_()
            # a product, then a sum: fused they would round once, the reference rounds twice
            whole.mul_(numbers[1:][groups].view(-1, 1)).add_(numbers[0])
            both = pairs[at.start // 2 : (at.stop + 1) // 2]
            codes, half = indices[: 2 * len(both)], spare[: len(both)]
            codes[0::2].copy_(torch.bitwise_right_shift(both, 4, out=half))
            codes[1::2].copy_(torch.bitwise_and(both, 15, out=half))
            torch.index_select(levels, 0, codes, out=values[: len(codes)])
            values[: rows * NF4_BLOCK].view(rows, NF4_BLOCK).mul_(maxima[:rows].view(-1, 1))
            target[at].copy_(values[: at.stop - at.start])
