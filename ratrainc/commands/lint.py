"""`ratrainc lint`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.options import Source, json_option
from ratrain.ratrainc.terminal import echo

if TYPE_CHECKING:
    from ratrain.ratrain_ir.actions import ActionTable

_EPILOG = """\b
Examples:
  ratrainc lint schedule.csv --format torch-csv
  ratrainc lint schedule.csv --json
  ratrainc schedule --kind 1f1b --stages 4 --micro-batches 8 -o s.csv && ratrainc lint s.csv

The file is what torch.distributed.pipelining dumps and loads: a row a rank, a cell an action (2F0, 2I0, 2W0, 2B0, 1SEND_F0,
2RECV_F0, 0UNSHARD, 0REDUCE_GRAD, (0F1;1B0)OVERLAP_F_B) or empty. Without sends and receives it is taken as compute only.

Exit code 0: sound; 1: diagnostics; 2: usage.
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=Source("table"), metavar="FILE.csv")
@click.option(
    "--format",
    "table_format",
    type=click.Choice(["torch-csv"]),
    default="torch-csv",
    show_default=True,
    help="The table's format: the CSV of torch.distributed.pipelining.",
)
@json_option
def command(file: str, table_format: str, as_json: bool) -> int:
    """Prove that a pipeline schedule of another runtime is sound, or show what is wrong and in which cell.

    Every micro-batch runs once, forward before backward; sends match receives, in one order for each pair of ranks; no rank waits
    forever, with buffered or with rendezvous sends; parameters are gathered where they are used, gradients reduced once.
    """
    del table_format  # there is one
    from ratrain.ratrain_ir.actions import read_torch_csv
    from ratrain.ratrain_ir.diagnostics import DiagnosticError
    from ratrain.ratrain_ir.gc import paused_gc
    from ratrain.ratrain_ir.verifier.schedule_rules import check_schedule
    from ratrain.ratrainc.console import print_json, show_diagnostics, status

    table: ActionTable | None = None
    try:
        with status(f"checking {file}"), paused_gc():
            table = read_torch_csv(file)
            check_schedule(table)
    except DiagnosticError as error:
        if as_json:
            print_json(_report(table, [d.to_json() for d in error.diagnostics]))
        show_diagnostics(error.diagnostics, as_json=False)
        return 1
    if as_json:
        print_json(_report(table, []))
    else:
        echo(f"{file}: sound ({_summary(table)})")
    return 0


def _report(table: ActionTable | None, diagnostics: list[dict[str, object]]) -> dict[str, object]:
    """What `--json` prints; ranks and actions are null where the file could not be read."""
    return {
        "sound": not diagnostics,
        "diagnostics": diagnostics,
        "ranks": None if table is None else len(table.rows),
        "actions": None if table is None else sum(map(len, table.rows)),
    }


def _summary(table: ActionTable) -> str:
    stages = {action.stage for action in table.actions}
    micro_batches = {action.micro_batch for action in table.actions} - {None}
    empty = len(table.ranks_without_actions)
    ranks = "ranks" + (f" ({empty} without actions)" if empty else "")
    form = "with messages" if table.is_lowered else "compute only"
    counts = ((len(table.rows), ranks), (len(stages), "stages"), (len(micro_batches), "micro-batches"))
    return ", ".join([*(f"{count} {what}" for count, what in counts), f"{sum(map(len, table.rows))} actions", form])
