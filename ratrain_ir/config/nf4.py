"""NF4 with double quantisation: frozen matrices in 4.127 bits an element.

Each block of `BLOCK` elements has its largest magnitude, its maximum. An element divided by it lies in [-1, 1] and is
stored as the number of the nearest of 16 levels, the quantiles of a normal distribution. The maxima are stored in 8
bits: less their mean over the matrix, the offset, they are quantised in the same way, in blocks of `NESTED_BLOCK`
with 256 levels and a scale in float32.

    element 0.3, maximum 1.2: 0.3 / 1.2 = 0.25, nearest level 10 (0.2461), so 0.2461 * 1.2 = 0.2953

    | offset | scale 0 | scale 1 | ... | code of maximum 0 | ... | codes of elements 0 and 1 | ... | padding |

The first element of a byte is in its upper half. A matrix is packed by itself: its offset is of its own maxima.

Formats are those of bitsandbytes (bitsandbytes/functional.py, `quantize_4bit` with `compress_statistics`,
`create_dynamic_map`; backends/default/ops.py, rounding). Source of the idea: Dettmers et al., "QLoRA: Efficient
Finetuning of Quantized LLMs", 2023.
"""

from __future__ import annotations

from typing import NamedTuple

NF4 = "nf4"
"""Name of the format in plans."""

BLOCK = 64
"""Elements that share a maximum: bitsandbytes functional.py quantize_4bit, blocksize; torchao to_nf4, block_size."""

NESTED_BLOCK = 256
"""Maxima that share a scale: bitsandbytes functional.py quantize_4bit, compress_statistics; torchao to_nf4."""

F32 = 4
"""Bytes of the offset, and of a scale."""

LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""Levels by code: bitsandbytes backends/utils.py, `_NF4_QUANT_TABLE`."""

LEAST_MAXIMUM = 1e-38
"""Least divisor of a block: bitsandbytes backends/default/ops.py, `quantize_4bit`."""


class Sizes(NamedTuple):
    """Numbers and bytes of the parts of a packed matrix."""

    scales: int
    """scales of maxima, in float32"""
    maxima: int
    """maxima, of a byte each"""
    pairs: int
    """bytes of codes, two in each"""

    @property
    def ends(self) -> tuple[int, int, int]:
        """Exclusive ends of the offset with the scales, of the maxima and of the pairs, in bytes."""
        head = F32 * (1 + self.scales)
        return head, head + self.maxima, head + self.maxima + self.pairs

    @property
    def nested_bytes(self) -> int:
        """Bytes of the maxima and of their scales, without the offset."""
        return self.maxima + F32 * self.scales


def nf4_sizes(elements: int) -> Sizes:
    """Return the sizes of the parts of a packed matrix."""
    maxima = -(-elements // BLOCK)
    return Sizes(-(-maxima // NESTED_BLOCK), maxima, -(-elements // 2))


def nf4_bytes(elements: int) -> int:
    """Return the bytes of a packed matrix: a multiple of a float32's."""
    return -(-nf4_sizes(elements).ends[-1] // F32) * F32
