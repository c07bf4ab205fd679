"""Sums over rows that do not depend on the number of threads: by groups of rows, then over the groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ratrain.targets.runtime.kernels.fast import fast_flat, fast_rows
from ratrain.targets.runtime.kernels.fast.fast_numba import bits

if TYPE_CHECKING:
    from ratrain.targets.runtime.kernels.interface import F32, Array
    from ratrain.targets.runtime.kernels.team import Team

GROUP_ROWS = 256
"""Rows that are summed together, whichever thread does it."""


def row_groups(rows: int) -> int:
    """Return the number of groups."""
    return -(-rows // GROUP_ROWS)


def sum_groups(team: Team, work: Callable[[int, slice], None], rows: int) -> None:
    """Do `work(group, its rows)` for all groups of rows, shared out to the threads."""
    groups = [(n, slice(n * GROUP_ROWS, min((n + 1) * GROUP_ROWS, rows))) for n in range(row_groups(rows))]

    def part(mine: slice) -> None:
        for group in groups[mine]:
            work(*group)

    team.run(part, team.ranges(len(groups)))


def store_sums(sums: F32, total: F32, out: Array, accumulate: bool) -> None:
    """Set out = [out +] the sum over groups of rows; `total` is a buffer."""
    total.fill(0)
    fast_rows.column_sum(sums, total)
    fast_flat.store_scaled(total, bits(out), np.float32(1), accumulate)
