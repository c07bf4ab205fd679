"""`ratrainc schedule`."""

from __future__ import annotations

from collections.abc import Iterator

import click

from ratrain.ratrainc.commands.options import Result, output_file
from ratrain.ratrainc.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc schedule --kind 1f1b --stages 4 --micro-batches 8
  ratrainc schedule --kind gpipe --stages 4 --micro-batches 8 -o gpipe.csv
"""


@click.command(epilog=_EPILOG)
@click.option("--kind", required=True, type=click.Choice(["1f1b", "gpipe", "zb-h1"]), help="The order.")
@click.option("--stages", required=True, type=click.IntRange(min=1), metavar="P", help="Pipeline stages, one a rank.")
@click.option("--micro-batches", required=True, type=click.IntRange(min=1), metavar="M", help="Micro-batches a step.")
@click.option(
    "-o",
    "--output",
    type=Result("table", ".csv"),
    callback=output_file,
    metavar="F.csv",
    help="Write the table; without it the rows go to stdout.",
)
def command(kind: str, stages: int, micro_batches: int, output: str | None) -> None:
    """Print a well-known schedule as a table of forwards and backwards: one CSV row a stage, 0F0,0F1,0B0,..."""
    from ratrain.ratrain_ir.files import write_lines

    _check_size(kind, stages, micro_batches)
    lines = _lines(kind, stages, micro_batches)
    if output is None:
        for line in lines:
            echo(line)
    else:
        write_lines(output, lines)
        echo(f"wrote {output}", err=True)


def _check_size(kind: str, stages: int, micro_batches: int) -> None:
    """Refuse a table that `lint` could not read however short its actions are."""
    from ratrain.ratrain_ir.files import MIB, MOST_BYTES

    most = MOST_BYTES["schedule table"] // len("0F0,")
    actions = stages * micro_batches * (3 if kind == "zb-h1" else 2)
    if actions > most:
        size = MOST_BYTES["schedule table"] // MIB
        raise click.UsageError(
            f"a table of {stages:,} stages and {micro_batches:,} micro-batches has up to {actions:,} actions; "
            f"one of more than {most:,} is longer than 'ratrainc lint' reads ({size} MiB)"
        )


def _lines(kind: str, stages: int, micro_batches: int) -> Iterator[str]:
    """The rows one by one: a large table need not be in memory."""
    from ratrain.ratrain_ir.actions import order_row, torch_csv_row
    from ratrain.ratrain_ir.schedules.named import SCHEDULES
    from ratrain.ratrain_ir.schedules.shape import PipelineShape

    shape = PipelineShape(stages, micro_batches)
    for stage in range(stages):
        yield torch_csv_row(order_row(stage, SCHEDULES[kind].actions(shape, stage)))
