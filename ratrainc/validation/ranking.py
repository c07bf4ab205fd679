"""Rank correlation of measured and simulated rates, which says if the simulator orders plans as they ran.

Constants that make every row slower change every error, but no order. So Spearman's coefficient of a table says whether
the faster of two plans is simulated as the faster one. It is the correlation of ranks; equal values share their mean
rank (Spearman, "The Proof and Measurement of Association between Two Things", 1904):

    measured  10  20  20  40    ranks  1  2.5  2.5  4
    simulated  9  25  21  30    ranks  1  3    2    4      coefficient 0.949
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ratrain.ratrainc.validation.errors import Errors

LEAST_ROWS = 10
"""Least timed rows of a table, or of a group in it, that are ranked."""
ALL = "all"


@frozen
class Ranking:
    """The rank correlation of the rates of some rows of a table."""

    table: str
    """path of the table's file"""
    group: str
    """name of the group of rows, or their model and machine; empty for the whole table"""
    split: str
    """`all`, or `held-out` for those rows alone"""
    rows: int
    spearman: float | None
    """None if all measured, or all simulated, rates are equal"""
    median: float
    """median error of these rows, without signs"""

    @classmethod
    def of(cls, table: str, group: str, split: str, rates: Sequence[tuple[float, float]], errors: Errors) -> Ranking:
        """Rank rows by their measured and simulated rates."""
        measured, simulated = zip(*rates, strict=True)
        return cls(table, group, split, len(rates), spearman(measured, simulated), errors.median)

    def to_json(self) -> dict[str, Any]:
        """Return the ranking as `--json` prints it."""
        return {
            "table": self.table,
            "group": self.group,
            "split": self.split,
            "rows": self.rows,
            "spearman": self.spearman,
            "median": self.median,
        }


def mean_ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """Return the ranks of values from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks: NDArray[np.float64] = (last - (counts - 1) / 2)[which]
    return ranks


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's coefficient of pairs of values; None if either side has no two different ones."""
    left, right = (each - each.mean() for each in (mean_ranks(first), mean_ranks(second)))
    size = float(np.sqrt((left @ left) * (right @ right)))
    return float(np.clip(left @ right / size, -1, 1)) if size else None
