"""`ratrainc export`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.words.options import InputFile, Result, refuse_idle, result_option
from ratrain.ratrainc.console.terminal import echo, echo_document

if TYPE_CHECKING:
    from ratrain.ratrainc.functions.checking import ExportFormat

_EPILOG = """\b
Examples:
  ratrainc export tiny.rtir --format torch-csv
  ratrainc export tiny.rtir --format torch-csv --lowered -o tiny.csv
  ratrainc export tiny.rtir --format megatron -o arguments.sh
  ratrainc export tiny.rtir --format torchtitan -o job.toml

Compute only is what _load_csv(file, format="compute_only") reads; --lowered is for format="compute_comms".
"""
_ENDINGS = {"torch-csv": ".csv", "megatron": ".sh", "torchtitan": ".toml"}


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("schedule"), metavar="FILE.rtir")
@click.option(
    "--format",
    "table_format",
    type=click.Choice([*_ENDINGS]),
    default="torch-csv",
    show_default=True,
    help="The CSV of torch.distributed.pipelining, the plan and its model as arguments of Megatron-LM, or the plan as "
    "settings of torchtitan.",
)
@result_option(
    "-o --output",
    Result("table or settings", *_ENDINGS.values()),
    "F.csv",
    "Write the export to this file; default: stdout.",
)
@click.option(
    "--lowered", is_flag=True, help="With sends, receives, gathering and reduction, in the order of the schedule."
)
def command(file: str, table_format: ExportFormat, output: str | None, lowered: bool) -> None:
    """Write a schedule as another runtime's table of actions, one row per rank, or its plan as a framework's settings.

    In a table, stage s runs on rank s. The schedule is checked as a module, and the table by the rules of 'ratrainc
    lint'. That runtime takes a rank's actions one by one, so a lowered schedule that needs concurrent engines is
    refused. Settings say whether layers are computed again in the backward. Listed on stderr are the keys of the plan,
    the fields of the model and the recomputation that another framework's settings cannot express, and the settings to
    add, which neither plan nor model says.
    """
    _check_ending(table_format, output)
    if table_format != "torch-csv":
        refuse_idle(f"is for a table: --format {table_format} writes settings", "lowered")
    from ratrain import api
    from ratrain.ratrain_ir.support.files import write_text
    from ratrain.ratrainc.console.console import status

    with status(f"reading and verifying {file}"):
        exported = api.export(file, table_format, lowered=lowered)
    if output is None:
        echo_document(exported.text)
    else:
        write_text(output, exported.text)
        echo(f"wrote {output}", err=True)
    for each in exported.missing:
        echo(f"not expressed: {each}", err=True)
    if exported.assumed:
        echo(f"assumed: {exported.assumed}", err=True)
    if exported.to_add:
        echo(f"to add: {exported.to_add}", err=True)


def _check_ending(table_format: str, output: str | None) -> None:
    """Raise `click.UsageError` if the output file has the ending of another format."""
    ending = os.path.splitext(output or "")[1].lower()  # noqa: PTH122 - the path may be anything
    if ending in _ENDINGS.values() and ending != _ENDINGS[table_format]:
        raise click.UsageError(f"--format {table_format} writes {_ENDINGS[table_format]} files, not '{output}'")
