"""Fit the constants of the built-in GPU machines to published step times, and write them into their files.

    python benchmarks/constants.py a100             # fit one device, print constants and errors, write nothing
    python benchmarks/constants.py --write          # `make constants`: all devices, into targets/pytorch/machines

Read are the rows of benchmarks/published whose split is `fit`; those that are `held-out` are only predicted, after the
fit. A row belongs to a device by the name of its machine (`a100-40gb-8` is an A100), and keeps that machine's memory
and links: only the constants of `FITTED` are common. Programs are compiled once on the machine as it is written today,
long steps folded as `ratrainc validate` folds them; so run it until the constants stay.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from attrs import evolve, frozen

from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrainc.calibration.fitting import OUTLIER, fitted, with_values
from ratrain.ratrainc.validation.errors import Errors, Seconds
from ratrain.ratrainc.validation.folding import FoldedStep, task_of
from ratrain.ratrainc.validation.validation_rows import ValidationRow, read_validation_table
from ratrain.targets.machine.constants import Constant
from ratrain.targets.machine.machine import Machine, load_machine

PUBLISHED = Path(__file__).parent / "published"
MACHINES = Path(__file__).parents[1] / "targets" / "pytorch" / "machines"
DEVICES = {"a100": "a100-node", "h100": "h100-node", "b200": "b200-node", "v100": "v100-node"}
"""Built-in machine of each device."""
FITTED = ("gemm_efficiency", "dispatch", "attention_efficiency", "gemm_half_extent", "head_efficiency", "launch")
"""Constants, those first that change most rows: a device of few rows has only the first of them fitted."""
ROWS_OF_A_CONSTANT = 4
"""Least rows for each constant. Fewer leave directions open: an efficiency of 0.98 beside one of 0.09 fits as well."""
_START = {
    "gemm_efficiency": 0.8,
    "dispatch": 6e-5,
    "attention_efficiency": 0.5,
    "gemm_half_extent": 64.0,
    "head_efficiency": 0.8,
    "launch": 2e-6,
}
"""Values from which every fit starts, whatever the file has. A dispatch below the time of every kernel would change no row."""
_HOLD = 0.02
"""Residual of a constant that changes by a factor of e: as much as a row that is 2 % off.

So constants that few rows determine stay plausible."""
_LOWERED = 0.9
"""Factor by which a constant is lowered to see if it changes any row; one that changes none keeps its value."""
_GAIN = 1e-3
"""Share of the loss that a step of the search must gain, else it ends."""
_MOST_ROWS = 8
"""Most rows of a table that are fitted, evenly spread: more of the same runs weigh more and say little more."""
_USUAL = 75
"""Percentile of held-out errors that a machine states as its `step_error`."""


@frozen(eq=False)
class _Row:
    """A published step and its compiled program."""

    row: ValidationRow
    step: FoldedStep

    @property
    def measured(self) -> float:
        """Published seconds of the step."""
        return self.row.seconds

    def seconds(self, values: Sequence[float]) -> float:
        """Return the simulated seconds with other values of the constants in `FITTED`."""
        with paused_gc():
            return self.step.seconds(with_values(self.step.task.machine, FITTED, values, ""))


def rows_of(device: str) -> list[ValidationRow]:
    """Return the rows of the published tables that ran on a device and were timed, of models without experts.

    What exchanges of experts cost is not in these constants, and its error would hide theirs.
    """
    tables = [read_validation_table(str(path)) for path in sorted(PUBLISHED.glob("*.csv"))]
    return [
        row
        for table in tables
        for row in table.rows
        if row.task is not None
        and row.task.model.experts is None
        and row.measure in ("step_seconds", "tokens_per_second")
        and row.task.machine.name.startswith(device)
        and row.task.machine.collectives == load_machine(DEVICES[device]).collectives
    ]


def fitted_rows(rows: Sequence[ValidationRow]) -> list[ValidationRow]:
    """Return the rows that constants are fitted to: of split fit, at most `_MOST_ROWS` a table."""
    kept = []
    for table in sorted({row.line.path for row in rows}):
        of_table = [row for row in rows if row.line.path == table and row.split == "fit"]
        count = min(len(of_table), _MOST_ROWS)
        kept += [of_table[index * len(of_table) // count] for index in range(count)]
    return kept


def compiled(rows: Sequence[ValidationRow]) -> list[_Row]:
    """Compile rows; one whose plan does not fit its machine has no time and is left out, by name."""
    found = []
    for row in rows:
        task = task_of(row, whole=False)
        assert task is not None
        step = FoldedStep.of(task)
        if step is None:
            print(f"left out: {row.id} does not fit {task.machine.name}")
            continue
        found.append(_Row(row, step))
    return found


def fit(device: str) -> tuple[Machine, list[_Row], Seconds]:
    """Return the fitted machine, all rows of a device, and their times on it."""
    rows = rows_of(device)
    kept = compiled(fitted_rows(rows))
    start = with_values(load_machine(DEVICES[device]), FITTED, [_START[name] for name in FITTED], "")

    def times(machine: Machine, rows: Sequence[_Row] = kept) -> Seconds:
        return np.array([each.seconds([machine[name] for name in FITTED]) for each in rows])

    usual = times(start)
    lowered = {name: with_values(start, [name], [_LOWERED * start[name]], "") for name in FITTED}
    names = [name for name in FITTED if np.any(times(lowered[name]) != usual)][: len(kept) // ROWS_OF_A_CONSTANT]
    tables = len({each.row.line.path for each in kept})
    source = f"benchmarks/constants.py: {len(kept)} rows of split fit of {tables} tables of benchmarks/published"
    measured = np.array([each.measured for each in kept])
    result = fitted(start, names, times, measured, source=source, outlier=OUTLIER, least_gain=_GAIN, hold=_HOLD)
    open_ones = {
        name: evolve(result.constants[name], certainty="assumed", source="where fits start: too few rows tell it")
        for name in FITTED
        if name not in names
    }
    every = [*kept, *compiled([row for row in rows if row.split == "held-out"])]
    return evolve(result, constants=result.constants | open_ones), every, times(result, every)


def report(device: str, machine: Machine, rows: Sequence[_Row], times: Seconds) -> Constant:
    """Print the fit of a device; return its `step_error`."""
    errors = times / np.array([each.measured for each in rows]) - 1
    held = np.array([each.row.split == "held-out" for each in rows])
    for name in FITTED:
        print(
            f"{device} {name} = {machine[name]:.4g} {machine.constants[name].unit}, {machine.constants[name].certainty}"
        )
    for split, of_split in (("fit", ~held), ("held-out", held)):
        each = Errors.of(errors[of_split])
        print(
            f"{device} {split}: {each.count} rows, median {each.median:.1%}, mean {each.mean:.1%}, {each.largest:.1%}"
        )
    for table in sorted({row.row.line.path for row in rows}):
        of_table = np.array([row.row.line.path == table for row in rows]) & held
        if of_table.any():
            each = errors[of_table]
            print(
                f"  {Path(table).stem}: held out {len(each)}, median {np.median(abs(each)):.1%}, "
                f"signed {np.median(each):+.1%}"
            )
    usual = float(np.percentile(np.abs(errors[held]), _USUAL))
    source = (
        f"benchmarks/constants.py: 3 of 4 of {held.sum()} held-out rows, median {np.median(np.abs(errors[held])):.1%}"
    )
    return Constant(usual, "fraction of a step's time", "measured", source)


def write(machine: Machine, error: Constant) -> None:
    """Put fitted constants and the error of held-out rows into a machine's file; all else in it stays."""
    path = MACHINES / f"{machine.name}.toml"
    text = path.read_text(encoding="utf-8")
    for name in (*FITTED, "step_error"):
        constant = error if name == "step_error" else machine.constants[name]
        section = (
            f'[{name}]\nvalue = {constant.value:.3g}\nunit = "{constant.unit}"\n'
            f'certainty = "{constant.certainty}"\nsource = "{constant.source}"\n'
        )
        pattern = rf"\[{name}\]\n(?:.+\n)+"
        found = re.search(pattern, text)
        if found:
            text = text[: found.start()] + section + text[found.end() :]
        else:
            text = text.replace("[runtime_overhead]", f"{section}\n[runtime_overhead]", 1)
    path.write_text(text, encoding="utf-8")
    load_machine(machine.name)


@click.command()
@click.argument("devices", nargs=-1, type=click.Choice(list(DEVICES)))
@click.option("--write", "writes", is_flag=True, help="Write the constants into the built-in machine files.")
def main(devices: tuple[str, ...], writes: bool) -> None:
    """Fit the constants of built-in GPU machines to published step times."""
    for device in devices or DEVICES:
        machine, rows, times = fit(device)
        error = report(device, machine, rows, times)
        if writes:
            write(machine, error)


if __name__ == "__main__":
    main()
