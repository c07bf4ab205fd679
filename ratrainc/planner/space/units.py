"""The units that the planner knows a model by, and the blocks of each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.model.blocks import Block, block

Vector = NDArray[np.float64]
"""Of the units, in their order, or of what the text beside it says."""

UNITS = ("embed", "layer", "head")
KINDS = {"embed": ("embed",), "layer": ("attention", "mlp"), "head": ("head",)}
"""Kinds of blocks of each unit."""


def block_of(kind: str) -> Block:
    """A block of a kind, in a model of one layer."""
    return block(kind, 0 if kind in ("attention", "mlp") else None)
