"""Block-quantised elements: how a flat tensor is packed where its plan lets it travel in fewer bits.

Blocks of `BLOCK_ELEMENTS` elements, the last of what is left, have a float32 scale each: the largest magnitude divided by the largest code.
Codes are element / scale, rounded to nearest even. Packed, the scales come first, then the codes: signed bytes, or halves of a byte, the
first element in the lower one, each plus 8. An element is code * scale again, in float32. Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2022, for blocks; Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023, for what
they are used for.
"""

from __future__ import annotations

BLOCK_ELEMENTS = 256
"""Elements that share a scale."""

SCALE_BYTES = 4

FORMATS = {"int8-block": 8, "int4-block": 4}
"""Bits of a code, by the name that plans have for it."""

LARGEST_CODE = {8: 127, 4: 7}
"""Codes are of [-largest, largest], by their bits."""

LEAST_SCALE = 2.0**-126
"""The least normal float32: a block whose scale would be less is zero, as devices differ in what they do with subnormal numbers."""


def block_count(elements: int) -> int:
    """Blocks of so many elements."""
    return -(-elements // BLOCK_ELEMENTS)


def packed_bytes(elements: int, bits: int) -> int:
    """Bytes of so many elements, packed: a multiple of those of a scale, so that several lie one behind the other."""
    codes = -(-elements * bits // (8 * SCALE_BYTES)) * SCALE_BYTES
    return block_count(elements) * SCALE_BYTES + codes


def packed_nbytes(elements: float, bits: int) -> float:
    """The same of elements in whole blocks, as costs count them."""
    return elements * (bits / 8 + SCALE_BYTES / BLOCK_ELEMENTS)
