"""`ratrainc alloc`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ratrain.ratrainc.commands.options import FiniteRange, Result, Source, byte_count, json_option, output_file

if TYPE_CHECKING:
    from ratrain.passes.memory.allocation import Allocation, Effort, LowerBound
    from ratrain.ratrain_ir.diagnostics import Diagnostic
    from ratrain.ratrainc.allocation_csv import Table

_EPILOG = """\b
Examples:
  ratrainc alloc problem.csv --capacity 20GiB
  ratrainc alloc problem.csv --capacity 1048576 -o solution.csv
  ratrainc alloc problem.csv --capacity 1MiB --seconds 60 --json

\b
The problem has one buffer a line, under a header with the columns id, lower, upper, size in any order: a buffer of
`size` bytes is live from time `lower` to time `upper`, `upper` excluded. The solution adds the column offset.

Exit code 0: every buffer has its place under the capacity; 1: diagnostics; 2: usage.
"""
_SHOWN = 16
_UNLIMITED = 1 << 60


@click.command(epilog=_EPILOG)
@click.argument("file", type=Source("allocation problem"), metavar="PROBLEM.csv")
@click.option(
    "--capacity", required=True, callback=byte_count, metavar="BYTES", help="The bytes there are, like 20GiB."
)
@click.option(
    "-o",
    "--output",
    type=Result("allocation problem", ".csv"),
    callback=output_file,
    metavar="SOLUTION.csv",
    help="Write the problem with an offset for each buffer.",
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

    Tries greedy placements from the cheapest to the dearest, then searches where the capacity is still exceeded. The lower bound is the
    largest number of bytes that live at once; no placement can need less.
    """
    from ratrain.passes.memory.allocation import allocate, check_allocation, lower_bound
    from ratrain.ratrainc.allocation_csv import read_problem, write_solution
    from ratrain.ratrainc.console import status

    with status(f"reading {file}"):
        table = read_problem(file)
        bound = lower_bound(table.problem)
    if bound.nbytes > capacity:
        return _refused(table, bound, None, _too_much_live(table, bound, capacity), as_json=as_json)
    with status(f"placing {len(table.ids)} buffers"):
        allocation = allocate(table.problem, capacity=capacity, effort=_effort(seconds))
        assert not check_allocation(table.problem, allocation.offsets), "the placement is not sound"
    if allocation.arena_bytes > capacity:
        return _refused(table, bound, allocation, _not_found(allocation, capacity), as_json=as_json)
    if output:
        write_solution(output, table, allocation.offsets)
    _report(file, table, allocation, output, as_json=as_json)
    return 0


def _effort(seconds: float | None) -> Effort:
    from ratrain.passes.memory.allocation import Effort

    return Effort() if seconds is None else Effort(work=_UNLIMITED, nodes=_UNLIMITED, seconds=seconds)


def _too_much_live(table: Table, bound: LowerBound, capacity: int) -> Diagnostic:
    from ratrain.ratrain_ir.diagnostics import Diagnostic, Note

    sizes = table.problem.sizes
    largest = sorted(bound.live, key=lambda i: (-sizes[i], i))
    names = ", ".join(f"{table.ids[i]} ({sizes[i]})" for i in largest[:_SHOWN])
    more = f" and {len(largest) - _SHOWN} more" if len(largest) > _SHOWN else ""
    return Diagnostic(
        "RT053",
        f"{bound.nbytes} bytes are live at time {bound.position}, {bound.nbytes - capacity} more than the capacity of {capacity}",
        notes=(Note(f"live then, of {len(largest)} buffers: {names}{more}"),),
        help="no placement can fit; end or recompute some of these buffers before that time, or raise the capacity",
    )


def _not_found(allocation: Allocation, capacity: int) -> Diagnostic:
    from ratrain.ratrain_ir.diagnostics import Diagnostic

    short = f"{allocation.arena_bytes - capacity} more than the capacity of {capacity}"
    if allocation.proved_bytes > capacity:
        return Diagnostic(
            "RT052",
            f"the lowest placement found needs {allocation.arena_bytes} bytes, {short}; "
            f"an exhaustive search showed that none fits, although only {allocation.lower_bound_bytes} bytes live at once",
            help="raise the capacity or shorten some lifetimes",
        )
    return Diagnostic(
        "RT052",
        f"no placement that fits was found in {allocation.seconds:.1f} s; the lowest one needs {allocation.arena_bytes} bytes, {short}",
        help=f"there may be one, since only {allocation.lower_bound_bytes} bytes live at once: search longer with --seconds",
    )


def _refused(
    table: Table, bound: LowerBound, allocation: Allocation | None, problem: Diagnostic, *, as_json: bool
) -> int:
    from ratrain.ratrainc.console import print_json, show_diagnostics

    if as_json:
        data = {
            "fits": False,
            "buffers": len(table.ids),
            "lower_bound_bytes": bound.nbytes,
            "arena_bytes": allocation.arena_bytes if allocation else None,
            "gap": allocation.gap if allocation else None,
            "method": allocation.method if allocation else None,
            "seconds": allocation.seconds if allocation else 0.0,
            "position": bound.position,
            "live": [table.ids[i] for i in bound.live],
            "diagnostics": [problem.to_json()],
        }
        print_json(data)
    show_diagnostics([problem], as_json=False)
    return 1


def _report(file: str, table: Table, allocation: Allocation, output: str | None, *, as_json: bool) -> None:
    from ratrain.ratrainc.console import print_json, say, seconds_text

    if as_json:
        data = {
            "fits": True,
            "buffers": len(table.ids),
            "lower_bound_bytes": allocation.lower_bound_bytes,
            "arena_bytes": allocation.arena_bytes,
            "gap": allocation.gap,
            "method": allocation.method,
            "seconds": allocation.seconds,
        }
        print_json(data)
        return
    say(
        f"{file}: {len(table.ids)} buffers in {allocation.arena_bytes} bytes; lower bound {allocation.lower_bound_bytes}, "
        f"gap {allocation.gap:.2%}; {allocation.method}, {seconds_text(allocation.seconds)}"
    )
    if output:
        say(f"wrote {output}")
