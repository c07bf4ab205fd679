"""Matrices in nf4 in plain numpy; `ratrain.ratrain_ir.config.quantised` defines the format.

Packing happens once, on the host, and every kernel set unpacks the same bytes. Codes are of the nearest level, of two
equally near ones the lower. Elements are scaled as bitsandbytes does (backends/default/ops.py, `quantize_4bit`,
`quantize_blockwise`): those of whole blocks are multiplied by 1 / maximum, those of a last short one divided by it. The
offset is the mean in float64, rounded to float32: that of bitsandbytes, a sum in float32, depends on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ratrain.ratrain_ir.config.quantised import NESTED_BLOCK, NF4_BLOCK, nf4_bytes, nf4_sizes
from ratrain.targets.runtime.kernels.reference.reference_common import f32, put, quiet, row_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.targets.runtime.kernels.interface import F32, U8

_FEW = 16
"""Bounds that are compared with all elements one by one, several times faster than a search."""
_ONE = np.float32(1)
_LEAST = np.float32(1e-38)
"""Least divisor of a block: bitsandbytes backends/default/ops.py, `quantize_4bit`."""


def _nested_levels() -> NDArray[np.float32]:
    """Return the 256 levels of maxima, ascending: 0, 1, and +-10^(e - 6) times 2^e fractions of [0.1, 1], e = 0 ... 6.

    Fractions are the middles of equal parts. Source: bitsandbytes functional.py, `create_dynamic_map`, in float32. Its
    `torch.linspace` counts from the nearer end and rounds once a product and a sum; float64 holds the product exactly.
    """
    found = [np.array([0, 1], np.float32)]
    first, last = np.float32(0.1), np.float32(1)
    for exponent in range(7):
        parts = 1 << exponent
        step = float((last - first) / np.float32(parts))
        count = np.arange(parts + 1)
        ends = np.where(2 * count < parts, float(first) + step * count, float(last) - step * (parts - count))
        edges = ends.astype(np.float32)
        middles = np.float32(10.0 ** (exponent - 6)) * ((edges[:-1] + edges[1:]) / np.float32(2))
        found += [middles, -middles]
    return np.sort(np.concatenate(found))


NF4_LEVELS = np.array(
    (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    np.float32,
)
"""Levels of elements, by code: bitsandbytes backends/utils.py, `_NF4_QUANT_TABLE`."""
NESTED_LEVELS = _nested_levels()
"""Levels of maxima less the offset, by code."""


class Nf4Parts(NamedTuple):
    """Views of the parts of a packed matrix."""

    offset: F32
    scales: F32
    maxima: U8
    pairs: U8


def nf4_parts(packed: U8, elements: int) -> Nf4Parts:
    """Return the parts of a packed matrix, as views."""
    scales, maxima, pairs = nf4_sizes(elements).ends
    head = packed[:scales].view(np.float32)
    return Nf4Parts(head[:1], head[1:], packed[scales:maxima], packed[maxima:pairs])


@quiet
def pack_nf4(values: F32, packed: U8 | None = None) -> U8:
    """Pack the elements [n] of a matrix, into `packed` if given. One that is not finite makes all of them NaN."""
    packed = np.empty(nf4_bytes(values.size), np.uint8) if packed is None else packed
    packed[nf4_sizes(values.size).ends[-1] :] = 0
    offset, scales, maxima, pairs = nf4_parts(packed, values.size)
    largest = np.empty(maxima.size, np.float32)
    for blocks in row_blocks(maxima.size, NF4_BLOCK):
        part = values[blocks.start * NF4_BLOCK : blocks.stop * NF4_BLOCK]
        codes, largest[blocks] = _quantised(part, NF4_BLOCK, NF4_LEVELS)
        if codes.size % 2:
            codes = np.append(codes, _quantised(np.zeros(1, np.float32), NF4_BLOCK, NF4_LEVELS)[0])
        pairs[blocks.start * (NF4_BLOCK // 2) :][: codes.size // 2] = codes[::2] << 4 | codes[1::2]
    mean = np.float32(largest.mean(dtype=np.float64))
    offset[0] = mean if np.isfinite(mean) else np.nan
    maxima[:], scales[:] = _quantised(largest - offset, NESTED_BLOCK, NESTED_LEVELS)
    return packed


def _quantised(values: F32, block: int, levels: F32) -> tuple[U8, F32]:
    """Return the codes of elements, and the largest magnitude of each block."""
    length = values.size - values.size % block
    whole, rest = values[:length].reshape(-1, block), values[length:]
    largest = np.abs(whole).max(axis=1, initial=0)
    scaled = (whole * (_ONE / np.maximum(largest, _LEAST))[:, None]).reshape(-1)
    if rest.size:
        last = np.maximum(np.abs(rest).max(), _LEAST)
        largest, scaled = np.append(largest, last), np.append(scaled, rest / last)
    np.clip(scaled, -1, 1, out=scaled)
    bounds = (levels[:-1] + levels[1:]) / np.float32(2)
    if bounds.size > _FEW:
        return np.searchsorted(bounds, scaled).astype(np.uint8), largest
    codes, above = np.zeros(scaled.size, np.uint8), np.empty(scaled.size, np.bool_)
    for bound in bounds:
        codes += np.greater(scaled, bound, out=above)
    return codes, largest


class ReferenceNf4:
    """The kernel of `ReferenceKernels` on matrices in nf4."""

    @quiet
    def dequantise_nf4(self, packed, out, *, scratch):
        flat = out.reshape(-1)
        offset, scales, nested, pairs = nf4_parts(packed, out.size)
        for blocks in row_blocks(nested.size, NF4_BLOCK):
            at = slice(blocks.start * NF4_BLOCK, min(blocks.stop * NF4_BLOCK, out.size))
            own = scales[np.arange(blocks.start, blocks.stop) // NESTED_BLOCK]
            maxima = f32(NESTED_LEVELS[nested[blocks]]) * own + offset
            both = pairs[at.start // 2 : (at.stop + 1) // 2]
            codes = np.stack([both >> 4, both & 15], axis=1).reshape(-1)[: at.stop - at.start]
            put(flat[at], NF4_LEVELS[codes] * np.repeat(maxima, NF4_BLOCK)[: codes.size])
