"""Least squares over a few constants of a machine: what makes predicted times agree with measured ones.

Constants are positive and differ by many orders of magnitude, so that the search is over the logarithms of what they are multiplied
by, and the residual of a row is the logarithm of predicted over measured: a row that is 10 % off counts the same whether it takes a
second or a minute. The search is scipy's trust region method within bounds (extra `calibrate`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, log
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.console.extras import check_installed
from ratrain.targets.machine.machine import Machine, largest_value

if TYPE_CHECKING:
    from ratrain.ratrain_ir.support.diagnostics import Location

Seconds: TypeAlias = NDArray[np.float64]
Predict: TypeAlias = Callable[[Machine], Seconds]
"""Seconds of every row on a machine."""

_MOST_CHANGE = 1e4
"""Factor that a fit changes a constant by at most: where rows say no more than that a bandwidth is high, it would go on for ever."""
_HOLD = 1e-3
"""Residual of a constant that is changed by a factor of e, so that what rows leave open stays near its start: a row that is 0.1 % off
counts the same."""
OUTLIER = 0.03
"""Of measured steps: the residual of a row beyond which it counts less than by its square."""
_SMALL_GAIN = 1e-9
_MOST_STEPS = 40
_TRIED_CHANGE = 1e-3
_NO_INFLUENCE = 1e-10
_SEEN = 1e-3
"""Share of a constant's change that some row must change by, for a fit of rates to see the constant."""


@frozen
class Errors:
    """Errors of some rows, without their signs; relative ones, |predicted / measured - 1|, where nothing else is said."""

    count: int
    mean: float
    median: float
    largest: float

    @classmethod
    def of(cls, signed: Seconds) -> Errors:
        """Of errors with their signs, of one row at least."""
        sizes = np.abs(signed)
        return cls(len(sizes), float(sizes.mean()), float(np.median(sizes)), float(sizes.max()))

    def to_json(self) -> dict[str, Any]:
        """The errors as `--json` prints them."""
        return {"rows": self.count, "mean": self.mean, "median": self.median, "largest": self.largest}


def errors(predicted: Seconds, measured: Seconds) -> Errors | None:
    """The errors of rows; None where there are none."""
    return Errors.of(predicted / measured - 1) if len(measured) else None


def with_values(machine: Machine, names: Sequence[str], values: Sequence[float], source: str) -> Machine:
    """A machine whose named constants have other values, with where they come from."""
    constants = dict(machine.constants)
    for name, value in zip(names, values, strict=True):
        constants[name] = evolve(constants[name], value=float(value), certainty="fitted", source=source)
    return evolve(machine, constants=constants)


def check_solver() -> None:
    """Raise `DiagnosticError` RT002 where there is nothing to fit with: good to know before rows are compiled."""
    check_installed("scipy", "calibrate", "fitting constants")


def fitted(
    machine: Machine,
    names: Sequence[str],
    predict: Predict,
    measured: Seconds,
    *,
    source: str,
    place: Location | None = None,
    outlier: float = inf,
) -> Machine:
    """The machine with the named constants that fit the measured seconds best, from its own values on.

    A residual beyond `outlier` counts by its size and no more by its square: rows that no constant explains then do not bend all others
    (scipy's loss soft_l1; Huber, "Robust Estimation of a Location Parameter", 1964).

    Raises `DiagnosticError` RT002 as `check_solver` does, and RT005 where there is nothing to start from or rows cannot tell the
    constants: fewer rows than constants, or one that changes no row.
    """
    check_solver()
    from scipy.optimize import least_squares

    if len(measured) < len(names):
        fail(
            "RT005",
            f"{len(names)} constants cannot be fitted to {len(measured)} rows",
            place,
            help="name fewer, or give more rows",
        )
    largest = np.array([largest_value(name) for name in names])
    start = np.minimum([machine[name] for name in names], largest)
    for name, value in zip(names, start, strict=True):
        if value == 0:
            fail(
                "RT005",
                f"[{name}] of machine '{machine.name}' is 0: a fit goes by factors",
                place,
                help="give it a positive value to start from",
            )

    def changed(changes: Seconds) -> Machine:
        return with_values(machine, names, np.minimum(start * np.exp(changes), largest).tolist(), source)

    def residuals(changes: Seconds) -> Seconds:
        with np.errstate(divide="ignore", over="ignore"):  # a time of 0 or beyond all numbers: such a step is not taken
            return np.log(predict(changed(changes)) / measured)

    _check_influence(residuals, names, place)
    solution = least_squares(
        lambda changes: np.concatenate((residuals(changes), _HOLD * changes)),
        np.zeros(len(names)),
        bounds=(-log(_MOST_CHANGE), np.minimum(np.log(largest / start), log(_MOST_CHANGE))),
        ftol=_SMALL_GAIN,
        max_nfev=_MOST_STEPS,
        loss="linear" if outlier == inf else "soft_l1",
        f_scale=1.0 if outlier == inf else outlier,
    )
    return changed(solution.x)


def fitted_rates(
    machine: Machine,
    names: Sequence[str],
    predict: Predict,
    measured: Seconds,
    *,
    source: str,
    unseen: str,
    place: Location | None = None,
) -> Machine:
    """`fitted`, of constants that nobody named: one that changes no row keeps its value, and `unseen` says so as its source."""
    unchanged = predict(machine)

    def moves_a_row(name: str) -> bool:
        lowered = with_values(machine, [name], [machine[name] * exp(-_TRIED_CHANGE)], source)
        return bool(np.abs(np.log(predict(lowered) / unchanged)).max(initial=0.0) >= _SEEN * _TRIED_CHANGE)

    seen = [name for name in names if moves_a_row(name)]
    found = fitted(machine, seen, predict, measured, source=source, place=place) if seen else machine
    kept = {name: evolve(found.constants[name], source=unseen) for name in names if name not in seen}
    return evolve(found, constants={**found.constants, **kept})


def _check_influence(residuals: Callable[[Seconds], Seconds], names: Sequence[str], place: Location | None) -> None:
    unchanged = residuals(np.zeros(len(names)))
    if not np.isfinite(unchanged).all():
        fail("RT005", "the machine has no time for some rows: a fit has nothing to start from", place)
    for index, name in enumerate(names):
        change = np.zeros(len(names))
        change[index] = -_TRIED_CHANGE  # downwards: a constant may start at the most it can be
        if np.abs(residuals(change) - unchanged).max() < _NO_INFLUENCE:
            fail(
                "RT005",
                f"[{name}] changes the time of no row: it cannot be fitted to them",
                place,
                help="leave it out of --fit",
            )
