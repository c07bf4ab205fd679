"""`ratrainc schedule`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ratrain.ratrain_ir.schedules.named import SCHEDULES
from ratrain.ratrain_ir.schedules.shape import LAYOUTS
from ratrain.ratrainc.commands.options import Result, output_file
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrain_ir.schedules.shape import PipelineShape

_EPILOG = """\b
Examples:
  ratrainc schedule --kind 1f1b --stages 4 --micro-batches 8
  ratrainc schedule --kind interleaved --stages 4 --micro-batches 8 --chunks 3
  ratrainc schedule --kind v-half --stages 4 --micro-batches 8 -o v.csv && ratrainc lint v.csv
  ratrainc schedule --kind seq1f1b --stages 4 --micro-batches 8 --slices 4

An action is a chunk, what it does (F; B, or its halves I and W) and a micro-batch: 2F1. Chunks are numbered in forward order over all
stages, as PyTorch numbers its stages. A slice of a micro-batch follows after a dot, 2F1.3; PyTorch has none.

\b
  kind                    chunks a stage   what it is for
  1f1b, gpipe, zb-h1      1                the basis; all at once; less idle time by split backwards
  interleaved             2 or more        1 / V of the idle time of 1f1b, a little more memory, V times the messages
  breadth-first           2 or more        the same idle time; every chunk's parameters are gathered once each way
  zb-v                    2 in a vee       no idle time where F = B = W, memory of 1f1b
  v-half, v-min           2 in a vee       half, a third of the memory of 1f1b
  dualpipe-v              2 in a vee       as DualPipe, the forward and the backward of a pair one after the other
  seq1f1b                 1 or more        K slices of a micro-batch: about 1 / K of the idle time, and of the memory of 1f1b
"""

_MOST_STAGES_IN_CHUNKS = 1024
"""An order of few micro-batches through several chunks is that of about two a stage, less those that are not there."""


@click.command(epilog=_EPILOG)
@click.option("--kind", required=True, type=click.Choice(list(SCHEDULES)), help="The order.")
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
@click.option(
    "-o",
    "--output",
    type=Result("table", ".csv"),
    callback=output_file,
    metavar="F.csv",
    help="Write the table; without it the rows go to stdout.",
)
def command(
    kind: str,
    stages: int,
    micro_batches: int,
    chunks: int | None,
    layout: str | None,
    slices: int,
    output: str | None,
) -> None:
    """Print a well-known schedule as a table of forwards and backwards: one CSV row a stage, 0F0,0F1,0B0,..."""
    from ratrain.ratrain_ir.files import write_lines
    from ratrain.ratrain_ir.schedules.shape import PipelineShape

    schedule = SCHEDULES[kind]
    shape = PipelineShape(stages, micro_batches, chunks or schedule.chunks, layout or schedule.layout, slices)
    _check_shape(kind, shape)
    _check_size(kind, shape)
    lines = _lines(kind, shape)
    if output is None:
        for line in lines:
            echo(line)
    else:
        write_lines(output, lines)
        echo(f"wrote {output}", err=True)


def _check_shape(kind: str, shape: PipelineShape) -> None:
    """Refuse chunks, a layout or slices that the schedule cannot have, or that would change nothing."""
    schedule = SCHEDULES[kind]
    problem = schedule.problem(shape)
    if problem is None and shape.chunks == 1 and shape.layout != "loop":
        problem = f"--layout {shape.layout} changes nothing with one chunk a stage"
    if problem is not None:
        usual = "" if schedule.chunks == 1 else f" --chunks {schedule.chunks} --layout {schedule.layout}"
        usual += " --slices 4" if kind == "seq1f1b" else ""
        raise click.UsageError(
            f"{schedule.title} cannot be made: {problem}; for example "
            f"'ratrainc schedule --kind {kind} --stages 4 --micro-batches 8{usual}'"
        )


def _check_size(kind: str, shape: PipelineShape) -> None:
    """Refuse a table that `lint` could not read however short its actions are."""
    from ratrain.ratrain_ir.files import MIB, MOST_BYTES

    most = MOST_BYTES["schedule table"] // len("0F0,")
    passes = shape.stages * shape.micro_batches * shape.chunks * shape.slices
    actions = passes * (3 if _splits_backwards(kind, shape) else 2)
    if actions > most:
        size = MOST_BYTES["schedule table"] // MIB
        raise click.UsageError(
            f"a table of {shape.stages:,} stages and {shape.micro_batches:,} micro-batches has up to {actions:,} actions; "
            f"one of more than {most:,} is longer than 'ratrainc lint' reads ({size} MiB)"
        )
    if shape.chunks > 1 and shape.stages > _MOST_STAGES_IN_CHUNKS:
        raise click.UsageError(
            f"tables of several chunks a stage are made for up to {_MOST_STAGES_IN_CHUNKS:,} stages, not {shape.stages:,}"
        )


def _splits_backwards(kind: str, shape: PipelineShape) -> bool:
    """Whether the schedule has backwards in halves anywhere, as seen in the smallest table of its kind."""
    from attrs import evolve

    from ratrain.ratrain_ir.schedules.action import ActionKind

    least = evolve(shape, stages=2, micro_batches=1, slices=min(shape.slices, 2), chunks=min(shape.chunks, 2))
    orders = (SCHEDULES[kind].actions(least, stage) for stage in range(2))
    return any(action.kind is ActionKind.BACKWARD_WEIGHT for order in orders for action in order)


def _lines(kind: str, shape: PipelineShape) -> Iterator[str]:
    """The rows one by one: a large table need not be in memory."""
    from ratrain.ratrain_ir.actions import order_row, torch_csv_row

    for stage in range(shape.stages):
        yield torch_csv_row(order_row(stage, SCHEDULES[kind].actions(shape, stage)))
