"""Memory monitor: checks every access of a run against the lifetimes in the program, and can poison freed bytes.

A tensor's life begins with the instruction that writes it (or uses it as scratch). It ends when the last instruction
that accesses it before the next write has *completed*. Lives of carried tensors continue into the next step.

    instructions          A writes x    B reads x    C reads x    D writes y at the same offset
    accesses remaining    2             1            0: x ends     allowed; before C completed it would stop the run

The monitor stops the run at the first access outside a life and at the first two lives that share a byte. With poison,
bytes that a life leaves are filled with NaNs at once, before any instruction that waits for them may start: a read of
freed bytes becomes a NaN in the loss. Cost: a bisection in the sorted live ranges of a rank per operand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

from attrs import define, field, frozen

from ratrain.ratrain_ir.config.types import Home, aligned
from ratrain.ratrain_ir.support.diagnostics import fail
from ratrain.targets.program.instruction import Access, Instruction, ProgramTensor

if TYPE_CHECKING:
    from ratrain.targets.program.program import ProgramStage
    from ratrain.targets.runtime.engine.rank import RankExecutor

POISON = 0xFF
"""Byte that makes NaNs of every float type."""

_FOR_EVER = -1  # a carried tensor that no step writes
Key = tuple[int, int]
"""Rank as (stage, number among the ranks of the stage)."""


@frozen
class StageLives:
    """Number of accesses that follow the beginning of each life, by (instruction, tensor), and of lives carried in."""

    accesses: dict[tuple[int, int], int]
    carried_in: dict[int, int]


def stage_lives(stage: ProgramStage) -> StageLives:
    """Count the accesses of every life of a stage's step."""
    accesses: dict[tuple[int, int], int] = {}
    carried_in: dict[int, int] = {}
    current: dict[int, tuple[int, int] | None] = {}
    """Beginning of each tensor's present life; None for one carried in."""
    for engine, position in stage.execution_order():
        instruction = stage.streams[engine][position]
        for operand in instruction.operands:
            if operand.access in (Access.WRITE, Access.SCRATCH):
                current[operand.tensor] = (id(instruction), operand.tensor)
                accesses[id(instruction), operand.tensor] = 0
            elif (begun := current.get(operand.tensor)) is not None:
                accesses[begun] += 1
            else:
                carried_in[operand.tensor] = carried_in.get(operand.tensor, 0) + 1
    for index, tensor in enumerate(stage.tensors):
        begun = current.get(index)
        if tensor.carried and begun is not None:  # the life goes on into the next step
            accesses[begun] += carried_in.get(index, 0)
        elif tensor.carried:
            carried_in[index] = _FOR_EVER
    return StageLives(accesses, carried_in)


@define(eq=False)
class _Live:
    """Lives of a rank at this moment."""

    remaining: dict[int, int] = field(factory=dict)
    """accesses to come, by tensor"""
    ranges: dict[Home, list[tuple[int, int, int]]] = field(factory=lambda: {home: [] for home in Home})
    """(first byte, end, tensor) of each memory, sorted"""
    live_bytes: int = 0
    """in DDR"""
    peak_bytes: int = 0


class MemoryMonitor:
    """Monitor of all ranks of a process."""

    def __init__(self, ranks: list[list[RankExecutor]], *, poison: bool) -> None:
        self.poison = poison
        self.lives = {replicas[0].stage_index: stage_lives(replicas[0].stage) for replicas in ranks if replicas}
        self.live: dict[Key, _Live] = {}
        for stage_ranks in ranks:
            for rank in stage_ranks:
                self.live[rank.stage_index, rank.lane] = _Live()
                for tensor, count in self.lives[rank.stage_index].carried_in.items():
                    self._begin(rank, tensor, count, None)

    @property
    def peak_bytes(self) -> int:
        """Most bytes live at once on any rank, over the run so far."""
        return max(live.peak_bytes for live in self.live.values())

    def before(self, rank: RankExecutor, instruction: Instruction) -> None:
        """Check an instruction that starts, and begin the lives of its outputs.

        Raises `DiagnosticError` RT093 for an access outside a life, or if a life begins in bytes of another.
        """
        live = self.live[rank.stage_index, rank.lane]
        for operand in instruction.operands:
            if operand.access in (Access.WRITE, Access.SCRATCH):
                count = self.lives[rank.stage_index].accesses[id(instruction), operand.tensor]
                self._begin(rank, operand.tensor, count, instruction)
            elif operand.tensor not in live.remaining:
                name = rank.stage.tensors[operand.tensor].name
                fail("RT093", f"{rank.name}: '{instruction.title}' accesses %{name}, which is not live")

    def after(self, rank: RankExecutor, instruction: Instruction) -> None:
        """Count the accesses of a completed instruction; end lives without further accesses and poison their bytes."""
        live = self.live[rank.stage_index, rank.lane]
        for operand in instruction.operands:
            left = live.remaining[operand.tensor]
            begins = operand.access in (Access.WRITE, Access.SCRATCH)
            if left == _FOR_EVER:
                continue
            # The access that begins a life is not among those counted for it.
            live.remaining[operand.tensor] = left if begins else left - 1
            if live.remaining[operand.tensor] == 0:
                self._end(rank, operand.tensor)

    def _begin(self, rank: RankExecutor, tensor: int, count: int, instruction: Instruction | None) -> None:
        """Begin a life with `count` accesses to come; raise RT093 if it overlaps another one."""
        live = self.live[rank.stage_index, rank.lane]
        held = rank.stage.tensors[tensor]
        start, end, _ = entry = (held.offset, held.end, tensor)
        ranges = live.ranges[held.home]
        at = bisect_left(ranges, entry)
        # Live ranges do not overlap, so a new one can only overlap its neighbours in the sorted list.
        for other_start, other_end, other in ranges[max(0, at - 1) : at + 1]:
            if other_start < end and start < other_end:
                title = instruction.title if instruction else "the start"
                names = f"%{held.name} and %{rank.stage.tensors[other].name}"
                fail("RT093", f"{rank.name}: at '{title}' the live tensors {names} share bytes")
        insort(ranges, entry)
        live.remaining[tensor] = count
        live.live_bytes += _bytes_in_ddr(held)
        live.peak_bytes = max(live.peak_bytes, live.live_bytes)

    def _end(self, rank: RankExecutor, tensor: int) -> None:
        """End a life; poison its bytes if asked to."""
        live = self.live[rank.stage_index, rank.lane]
        held = rank.stage.tensors[tensor]
        del live.remaining[tensor]
        ranges = live.ranges[held.home]
        del ranges[bisect_left(ranges, (held.offset, held.end, tensor))]
        live.live_bytes -= _bytes_in_ddr(held)
        if self.poison:
            rank.poison(tensor, POISON)


def _bytes_in_ddr(held: ProgramTensor) -> int:
    return aligned(held.type.nbytes) if held.home is Home.DDR else 0
