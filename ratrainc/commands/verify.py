"""`ratrainc verify`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import (
    InputFile,
    json_option,
    machine_option,
    misuse_of_command,
    processes_option,
    refuse_idle,
)
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc verify tiny.rtir
  ratrainc verify tiny.rtx --json
  ratrainc verify tiny.rtir --machine mine.toml

Exit code 0: sound; 1: diagnostics; 2: usage.
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("program"), metavar="FILE.rtir|FILE.rtx")
@machine_option
@processes_option()
@json_option
def command(file: str, machine: str | None, as_json: bool) -> int:
    """Prove that a schedule or a program is sound, or show each error with its place.

    A schedule: types, completeness, dataflow, memory, messages, collectives, progress with buffered and rendezvous
    sends, and enough workspace for every op on the machine. A program: its container and routines, the schedule it
    executes by the same rules, progress, and that no two instructions race.
    """
    from ratrain import api
    from ratrain.ratrain_ir.support.diagnostics import DiagnosticError
    from ratrain.ratrainc.commands.words.loading import machine_of_option, state_machine
    from ratrain.ratrainc.console.console import print_json, show_diagnostics, status

    chosen = machine_of_option(machine)
    try:
        with status(f"verifying {file}"), misuse_of_command():
            proof = api.verify(file, machine=chosen)
    except DiagnosticError as error:
        if as_json:
            print_json({"sound": False, "diagnostics": [d.to_json() for d in error.diagnostics]})
        show_diagnostics(error.diagnostics, as_json=False)
        return 1
    if proof.target is None:
        refuse_idle("is for a schedule that was sized for a machine: this one was not", "machine")
    else:
        state_machine(file, proof.target, chosen)
    if as_json:
        print_json({"sound": True, "diagnostics": []})
    else:
        echo(f"{file}: {proof}")
    return 0
