"""Matrices in nf4 in numba loops, with the bits of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ratrain.ratrain_ir.config.quantised import NESTED_BLOCK, NF4_BLOCK
from ratrain.targets.runtime.kernels.fast.fast_numba import exact, flat, narrow
from ratrain.targets.runtime.kernels.reference.reference_nf4 import NESTED_LEVELS, NF4_LEVELS, nf4_parts

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.team import Team

_LEAST_BLOCKS = 1024
"""Blocks that a thread takes at least."""


@exact()
def _store_values(
    offset: Any, scales: Any, nested: Any, pairs: Any, levels: Any, nested_levels: Any, out: Any, start: Any, stop: Any
) -> None:
    """Set the elements of blocks [start, stop)."""
    for block in range(start, stop):
        # the product is rounded before the sum: `exact` loops are compiled without fused operations
        largest = nested_levels[nested[block]] * scales[block // NESTED_BLOCK] + offset[0]
        first = block * NF4_BLOCK
        values, both = out[first : min(first + NF4_BLOCK, out.size)], pairs[first // 2 :]
        for i in range(values.size // 2):
            values[2 * i] = narrow(levels[both[i] >> 4] * largest, out.dtype)
            values[2 * i + 1] = narrow(levels[both[i] & 15] * largest, out.dtype)
        if values.size % 2:
            last = values.size // 2
            values[2 * last] = narrow(levels[both[last] >> 4] * largest, out.dtype)


class FastNf4:
    """The kernel of `Fast` on matrices in nf4. Threads take whole blocks."""

    team: Team

    def dequantise_nf4(self, packed, out, *, scratch):
        values, parts = flat(out), nf4_parts(packed, out.size)

        def part(mine: slice) -> None:
            _store_values(*parts, NF4_LEVELS, NESTED_LEVELS, values, mine.start, mine.stop)

        self.team.run(part, self.team.ranges(parts.maxima.size, least=_LEAST_BLOCKS))
