"""Block-quantised elements on tensors, with the bits of the reference: divisions and roundings are IEEE 754's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ratrain.ratrain_ir.config.quantised import BLOCK_ELEMENTS, LARGEST_CODE, LEAST_SCALE, SCALE_BYTES, block_count
from ratrain.targets.pytorch.device.device_common import add_wide, chunk_rows, row_chunks, size
from ratrain.targets.pytorch.device.device_flat import notice
from ratrain.targets.runtime.arena.scratch import Buffer

if TYPE_CHECKING:
    from ratrain.targets.pytorch.device.device_common import F32, U8, Array
    from ratrain.targets.pytorch.device.tensor_scratch import TensorScratch as Scratch
    from ratrain.targets.runtime.arena.scratch import Plan


def quantise_plan(a: Array, *, bits: int, **_: object) -> Plan:
    """Plan a chunk of elements, magnitudes, two numbers for each block; for 4 bits also the chunk's codes."""
    rows = _chunk_rows(size(a))
    spare = [Buffer((rows, BLOCK_ELEMENTS), np.uint8)] if bits == 4 else []
    return [
        Buffer((rows, BLOCK_ELEMENTS)),
        Buffer((rows, BLOCK_ELEMENTS)),
        Buffer((rows,)),
        Buffer((rows,), np.uint8),
        *spare,
    ]


def dequantise_plan(out: Array, *, bits: int, **_: object) -> Plan:
    """Plan a chunk of values; for 4 bits also the chunk's codes."""
    rows = _chunk_rows(size(out))
    spare = [Buffer((rows, BLOCK_ELEMENTS), np.uint8)] if bits == 4 else []
    return [Buffer((rows, BLOCK_ELEMENTS)), *spare]


def mean_of_quantised_plan(out: Array, *, bits: int, **_: object) -> Plan:
    """Plan the sum, the mark of finiteness and a part of it, then the buffers of `dequantise`."""
    rows = _chunk_rows(size(out))
    return [Buffer((rows * BLOCK_ELEMENTS,)), Buffer((1,)), Buffer((1,)), *dequantise_plan(out, bits=bits)]


class DeviceQuantised:
    """The kernels of `TorchDevice` on packed elements."""

    def quantise(self, a, packed, *, scratch, bits):
        values, spare, worst, mark, *nibbles = scratch.take_all(quantise_plan(a, bits=bits))
        source, (scales, stored) = a.view(-1), _packed_parts(packed, size(a))
        stored[size(a) * bits // 8 :].zero_()
        for blocks, at in _chunks(size(a)):
            count, length = blocks.stop - blocks.start, at.stop - at.start
            whole, sizes, scale, bad = values[:count], spare[:count], scales[blocks], mark[:count].view(torch.bool)
            whole.view(-1)[length:].zero_()
            whole.view(-1)[:length].copy_(source[at])
            torch.amax(torch.abs(whole, out=sizes), dim=1, out=scale)
            # 0 times an infinity or a NaN is NaN: added to the scale later, it marks blocks that are not finite
            torch.mul(scale, 0, out=worst[:count])
            # by a tensor: PyTorch would multiply by the inverse of a number on a GPU, which rounds twice
            scale.div_(sizes.view(-1)[:count].fill_(LARGEST_CODE[bits]))
            scale.masked_fill_(torch.lt(scale, LEAST_SCALE, out=bad), 0)
            scale.add_(worst[:count])
            # blocks with scale 0 or NaN are divided by 1, and their codes set to 0
            torch.ge(scale, LEAST_SCALE, out=bad).logical_not_()
            divisor = worst[:count].copy_(scale).masked_fill_(bad, 1)
            whole.div_(divisor.view(-1, 1)).round_().masked_fill_(bad.view(-1, 1), 0)
            if bits == 8:
                stored.view(torch.int8)[at].copy_(whole.view(-1)[:length])
            else:
                _pack_pairs(whole.add_(8), nibbles[0].view(-1), stored, at)

    def dequantise(self, packed, out, *, scratch, bits):
        values, *nibbles = scratch.take_all(dequantise_plan(out, bits=bits))
        target = out.view(-1)
        for blocks, at in _chunks(size(out)):
            target[at].copy_(_values(packed, size(out), blocks, at, values, nibbles))

    def mean_of_quantised(self, parts, out, *, scratch, accumulate, divisor, bits):
        """Average replicas' packed parts. Waits for the device once: the host needs the answer."""
        told = self.told_mean_of_quantised(
            parts, out, scratch=scratch, accumulate=accumulate, divisor=divisor, bits=bits
        )
        return bool(told.item() == 0)

    def told_mean_of_quantised(
        self, parts: Sequence[U8], out: Array, *, scratch: Scratch, accumulate: bool, divisor: float, bits: int
    ) -> F32:
        """Do `mean_of_quantised`; the answer stays on the device: in scratch, 0 if all is finite, else NaN."""
        acc, told, part, values, *nibbles = scratch.take_all(mean_of_quantised_plan(out, bits=bits))
        told.zero_()
        target = out.view(-1)
        for blocks, at in _chunks(size(out)):
            total = acc[: at.stop - at.start].zero_()
            for each in parts:
                total.add_(_values(each, size(out), blocks, at, values, nibbles))
            total.mul_(1 / divisor)
            if accumulate:
                add_wide(total, values.view(-1), target[at])
            target[at].copy_(total)
            notice(total.copy_(target[at]), told, part)
        return told


def _chunk_rows(elements: int) -> int:
    return chunk_rows(block_count(elements), BLOCK_ELEMENTS)


def _chunks(elements: int) -> Iterator[tuple[slice, slice]]:
    """Yield the blocks of a chunk, and their elements."""
    for blocks in row_chunks(block_count(elements), BLOCK_ELEMENTS):
        yield blocks, slice(blocks.start * BLOCK_ELEMENTS, min(blocks.stop * BLOCK_ELEMENTS, elements))


def _packed_parts(packed: U8, elements: int) -> tuple[F32, U8]:
    """Return the scales and the bytes of the codes of `elements` packed elements, as views."""
    start = block_count(elements) * SCALE_BYTES
    return packed[:start].view(torch.float32), packed[start:]


def _pack_pairs(codes: F32, nibbles: U8, stored: U8, at: slice) -> None:
    """Pack pairs of codes, each plus 8, into bytes; after an odd number the code 0 follows."""
    nibbles = nibbles[: size(codes)].copy_(codes.view(-1))
    low, high = nibbles[0::2], nibbles[1::2]
    low.bitwise_or_(high.mul_(16))
    length = (at.stop - at.start + 1) // 2
    stored[at.start // 2 : at.start // 2 + length].copy_(low[:length])


def _values(packed: U8, elements: int, blocks: slice, at: slice, buffer: F32, nibbles: Sequence[U8]) -> F32:
    """Unpack the elements of a chunk of blocks into a buffer."""
    scales, stored = _packed_parts(packed, elements)
    length, whole = at.stop - at.start, buffer[: blocks.stop - blocks.start]
    flat = whole.view(-1)
    if nibbles:
        pairs = stored[at.start // 2 : (at.stop + 1) // 2]
        spare = nibbles[0].view(-1)[: len(pairs)]
        flat[: 2 * len(pairs) : 2].copy_(torch.bitwise_and(pairs, 15, out=spare))
        flat[1 : 2 * len(pairs) : 2].copy_(torch.bitwise_right_shift(pairs, 4, out=spare))
        flat[: 2 * len(pairs)].sub_(8)
    else:
        flat[:length].copy_(stored.view(torch.int8)[at])
    flat[length:].zero_()
    whole.mul_(scales[blocks].view(-1, 1))
    return flat[:length]
