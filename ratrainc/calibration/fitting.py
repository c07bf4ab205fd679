"""Least squares over a few constants of a machine: what makes predicted times agree with measured ones.

Constants are positive and differ by many orders of magnitude, so that the search is over their logarithms, and the residual of a
row is the logarithm of predicted over measured: a row that is 10 % off counts the same whether it takes a second or a minute.
Levenberg's method with a Jacobian by finite differences; a step that does not help is shortened.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from ratrain.ratrain_ir.diagnostics import fail
from ratrain.targets.machine.machine import Machine, largest_value

if TYPE_CHECKING:
    from ratrain.ratrain_ir.diagnostics import Location

Seconds: TypeAlias = NDArray[np.float64]
Predict: TypeAlias = Callable[[Machine], Seconds]
"""Seconds of every row on a machine."""

_DIFFERENCE = 1e-3
"""Relative change of a constant that a derivative is taken over: coarse, because max() makes predictions piecewise smooth."""
_LONGEST_STEP = 1.0
_SMALL_GAIN = 1e-9
_MOST_STEPS = 40
_NO_INFLUENCE = 1e-7


@frozen
class Errors:
    """Relative errors |predicted / measured - 1| of some rows."""

    count: int
    mean: float
    median: float
    largest: float

    def to_json(self) -> dict[str, Any]:
        """The errors as `--json` prints them."""
        return {"rows": self.count, "mean": self.mean, "median": self.median, "largest": self.largest}


def errors(predicted: Seconds, measured: Seconds) -> Errors | None:
    """The errors of rows; None where there are none."""
    if not len(measured):
        return None
    found = np.abs(predicted / measured - 1)
    return Errors(len(found), float(found.mean()), float(np.median(found)), float(found.max()))


def with_values(machine: Machine, names: Sequence[str], values: Sequence[float], source: str) -> Machine:
    """A machine whose named constants have other values, with where they come from."""
    constants = dict(machine.constants)
    for name, value in zip(names, values, strict=True):
        constants[name] = evolve(constants[name], value=float(value), certainty="fitted", source=source)
    return evolve(machine, constants=constants)


def fitted(
    machine: Machine,
    names: Sequence[str],
    predict: Predict,
    measured: Seconds,
    *,
    source: str,
    place: Location | None = None,
) -> Machine:
    """The machine with the named constants that fit the measured seconds best, from its own values on.

    Raises `DiagnosticError` RT005 where rows cannot tell the constants: fewer rows than constants, or one that changes no row.
    """
    if len(measured) < len(names):
        fail(
            "RT005",
            f"{len(names)} constants cannot be fitted to {len(measured)} rows",
            place,
            help="name fewer, or give more rows",
        )
    start = np.array([machine[name] for name in names])
    for name, value in zip(names, start, strict=True):
        if value == 0:
            fail(
                "RT005",
                f"[{name}] of machine '{machine.name}' is 0: a fit goes by factors",
                place,
                help="give it a positive value to start from",
            )
    most = np.log([largest_value(name) for name in names])

    def residuals(logs: Seconds) -> Seconds:
        return np.log(predict(with_values(machine, names, np.exp(logs).tolist(), source)) / measured)

    logs = np.minimum(np.log(start), most)
    found = residuals(logs)
    damping = 1e-3
    for step in range(_MOST_STEPS):
        slopes = _slopes(residuals, logs, found, most)
        if step == 0:
            _check_influence(slopes, names, place)
        shorter = _shorter_step(residuals, logs, found, slopes, most, damping)
        if shorter is None:
            break
        gain = found @ found - shorter[1] @ shorter[1]
        logs, found, damping = shorter
        if gain <= _SMALL_GAIN * (found @ found):
            break
    return with_values(machine, names, np.exp(logs).tolist(), source)


def _slopes(residuals: Callable[[Seconds], Seconds], logs: Seconds, found: Seconds, most: Seconds) -> Seconds:
    """The Jacobian: rows by constants. At its upper bound a constant is varied downwards."""
    columns = []
    for index in range(len(logs)):
        change = np.zeros(len(logs))
        change[index] = -_DIFFERENCE if logs[index] + _DIFFERENCE > most[index] else _DIFFERENCE
        columns.append((residuals(logs + change) - found) / change[index])
    return np.array(columns).T


def _shorter_step(
    residuals: Callable[[Seconds], Seconds],
    logs: Seconds,
    found: Seconds,
    slopes: Seconds,
    most: Seconds,
    damping: float,
) -> tuple[Seconds, Seconds, float] | None:
    """The next logarithms, their residuals and damping; None where no step helps any more."""
    normal, gradient = slopes.T @ slopes, slopes.T @ found
    scale = np.diag(np.maximum(np.diag(normal), _NO_INFLUENCE))
    while damping < 1e9:
        step = np.linalg.solve(normal + damping * scale, -gradient)
        tried = np.minimum(logs + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP), most)
        result = residuals(tried)
        if np.isfinite(result).all() and result @ result < found @ found:
            return tried, result, damping / 3
        damping *= 4
    return None


def _check_influence(slopes: Seconds, names: Sequence[str], place: Location | None) -> None:
    for name, column in zip(names, slopes.T, strict=True):
        if np.abs(column).max() < _NO_INFLUENCE:
            fail(
                "RT005",
                f"[{name}] changes the time of no row: it cannot be fitted to them",
                place,
                help="leave it out of --fit",
            )
