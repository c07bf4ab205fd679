"""`ratrainc verify`."""

from __future__ import annotations

import click

from ratrainc.commands.options import json_option

_EPILOG = """\b
Examples:
  ratrainc verify tiny.rtir
  ratrainc verify tiny.rtx --json

Exit code 0: sound; 1: diagnostics; 2: usage.
"""


@click.command(epilog=_EPILOG)
@click.argument("file", metavar="FILE.rtir|FILE.rtx")
@json_option
def command(file: str, as_json: bool) -> int:
    """Prove that a schedule or a program is sound, or show what is wrong and where.

    A schedule: types, completeness, dataflow, memory, messages, collectives, progress with buffered and rendezvous sends. A program:
    its container and routines, the schedule it executes by the same rules, progress, and that no two instructions race.
    """
    from ratrain_ir.diagnostics import DiagnosticError
    from ratrainc.console import print_json, show_diagnostics, status

    try:
        with status(f"verifying {file}"):
            proved = _verify_program(file) if file.endswith(".rtx") else _verify_schedule(file)
    except DiagnosticError as error:
        if as_json:
            print_json({"sound": False, "diagnostics": [d.to_json() for d in error.diagnostics]})
        show_diagnostics(error.diagnostics, as_json=False)
        return 1
    if as_json:
        print_json({"sound": True, "diagnostics": []})
    else:
        click.echo(f"{file}: sound ({proved})")
    return 0


def _verify_schedule(file: str) -> str:
    from ratrainc import api

    module = api.load_schedule(file)
    api.check(module)
    ops = sum(len(stage.ops) for stage in module.stages)
    return f"level {module.level.value}, {len(module.stages)} stages, {ops} ops"


def _verify_program(file: str) -> str:
    from ratrainc import api
    from targets.program_verifier import check_program

    program = api.load(file)
    check_program(program)
    count = sum(stage.instructions for stage in program.stages)
    return f"{len(program.stages)} stages, {count} instructions, {len(program.routines)} routines"
