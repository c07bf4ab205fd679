"""First fit of an instance, without importing the compiler before it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import Instance, Int64s


ANY_HEIGHT = 1 << 62


def placed_in_order(
    instance: Instance, order: Int64s, offsets: Int64s | None = None, pinned: int = 0, limit: int = ANY_HEIGHT
) -> tuple[Int64s, int]:
    """Offsets of all buffers, each in turn the lowest that is free in its life, and the height; the first `pinned` of the order keep theirs of `offsets`.

    Once one ends at a `limit` or above, that is the height, and those after it are not placed.
    """
    from ratrain.passes.memory.allocation.tree import first_fit

    placed = np.empty(instance.count, np.int64) if offsets is None else offsets.copy()
    height = first_fit(
        order, instance.sizes, instance.sides, instance.first, instance.starts, instance.stops, instance.sections,
        pinned, placed, limit,
    )  # fmt: skip
    return placed, int(height)
