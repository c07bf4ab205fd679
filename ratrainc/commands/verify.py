"""`ratrainc verify`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.options import Source, json_option, machine_option, refuse_idle
from ratrain.ratrainc.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc verify tiny.rtir
  ratrainc verify tiny.rtx --json
  ratrainc verify tiny.rtir --machine mine.toml

Exit code 0: sound; 1: diagnostics; 2: usage.
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=Source("program"), metavar="FILE.rtir|FILE.rtx")
@machine_option
@json_option
def command(file: str, machine: str | None, as_json: bool) -> int:
    """Prove that a schedule or a program is sound, or show what is wrong and where.

    A schedule: types, completeness, dataflow, memory, messages, collectives, progress with buffered and rendezvous sends, and that
    every op has the workspace that the machine needs. A program: its container and routines, the schedule it executes by the same rules, progress, and that no two instructions race.
    """
    from ratrain.ratrain_ir.diagnostics import DiagnosticError
    from ratrain.ratrainc.console import print_json, show_diagnostics, status

    is_program = file.endswith(".rtx")
    if is_program and machine is not None:
        raise click.UsageError("a program holds what its machine's routines need: leave --machine out")
    try:
        with status(f"verifying {file}"):
            proved = _verify_program(file) if is_program else _verify_schedule(file, machine)
    except DiagnosticError as error:
        if as_json:
            print_json({"sound": False, "diagnostics": [d.to_json() for d in error.diagnostics]})
        show_diagnostics(error.diagnostics, as_json=False)
        return 1
    if as_json:
        print_json({"sound": True, "diagnostics": []})
    else:
        echo(f"{file}: sound ({proved})")
    return 0


def _verify_schedule(file: str, machine: str | None) -> str:
    from ratrain.ratrainc.commands.loading import checked_schedule

    module, _ = checked_schedule(file, machine)
    if module.target is None:
        refuse_idle("is for a schedule that was sized for a machine: this one was not", "machine")
    ops = sum(len(stage.ops) for stage in module.stages)
    return f"level {module.level.value}, {len(module.stages)} stages, {ops} ops"


def _verify_program(file: str) -> str:
    from ratrain import api
    from ratrain.targets.program.program_verifier import check_program

    program = api.load(file)
    check_program(program)
    count = sum(stage.instructions for stage in program.stages)
    return f"{len(program.stages)} stages, {count} instructions, {len(program.routines)} routines"
