"""Errors of predicted times against measured ones, in three figures."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

Seconds: TypeAlias = NDArray[np.float64]


@frozen
class Errors:
    """Absolute errors of some rows: |predicted / measured - 1| unless a name says otherwise."""

    count: int
    mean: float
    median: float
    largest: float

    @classmethod
    def of(cls, signed: Seconds) -> Errors:
        """Summarise signed errors of at least one row."""
        sizes = np.abs(signed)
        return cls(len(sizes), float(sizes.mean()), float(np.median(sizes)), float(sizes.max()))

    def to_json(self) -> dict[str, Any]:
        """Return the errors as `--json` prints them."""
        return {"rows": self.count, "mean": self.mean, "median": self.median, "largest": self.largest}


def errors(predicted: Seconds, measured: Seconds) -> Errors | None:
    """Return the errors of rows; None if there are no rows."""
    return Errors.of(predicted / measured - 1) if len(measured) else None
