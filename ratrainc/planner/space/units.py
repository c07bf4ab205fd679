"""The units that profiles and bounds describe a model by, and the blocks of each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.model.blocks import Block, block

Vector = NDArray[np.float64]
"""One number a unit, in the order of `UNITS`, unless the field says otherwise."""

EMBED, LAYER, HEAD = range(3)
UNITS = ("embed", "layer", "head")
KINDS = {"embed": ("embed",), "layer": ("attention", "mlp"), "head": ("head",)}
"""Kinds of blocks of each unit."""
UNIT_OF = {kind: number for number, unit in enumerate(UNITS) for kind in KINDS[unit]}
"""The unit of each kind of block, as an index."""


def block_of(kind: str) -> Block:
    """Return the block of a kind in a model of one layer."""
    return block(kind, 0 if kind in KINDS["layer"] else None)
