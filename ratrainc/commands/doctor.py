"""`ratrainc doctor`."""

from __future__ import annotations

import click

from ratrain.ratrainc.choices.machine_choice import MachineChoice, stated
from ratrain.ratrainc.commands.words.options import InputFile, json_option, machine_option, model_option, plan_option

_EPILOG = """\b
Examples:
  ratrainc doctor
  ratrainc doctor tiny.rtx                                      also: does this program fit this machine's memory?
  ratrainc doctor --model llama-2-7b --plan P.toml              the same for a plan, compiled for it
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("program"), required=False, metavar="[FILE.rtx|FILE.rtir]")
@model_option(required=False)
@plan_option
@machine_option
@json_option
def command(file: str | None, model: str | None, plan: str | None, machine: str | None, as_json: bool) -> int:
    """Check this machine for runs: BLAS and its core type, threads, bf16, kernel cache, MPI, torch.distributed, memory.

    Exit code 1 if something would stop a run.
    """
    if (model is None) != (plan is None):
        raise click.UsageError("--model and --plan belong together")
    if file is not None and plan is not None:
        raise click.UsageError("a file and --plan exclude each other")
    if machine is not None and file is None and plan is None:
        raise click.UsageError(
            "--machine goes with a file or with --model and --plan: nothing is compiled without them"
        )
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json, status
    from ratrain.ratrainc.console.parts import show

    program = None
    with status("compiling"):
        if file is not None:
            program = api.load(file, machine=machine)
        elif model is not None and plan is not None:
            chosen = MachineChoice(machine).for_plan(plan, stated).load()
            program = api.emit(api.compile(model, plan, machine=chosen), machine=chosen)
    with status("looking around"):
        offer = api.doctor(program)
    if as_json:
        print_json(offer.to_json())
    else:
        show(offer.parts())
    return 1 if offer.problems else 0
