"""The units that profiles and bounds describe a model by, and the blocks of each.

Units are the embedding, a layer (attention and mlp) and the head. Layers that differ are told apart by class
(`layer_classes.py`): a vector then has the least layer of all, and after the head what each class has beyond it.

    forward of 8 layers, 4 of 2 s and 4 of 3 s; embedding 1 s, head 5 s:    [1, 2, 5,   0, 1]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ratrain.ratrain_ir.model.blocks import Block, block

Vector = NDArray[np.float64]
"""Numbers of the embedding, the least layer and the head; then, if there are several, each class of layers' excess over
the least. So unless the field says otherwise."""

EMBED, LAYER, HEAD, EXCESS = range(4)
KINDS = {"embed": ("embed",), "layer": ("attention", "mlp"), "head": ("head",)}
"""Kinds of blocks of each unit."""


def unit_vector(embed: float, layers: Sequence[float], head: float) -> Vector:
    """Return the vector of the numbers of embedding, each class of layers, and head."""
    least = min(layers)
    excess = [each - least for each in layers] if len(layers) > 1 else []
    return np.array([embed, least, head, *excess], float)


def by_block(classes: int, of_block: Callable[[Block], float]) -> Vector:
    """Return the vector of a number of blocks, summed over those of a unit; layers are those of a model of classes."""
    layers = [sum(of_block(block(kind, layer)) for kind in KINDS["layer"]) for layer in range(classes)]
    return unit_vector(of_block(block("embed")), layers, of_block(block("head")))
