"""`ratrainc calibrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.options import Result, Source, json_option, machine_option, output_file, refuse_idle
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrainc.calibration.report import Calibration

_EPILOG = """\b
Examples:
  ratrainc calibrate --rows measured.csv --fit gemm_efficiency -o mine.toml
  ratrainc calibrate --rows measured.csv --fit gemm_efficiency,link_latency --hold-out 4 -o mine.toml --json
  ratrainc run tiny.rtx --steps 20 --threads 1 --profile run.json
  ratrainc calibrate --profile run.json -o here.toml
  ratrainc simulate other.rtx --machine here.toml --one-core

\b
A row says what one step took, in seconds or tokens/s, and may say which rows are only predicted:
  model,plan,dp,tokens_per_second,use
  llama-2-7b,plan.toml,128,29069.73,fit
  llama-2-7b,plan.toml,512,112790.55,held-out
"""


def _names(_context: click.Context, _parameter: click.Parameter, text: str | None) -> list[str]:
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if len({*names}) < len(names):
        raise click.BadParameter("a constant is named twice")
    return names


@click.command(epilog=_EPILOG)
@click.option("--rows", type=Source("rows"), metavar="measured.csv", help="Measured step times.")
@click.option("--fit", "names", callback=_names, metavar="NAME,...", help="Constants of the machine file to fit.")
@click.option(
    "--profile",
    type=Source("profile"),
    metavar="FILE.json",
    help="Instead of rows: op times of 'ratrainc run --profile'.",
)
@click.option("--name", default="this-machine", show_default=True, help="With --profile: the machine's name.")
@click.option(
    "-o",
    "--output",
    type=Result("machine", ".toml"),
    callback=output_file,
    metavar="machine.toml",
    help="Write the machine file.",
)
@click.option(
    "--hold-out",
    "every",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Do not fit each K-th row, only predict it; 0: fit all. For tables without the column 'use'.",
)
@click.option("--strategy", "strategy_name", metavar="S", help="How the rows ran. Default: ratrain.")
@machine_option
@json_option
def command(
    rows: str | None,
    names: list[str],
    profile: str | None,
    name: str,
    output: str | None,
    every: int,
    strategy_name: str | None,
    machine: str | None,
    as_json: bool,
) -> None:
    """Fit constants of a machine file to measured step times; the error is of rows that were not fitted.

    The machine that is given is where the fit starts; its other constants stay. Programs are compiled for it, timed on each machine the
    search tries, and compiled and fitted again for the result until the constants settle.

    With --profile the machine is this one: a table of the seconds of every op that ran, and rates fitted to them for others.

    Fits need scipy: pip install 'ratrain[calibrate]'.
    """
    if (rows is None) == (profile is None):
        raise click.UsageError("give --rows or --profile")
    if profile is not None and names:
        raise click.UsageError("--fit goes with --rows: with --profile the rates are fitted")
    if profile is not None:
        refuse_idle(
            "goes with --rows: a profile is of this machine, and all of it is used", "every", "strategy_name", "machine"
        )
    else:
        refuse_idle("goes with --profile: fitted rows keep the name of their machine", "name")
    if profile is not None:
        _calibrate_profile(profile, name, output, as_json=as_json)
        return
    assert rows is not None
    from ratrain.ratrainc.calibration.report import calibrate_rows
    from ratrain.ratrainc.console import print_json, status
    from ratrain.ratrainc.machine_choice import given_machine
    from ratrain.ratrainc.strategies import DEFAULT_STRATEGY, strategy
    from ratrain.targets.machine.writer import write_machine

    if not names:
        raise click.UsageError("--fit names no constant")
    passes = strategy(strategy_name or DEFAULT_STRATEGY).passes
    with status(f"fitting {', '.join(names)}"):
        calibration = calibrate_rows(rows, given_machine(machine), names, every=every, passes=passes)
    if output is not None:
        write_machine(calibration.machine, output)
    if as_json:
        print_json(calibration.to_json() | {"output": output})
        return
    _show(calibration)
    if output is not None:
        echo(f"wrote {output}")


def _calibrate_profile(path: str, name: str, output: str | None, *, as_json: bool) -> None:
    from threadpoolctl import threadpool_limits

    from ratrain.ratrainc.calibration.from_profile import machine_from_profile
    from ratrain.ratrainc.console import print_json, seconds_text, status
    from ratrain.targets.machine.writer import write_machine
    from ratrain.targets.runtime.utilisation import measured_peak_flops

    with status("fitting rates"):
        with threadpool_limits(limits=1):
            peak = measured_peak_flops()
        profiled = machine_from_profile(path, name, peak)
    if output is not None:
        write_machine(profiled.machine, output)
    if as_json:
        print_json(profiled.to_json() | {"output": output})
        return
    echo(
        f"{len(profiled.machine.table.ops)} distinct ops of {profiled.steps} steps, {seconds_text(profiled.step_seconds)} a step"
    )
    if profiled.rates is not None:
        echo(
            f"fitted rates, for ops that did not run: off by {100 * profiled.rates.mean:.0f} % on average on those that did"
        )
    if output is not None:
        echo(f"wrote {output}")


def _show(calibration: Calibration) -> None:
    from ratrain.ratrainc.console import table

    constants = [
        [name, f"{start:.6g}", f"{calibration.machine[name]:.6g}", calibration.machine.constants[name].unit]
        for name, start in calibration.start.items()
    ]
    table("constants fitted", ("constant", "start", "fitted", "unit"), constants)
    lines = [
        [name, str(e.count), *(f"{100 * v:.2f} %" for v in (e.mean, e.median, e.largest))]
        for name, e in calibration.errors
    ]
    table("error of simulated against measured step times", ("rows", "count", "mean", "median", "largest"), lines)
    if "held out" not in dict(calibration.errors):
        echo("no row was held out: nothing says how well other rows are predicted")
