"""Rank correlation of measured and simulated rates, which says if the simulator orders plans as they ran.

Constants that make every row slower change every error, but no order. So Spearman's coefficient of a table says whether
the faster of two plans is simulated as the faster one. It is the correlation of ranks; equal values share their mean
rank (Spearman, "The Proof and Measurement of Association between Two Things", 1904):

    measured  10  20  20  40    ranks  1  2.5  2.5  4
    simulated  9  25  21  30    ranks  1  3    2    4      coefficient 0.949
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from ratrain.ratrainc.calibration.fitting import Errors
from ratrain.ratrainc.validation.validation_rows import SPLITS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ratrain.ratrainc.validation.outcome import RowOutcome, Validation

LEAST_ROWS = 10
"""Least timed rows of a table, or of a group in it, that are ranked."""
_, HELD_OUT = SPLITS
ALL = "all"


@frozen
class Ranking:
    """How well the rates of some rows of a table are ordered."""

    table: str
    """name of the table's file, without folder and ending"""
    group: str
    """name of the group of rows, or their model and machine; empty for the whole table"""
    split: str
    """`all`, or `held-out` for those rows alone"""
    rows: int
    spearman: float | None
    """None if all measured, or all simulated, rates are equal"""
    median: float
    """median error of these rows, without signs"""

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


def rankings(validation: Validation) -> Iterator[Ranking]:
    """Yield the rankings of each table with enough timed rows, and of its groups, each for all rows and the held-out.

    A group is the rows of a name in the column `group`, or those that share model and machine. A group that is the
    whole table is not repeated. Compared are tokens a second and rank.
    """
    for table in validation.tables:
        outcomes = [each for each in validation.of_table(table).outcomes if each.is_timed]
        seen = set()
        for group, rows in {"": outcomes, **_groups(outcomes)}.items():
            key = frozenset(map(id, rows))
            if key not in seen:
                seen.add(key)
                yield from _of_rows(table.name, group, rows)


def _groups(outcomes: Sequence[RowOutcome]) -> dict[str, list[RowOutcome]]:
    groups = defaultdict(list)
    for each in outcomes:
        assert each.row.task is not None
        if each.row.group:
            groups[each.row.group].append(each)
        groups[f"{each.row.task.model.name} on {each.row.task.machine.name}"].append(each)
    return groups


def _of_rows(table: str, group: str, rows: Sequence[RowOutcome]) -> Iterator[Ranking]:
    if len(rows) < LEAST_ROWS:
        return
    held = [each for each in rows if each.row.split == HELD_OUT]
    yield _ranking(table, group, ALL, rows)
    if 1 < len(held) < len(rows):
        yield _ranking(table, group, HELD_OUT, held)


def _ranking(table: str, group: str, split: str, rows: Sequence[RowOutcome]) -> Ranking:
    measured = [each.rank_rate(each.row.measured) for each in rows]
    simulated = [each.rank_rate(each.simulated) for each in rows if each.simulated is not None]
    median = Errors.of(np.array([each.error for each in rows if each.error is not None])).median
    return Ranking(table, group, split, len(rows), spearman(measured, simulated), median)
