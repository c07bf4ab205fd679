"""First fit of an instance, with the compiler imported only on use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.problem import Instance, Int64s


ANY_HEIGHT = 1 << 62
"""Limit above any height."""


def placed_in_order(
    instance: Instance, order: Int64s, offsets: Int64s | None = None, pinned: int = 0, limit: int = ANY_HEIGHT
) -> tuple[Int64s, int]:
    """Give each buffer in turn the lowest offset that is free in its life; return offsets and height.

    The first `pinned` of the order keep their `offsets`. Once a buffer ends at the `limit` or above, that is the
    height, and no later buffer is placed.
    """
    from ratrain.passes.memory.allocation.tree import first_fit

    placed = np.empty(instance.count, np.int64) if offsets is None else offsets.copy()
    return placed, first_fit(instance, order, placed, pinned, limit)
