"""Block quantisation: the packed form of a flat tensor whose plan lets it travel in fewer bits.

Each block of `BLOCK_ELEMENTS` elements (the last one may be shorter) has a float32 scale: its largest magnitude divided
by the largest code. A code is element / scale, rounded to nearest even. Unpacked, an element is code * scale in
float32.

    | scale 0 | scale 1 | ... | code 0 | code 1 | ... | padding |

Codes of 8 bits are signed bytes. Codes of 4 bits are stored as code + 8, the first of two in the lower half of a byte.

Frozen matrices may be in `nf4` too, with double quantisation: 4.127 bits an element. Each block of `NF4_BLOCK` elements
has its largest magnitude, its maximum. An element divided by it lies in [-1, 1] and is stored as the number of the
nearest of 16 levels, the quantiles of a normal distribution. The maxima are stored in 8 bits: less their mean over the
matrix, the offset, they are quantised in the same way, in blocks of `NESTED_BLOCK` with 256 levels.

    element 0.3, maximum 1.2: 0.3 / 1.2 = 0.25, nearest level 10 (0.2461), so 0.2461 * 1.2 = 0.2953

    | offset | scale 0 | scale 1 | ... | code of maximum 0 | ... | codes of elements 0 and 1 | ... | padding |

The first of two codes is in the upper half of a byte. A matrix is packed by itself: the offset is of its own maxima.
Source: bitsandbytes, functional.py, `quantize_4bit` with `compress_statistics`; Dettmers et al., "QLoRA: Efficient
Finetuning of Quantized LLMs", 2023.

Sources of the other formats: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, for blocks; Wang
et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, for their use.
"""

from __future__ import annotations

from typing import NamedTuple

BLOCK_ELEMENTS = 256
"""Elements that share a scale."""

SCALE_BYTES = 4

FORMATS = {"int8-block": 8, "int4-block": 4}
"""Bits of a code by the name that plans use."""

NF4 = "nf4"
"""Name of the format of frozen matrices that has levels."""

NF4_BLOCK = 64
"""Elements that share a maximum: bitsandbytes functional.py quantize_4bit, blocksize; torchao to_nf4, block_size."""

NESTED_BLOCK = 256
"""Maxima that share a scale: bitsandbytes functional.py quantize_4bit, compress_statistics; torchao to_nf4."""

FROZEN_FORMATS = (*FORMATS, NF4)
"""Formats of frozen matrices; data travels in `FORMATS` alone."""

LARGEST_CODE = {8: 127, 4: 7}
"""Largest code by bits; codes are in [-largest, largest]."""

LEAST_SCALE = 2.0**-126
"""Least normal float32. A block with a smaller scale is zero, because devices differ on subnormal numbers."""


def block_count(elements: int) -> int:
    """Return the number of blocks of a number of elements."""
    return -(-elements // BLOCK_ELEMENTS)


def packed_bytes(elements: int, bits: int) -> int:
    """Return the bytes of packed elements: a multiple of a scale's, so packed tensors can lie one behind the other."""
    codes = -(-elements * bits // (8 * SCALE_BYTES)) * SCALE_BYTES
    return block_count(elements) * SCALE_BYTES + codes


class Nf4Sizes(NamedTuple):
    """Numbers and bytes of the parts of a matrix in nf4."""

    scales: int
    """scales of maxima, in float32"""
    maxima: int
    """maxima, of a byte each"""
    pairs: int
    """bytes of codes, two in each"""

    @property
    def ends(self) -> tuple[int, int, int]:
        """Exclusive ends of the offset with the scales, of the maxima and of the pairs, in bytes."""
        head = SCALE_BYTES * (1 + self.scales)
        return head, head + self.maxima, head + self.maxima + self.pairs

    @property
    def nested_bytes(self) -> int:
        """Bytes of the maxima and of their scales, without the offset."""
        return self.maxima + SCALE_BYTES * self.scales


def nf4_sizes(elements: int) -> Nf4Sizes:
    """Return the sizes of the parts of a matrix in nf4."""
    maxima = -(-elements // NF4_BLOCK)
    return Nf4Sizes(-(-maxima // NESTED_BLOCK), maxima, -(-elements // 2))


def nf4_bytes(elements: int) -> int:
    """Return the bytes of a matrix in nf4: a multiple of a scale's."""
    return -(-nf4_sizes(elements).ends[-1] // SCALE_BYTES) * SCALE_BYTES


def frozen_bytes(elements: int, name: str) -> int:
    """Return the bytes of a frozen matrix that is packed in one of `FROZEN_FORMATS`."""
    return nf4_bytes(elements) if name == NF4 else packed_bytes(elements, FORMATS[name])


def packed_nbytes(elements: float, bits: int) -> float:
    """Return the packed bytes of elements in whole blocks, as cost models count them."""
    return elements * (bits / 8 + SCALE_BYTES / BLOCK_ELEMENTS)
