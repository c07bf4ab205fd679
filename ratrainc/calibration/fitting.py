"""Least squares over a few constants of a machine, so that predicted times agree with measured ones.

Constants are positive and differ by many orders of magnitude. So the variables are logarithms of the factors by which
they change, and the residual of a row is the logarithm of predicted over measured: 10 % off counts the same for a
second and for a minute.

    gemm_efficiency 0.70 -> 0.68:  variable log(0.68 / 0.70) = -0.029
    a row, 10.5 s for 10.0 s:      residual log(10.5 / 10.0) = +0.049

The search is scipy's trust region method within bounds (extra `calibrate`). It finds a local optimum near the start.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp, inf, log
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from attrs import evolve

from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.ratrainc.console.extras import check_installed
from ratrain.ratrainc.validation.errors import Seconds
from ratrain.targets.machine.constants import largest_value
from ratrain.targets.machine.machine import Machine

if TYPE_CHECKING:
    from ratrain.ratrain_ir.support.diagnostics import Location

Predict: TypeAlias = Callable[[Machine], Seconds]
"""Seconds of every row on a machine."""

_MOST_CHANGE = 1e4
"""Largest factor by which a fit changes a constant; rows that only need a high bandwidth would push it forever."""
_HOLD = 1e-3
"""Residual of a constant that changes by a factor of e: as much as a row that is 0.1 % off. So constants that the rows
leave open stay near their start.
"""
OUTLIER = 0.03
"""Residual of a measured step beyond which a row counts less than by its square."""
_SMALL_GAIN = 1e-9
_MOST_STEPS = 40
_TRIED_CHANGE = 1e-3
_NO_INFLUENCE = 1e-10
_SEEN = 1e-3
"""Least effect for `fitted_rates` to fit a constant: the relative change of some row over that of the constant."""


def with_values(machine: Machine, names: Sequence[str], values: Sequence[float], source: str) -> Machine:
    """Return a machine whose named constants have new values, with their source."""
    constants = dict(machine.constants)
    for name, value in zip(names, values, strict=True):
        constants[name] = evolve(constants[name], value=float(value), certainty="fitted", source=source)
    return evolve(machine, constants=constants)


def check_solver() -> None:
    """Raise `DiagnosticError` RT002 if scipy is not installed; called before rows are compiled."""
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
    least_gain: float = _SMALL_GAIN,
    hold: float = _HOLD,
) -> Machine:
    """Fit named constants of a machine to measured seconds, starting from its own values.

    `predict` returns the seconds of all rows on a machine. A residual beyond `outlier` counts by its size and not its
    square, so rows that no constant explains do not bend the rest (scipy's loss soft_l1; Huber, "Robust Estimation of a
    Location Parameter", 1964). The search ends when a step gains less than `least_gain` of the loss. `hold` is
    the residual of a constant that changes by a factor of e. Raises
    `DiagnosticError` RT002 as `check_solver` does, and RT005 if the start predicts no positive times, if there are
    fewer rows than constants, or if a constant changes no row.
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
    # Some constants have a largest value (an efficiency is at most 1). Both the bounds and `changed` keep to it:
    # rounding in exp may exceed a bound by a bit.
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

    # Check first: a constant without influence has a gradient of 0 and would keep its start silently.
    _check_influence(residuals, names, place)
    solution = least_squares(
        # The additional residuals pull each constant to its start, so that the solution is unique even if the rows
        # leave a direction open.
        lambda changes: np.concatenate((residuals(changes), hold * changes)),
        np.zeros(len(names)),
        bounds=(-log(_MOST_CHANGE), np.minimum(np.log(largest / start), log(_MOST_CHANGE))),
        # soft_l1 is 2 (sqrt(1 + z) - 1) with z = (residual / f_scale)^2: a square for small residuals, linear for large
        # ones.
        ftol=least_gain,
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
    """Fit constants as `fitted` does, but keep the value of one that changes no row, with `unseen` as its source."""
    unchanged = predict(machine)

    def moves_a_row(name: str) -> bool:
        # Downwards, as in `_check_influence`: a constant at its largest value cannot grow.
        lowered = with_values(machine, [name], [machine[name] * exp(-_TRIED_CHANGE)], source)
        return bool(np.abs(np.log(predict(lowered) / unchanged)).max(initial=0.0) >= _SEEN * _TRIED_CHANGE)

    seen = [name for name in names if moves_a_row(name)]
    found = fitted(machine, seen, predict, measured, source=source, place=place) if seen else machine
    # They keep their assumed certainty; the source says why they were not fitted.
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
