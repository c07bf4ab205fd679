"""`ratrainc calibrate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.words import completing
from ratrain.ratrainc.commands.words.options import (
    InputFile,
    KernelSetName,
    Result,
    device_name,
    json_option,
    machine_option,
    model_option,
    plan_option,
    refuse_idle,
    result_option,
    seconds_option,
)
from ratrain.ratrainc.console.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrainc.calibration.calibrated import Calibrated
    from ratrain.ratrainc.calibration.from_device import DeviceChoice

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
A row says what one step took, in seconds or tokens/s, and may say which rows are only predicted; columns are those of
'ratrainc validate', any key of a plan among them:
  model,plan,dp,tokens_per_second,split
  llama-2-7b,plan.toml,128,29069.73,fit
  llama-2-7b,plan.toml,512,112790.55,held-out
"""


def _names(_context: click.Context, _parameter: click.Parameter, text: str | None) -> list[str]:
    names = [name.strip() for name in (text or "").split(",") if name.strip()]
    if len({*names}) < len(names):
        raise click.BadParameter("a constant is named twice")
    return names


@click.command(epilog=_EPILOG)
@click.option("--rows", type=InputFile("rows"), metavar="measured.csv", help="Measured step times.")
@click.option("--fit", "names", callback=_names, metavar="NAME,...", help="Constants of the machine file to fit.")
@click.option(
    "--profile",
    "profiles",
    type=InputFile("profile"),
    multiple=True,
    metavar="FILE.json",
    help="Instead of rows: op times of 'ratrainc run --profile'. May be given for several runs, as of stages "
    "and of replicas.",
)
@click.option(
    "--device",
    metavar="cpu|cuda|cuda:N",
    callback=device_name,
    help="Instead of rows: time kernels, updates and copies on this processor or a device of PyTorch.",
)
@model_option(required=False)
@plan_option
@click.option(
    "--kernels",
    type=KernelSetName(),
    help="With --device: the kernel set that is timed, on one thread. Default: fast, on a device torch-device.",
)
@click.option(
    "--dtype",
    type=click.Choice(["f16", "bf16", "f32"]),
    help="With --device: type of weights, gradients and activations of the small programs that are timed. "
    "Default: the plan's, else bf16.",
)
@seconds_option(30.0, "With --device: about how long kernels are timed, all in turn; each three times at least.")
@click.option(
    "--links",
    type=InputFile("machine"),
    metavar="NAME|FILE.toml",
    help="With --device: the machine to take link constants from. Default: the built-in one of such devices.",
)
@click.option(
    "--name", default="this-machine", show_default=True, help="With --profile and --device: the machine's name."
)
@result_option("-o --output", Result("machine", ".toml"), "machine.toml", "Write the machine file.")
@click.option(
    "--hold-out",
    "every",
    type=click.IntRange(min=0),
    default=5,
    show_default=True,
    help="Do not fit each K-th row, only predict it; 0: fit all. For rows without a 'split'.",
)
@click.option(
    "--strategy",
    "strategy_name",
    metavar="S",
    shell_complete=completing.strategy,
    help="How rows ran that name no strategy. Default: ratrain.",
)
@machine_option
@json_option
def command(
    rows: str | None,
    names: list[str],
    profiles: tuple[str, ...],
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
    """Fit constants of a machine file to measured step times; report the error on rows that were not fitted.

    The fit starts from the given machine; its other constants stay. Programs are compiled for it, timed on each machine
    that the search tries, and compiled and fitted again for the result until the constants settle.

    With --profile the machine is this one: a table with the seconds of every op that ran, and rates fitted to them for
    other ops. With profiles of ranks that shared cores and of ranks that did not, it learns the cost of sharing
    (core_sharing).

    With --device it is the device at hand: a table with the seconds of kernel calls and updates, each timed alone, of
    small programs and, with --model and --plan, of that plan; and rates fitted to them for other calls. Links to other
    devices are not measured.

    Fits need scipy: pip install 'ratrain[calibrate]'.
    """
    if sum(each is not None for each in (rows, profiles or None, device)) != 1:
        raise click.UsageError("give one of --rows, --profile and --device")
    if rows is None:
        if names:
            raise click.UsageError("--fit goes with --rows: elsewhere the rates are fitted")
        text = "goes with --rows: profiles and devices are of this machine, and all of their times are used"
        refuse_idle(text, "every", "strategy_name", "machine")
    if device is None:
        refuse_idle("goes with --device", "model", "plan", "kernels", "dtype", "seconds", "links")
    if profiles:
        _show(_of_profiles(profiles, name), output, as_json=as_json)
        return
    if device is not None:
        if (model is None) != (plan is None):
            raise click.UsageError("--model and --plan belong together")
        from ratrain.ratrainc.calibration.from_device import DeviceChoice

        choice = DeviceChoice(device, kernels, model, plan, dtype, seconds, links)
        _show(_of_device(choice, name), output, as_json=as_json)
        return
    refuse_idle("goes with --profile and --device: fitted rows keep the name of their machine", "name")
    if not names:
        raise click.UsageError("--fit names no constant")
    assert rows is not None
    from ratrain import api
    from ratrain.ratrainc.choices.machine_choice import given_machine
    from ratrain.ratrainc.console.console import status

    with status(f"fitting {', '.join(names)}"):
        start = None if machine is None else given_machine(machine)
        found = api.calibrate_rows(rows, names, machine=start, hold_out=every, strategy=strategy_name)
    _show(found, output, as_json=as_json)


def _show(found: Calibrated, output: str | None, *, as_json: bool) -> None:
    """Write the machine file if one is asked for, and print the machine."""
    from ratrain.ratrainc.console.console import print_json
    from ratrain.ratrainc.console.parts import show

    if output is not None:
        found.save(output)
    if as_json:
        print_json(found.to_json() | {"output": output})
        return
    show(found.parts())
    if output is not None:
        echo(f"wrote {output}")


def _of_profiles(paths: tuple[str, ...], name: str) -> Calibrated:
    from ratrain import api
    from ratrain.ratrainc.console.console import status

    with status("fitting rates"):
        return api.calibrate_profile(paths, name)


def _of_device(choice: DeviceChoice, name: str) -> Calibrated:
    from ratrain import api
    from ratrain.ratrainc.console.console import bar

    with bar(None, f"timing {choice.device}") as progress:
        return api.calibrate_device(choice, name, progress=progress)
