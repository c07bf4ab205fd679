"""Block-quantised elements in plain numpy; `ratrain.ratrain_ir.config.quantised` defines the format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrain_ir.config.quantised import BLOCK_ELEMENTS, LARGEST_CODE, LEAST_SCALE, SCALE_BYTES, block_count
from ratrain.targets.runtime.kernels.reference.reference_common import f32, put, quiet, row_blocks

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, U8, Array


def packed_parts(packed: U8, elements: int) -> tuple[F32, U8]:
    """Return the scales and the bytes of the codes of `elements` packed elements, as views."""
    start = block_count(elements) * SCALE_BYTES
    return packed[:start].view(np.float32), packed[start:]


class ReferenceQuantised:
    """The kernels of `ReferenceKernels` on packed elements."""

    @quiet
    def quantise(self, a, packed, *, scratch, bits):
        values = a.reshape(-1)
        scales, stored = packed_parts(packed, a.size)
        stored[a.size * bits // 8 :] = 0
        for blocks in row_blocks(len(scales), BLOCK_ELEMENTS):
            part = values[blocks.start * BLOCK_ELEMENTS : blocks.stop * BLOCK_ELEMENTS]
            whole = np.zeros((blocks.stop - blocks.start, BLOCK_ELEMENTS), np.float32)
            whole.reshape(-1)[: len(part)] = f32(part)
            largest = np.abs(whole).max(axis=1)
            scale = largest / np.float32(LARGEST_CODE[bits])
            scale[scale < np.float32(LEAST_SCALE)] = 0
            scale[~np.isfinite(largest)] = np.nan
            scales[blocks] = scale
            divisor = np.where(
                scale > 0, scale, np.float32(np.inf)
            )  # blocks of zeros, and blocks that are not finite, have zeros as codes
            codes = np.where(np.isfinite(scale)[:, None], np.rint(whole / divisor[:, None]), 0).astype(np.int8)
            self._store(codes.reshape(-1)[: len(part)], stored, blocks.start * BLOCK_ELEMENTS, bits)

    @staticmethod
    def _store(codes: Array, stored: U8, start: int, bits: int) -> None:
        if bits == 8:
            stored[start : start + len(codes)] = codes.view(np.uint8)
            return
        nibbles = np.full((len(codes) + 1) // 2 * 2, 8, np.uint8)
        nibbles[: len(codes)] = codes + 8
        stored[start // 2 : (start + len(nibbles)) // 2] = nibbles[0::2] | nibbles[1::2] << 4

    @quiet
    def dequantise(self, packed, out, *, scratch, bits):
        flat = out.reshape(-1)
        for at in row_blocks(out.size, 1):
            put(flat[at], _values(packed, out.size, at, bits))

    @quiet
    def mean_of_quantised(self, parts, out, *, scratch, accumulate, divisor, bits):
        flat, finite = out.reshape(-1), True
        for at in row_blocks(out.size, 1):
            total = np.zeros(at.stop - at.start, np.float32)
            for part in parts:
                total += _values(part, out.size, at, bits)
            total *= np.float32(1 / divisor)
            put(flat[at], total + f32(flat[at]) if accumulate else total)
            finite = finite and bool(np.isfinite(flat[at]).all())
        return finite


def _values(packed: U8, elements: int, at: slice, bits: int) -> F32:
    """Return some unpacked elements in float32; the first of them must begin a block."""
    scales, stored = packed_parts(packed, elements)
    if bits == 8:
        codes = stored.view(np.int8)[at]
    else:
        pairs = stored[at.start // 2 : (at.stop + 1) // 2]
        codes = np.stack([pairs & 15, pairs >> 4], axis=1).reshape(-1)[: at.stop - at.start].astype(np.int8) - np.int8(
            8
        )
    of_blocks = scales[at.start // BLOCK_ELEMENTS : block_count(at.stop)]
    return f32(codes) * np.repeat(of_blocks, BLOCK_ELEMENTS)[: len(codes)]
