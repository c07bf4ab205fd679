"""`ratrainc calibrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands import completing
from ratrain.ratrainc.commands.options import (
    KernelSetName,
    Result,
    Source,
    device_name,
    json_option,
    machine_option,
    model_option,
    output_file,
    plan_option,
    refuse_idle,
    seconds_option,
)
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrainc.calibration.from_device import DeviceChoice, DeviceMachine
    from ratrain.ratrainc.calibration.report import Calibration

_EPILOG = """\b
Examples:
  ratrainc calibrate --rows measured.csv --fit gemm_efficiency -o mine.toml
  ratrainc calibrate --rows measured.csv --fit gemm_efficiency,link_latency --hold-out 4 -o mine.toml --json
  ratrainc run tiny.rtx --steps 20 --threads 1 --profile run.json
  ratrainc calibrate --profile run.json -o here.toml
  ratrainc simulate other.rtx --machine here.toml --one-core
  ratrainc calibrate --device cuda -o here.toml                times kernels, updates and copies on the GPU at hand
  ratrainc calibrate --device cpu --model llama-2-7b --plan P.toml --kernels torch-device -o here.toml
  ratrainc plan --model llama-2-7b --clusters 8 --global-batch 64 --machine here.toml -o P.toml

\b
A row says what one step took, in seconds or tokens/s, and may say which rows are only predicted:
  model,plan,dp,tokens_per_second,use
  llama-2-7b,plan.toml,128,29069.73,fit
  llama-2-7b,plan.toml,512,112790.55,held-out
"""


_PARTS = 100
"""Of the work, in a bar of progress."""


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
@click.option(
    "--device",
    metavar="cpu|cuda|cuda:N",
    callback=device_name,
    help="Instead of rows: time kernels, updates and copies on this processor or a device of PyTorch.",
)
@model_option(required=False)
@plan_option(required=False)
@click.option(
    "--kernels",
    type=KernelSetName(),
    help="With --device: the kernel set that is timed, on one thread. Default: fast, on a device torch-device.",
)
@click.option(
    "--dtype",
    type=click.Choice(["f16", "bf16", "f32"]),
    help="With --device: type of weights, gradients and activations of the small programs that are timed. Default: the plan's, else bf16.",
)
@seconds_option(30.0, "With --device: about how long kernels are timed, all in turn; each three times at least.")
@click.option(
    "--links",
    type=Source("machine"),
    metavar="NAME|FILE.toml",
    help="With --device: the machine whose links it has to others of its kind. Default: the built-in one of such devices.",
)
@click.option(
    "--name", default="this-machine", show_default=True, help="With --profile and --device: the machine's name."
)
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
@click.option(
    "--strategy",
    "strategy_name",
    metavar="S",
    shell_complete=completing.strategy,
    help="How the rows ran. Default: ratrain.",
)
@machine_option
@json_option
def command(
    rows: str | None,
    names: list[str],
    profile: str | None,
    device: str | None,
    model: str | None,
    plan: str | None,
    kernels: str | None,
    dtype: str | None,
    seconds: float,
    links: str | None,
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

    With --device it is the one at hand: a table of the seconds of kernel calls, each timed by itself, in small programs and, with --model
    and --plan, in those of that plan, and of their updates; and rates fitted to them for others. Links to other devices are not measured.

    Fits need scipy: pip install 'ratrain[calibrate]'.
    """
    if sum(each is not None for each in (rows, profile, device)) != 1:
        raise click.UsageError("give one of --rows, --profile and --device")
    if rows is None:
        if names:
            raise click.UsageError("--fit goes with --rows: elsewhere the rates are fitted")
        text = "goes with --rows: what is measured is of this machine, and all of it is used"
        refuse_idle(text, "every", "strategy_name", "machine")
    if device is None:
        refuse_idle("goes with --device", "model", "plan", "kernels", "dtype", "seconds", "links")
    if profile is not None:
        _calibrate_profile(profile, name, output, as_json=as_json)
        return
    if device is not None:
        if (model is None) != (plan is None):
            raise click.UsageError("--model and --plan belong together")
        from ratrain.ratrainc.calibration.from_device import DeviceChoice

        choice = DeviceChoice(device, kernels, model, plan, dtype, seconds, links)
        _calibrate_device(choice, name, output, as_json=as_json)
        return
    refuse_idle("goes with --profile and --device: fitted rows keep the name of their machine", "name")
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


def _calibrate_device(choice: DeviceChoice, name: str, output: str | None, *, as_json: bool) -> None:
    from threadpoolctl import threadpool_limits

    from ratrain.ratrainc.calibration.from_device import machine_of_device
    from ratrain.ratrainc.console import print_json, progress
    from ratrain.targets.machine.writer import write_machine

    with progress(_PARTS, f"timing {choice.device}") as (bar, task), threadpool_limits(limits=1):
        timed = machine_of_device(choice, name, lambda part: bar.update(task, completed=round(_PARTS * part)))
    if output is not None:
        write_machine(timed.machine, output)
    if as_json:
        print_json(timed.to_json() | {"output": output})
        return
    _show_device(timed)
    if output is not None:
        echo(f"wrote {output}")


def _show_device(timed: DeviceMachine) -> None:
    from ratrain.ratrainc.console import seconds_text, table

    machine = timed.machine
    echo(
        f"kernel set {timed.kernels}: {len(machine.table.ops)} distinct kernel calls and ops; medians of {timed.turns} turns"
    )
    constants = [
        [key, f"{constant.value:.6g}", constant.unit, constant.certainty] for key, constant in machine.constants.items()
    ]
    table("constants", ("constant", "value", "unit", "certainty"), constants)
    steps = [
        [
            step.name,
            seconds_text(step.measured),
            seconds_text(step.predicted),
            f"{step.predicted / step.measured - 1:+.1%}",
        ]
        for step in timed.steps
    ]
    table("steps of the small programs", ("program", "measured", "predicted", "error"), steps)
    if timed.rates is not None:
        echo(
            f"fitted rates, for kernels that did not run: off by {timed.rates.median:.0%} in the median of those that did"
        )
    echo(f"links were not measured: they are those of the machine '{timed.links}'")


def _show(calibration: Calibration) -> None:
    from ratrain.ratrainc.console import table

    constants = [
        [name, f"{start:.6g}", f"{calibration.machine[name]:.6g}", calibration.machine.constants[name].unit]
        for name, start in calibration.start.items()
    ]
    table("constants fitted", ("constant", "start", "fitted", "unit"), constants)
    parts = calibration.errors
    if len({*calibration.peers}) > 1:
        parts += [(f"held out, tp = {count}", each) for count, each in calibration.errors_by_peers]
    lines = [[name, str(e.count), *(f"{100 * v:.2f} %" for v in (e.mean, e.median, e.largest))] for name, e in parts]
    table("error of simulated against measured step times", ("rows", "count", "mean", "median", "largest"), lines)
    if "held out" not in dict(calibration.errors):
        echo("no row was held out: nothing says how well other rows are predicted")
