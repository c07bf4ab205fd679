"""Which token comes next: the likeliest, or one drawn from its distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ratrain.targets.runtime.settings import Sampling

_DRAW_KEY = 2  # keeps these random numbers apart from those of weights and data order
_BITS = 53
"""Of a random fraction: all that a float64 holds."""


class Chooser:
    """Chooses token after token; the same ones again from the same seed and logits."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._bits = np.random.PCG64(np.random.SeedSequence(sampling.seed, spawn_key=(_DRAW_KEY,)))

    def choose(self, logits: NDArray[np.float32]) -> int:
        """The token that is chosen from finite logits, shape [vocabulary]."""
        if self._sampling.temperature == 0.0:
            return int(np.argmax(logits))
        scaled = (logits.astype(np.float64) - float(logits.max())) / self._sampling.temperature
        weights = np.exp(scaled)
        order = np.argsort(-weights, kind="stable")
        sums = np.cumsum(weights[order])
        kept = min(int(np.searchsorted(sums, self._sampling.top_p * sums[-1])) + 1, len(order))
        # raw bits, as those of numpy's generators stay the same in all its versions
        fraction = (int(self._bits.random_raw()) >> (64 - _BITS)) / (1 << _BITS)
        return int(order[min(int(np.searchsorted(sums[:kept], fraction * sums[kept - 1], "right")), kept - 1)])
