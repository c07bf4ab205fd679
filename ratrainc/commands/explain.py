"""`ratrainc explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from attrs import evolve

from ratrain.ratrainc.commands.words.options import (
    InputFile,
    json_option,
    machine_option,
    misuse_of_command,
    processes_option,
    refuse_idle,
    seconds_option,
)
from ratrain.ratrainc.console.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrainc.console.progress import Progress
    from ratrain.ratrainc.report.byte_report import ByteReport

_EPILOG = """\b
Examples:
  ratrainc explain 7b.rtir
  ratrainc explain 7b.rtir --stage 1 --no-levers
  ratrainc explain 7b.rtx --time
  ratrainc explain 7b.rtx --time --stage 0 --cold
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("program"), metavar="FILE.rtir|FILE.rtx")
@click.option("--time", "of_time", is_flag=True, help="Explain the time of a step instead of its bytes.")
@click.option("--cold", is_flag=True, help="With --time: the first step, from cold, instead of a steady one.")
@click.option(
    "--stage", type=click.IntRange(min=0), help="The stage to explain. Default: the one with the highest peak."
)
@click.option(
    "--levers/--no-levers", default=True, show_default=True, help="Try changes that free bytes, and price them."
)
@seconds_option(
    None,
    "Time for trying changes, of each process. Default: enough for all of them if they are expected to take a minute "
    "or less, marked estimates among them, else 8.",
)
@processes_option(
    "Levers are tried in parallel too: more processes have time for more of them, and say the same of each."
)
@machine_option
@json_option
def command(
    file: str,
    of_time: bool,
    cold: bool,
    stage: int | None,
    levers: bool,
    seconds: float | None,
    machine: str | None,
    as_json: bool,
) -> None:
    """Explain each byte: which tensors are live at the peak, what the arena adds, and what a change would free.

    Each change (lever) is compiled, placed and simulated alone; several are tried in parallel. Where whole steps of all
    are expected to take more than 8 s (more than --seconds, if given), they are estimated from fewer micro-batches, and
    marked, if that saves much. Changes for which --seconds leave no time are listed. Prices are simulated seconds.

    The tables of the peak are printed before changes are tried: an interruption (Ctrl-C) leaves them.

    For a program (.rtx), its schedule is compiled again from its model, plan and passes, if that gives this very
    program.

    With --time, explain the time of a step: the cause of every idle second of every engine, and the critical path.
    """
    if cold and not of_time:
        apart = "" if levers else ", which excludes --no-levers"
        raise click.UsageError(f"--cold is about the time of a step: it goes with --time{apart}")
    if of_time:
        refuse_idle("is for bytes: it does not go with --time", "levers", "seconds")
    elif not levers:
        refuse_idle("is the time for trying changes: it does not go with --no-levers", "seconds")
    from ratrain import api
    from ratrain.ratrainc.commands.words.loading import checked_program, explained_schedule
    from ratrain.ratrainc.console.console import print_json, spinner, status
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.report.time_report import TimeReport

    found: TimeReport | ByteReport
    with misuse_of_command():
        if of_time:
            with status(f"simulating {file}"):
                program, chosen = checked_program(file, machine)
                found = api.explain_time(api.simulate(program, machine=chosen), stage=stage, cold=cold)
        else:
            module, given = explained_schedule(file, machine)
            with spinner(f"explaining {file}", "counting bytes") as progress:
                found = api.explain(
                    module,
                    machine=given,
                    stage=stage,
                    levers=levers,
                    seconds=seconds,
                    progress=lambda now: progress(_with_way_out(now)),
                    at_peak=None if as_json else lambda report: show(report.parts()),
                )
            if found.untried:
                echo(found.untried, err=True)
    if as_json:
        print_json(found.to_json())
    else:
        show(found.parts() if isinstance(found, TimeReport) else found.lever_parts())


def _with_way_out(now: Progress) -> Progress:
    """Add the option that spares the trying of changes, the one kind of work whose total is known."""
    return now if now.total is None else evolve(now, text=f"{now.text}; --no-levers tries none")
