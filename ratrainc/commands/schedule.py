"""`ratrainc schedule`."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import LAYOUTS
from ratrain.ratrainc.commands.words.options import Result, misuse_of_command, result_option
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc schedule --kind 1f1b --stages 4 --micro-batches 8
  ratrainc schedule --kind interleaved --stages 4 --micro-batches 8 --chunks 3
  ratrainc schedule --kind v-half --stages 4 --micro-batches 8 -o v.csv && ratrainc lint v.csv
  ratrainc schedule --kind seq1f1b --stages 4 --micro-batches 8 --slices 4
  ratrainc schedule --kind zb-v --stages 4 --micro-batches 8 --draw zb-v.svg

An action is a chunk, a letter (F for forward; B for backward, or I and W for its halves) and a micro-batch: 2F1. Chunks
are numbered in forward order over all stages, as PyTorch numbers its stages. A slice of a micro-batch follows after a
dot, 2F1.3; PyTorch has none.

\b
  kind                    chunks a stage   what it is for
  1f1b, gpipe, zb-h1      1                the basis; all at once; less idle time by split backwards
  1f1b-ahead              1                1f1b, a micro-batch more in flight: exchanges hide behind another's compute
  zb-h2                   1                no idle time where F = B = W, twice the memory of 1f1b
  interleaved             2 or more        1 / V of the idle time of 1f1b, a little more memory, V times the messages
  breadth-first           2 or more        the same idle time; every chunk's parameters are gathered once each way
  zb-v                    2 in a vee       no idle time where F = B = W, memory of 1f1b
  v-half, v-min           2 in a vee       half, a third of the memory of 1f1b
  dualpipe-v              2 in a vee       as DualPipe, the forward and the backward of a pair one after the other
  seq1f1b                 1 or more        K slices of a micro-batch: about 1 / K of the idle time and memory of 1f1b
"""


class ScheduleKind(click.types.StringParamType):
    """Name of a schedule; read when it is given, as plugins add to the table."""

    name = "schedule"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name; raise a usage error if no schedule has it."""
        if value not in SCHEDULES:
            self.fail(f"{value!r} is not one of {', '.join(map(repr, SCHEDULES))}", param, ctx)
        return str(value)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """Return the names for help texts."""
        del param, ctx
        return f"[{'|'.join(SCHEDULES)}]"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin with what was typed."""
        del ctx, param
        return [CompletionItem(name) for name in SCHEDULES if name.startswith(incomplete)]


@click.command(epilog=_EPILOG)
@click.option(
    "--kind", required=True, type=ScheduleKind(), metavar="KIND", help="The order: a kind of the table below."
)
@click.option("--stages", required=True, type=click.IntRange(min=1), metavar="P", help="Pipeline stages, one a rank.")
@click.option("--micro-batches", required=True, type=click.IntRange(min=1), metavar="M", help="Micro-batches a step.")
@click.option("--chunks", type=click.IntRange(min=1), metavar="V", help="Chunks a stage; the kind's own if not given.")
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    help="How chunks lie on the stages: round and round, or there and back; the kind's own if not given.",
)
@click.option(
    "--slices",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="K",
    help="Slices of a micro-batch, along the sequence.",
)
@result_option("-o --output", Result("table", ".csv"), "F.csv", "Write the table; without it the rows go to stdout.")
@result_option(
    "--draw",
    Result("picture", ".svg"),
    "OUT.svg",
    "Draw a step: a lane for each stage, a box for each forward and backward.",
)
def command(
    kind: str,
    stages: int,
    micro_batches: int,
    chunks: int | None,
    layout: str | None,
    slices: int,
    output: str | None,
    draw: str | None,
) -> None:
    """Print a well-known schedule as a table of forwards and backwards: one CSV row a stage, 0F0,0F1,0B0,..."""
    from ratrain import api
    from ratrain.ratrainc.console.pictures import DRAWN, check_ending

    if draw is not None:
        check_ending(draw, "picture", DRAWN)
    with misuse_of_command():
        table = api.schedule(kind, stages, micro_batches, chunks=chunks, layout=layout, slices=slices)
        if draw is not None:
            table.picture().save(draw)
            echo(f"wrote {draw}", err=True)
        if output is None:
            for line in table.rows():
                echo(line)
        else:
            table.save(output)
            echo(f"wrote {output}", err=True)
        if (problem := table.problem()) is not None:
            linted = output or "F.csv"
            how = f"'ratrainc lint {linted}' shows each cell" + ("" if output else ", of what -o F.csv writes")
            echo(f"warning: this table is wrong, and no command runs it: {problem}; {how}", err=True)
