"""Beams of sweeps over an instance, forwards and backwards in time. Importing this module imports numba."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ratrain.passes.memory.allocation.sweep import beam_sweep

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation.attempt import Attempt

_KINDS = 8
"""Classes by lifetime, each with its own policy in a beam."""
_PIECE = 1000
"""Buffers of a piece of time, where that makes more pieces: on a million buffers shorter pieces gain half a percent."""


def beams(attempt: Attempt, width: int, tries: int, pieces: int, *, seed: int) -> None:
    """A beam of sweeps forwards and one backwards: `width` are kept, `tries` made of each, at the ends of at least so many pieces of time."""
    instance = attempt.instance
    widths = instance.widths()
    borders = np.unique(np.quantile(widths, np.linspace(0, 1, _KINDS + 1)[1:-1]))
    classes = np.searchsorted(borders, widths, "right")
    for backwards in (False, True):
        if attempt.enough() or attempt.good() or not attempt.afford(width * tries * instance.count):
            return
        events = instance.events(backwards=backwards)
        cuts = np.unique(np.linspace(0, len(events), max(pieces, instance.count // _PIECE) + 1).astype(np.int64))
        offsets = np.empty(instance.count, np.int64)
        height = beam_sweep(
            events, instance.sizes, classes, len(borders) + 1, attempt.bound, cuts, width, tries, seed, offsets
        )
        attempt.offer("beam of sweeps, backwards" if backwards else "beam of sweeps", offsets, height)
