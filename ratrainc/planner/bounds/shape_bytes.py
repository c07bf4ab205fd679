"""Lower bounds on the step seconds of shapes under any cuts, with the recovery that bytes demand.

A stage is bounded with the least that may lie before it, one layer a chunk of each earlier stage, so that its bound
depends on its own layers alone. All layers are shared out: under a step of T seconds a stage has as many layers as its
bound allows, and bisection finds the least T under which all stages together have the layers of the model. Example: two
stages allow 1, 2, 3 layers from 5, 8, 12 s on; 4 layers need 8 s. `cuts.best_cuts` is exact, for one shape at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrainc.planner.bounds.bounds import least_stage_seconds

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.bounds.shape_columns import Columns, Numbers

_HALVINGS = 24
_BLOCK = 1 << 18
"""Stages times layers that are bounded together."""


def shape_bounds_with_bytes(c: Columns) -> Numbers:
    """Return lower bounds of the step seconds of shapes; infinite if no cuts fit."""
    found = np.full(len(c.pp), np.inf)
    key = c.pp * (1 << 10) + c.chunks
    for group in np.unique(key):
        rows = np.flatnonzero(key == group)
        pp, chunks = int(c.pp[rows[0]]), int(c.chunks[rows[0]])
        step = max(1, _BLOCK // (pp * int(c.layers)))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            found[part] = _of_equal_stages(c.rows(part), pp, chunks)
    return found


def _of_equal_stages(c: Columns, pp: int, chunks: int) -> Numbers:
    """Return the bounds of shapes with equal numbers of stages and chunks."""
    total = int(c.layers)
    most = total - (pp - 1) * chunks
    counts = np.arange(chunks, most + 1, dtype=float)
    layers = np.broadcast_to(counts[:, None], (pp, len(counts), 1))
    before = chunks * np.arange(pp, dtype=float)[:, None, None]
    seconds = least_stage_seconds(c, before, layers)
    # more layers take no less: undo what rounding says otherwise
    seconds = np.minimum.accumulate(seconds[:, ::-1], axis=1)[:, ::-1]
    least = seconds[:, 0].max(axis=0)  # every stage has at least the fewest layers
    reach = np.where(np.isfinite(seconds), seconds, -np.inf).max(axis=(0, 1))
    fits = _shared_out(seconds, reach, chunks) >= total
    fits &= np.isfinite(least)
    low, high = np.where(fits, least, 0.0), np.where(fits, np.maximum(reach, least), 0.0)
    done = _shared_out(seconds, low, chunks) >= total
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = _shared_out(seconds, middle, chunks) >= total
        high = np.where(enough, middle, high)
        low = np.where(enough | done, low, middle)
    bound: Numbers = np.where(fits, low, np.inf)
    return bound


def _shared_out(seconds: Numbers, limit: Numbers, chunks: int) -> Numbers:
    """Return the layers that all stages together may have within a limit, at least one a chunk."""
    more = (seconds[:, 1:] <= limit).sum(axis=1)
    total: Numbers = (chunks + more).sum(axis=0).astype(float)
    return total
