"""`ratrainc lint`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.words.options import (
    FiniteRange,
    InputFile,
    Result,
    json_option,
    refuse_idle,
    result_option,
)
from ratrain.ratrainc.console.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrain_ir.analysis.schedule_worth import PassTimes

_EPILOG = """\b
Examples:
  ratrainc lint schedule.csv --format torch-csv
  ratrainc lint schedule.csv --json
  ratrainc lint schedule.csv --forward 0.9 --backward 1.9 --weight 0.8
  ratrainc lint lowered.csv --sharded
  ratrainc lint schedule.csv --draw schedule.svg
  ratrainc schedule --kind 1f1b --stages 4 --micro-batches 8 -o s.csv && ratrainc lint s.csv

The file is a table that torch.distributed.pipelining dumps and loads: a row for each rank, in each cell an action (2F0,
2I0, 2W0, 2B0, 1SEND_F0, 2RECV_F0, 0UNSHARD, 0REDUCE_GRAD, (0F1;1B0)OVERLAP_F_B) or nothing. A table without sends and
receives is taken as compute only. If micro-batches are cut into slices, the slice follows after a dot: 2F0.1.

For a sound schedule the command prints the length of a step, where a forward and each half of a backward take one unit
of time and a message none; the bubble, in which ranks are idle; and the most passes that each rank has in flight at a
time: their forward has begun, and the gradient of their input is not made yet.

Exit code 0: sound; 1: diagnostics; 2: usage.
"""

_SECONDS = FiniteRange(min=0, min_open=True)


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("table"), metavar="FILE.csv")
@click.option(
    "--format",
    "table_format",
    type=click.Choice(["torch-csv"]),
    default="torch-csv",
    show_default=True,
    help="The table's format: the CSV of torch.distributed.pipelining.",
)
@click.option(
    "--forward", type=_SECONDS, metavar="S", help="Seconds of a forward through one stage of the table, to time a step."
)
@click.option("--backward", type=_SECONDS, metavar="S", help="Seconds of a whole backward through it.")
@click.option(
    "--weight",
    type=_SECONDS,
    metavar="S",
    help="Seconds of its half for the parameters' gradients; half of it if not given.",
)
@click.option(
    "--sharded",
    is_flag=True,
    help="Stages begin a step with a shard of their parameters (FSDP): all are gathered where they are used, "
    "and reduced.",
)
@click.option(
    "--forward-only",
    type=click.IntRange(min=1),
    metavar="N",
    help="The first N stages have no backward: all their parameters are frozen.",
)
@result_option(
    "--draw",
    Result("picture", ".svg"),
    "OUT.svg",
    "Draw a step of a sound table: a lane for each rank, a box for each forward and backward.",
)
@json_option
def command(
    file: str,
    table_format: str,
    forward: float | None,
    backward: float | None,
    weight: float | None,
    sharded: bool,
    forward_only: int | None,
    draw: str | None,
    as_json: bool,
) -> int:
    """Prove that a pipeline schedule of another runtime is sound, or show each error with its cell.

    Every micro-batch runs once, forward before backward; sends match receives, in one order for each pair of ranks; no
    rank waits forever, with buffered or with rendezvous sends; parameters are gathered before use, gradients reduced
    once.

    The micro-batches of a stage may run in any order, as they may under PyTorch; the command names the first that does
    not ascend, since losses and gradients are then rounded otherwise and 'place-from-file' refuses the table.
    """
    del table_format  # there is one
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json, show_diagnostics, status
    from ratrain.ratrainc.console.parts import show
    from ratrain.ratrainc.console.pictures import DRAWN, check_ending

    times = _pass_times(forward, backward, weight)
    if draw is not None:
        check_ending(draw, "picture", DRAWN)
    try:
        with status(f"checking {file}"):
            found = api.lint(file, sharded=sharded, times=times, forward_only=forward_only or 0)
    except api.UnsoundTableError as unsound:
        if as_json:
            print_json(unsound.to_json())
        show_diagnostics(unsound.diagnostics, as_json=False)
        return 1
    if weight is not None and not found.has_halves:
        refuse_idle("changes nothing: the schedule has no backward in halves", "weight")
    if draw is not None:
        found.picture().save(draw)
    if as_json:
        print_json(found.to_json())
    else:
        show(found.parts())
        if draw is not None:
            echo(f"wrote {draw}")
    return 0


def _pass_times(forward: float | None, backward: float | None, weight: float | None) -> PassTimes | None:
    """Return the times of a pass, in any unit, or None if none is given.

    Without `weight` the weight half is half of the backward. Raises `click.UsageError` if forward and backward are not
    given together, or the weight half is not less than the backward.
    """
    from ratrain.ratrain_ir.analysis.schedule_worth import PassTimes

    if forward is None and backward is None and weight is None:
        return None
    if forward is None or backward is None:
        raise click.UsageError("a step is timed with --forward and --backward together, and optionally --weight")
    if weight is not None and weight >= backward:
        raise click.UsageError(f"--weight {weight:g} must be less than --backward {backward:g}, of which it is a part")
    return PassTimes(forward, backward, backward / 2 if weight is None else weight)
