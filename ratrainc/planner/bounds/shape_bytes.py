"""Lower bounds on the step seconds of shapes under any cuts that know of bytes: what shapes must recover, and which do not fit.

A stage's bound is taken with the least that may lie before it, a layer a chunk of each earlier stage, so that it depends on its own layers
alone. All layers are shared out: under a step of T seconds a stage has as many as its bound allows, and the least T is looked for under
which all stages together have those of the model. `cuts.best_cuts` is exact, one shape at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.ratrainc.planner.bounds.bounds import least_stage_seconds

if TYPE_CHECKING:
    from ratrain.ratrainc.planner.bounds.columns import Columns, Numbers

_HALVINGS = 24
_BLOCK = 1 << 18
"""Stages of so many layers each that are bounded together."""


def shape_bounds_with_bytes(c: Columns) -> Numbers:
    """Lower bounds of the step seconds of shapes; infinite where no cuts fit."""
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
    """The same of shapes with as many stages and chunks."""
    total = int(c.layers)
    most = total - (pp - 1) * chunks
    counts = np.arange(chunks, most + 1, dtype=float)
    layers = np.broadcast_to(counts[:, None], (pp, len(counts), 1))
    before = chunks * np.arange(pp, dtype=float)[:, None, None]
    seconds = least_stage_seconds(c, before, layers)
    # more layers take no less; so it stays where rounding says else
    seconds = np.minimum.accumulate(seconds[:, ::-1], axis=1)[:, ::-1]
    least = seconds[:, 0].max(axis=0)  # every stage has as many as the fewest
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
    """Layers that all stages together may have within a limit, a layer a chunk at least."""
    more = (seconds[:, 1:] <= limit).sum(axis=1)
    total: Numbers = (chunks + more).sum(axis=0).astype(float)
    return total
