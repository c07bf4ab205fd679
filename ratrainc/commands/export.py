"""`ratrainc export`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.options import Result, Source, output_file
from ratrain.ratrainc.terminal import echo, echo_document

_EPILOG = """\b
Examples:
  ratrainc export tiny.rtir --format torch-csv
  ratrainc export tiny.rtir --format torch-csv --lowered -o tiny.csv

Compute only is what _load_csv(file, format="compute_only") reads; --lowered is for format="compute_comms".
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=Source("schedule"), metavar="FILE.rtir")
@click.option(
    "--format",
    "table_format",
    type=click.Choice(["torch-csv"]),
    default="torch-csv",
    show_default=True,
    help="The table's format: the CSV of torch.distributed.pipelining.",
)
@click.option(
    "-o",
    "--output",
    type=Result("table", ".csv"),
    callback=output_file,
    metavar="F.csv",
    help="Write the table; without it the rows go to stdout.",
)
@click.option(
    "--lowered", is_flag=True, help="With sends, receives, gathering and reduction, in the order of the schedule."
)
def command(file: str, table_format: str, output: str | None, lowered: bool) -> None:
    """Write a schedule as the table of actions of another runtime, one row a rank (stage s runs on rank s).

    Both sides are checked: the schedule as a module, the table by the rules of 'ratrainc lint'. That runtime takes a rank's
    actions one by one, so a schedule that needs engines running side by side is refused when it is lowered.
    """
    del table_format  # there is one
    from ratrain import api
    from ratrain.ratrain_ir.actions import actions_of_module, compute_only, torch_csv_lines, with_gathered_parameters
    from ratrain.ratrain_ir.files import write_lines
    from ratrain.ratrain_ir.verifier import check
    from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule
    from ratrain.ratrainc.console import status

    with status(f"reading and verifying {file}"):
        module = api.load_schedule(file)
        check(module)
        actions = actions_of_module(module)
        table = with_gathered_parameters(actions) if lowered else compute_only(actions)
        check_schedule(table)
    if output is None:
        echo_document("".join(f"{line}\n" for line in torch_csv_lines(table)))
    else:
        write_lines(output, torch_csv_lines(table))
        echo(f"wrote {output}", err=True)
