"""Functions that compare simulation with measurements: fitted and timed machines, and published tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ratrain.ratrain_ir.support.diagnostics import DiagnosticError, Diagnostics
from ratrain.ratrainc.choices.strategies import strategy as strategy_named
from ratrain.ratrainc.compiling.building import chosen_machine
from ratrain.ratrainc.console.progress import OnProgress, Progress, counting, unheard

if TYPE_CHECKING:
    from ratrain.ratrainc.calibration.calibration_report import Calibration
    from ratrain.ratrainc.calibration.from_device import DeviceChoice, DeviceMachine
    from ratrain.ratrainc.calibration.from_profile import ProfiledMachine
    from ratrain.ratrainc.validation.outcome import Validation
    from ratrain.targets.machine.machine import Machine


def calibrate_rows(
    rows: str,
    fit: Sequence[str],
    *,
    machine: str | Machine | None = None,
    hold_out: int = 5,
    strategy: str | None = None,
) -> Calibration:
    """Fit constants of a machine to measured step times, the rows of a CSV table as `validate` reads it.

    `fit` names the constants, `machine` the machine in place of the one that rows name. Rows whose `split` is held-out
    are only predicted and not fitted; of rows without a split, every `hold_out`-th, 0 fits all. The plans of rows that
    name no strategy are adapted to `strategy`, which may set their ZeRO level, chunks or slices. Raises
    `DiagnosticError` if the table is wrong, its rows name several machines, scipy is not installed, or the rows do not
    determine the constants.
    """
    from ratrain.ratrainc.calibration.calibration_report import calibrate_rows as fitted

    named = None if strategy is None else strategy_named(strategy)
    return fitted(rows, None if machine is None else chosen_machine(machine), fit, every=hold_out, strategy=named)


def calibrate_profile(profile: str | Sequence[str], name: str = "this-machine") -> ProfiledMachine:
    """Describe the machine on which one or several profiles of runs were taken.

    It has a table with the seconds of every op, and rates fitted to them. Its peak rate is measured here, on one
    thread. Raises `DiagnosticError` if a file is not a profile, profiles do not go together, or scipy is not installed.
    """
    from threadpoolctl import threadpool_limits

    from ratrain.ratrainc.calibration.from_profile import machine_from_profiles
    from ratrain.targets.runtime.training.utilisation import measured_peak_flops

    with threadpool_limits(limits=1):
        peak = measured_peak_flops()
    return machine_from_profiles([profile] if isinstance(profile, str) else profile, name, peak)


def calibrate_device(
    choice: DeviceChoice, name: str = "this-machine", *, progress: OnProgress | None = None
) -> DeviceMachine:
    """Describe the machine at hand by timing its kernels, updates and copies one by one.

    Links to other machines are not measured. Raises `DiagnosticError` if there is no such device, or the parts of
    `choice` contradict each other.
    """
    from threadpoolctl import threadpool_limits

    from ratrain.ratrainc.calibration.from_device import machine_of_device

    hear = progress or unheard
    with threadpool_limits(limits=1):
        return machine_of_device(choice, name, lambda part: hear(Progress(round(100 * part), 100, "")))


def validate(
    *tables: str,
    machine: str | Machine | None = None,
    whole: bool = False,
    jobs: int = 1,
    results: str | None = None,
    progress: OnProgress | None = None,
) -> Validation:
    """Compile and simulate published measurements (CSV tables), and report the simulation's errors by class of rows.

    `machine` replaces the machines that rows name. With `whole`, every micro-batch of long steps is simulated. `jobs`
    is the number of processes. Each row's result is appended to the file `results` as it is found, and what the file
    has of the same row, machine and code is not simulated again. `progress` hears a line of each row. All tables are
    read before the first row is simulated. Raises `DiagnosticError` with everything that is wrong in them.
    """
    from ratrain.ratrainc.planner.search.kept_results import KeptResults
    from ratrain.ratrainc.validation.outcome import validate as validated
    from ratrain.ratrainc.validation.validation_rows import read_validation_table
    from ratrain.ratrainc.validation.validation_tables import row_text

    chosen = None if machine is None else chosen_machine(machine)
    problems = Diagnostics()
    read = []
    for path in tables:
        try:
            read.append(read_validation_table(path, chosen))
        except DiagnosticError as error:
            problems.items.extend(error.diagnostics)
    problems.check()
    count = sum(row.task is not None for table in read for row in table.rows)
    tick = counting(progress, count)
    kept = None if results is None else KeptResults.of(results)
    return validated(read, min(jobs, count), lambda row: tick.found(row_text(row)), whole=whole, kept=kept)
