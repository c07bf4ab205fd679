"""Calibration by a table of measured steps: the fit, and the errors of its predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.support.diagnostics import Location, fail, nearest
from ratrain.ratrain_ir.support.quantities import number_of
from ratrain.ratrainc.calibration.calibrated import Calibrated
from ratrain.ratrainc.calibration.fitting import OUTLIER, check_solver, fitted
from ratrain.ratrainc.calibration.gpt_layers import MeasuredLayer, measured_layers
from ratrain.ratrainc.calibration.gpt_rows import is_gpt_header, predicted_gpt, read_gpt_rows
from ratrain.ratrainc.calibration.measured_rows import MeasuredRow, compiled, held_out, predicted, read_rows
from ratrain.ratrainc.console.parts import Part, TextTable
from ratrain.ratrainc.validation.errors import Errors, Seconds, errors
from ratrain.ratrainc.validation.measured_tables import read_commented_table
from ratrain.targets.machine.constants import is_whole
from ratrain.targets.machine.machine import Machine, load_machine

if TYPE_CHECKING:
    from ratrain.ratrainc.choices.strategies import Strategy

_ROUNDS = 3
"""Most rounds of compiling and fitting. Programs depend on the machine, so they are compiled again after each fit."""
_SETTLED = 1e-4


@frozen(eq=False)
class OwnLayers:
    """Factors of layers by shape, from the fitted rows, and the errors of all rows predicted with them."""

    layers: list[MeasuredLayer]
    predicted: Seconds

    def parts(self) -> Iterator[Part]:
        """Yield a table of the factors, and a remark on them."""
        columns = ("tp", "hidden", "heads", "seq", "micro-batch", "rows", "factor")
        lines = [[*map(str, (*each.sizes, each.rows)), f"{each.factor:.3f}"] for each in self.layers]
        yield TextTable("layers as fitted rows have them: times what the constants give", columns, lines)
        yield "they are of layers that were measured: the machine file has the constants alone"


@frozen(eq=False, repr=False)
class Calibration(Calibrated):
    """A fitted machine and how well it predicts."""

    machine: Machine
    start: dict[str, float]
    """values of the fitted constants before the fit"""
    labels: list[str]
    measured: Seconds
    predicted: Seconds
    is_held_out: list[bool]
    peers: list[int]
    """number of tensor-parallel ranks of each row"""
    own_layers: OwnLayers | None = None
    """None unless the rows are GPT iterations"""
    left_out: int = 0
    """rows of the table that measure no time, or need what is not built"""

    @property
    def errors(self) -> list[tuple[str, Errors]]:
        """Errors of the fitted rows and, if there are any, of the held-out ones."""
        return self._errors(self.predicted)

    def _errors(self, predicted: Seconds) -> list[tuple[str, Errors]]:
        held = np.array(self.is_held_out)
        groups = (
            ("fitted", errors(predicted[~held], self.measured[~held])),
            ("held out", errors(predicted[held], self.measured[held])),
        )
        return [(name, each) for name, each in groups if each is not None]

    @property
    def errors_with_own_layers(self) -> list[tuple[str, Errors]]:
        """Errors with each layer scaled by its shape's factor; empty unless the rows are GPT iterations."""
        return [] if self.own_layers is None else self._errors(self.own_layers.predicted)

    @property
    def errors_by_tp(self) -> list[tuple[int, Errors]]:
        """Errors of the held-out rows, by number of tensor-parallel ranks."""
        signed, held, peers = self.predicted / self.measured - 1, np.array(self.is_held_out), np.array(self.peers)
        return [(int(count), Errors.of(signed[held & (peers == count)])) for count in np.unique(peers[held])]

    def parts(self) -> Iterator[Part]:
        """Yield tables of the constants and of the errors."""
        constants = [
            [name, f"{start:.6g}", f"{self.machine[name]:.6g}", self.machine.constants[name].unit]
            for name, start in self.start.items()
        ]
        yield TextTable("constants fitted", ("constant", "start", "fitted", "unit"), constants)
        parts = self.errors
        if len({*self.peers}) > 1:
            parts += [(f"held out, tp = {count}", each) for count, each in self.errors_by_tp]
        parts += [(f"{name}, with layers' own times", each) for name, each in self.errors_with_own_layers]
        lines = [
            [name, str(e.count), *(f"{100 * v:.2f} %" for v in (e.mean, e.median, e.largest))] for name, e in parts
        ]
        title = "error of simulated against measured step times"
        yield TextTable(title, ("rows", "count", "mean", "median", "largest"), lines)
        if self.own_layers is not None:
            yield from self.own_layers.parts()
        if self.left_out:
            yield f"left out: {number_of(self.left_out, 'row')} without a time, or that need what is not built"
        if "held out" not in dict(self.errors):
            yield "no row was held out: nothing says how well other rows are predicted"

    def to_json(self) -> dict[str, Any]:
        """Return the calibration as `--json` prints it."""
        rows = zip(self.labels, self.measured, self.predicted, self.is_held_out, strict=True)
        return {
            "machine": self.machine.name,
            "constants": {
                name: {"start": start, "fitted": self.machine[name], "unit": self.machine.constants[name].unit}
                for name, start in self.start.items()
            },
            "errors": {name.replace(" ", "_"): each.to_json() for name, each in self.errors},
            "held_out_by_tp": {str(count): each.to_json() for count, each in self.errors_by_tp},
            "errors_with_own_layers": {
                name.replace(" ", "_"): each.to_json() for name, each in self.errors_with_own_layers
            },
            "left_out": self.left_out,
            "layers": [] if self.own_layers is None else [each.to_json() for each in self.own_layers.layers],
            "rows": [
                {"label": label, "measured_seconds": float(m), "predicted_seconds": float(p), "held_out": held}
                for label, m, p, held in rows
            ],
        }


def check_names(machine: Machine, names: Sequence[str]) -> None:
    """Raise `DiagnosticError` RT004 if a name is not a constant of the machine, RT005 if the constant is a count."""
    for name in names:
        if name not in machine.constants:
            known = ", ".join(machine.constants)
            fail(
                "RT004",
                f"'{name}' is not a constant of machine '{machine.name}': {known}",
                help=nearest(name, machine.constants),
            )
        if is_whole(name):
            fail("RT005", f"[{name}] counts something: it is known, not fitted")


def calibrate_rows(
    path: str, machine: Machine | None, names: Sequence[str], *, every: int, strategy: Strategy | None = None
) -> Calibration:
    """Fit named constants of a machine to the rows of a table; every `every`-th row without a split is held out.

    Without `machine` it is the one that rows name. Rows that name no strategy ran under `strategy`; None is the default
    one. Raises `DiagnosticError` RT002 as `check_solver` does, and
    for a bad table, a bad name, a plan that does not fit, or rows that do not determine the constants.
    """
    check_solver()
    if is_gpt_header(read_commented_table(path, "table of measured steps")[1][0].cells):
        if strategy is not None:
            text = "GPT iterations are timed in closed form: a strategy changes nothing of them"
            fail("RT002", text, Location(path, 1), help="leave --strategy out")
        machine = machine or load_machine(None)
        check_names(machine, names)
        return _calibrate_gpt(path, machine, names, every)
    found = read_rows(path, machine, strategy)
    check_names(found.machine, names)
    held = held_out(found.rows, every)
    calibration = calibrate(found.rows, found.machine, names, held, Location(path, 1))
    return evolve(calibration, left_out=found.left_out)


def calibrate(
    rows: Sequence[MeasuredRow],
    machine: Machine,
    names: Sequence[str],
    held: list[bool],
    place: Location,
) -> Calibration:
    """Fit named constants of a machine to the rows that are not held out.

    Raises `DiagnosticError` if a plan does not fit, or the rows do not determine the constants.
    """
    measured = np.array([row.seconds for row in rows])
    kept = np.array([not each for each in held])
    kept_rows = [row for row, each in zip(rows, kept, strict=True) if each]
    source = f"fitted to {len(kept_rows)} measured steps in {place.file}"
    result = machine
    for _ in range(_ROUNDS):
        programs = compiled(kept_rows, result)
        before = np.array([result[name] for name in names])
        predict = partial(predicted, programs)
        result = fitted(result, names, predict, measured[kept], source=source, place=place, outlier=OUTLIER)
        if np.allclose([result[name] for name in names], before, rtol=_SETTLED, atol=0):
            break
    again = predicted(compiled(rows, result), result)
    start = {name: machine[name] for name in names}
    peers = [row.task.plan.tp for row in rows]
    return Calibration(result, start, [row.label for row in rows], measured, again, held, peers)


def _calibrate_gpt(path: str, machine: Machine, names: Sequence[str], every: int) -> Calibration:
    rows = read_gpt_rows(path)
    held = [bool(every) and i % every == 0 for i in range(1, len(rows) + 1)]
    kept = [row for row, each in zip(rows, held, strict=True) if not each]
    measured = np.array([row.seconds for row in rows])
    source = f"fitted to {len(kept)} measured iterations in {path}"
    predict = partial(predicted_gpt, kept)
    place = Location(path, 1)
    result = fitted(machine, names, predict, measured[~np.array(held)], source=source, place=place, outlier=OUTLIER)
    start = {name: machine[name] for name in names}
    labels = [f"row {row.number}" for row in rows]
    peers = [row.run.tp for row in rows]
    layers = measured_layers(kept, result)
    factors = {each.shape: each.factor for each in layers}
    own = OwnLayers(layers, predicted_gpt(rows, result, factors))
    return Calibration(result, start, labels, measured, predicted_gpt(rows, result), held, peers, own)
