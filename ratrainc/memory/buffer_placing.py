"""Addresses for buffers whose lifetimes a file lists: the work of `ratrainc alloc`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import field, frozen

from ratrain.passes.memory.allocation import Allocation, Effort, LowerBound, allocate, check_allocation, lower_bound
from ratrain.ratrain_ir.support.diagnostics import Diagnostic, DiagnosticError, Note
from ratrain.ratrain_ir.support.gc import paused_gc
from ratrain.ratrainc.console.console import seconds_text
from ratrain.ratrainc.console.parts import Part, Shown
from ratrain.ratrainc.console.progress import OnProgress, Progress
from ratrain.ratrainc.memory.allocation_csv import AllocationTable, read_problem, write_solution

_SHOWN = 16
_UNLIMITED = 1 << 60


@frozen(repr=False)
class Placing(Shown):
    """The addresses found for the buffers of a file."""

    file: str
    table: AllocationTable = field(eq=False)
    allocation: Allocation = field(eq=False)

    @property
    def offsets(self) -> dict[str, int]:
        """The first byte of each buffer, by its id."""
        return dict(zip(self.table.ids, map(int, self.allocation.offsets), strict=True))

    def save(self, path: str) -> None:
        """Write the problem with an offset for each buffer.

        Raises `DiagnosticError` RT002 where the file cannot be written.
        """
        write_solution(path, self.table, self.allocation.offsets)

    def parts(self) -> Iterator[Part]:
        """Yield a sentence."""
        made = self.allocation
        yield (
            f"{self.file}: {len(self.table.ids)} buffers in {made.arena_bytes} bytes; lower bound "
            f"{made.lower_bound_bytes}, "
            f"gap {made.gap:.2%}; {made.method}, {seconds_text(made.seconds)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        made = self.allocation
        return {
            "fits": True,
            "buffers": len(self.table.ids),
            "lower_bound_bytes": made.lower_bound_bytes,
            "arena_bytes": made.arena_bytes,
            "gap": made.gap,
            "method": made.method,
            "seconds": made.seconds,
        }


class RefusedPlacingError(DiagnosticError):
    """The error if no placement fits, or none was found, with the bound and the best placement."""

    def __init__(
        self, problem: Diagnostic, table: AllocationTable, bound: LowerBound, allocation: Allocation | None
    ) -> None:
        super().__init__([problem])
        self.table = table
        self.bound = bound
        self.allocation = allocation

    def to_json(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        made = self.allocation
        return {
            "fits": False,
            "buffers": len(self.table.ids),
            "lower_bound_bytes": self.bound.nbytes,
            "arena_bytes": made.arena_bytes if made else None,
            "gap": made.gap if made else None,
            "method": made.method if made else None,
            "seconds": made.seconds if made else 0.0,
            "position": self.bound.position,
            "live": [self.table.ids[i] for i in self.bound.live],
            "diagnostics": [problem.to_json() for problem in self.diagnostics],
        }


def place_buffers(file: str, capacity: int, seconds: float | None, progress: OnProgress) -> Placing:
    """Try greedy placements from the cheapest to the dearest, then search if none fits the capacity.

    If the file gives offsets, they are checked instead. Raises `DiagnosticError` if the file is wrong, and
    `RefusedPlacingError`: RT053 if more bytes live at once than the capacity, RT052 if no placement that fits was
    found, RT050 if given offsets overlap.
    """
    with paused_gc():
        table = read_problem(file)
        return _placed(table, file, capacity, seconds, progress)


def _placed(table: AllocationTable, file: str, capacity: int, seconds: float | None, progress: OnProgress) -> Placing:
    bound = lower_bound(table.problem)
    # no placement is smaller than the bytes that live at once, so nothing need be tried
    if bound.nbytes > capacity:
        raise RefusedPlacingError(_too_much_live(table, bound, capacity), table, bound, None)
    if table.given is not None:
        return Placing(file, table, _as_given(table, table.given, bound, capacity))
    progress(Progress(0, None, f"placing {len(table.ids)} buffers"))
    allocation = allocate(table.problem, capacity=capacity, effort=_effort(seconds))
    # buffers that share bytes would corrupt data without a word, so the result is checked again
    assert not check_allocation(table.problem, allocation.offsets), "the placement is not sound"
    if allocation.arena_bytes > capacity:
        raise RefusedPlacingError(_not_found(allocation, capacity), table, bound, allocation)
    return Placing(file, table, allocation)


def _as_given(table: AllocationTable, offsets: list[int], bound: LowerBound, capacity: int) -> Allocation:
    """Return the file's placement. Raises `RefusedPlacingError` RT050 if buffers overlap, RT052 if it does not fit."""
    # a buffer of no bytes needs none, wherever its offset is
    ends = (offset + size for offset, size in zip(offsets, table.problem.sizes, strict=True) if size)
    made = Allocation(offsets, max(ends, default=0), bound.nbytes, bound.nbytes, "as given")
    wrong = check_allocation(table.problem, offsets)
    way_out = "leave the column 'offset' out to have all buffers placed"
    if wrong:
        pair = f"'{table.ids[wrong[0].first]}' and '{table.ids[wrong[0].second]}'"
        text = f"the given offsets let the buffers {pair} share bytes at time {wrong[0].position}"
        raise RefusedPlacingError(Diagnostic("RT050", text, help=way_out), table, bound, made)
    if made.arena_bytes > capacity:
        text = (
            f"the given offsets need {made.arena_bytes} bytes, {made.arena_bytes - capacity} more than the "
            f"capacity of {capacity}"
        )
        raise RefusedPlacingError(Diagnostic("RT052", text, help=way_out), table, bound, made)
    return made


def _effort(seconds: float | None) -> Effort:
    # with a limit in seconds the budgets of work, which make results independent of the machine, are lifted
    return Effort() if seconds is None else Effort(work=_UNLIMITED, nodes=_UNLIMITED, seconds=seconds)


def _too_much_live(table: AllocationTable, bound: LowerBound, capacity: int) -> Diagnostic:
    sizes = table.problem.sizes
    largest = sorted(bound.live, key=lambda i: (-sizes[i], i))
    names = ", ".join(f"{table.ids[i]} ({sizes[i]})" for i in largest[:_SHOWN])
    more = f" and {len(largest) - _SHOWN} more" if len(largest) > _SHOWN else ""
    return Diagnostic(
        "RT053",
        f"{bound.nbytes} bytes are live at time {bound.position}, {bound.nbytes - capacity} more than the "
        f"capacity of {capacity}",
        notes=(Note(f"live then, of {len(largest)} buffers: {names}{more}"),),
        help="no placement can fit; end or recompute some of these buffers before that time, or raise the capacity",
    )


def _not_found(allocation: Allocation, capacity: int) -> Diagnostic:
    short = f"{allocation.arena_bytes - capacity} more than the capacity of {capacity}"
    # holes in lives or an exhaustive search can prove more than the bytes that live at once
    if allocation.proved_bytes > capacity:
        return Diagnostic(
            "RT052",
            f"the lowest placement found needs {allocation.arena_bytes} bytes, {short}; "
            f"it is proved that none fits, although only {allocation.lower_bound_bytes} bytes live at once",
            help="raise the capacity or shorten some lifetimes",
        )
    return Diagnostic(
        "RT052",
        f"no placement that fits was found in {allocation.seconds:.1f} s; the lowest one needs "
        f"{allocation.arena_bytes} bytes, {short}",
        help=f"there may be one, since only {allocation.lower_bound_bytes} bytes live at once: search longer "
        "with --seconds",
    )
