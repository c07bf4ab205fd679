"""`ratrainc doctor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.options import Source, json_option, machine_option, model_option, plan_option

if TYPE_CHECKING:
    from ratrain.targets.program.program import Program

_EPILOG = """\b
Examples:
  ratrainc doctor
  ratrainc doctor tiny.rtx                                      also: does this program fit this machine's memory?
  ratrainc doctor --model llama-2-7b --plan P.toml              the same for a plan, compiled for it
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=Source("program"), required=False, metavar="[FILE.rtx|FILE.rtir]")
@model_option(required=False)
@plan_option(required=False)
@machine_option
@json_option
def command(file: str | None, model: str | None, plan: str | None, machine: str | None, as_json: bool) -> int:
    """Say what this machine offers a run: BLAS and its core type, threads, bf16, the kernels' cache, MPI, torch.distributed, free memory.

    Exit code 1 when something would stop a run.
    """
    if (model is None) != (plan is None):
        raise click.UsageError("--model and --plan belong together")
    if file is not None and plan is not None:
        raise click.UsageError("a file and --plan exclude each other")
    if machine is not None and file is None and plan is None:
        raise click.UsageError(
            "--machine goes with a file or with --model and --plan: nothing is compiled without them"
        )
    from ratrain.ratrainc.console import print_json, say, status
    from ratrain.ratrainc.machine_facts import machine_facts, program_fact

    with status("compiling"):
        program = _program(file, model, plan, machine)
    with status("looking around"):
        facts = machine_facts()
        if program is not None:
            facts["program"] = program_fact(program)
    problems = [name for name, fact in facts.items() if fact.stops_a_run]
    if as_json:
        print_json({"facts": {name: fact.to_json() for name, fact in facts.items()}, "problems": problems})
    else:
        for name, fact in facts.items():
            mark = "!!" if fact.stops_a_run else "ok"
            say(f"{mark}  {name}: {fact.found}" + (f"\n      {fact.remark}" if fact.remark else ""))
    return 1 if problems else 0


def _program(file: str | None, model: str | None, plan: str | None, machine: str | None) -> Program | None:
    """The program at hand, if there is one."""
    from ratrain import api
    from ratrain.targets.program.program_verifier import check_program

    if file is not None:
        program = api.load(file, machine=machine)
        check_program(program)  # what it takes is told of a sound program only
        return program
    if model is None or plan is None:
        return None
    return api.emit(api.compile(model, plan, machine=machine), machine=machine)
