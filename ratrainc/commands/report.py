"""`ratrainc report`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.options import (
    Result,
    Source,
    machine_option,
    output_file,
    rendezvous_option,
    sharing_option,
)

_EPILOG = """\b
Examples:
  ratrainc report 7b.rtx -o 7b.html
  ratrainc report 7b.rtir -o 7b.html --machine my-machine.toml
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=Source("program"), metavar="FILE.rtx|FILE.rtir")
@click.option(
    "-o",
    "--output",
    type=Result("page", ".html", ".htm"),
    callback=output_file,
    required=True,
    metavar="report.html",
    help="The page to write.",
)
@machine_option
@rendezvous_option
@sharing_option
def command(file: str, output: str, machine: str | None, rendezvous: bool, sharing: bool) -> None:
    """Draw a program's schedule: one HTML page that needs no network.

    It shows when every op runs on every engine, where every tensor lies in DDR and when, the live bytes against the capacity, the
    bubbles by cause, the plan and the machine. All times are simulated.
    """
    from ratrain import api
    from ratrain.ratrainc.commands.loading import checked_program
    from ratrain.ratrainc.console import say, size_text, status
    from ratrain.ratrainc.report.page import write_report

    with status(f"simulating {file}"):
        program, chosen = checked_program(file, machine)
        figures, timeline = api.simulate_with_timeline(program, machine=chosen, rendezvous=rendezvous, sharing=sharing)
    with status(f"writing {output}"):
        count = write_report(timeline, figures, chosen, output)
    say(f"wrote {output}, {size_text(count)}")
