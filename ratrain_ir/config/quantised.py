"""Block quantisation: the packed form of a flat tensor whose plan lets it travel in fewer bits.

Each block of `BLOCK_ELEMENTS` elements (the last one may be shorter) has a float32 scale: its largest magnitude divided
by the largest code. A code is element / scale, rounded to nearest even. Unpacked, an element is code * scale in
float32.

    | scale 0 | scale 1 | ... | code 0 | code 1 | ... | padding |

Codes of 8 bits are signed bytes. Codes of 4 bits are stored as code + 8, the first of two in the lower half of a byte.

Sources: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, for blocks; Wang et al., "ZeRO++:
Extremely Efficient Collective Communication for Giant Model Training", 2023, for their use.
"""

from __future__ import annotations

from ratrain.ratrain_ir.config.nf4 import NF4, nf4_bytes

BLOCK_ELEMENTS = 256
"""Elements that share a scale."""

SCALE_BYTES = 4

FORMATS = {"int8-block": 8, "int4-block": 4}
"""Bits of a code by the name that plans use."""

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


def frozen_bytes(elements: int, name: str) -> int:
    """Return the bytes of a frozen matrix that is packed in one of `FROZEN_FORMATS`."""
    return nf4_bytes(elements) if name == NF4 else packed_bytes(elements, FORMATS[name])


def packed_nbytes(elements: float, bits: int) -> float:
    """Return the packed bytes of elements in whole blocks, as cost models count them."""
    return elements * (bits / 8 + SCALE_BYTES / BLOCK_ELEMENTS)
