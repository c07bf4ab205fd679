"""`ratrainc alloc`."""

from __future__ import annotations

import click

from ratrain.ratrainc.commands.words.options import (
    FiniteRange,
    InputFile,
    Result,
    byte_count,
    json_option,
    result_option,
)
from ratrain.ratrainc.console.terminal import echo

_EPILOG = """\b
Examples:
  ratrainc alloc problem.csv --capacity 20GiB
  ratrainc alloc problem.csv --capacity 1048576 -o solution.csv
  ratrainc alloc problem.csv --capacity 1MiB --seconds 60 --json

\b
The problem has one buffer a line, under a header with the columns id, lower, upper, size in any order: a buffer of
`size` bytes is live from time `lower` to time `upper`, `upper` excluded. The solution adds the column offset; if the
problem has an offset for every buffer, these are checked. With a column alignment, sizes must be multiples of it.

Exit code 0: every buffer has its place under the capacity; 1: diagnostics; 2: usage.
"""


@click.command(epilog=_EPILOG)
@click.argument("file", type=InputFile("allocation problem"), metavar="PROBLEM.csv")
@click.option(
    "--capacity", required=True, callback=byte_count, metavar="BYTES", help="The bytes there are, like 20GiB."
)
@result_option(
    "-o --output",
    Result("allocation problem", ".csv"),
    "SOLUTION.csv",
    "Write the problem with an offset for each buffer.",
)
@click.option(
    "--seconds",
    type=FiniteRange(min=0, min_open=True),
    metavar="N",
    help="Time to search where the capacity is hard to reach. Default: a fixed amount of work, about half a minute.",
)
@json_option
def command(file: str, capacity: int, output: str | None, seconds: float | None, as_json: bool) -> int:
    """Give buffers with known lifetimes addresses in one memory.

    Tries greedy placements from the cheapest to the dearest, then searches if none fits the capacity. The lower bound
    is the largest number of bytes that live at once; no placement can need less.
    """
    from ratrain import api
    from ratrain.ratrainc.console.console import print_json, show_diagnostics, spinner
    from ratrain.ratrainc.console.parts import show

    try:
        with spinner(file, "reading it") as progress:
            placing = api.alloc(file, capacity, seconds=seconds, progress=progress)
    except api.RefusedPlacingError as refused:
        if as_json:
            print_json(refused.to_json())
        show_diagnostics(refused.diagnostics, as_json=False)
        return 1
    if output:
        placing.save(output)
    if as_json:
        print_json(placing.to_json())
        return 0
    show(placing.parts())
    if output:
        echo(f"wrote {output}")
    return 0
